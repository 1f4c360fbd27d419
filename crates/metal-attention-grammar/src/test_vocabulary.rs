//! Helpers for tests: a small vocabulary, and a check whether a grammar accepts a text.

use std::sync::Arc;

use metal_attention::Constraint;
use metal_attention::gguf::{Metadata, StringArray};
use metal_attention::tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions};

use crate::Grammar;

/// A vocabulary of the 256 bytes, the tokens `control` and "</s>", which ends a generation.
pub fn vocabulary(control: &[&str]) -> Arc<Tokenizer> {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    let bytes = (0..=255)
        .map(|byte| if plain(byte) { char::from(byte) } else { char::from_u32(others.next().unwrap()).unwrap() });
    let control = control.iter().chain(&["</s>"]).map(|text| (*text).to_owned());
    let tokens: Vec<String> = bytes.map(String::from).chain(control).collect();
    let types: Vec<i32> = (0..tokens.len()).map(|i| if i < 256 { 1 } else { 3 }).collect();
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", tokens.iter().map(String::as_str).collect::<StringArray>());
    metadata.set("tokenizer.ggml.token_type", types);
    metadata.set("tokenizer.ggml.merges", StringArray::default());
    metadata.set("tokenizer.ggml.eos_token_id", tokens.len() as u32 - 1);
    Arc::new(Tokenizer::from_metadata(&metadata, &TokenizerOptions::default()).unwrap())
}

/// Whether `grammar` allows the tokens of `text`, and the end after them.
pub fn accepts(mut grammar: Grammar, tokenizer: &Tokenizer, text: &str) -> bool {
    let allows = |grammar: &mut Grammar, ids: &[u32]| {
        let mut mask = vec![0u32; tokenizer.n_vocab().div_ceil(32)];
        grammar.allowed(&mut mask).unwrap();
        ids.iter().any(|&id| mask[id as usize / 32] & (1 << (id % 32)) != 0)
    };
    for id in tokenizer.encode(text, EncodeOptions { add_special: false, parse_special: true }) {
        if grammar.is_complete() || !allows(&mut grammar, &[id]) {
            return false;
        }
        grammar.accept(id).unwrap();
    }
    grammar.is_complete() || allows(&mut grammar, tokenizer.end_of_generation())
}
