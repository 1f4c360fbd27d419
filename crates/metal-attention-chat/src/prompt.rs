//! [`Prompt`]: a rendered conversation.

use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text. Control tokens of the template appear in their spelling.
    pub text: String,
    /// Byte offsets in `text`, ascending, where the spelling of a control token begins that came from a message or
    /// tool. There it is encoded as plain text.
    pub literals: Vec<usize>,
}

impl Prompt {
    /// Encodes the prompt to token ids. BOS is put first if the model wants it and the template has not written it.
    /// EOS comes from the template only.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let options = EncodeOptions { add_special: false, parse_special: true };
        let mut ids = tokenizer.encode_with_literals(&self.text, &self.literals, options);
        if let Some(bos) = tokenizer.bos().filter(|&bos| tokenizer.adds_bos() && ids.first() != Some(&bos)) {
            ids.insert(0, bos);
        }
        ids
    }
}
