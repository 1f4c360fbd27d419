//! The text of a generation, token by token.

use metal_attention_tokenizer::{StreamDecoder, Tokenizer};

use crate::stop_strings::StopStrings;

/// Decodes generated tokens to text, and withholds partial characters and possible starts of stop strings.
#[derive(Debug)]
pub struct TextStream<'t> {
    /// Bytes of tokens to whole characters.
    decoder: StreamDecoder<'t>,
    /// Search for the stop strings.
    stop_strings: StopStrings,
    /// Whether the last token completed a stop string.
    stopped: bool,
}

impl<'t> TextStream<'t> {
    /// The text that follows the tokens `before`, up to the first of the strings `stop`.
    pub fn new(tokenizer: &'t Tokenizer, before: &[u32], stop: Vec<String>) -> Self {
        let decoder = tokenizer.decoder();
        // Text after other text keeps its leading space; at the start of a text the tokenizer removes it.
        let begun = before.iter().any(|&id| !tokenizer.is_control(id));
        Self {
            decoder: if begun { decoder.continuing() } else { decoder },
            stop_strings: StopStrings::new(stop),
            stopped: false,
        }
    }

    /// Adds a token. Returns the text that is certain now, and whether the text ends there, right before a stop string.
    pub fn push(&mut self, id: u32) -> (String, bool) {
        let (text, stopped) = self.stop_strings.push(&self.decoder.push(id));
        self.stopped = stopped;
        (text, stopped)
    }

    /// The stop string that ended the text.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop_strings.found()
    }

    /// Returns the withheld text: the start of a stop string that was not completed, then a partial character as
    /// U+FFFD. Empty after a stop string.
    pub fn finish(mut self) -> String {
        if self.stopped {
            return String::new();
        }
        let (text, stopped) = self.stop_strings.push(&self.decoder.finish());
        if stopped { text } else { text + &self.stop_strings.rest() }
    }
}
