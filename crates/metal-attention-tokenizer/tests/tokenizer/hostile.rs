//! Tokenizers of metadata that is incomplete, inconsistent or hostile: errors or a working tokenizer, never a panic.

use metal_attention_gguf::{Metadata, StringArray};
use metal_attention_tokenizer::{EncodeOptions, Tokenizer, TokenizerError, TokenizerOptions};
use proptest::prelude::*;

fn strings<S: AsRef<str>>(texts: impl IntoIterator<Item = S>) -> StringArray {
    texts.into_iter().collect()
}

/// A small but complete vocabulary of the kind `model`.
fn metadata(model: &str) -> Metadata {
    let tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "Ġ", "▁ab", "<0x41>", "[UNK]", "Ċ", "<0xFF>"];
    let types = [2, 3, 3, 1, 1, 1, 1, 1, 1, 6, 2, 1, 6];
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", model);
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", strings(tokens));
    metadata.set("tokenizer.ggml.token_type", types.to_vec());
    metadata.set("tokenizer.ggml.scores", (0..tokens.len()).map(|i| -(i as f32)).collect::<Vec<f32>>());
    metadata.set("tokenizer.ggml.merges", strings(["a b", "▁ ab"]));
    metadata
}

const MODELS: [&str; 7] = ["llama", "gpt2", "gemma4", "whitespace", "t5", "bert", "rwkv"];

fn build(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    Tokenizer::from_metadata(metadata, &TokenizerOptions::default())
}

/// Encodes and decodes with every option. Checks only that ids are in range and nothing panics.
fn exercise(tokenizer: &Tokenizer, text: &str) {
    for (add_special, parse_special) in [(false, false), (true, false), (false, true), (true, true)] {
        let ids = tokenizer.encode(text, EncodeOptions { add_special, parse_special });
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.n_vocab()));
        tokenizer.decode(&ids, parse_special);
    }
}

const TEXT: &str = "<s> ab  a\nb▁é😀\u{0}\u{FFFD} 12</s>[UNK]";

#[test]
fn the_small_vocabularies_work() {
    for model in MODELS {
        let tokenizer = build(&metadata(model)).unwrap_or_else(|e| panic!("{model}: {e}"));
        exercise(&tokenizer, TEXT);
    }
    let spm = build(&metadata("llama")).unwrap();
    assert_eq!(spm.encode("ab", EncodeOptions::default()), [8]);
    assert_eq!(spm.encode("A\u{FF}", EncodeOptions::default()), [3, 9, 0, 0]);
}

#[test]
fn missing_keys_are_named() {
    for key in ["tokenizer.ggml.model", "tokenizer.ggml.tokens"] {
        let mut metadata = metadata("llama");
        metadata.remove(key);
        let error = build(&metadata).unwrap_err();
        assert!(matches!(error, TokenizerError::MissingKey { key: k } if k == key), "{error}");
        assert!(error.to_string().contains(key));
    }
    let mut metadata = metadata("gpt2");
    metadata.remove("tokenizer.ggml.merges");
    assert!(matches!(build(&metadata), Err(TokenizerError::MissingKey { .. })));
}

#[test]
fn errors_for_unknown_kinds_list_the_known_ones() {
    let mut metadata = metadata("gpt2");
    metadata.set("tokenizer.ggml.pre", "no-such-pre");
    let message = build(&metadata).unwrap_err().to_string();
    assert!(message.contains("`no-such-pre`") && message.contains("llama-bpe"), "{message}");
    let options = TokenizerOptions { pre: Some("qwen2".to_owned()) };
    let tokenizer = Tokenizer::from_metadata(&metadata, &options).unwrap();
    assert_eq!(tokenizer.pre(), "qwen2");

    metadata.set("tokenizer.ggml.model", "plamo2");
    let message = build(&metadata).unwrap_err().to_string();
    assert!(message.contains("`plamo2`") && message.contains("gpt2"), "{message}");
}

#[test]
fn a_missing_pre_means_the_default() {
    let mut metadata = metadata("gpt2");
    metadata.remove("tokenizer.ggml.pre");
    assert_eq!(build(&metadata).unwrap().pre(), "default");
}

#[test]
fn values_of_a_wrong_type_are_errors() {
    for key in ["model", "tokens", "token_type", "bos_token_id", "add_bos_token", "merges", "pre", "scores"] {
        let mut metadata = metadata("gpt2");
        let key = format!("tokenizer.ggml.{key}");
        metadata.set(key.as_str(), 1.5f64);
        let error = build(&metadata).unwrap_err();
        assert!(matches!(error, TokenizerError::Metadata(_)), "{key}: {error}");
    }
    let mut metadata = metadata("t5");
    metadata.set("tokenizer.ggml.precompiled_charsmap", 1u32);
    assert!(matches!(build(&metadata), Err(TokenizerError::CharsMap { .. })));
}

