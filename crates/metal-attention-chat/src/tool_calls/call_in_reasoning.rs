//! [`CallInReasoning`]: calls that a model writes within its reasoning without ending the reasoning first.

use super::{AnswerEvent, ToolCallParser};

/// Text at the end of reasoning that may be calls. If the answer ends with the calls, they are calls; if anything else
/// follows, the text is reasoning.
#[derive(Debug)]
pub(super) struct CallInReasoning {
    parser: Box<ToolCallParser>,
    /// The text so far, with the white space before it.
    pub raw: String,
    events: Vec<AnswerEvent>,
}

impl CallInReasoning {
    /// A new text. `parser` parses the calls; `blank` is the white space before them.
    pub fn new(parser: ToolCallParser, blank: String) -> Self {
        Self { parser: Box::new(parser), raw: blank, events: Vec::new() }
    }

    /// Reads the next piece. Returns `Some(rest)` if the text is not a call; then `rest` has not been read.
    pub fn push(&mut self, text: &str) -> Option<String> {
        for (at, c) in text.char_indices() {
            self.raw.push(c);
            let events = self.parser.push(c.encode_utf8(&mut [0; 4]));
            if events.iter().any(|event| self.rules_out_call(event)) {
                let unread = std::mem::take(&mut self.parser.pending);
                self.raw.truncate(self.raw.len() - unread.len());
                return Some(unread + &text[at + c.len_utf8()..]);
            }
            self.events.extend(events);
        }
        None
    }

    /// The answer ends here: the events of the calls, or the text, which is reasoning.
    pub fn finish(mut self) -> Result<Vec<AnswerEvent>, String> {
        self.events.extend(self.parser.finish());
        let is_call = self.parser.n_calls() > 0 && !self.events.iter().any(|event| self.rules_out_call(event));
        if is_call { Ok(self.events) } else { Err(self.raw) }
    }

    /// Whether `event` shows that the text is not a call of a known function.
    fn rules_out_call(&self, event: &AnswerEvent) -> bool {
        match event {
            AnswerEvent::Content(_) | AnswerEvent::Reasoning(_) => true,
            AnswerEvent::CallStart { name, .. } => !self.parser.names.contains(name),
            AnswerEvent::CallArguments { .. } | AnswerEvent::CallEnd { .. } => false,
        }
    }
}
