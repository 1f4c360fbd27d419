//! Fuzz target of tokenizers, with arbitrary vocabularies and texts. Building, encoding and decoding must not panic, ids must
//! be in the vocabulary, and the streaming decoder must agree with decoding all bytes at once.
#![no_main]

use libfuzzer_sys::fuzz_target;
use metal_attention_gguf::{Metadata, StringArray};
use metal_attention_tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions, pre_tokenizers};

const MODELS: [&str; 7] = ["llama", "gpt2", "gemma4", "whitespace", "t5", "bert", "rwkv"];

/// Splits off the input up to the next 0xFF byte, and removes that byte.
fn field<'d>(data: &mut &'d [u8]) -> &'d [u8] {
    let end = data.iter().position(|&byte| byte == 0xFF).unwrap_or(data.len());
    let (field, rest) = data.split_at(end);
    *data = rest.get(1..).unwrap_or_default();
    field
}

/// The strings between tabs.
fn lines(bytes: &[u8]) -> StringArray {
    bytes.split(|&byte| byte == b'\t').map(String::from_utf8_lossy).collect()
}

fuzz_target!(|data: &[u8]| {
    let [choice, rest @ ..] = data else { return };
    let mut data = rest;
    let tokens = lines(field(&mut data));
    let count = tokens.len();
    let kinds = field(&mut data);
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", MODELS[*choice as usize % MODELS.len()]);
    metadata.set("tokenizer.ggml.tokens", tokens);
    let kind = |i| i32::from(kinds.get(i).copied().unwrap_or(1) % 8);
    metadata.set("tokenizer.ggml.token_type", (0..count).map(kind).collect::<Vec<i32>>());
    let score = |i| f32::from(kinds.get(i).copied().unwrap_or(0) / 8) - 16.0;
    metadata.set("tokenizer.ggml.scores", (0..count).map(score).collect::<Vec<f32>>());
    metadata.set("tokenizer.ggml.merges", lines(field(&mut data)));
    metadata.set("tokenizer.ggml.add_space_prefix", choice & 64 == 0);
    metadata.set("tokenizer.ggml.precompiled_charsmap", field(&mut data).to_vec());

    let pre = pre_tokenizers().nth(kinds.first().copied().unwrap_or(0) as usize).map(str::to_owned);
    let pre = pre.or(Some("default".to_owned()));
    let Ok(tokenizer) = Tokenizer::from_metadata(&metadata, &TokenizerOptions { pre }) else { return };
    let text = String::from_utf8_lossy(data);
    let options = EncodeOptions { add_special: choice & 128 != 0, parse_special: choice & 32 != 0 };
    let ids = tokenizer.encode(&text, options);
    assert!(ids.iter().all(|&id| (id as usize) < count));

    let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
    let mut decoder = tokenizer.decoder().continuing();
    let mut streamed: String = ids.iter().map(|&id| decoder.push(id)).collect();
    streamed += &decoder.finish();
    assert_eq!(streamed, String::from_utf8_lossy(&bytes));
});