#[test]
fn short_lists_are_errors_and_long_ones_are_accepted() {
    for model in MODELS {
        let mut short = metadata(model);
        short.set("tokenizer.ggml.scores", vec![0.0f32; 3]);
        assert!(matches!(build(&short), Err(TokenizerError::ShortList { found: 3, tokens: 13, .. })));
        let mut short = metadata(model);
        short.set("tokenizer.ggml.token_type", vec![1i32; 12]);
        assert!(matches!(build(&short), Err(TokenizerError::ShortList { found: 12, .. })));
        let mut long = metadata(model);
        long.set("tokenizer.ggml.scores", vec![f32::NAN; 100]);
        long.set("tokenizer.ggml.token_type", vec![99i32; 100]);
        exercise(&build(&long).unwrap(), TEXT);
    }
}

#[test]
fn an_empty_vocabulary_is_an_error() {
    let mut metadata = metadata("llama");
    metadata.set("tokenizer.ggml.tokens", strings::<&str>([]));
    assert!(matches!(build(&metadata), Err(TokenizerError::EmptyVocabulary)));
}

#[test]
fn a_vocabulary_of_one_empty_token_works() {
    for model in MODELS {
        let mut metadata = metadata(model);
        metadata.set("tokenizer.ggml.tokens", strings([""]));
        let tokenizer = build(&metadata).unwrap();
        exercise(&tokenizer, TEXT);
        assert_eq!(tokenizer.token_text(0), Some("[EMPTY_0]"));
        assert_eq!(tokenizer.bos(), None);
    }
}

#[test]
fn special_ids_out_of_range_are_ignored() {
    for model in MODELS {
        let mut metadata = metadata(model);
        for key in ["bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "fim_pad", "prefix"] {
            metadata.set(format!("tokenizer.ggml.{key}_token_id"), 4_000_000_000u32);
        }
        metadata.set("tokenizer.ggml.add_bos_token", true);
        metadata.set("tokenizer.ggml.add_eos_token", true);
        let tokenizer = build(&metadata).unwrap();
        exercise(&tokenizer, TEXT);
        let in_range = |id: &u32| (*id as usize) < tokenizer.n_vocab();
        assert!(tokenizer.end_of_generation().iter().all(in_range));
    }
}

#[test]
fn odd_merges_are_harmless() {
    let mut metadata = metadata("gpt2");
    let merges = ["", " ", "  ", "a", "a ", " a", "x y", "a b c", "a b", "a b", "é 😀", "< s>", "<s> a"];
    metadata.set("tokenizer.ggml.merges", strings(merges));
    exercise(&build(&metadata).unwrap(), TEXT);
}

#[test]
fn merges_cannot_build_control_tokens() {
    let mut metadata = metadata("gpt2");
    metadata.set("tokenizer.ggml.tokens", strings(["<", "s", ">", "<s", "<s>"]));
    metadata.set("tokenizer.ggml.token_type", vec![1i32, 1, 1, 1, 3]);
    metadata.set("tokenizer.ggml.merges", strings(["< s", "<s >"]));
    metadata.set("tokenizer.ggml.pre", "superbpe");
    let tokenizer = build(&metadata).unwrap();
    assert_eq!(tokenizer.encode("<s>", EncodeOptions::default()), [3, 2]);
    let parse = EncodeOptions { parse_special: true, ..EncodeOptions::default() };
    assert_eq!(tokenizer.encode("<s>", parse), [4]);
    // Neither does SentencePiece, even if the score of a control token is the highest.
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.add_space_prefix", false);
    metadata.set("tokenizer.ggml.scores", vec![-1.0f32, -1.0, -1.0, -1.0, 0.0]);
    let tokenizer = build(&metadata).unwrap();
    assert_eq!(tokenizer.encode("<s>", EncodeOptions::default()), [3, 2]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Random normalisation maps, tokens, merges and token types.
    #[test]
    fn random_vocabularies_never_panic(
        model in prop::sample::select(MODELS.to_vec()),
        tokens in prop::collection::vec("[ab▁Ġ<>0xsé ]{0,4}", 1..30),
        merges in prop::collection::vec("[ab▁Ġé ]{0,6}", 0..20),
        types in prop::collection::vec(-1i32..9, 30),
        scores in prop::collection::vec(any::<f32>(), 30),
        charsmap in prop::collection::vec(any::<u8>(), 0..600),
        nodes in 0u32..150,
        text in "[ab▁<>0xsé 😀\n]{0,40}",
    ) {
        let mut metadata = metadata(model);
        let mut map = (nodes * 4).to_le_bytes().to_vec();
        map.extend(charsmap);
        metadata.set("tokenizer.ggml.tokens", strings(tokens));
        metadata.set("tokenizer.ggml.merges", strings(merges));
        metadata.set("tokenizer.ggml.token_type", types);
        metadata.set("tokenizer.ggml.scores", scores);
        metadata.set("tokenizer.ggml.precompiled_charsmap", map);
        metadata.set("tokenizer.ggml.add_space_prefix", true);
        if let Ok(tokenizer) = build(&metadata) {
            exercise(&tokenizer, &text);
        }
    }
}
