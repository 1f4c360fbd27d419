//! The text that tokens write, as far as it can be shown.

use metal_attention_tokenizer::{StreamDecoder, Tokenizer};

use crate::stop_strings::StopStrings;

/// Turns the tokens of a continuation into text: whole characters, and nothing that may turn out to be the start of a stop
/// string.
#[derive(Debug)]
pub struct TextStream<'t> {
    decoder: StreamDecoder<'t>,
    stop_strings: StopStrings,
    stopped: bool,
}

impl<'t> TextStream<'t> {
    /// What follows the tokens `before`, up to the first of the strings `stop`.
    pub fn new(tokenizer: &'t Tokenizer, before: &[u32], stop: Vec<String>) -> Self {
        let decoder = tokenizer.decoder();
        // A text that has begun is continued, leading space and all.
        let begun = before.iter().any(|&id| !tokenizer.is_control(id));
        Self {
            decoder: if begun { decoder.continuing() } else { decoder },
            stop_strings: StopStrings::new(stop),
            stopped: false,
        }
    }

    /// Takes the next token. Returns what can be shown now, and whether the text ends there, right before a stop string.
    pub fn push(&mut self, id: u32) -> (String, bool) {
        let (text, stopped) = self.stop_strings.push(&self.decoder.push(id));
        self.stopped = stopped;
        (text, stopped)
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop_strings.found()
    }

    /// What was held back: the start of a stop string that never came, then half a character as U+FFFD. Nothing where a
    /// stop string ended the text.
    pub fn finish(mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let (text, stopped) = self.stop_strings.push(&self.decoder.finish());
        if stopped { text } else { text + &self.stop_strings.rest() }
    }
}
