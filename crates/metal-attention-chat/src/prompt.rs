//! A rendered conversation.

use metal_attention_tokenizer::{EncodeOptions, Tokenizer};

/// The text of a conversation for a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text, with the template's control tokens as they are spelled.
    pub text: String,
    /// Byte offsets in `text`, ascending, of characters that came from messages and tools and would begin a control
    /// token: there the spelling is plain text.
    pub literals: Vec<usize>,
}

impl Prompt {
    /// The token ids. BOS comes first where the model wants it, once, be it from the template or from here; EOS comes
    /// only from the template.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let options = EncodeOptions { add_special: false, parse_special: true };
        let mut ids = tokenizer.encode_with_literals(&self.text, &self.literals, options);
        if let Some(bos) = tokenizer.bos().filter(|&bos| tokenizer.adds_bos() && ids.first() != Some(&bos)) {
            ids.insert(0, bos);
        }
        ids
    }
}
