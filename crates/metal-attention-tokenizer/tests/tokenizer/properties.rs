//! Properties of encoding and decoding, for random texts and ids.

use metal_attention_gguf::{GgufFile, Metadata, StringArray};
use metal_attention_tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions};
use proptest::prelude::*;
use std::sync::LazyLock;

fn open(name: &str) -> Tokenizer {
    let file = GgufFile::from_bytes(&metal_attention_testing::vocabulary::bytes(name)).expect("a vocabulary");
    Tokenizer::from_metadata(file.metadata(), &TokenizerOptions::default()).expect("a vocabulary")
}

static GPT2: LazyLock<Tokenizer> = LazyLock::new(|| open("gpt-2-cut.gguf"));
static LLAMA_BPE: LazyLock<Tokenizer> = LazyLock::new(|| open("llama-bpe-cut.gguf"));
static LLAMA_SPM: LazyLock<Tokenizer> = LazyLock::new(|| open("llama-spm-cut.gguf"));
static GEMMA: LazyLock<Tokenizer> = LazyLock::new(|| open("gemma-4-cut.gguf"));
static T5: LazyLock<Tokenizer> = LazyLock::new(|| open("nomic-bert-moe-cut.gguf"));
static BERT: LazyLock<Tokenizer> = LazyLock::new(|| open("bert-bge-cut.gguf"));
static RWKV: LazyLock<Tokenizer> = LazyLock::new(|| open("rwkv-cut.gguf"));

/// A tokenizer of each kind.
fn all() -> [&'static Tokenizer; 7] {
    [&GPT2, &LLAMA_BPE, &LLAMA_SPM, &GEMMA, &T5, &BERT, &RWKV]
}

/// Random texts of words, white space, digits, spellings of special tokens and arbitrary characters.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        "[a-zA-Z']{1,8}",
        "[ \n\t\r]{1,6}",
        "[0-9.,!?<>|_/-]{1,8}",
        "\\PC{1,4}",
        any::<String>(),
        prop::sample::select(vec!["<s>", "</s>", "<|endoftext|>", "<0x0A>", "▁", "<|eot_id|>", "<eos>", "[SEP]"])
            .prop_map(str::to_owned),
    ];
    prop::collection::vec(part, 0..12).prop_map(|parts| parts.concat())
}

/// The text of `ids`, decoded one by one.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut decoder = tokenizer.decoder().continuing();
    let mut text: String = ids.iter().map(|&id| decoder.push(id)).collect();
    text += &decoder.finish();
    text
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Vocabularies with byte-level or byte-fallback tokens can encode every text.
    #[test]
    fn decoding_restores_the_text(text in text()) {
        for tokenizer in [&*GPT2, &*LLAMA_BPE, &*LLAMA_SPM, &*GEMMA, &*RWKV] {
            // SentencePiece vocabularies decode "▁" as a blank.
            let escapes = !matches!(tokenizer.model(), "gpt2" | "rwkv");
            let expected = if escapes { text.replace('▁', " ") } else { text.clone() };
            let ids = tokenizer.encode(&text, EncodeOptions::default());
            prop_assert_eq!(tokenizer.decode(&ids, false), expected.clone(), "{:?}", tokenizer);
            let ids = tokenizer.encode(&text, EncodeOptions { add_special: true, parse_special: false });
            prop_assert_eq!(tokenizer.decode(&ids, false), expected, "{:?}", tokenizer);
        }
    }

    /// User text never becomes a control token.
    #[test]
    fn control_tokens_need_parse_special(text in text()) {
        for tokenizer in all() {
            let ids = tokenizer.encode(&text, EncodeOptions::default());
            let unknown = tokenizer.unknown();
            prop_assert!(ids.iter().all(|&id| !tokenizer.is_control(id) || Some(id) == unknown));
        }
    }

    /// Streamed decoding of any ids equals the lossy UTF-8 decoding of all their bytes.
    #[test]
    fn streamed_decoding_equals_from_utf8_lossy(ids in prop::collection::vec(0u32..7000, 0..60)) {
        for tokenizer in all() {
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
            prop_assert_eq!(stream(tokenizer, &ids), String::from_utf8_lossy(&bytes));
        }
    }

    /// The same for arbitrary bytes: the first 256 tokens of GPT-2 are the bytes.
    #[test]
    fn any_bytes_stream_like_from_utf8_lossy(bytes in prop::collection::vec(
        prop_oneof![any::<u8>(), 0x80u8..0xF8, Just(0xE2), Just(0xF0), Just(0x9F)], 0..40))
    {
        let ids: Vec<u32> = bytes
            .iter()
            .map(|&byte| (0..256).find(|&id| GPT2.token_bytes(id) == [byte]).expect("a byte token"))
            .collect();
        prop_assert_eq!(stream(&GPT2, &ids), String::from_utf8_lossy(&bytes));
    }

    /// Streamed text is never revised, and is delayed by at most one character.
    #[test]
    fn complete_characters_are_streamed_immediately(text in "\\PC{0,20}") {
        let mut decoder = GPT2.decoder();
        let mut streamed = String::new();
        let mut bytes = 0;
        for id in GPT2.encode(&text, EncodeOptions::default()) {
            bytes += GPT2.token_bytes(id).len();
            streamed += &decoder.push(id);
            prop_assert!(text.starts_with(&streamed));
            prop_assert!(streamed.len() + 4 > bytes);
        }
    }
}

#[test]
fn spm_drops_the_added_leading_blank() {
    let the = LLAMA_SPM.encode("the", EncodeOptions::default());
    assert_eq!(LLAMA_SPM.token_text(the[0]), Some("▁the"));
    assert_eq!(LLAMA_SPM.decode(&the, false), "the");
    let mut decoder = LLAMA_SPM.decoder().continuing();
    assert_eq!(decoder.push(the[0]), " the");
    // Control tokens before the text do not affect this.
    let mut decoder = LLAMA_SPM.decoder();
    assert_eq!(decoder.push(1), "");
    assert_eq!(decoder.push(the[0]), "the");
    assert_eq!(decoder.push(the[0]), " the");
}

#[test]
fn special_tokens_are_parsed_and_written_on_request() {
    let parse = EncodeOptions { add_special: false, parse_special: true };
    let ids = LLAMA_SPM.encode("<s>the</s>", parse);
    assert_eq!((ids[0], ids[ids.len() - 1]), (1, 2));
    assert_eq!(LLAMA_SPM.decode(&ids, false), "the");
    assert_eq!(LLAMA_SPM.decode(&ids, true), "<s> the</s>");
    assert!(LLAMA_SPM.is_end_of_generation(2) && !LLAMA_SPM.is_end_of_generation(1));
    assert_eq!(LLAMA_SPM.token_id("</s>"), Some(2));
}

#[test]
fn rwkv_takes_the_longest_token_at_each_position() {
    let tokens = ["<s>", r"\xe4", r"\xe4\xb8", "ab", "abcd", "cb", r"it\'s", r"\n\n", "ab", "[PAD9]", ""];
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "rwkv");
    metadata.set("tokenizer.ggml.tokens", tokens.into_iter().collect::<StringArray>());
    metadata.set("tokenizer.ggml.token_type", vec![3, 1, 1, 1, 1, 1, 1, 1, 1, 5, 1]);
    metadata.set("tokenizer.ggml.eot_token_id", 7u32);
    let build = |metadata: &Metadata| Tokenizer::from_metadata(metadata, &TokenizerOptions::default()).unwrap();
    let tokenizer = build(&metadata);
    let encode = |text: &str| tokenizer.encode(text, EncodeOptions { add_special: true, parse_special: false });
    // "abc" is only the beginning of a token. "ab" is the text of two tokens, of which the later one is used.
    assert_eq!(encode("abcb"), [8, 5]);
    assert_eq!(encode("abcdabc"), [4, 8]);
    // No token has the last byte of 中 (e4 b8 ad), nor the last two of a character with the same first byte (e4 b9 80).
    assert_eq!((encode("中"), encode("乀")), (vec![2], vec![1]));
    assert_eq!(encode("it's\n\n\n"), [6, 7]);
    assert_eq!((encode("<s>"), encode("[PAD9]"), encode("")), (vec![], vec![9], vec![]));
    assert_eq!(
        (tokenizer.decode(&[2, 6, 9, 0, 7], false), tokenizer.end_of_generation()),
        ("\u{FFFD}it's[PAD9]\n\n".into(), &[7][..])
    );
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.unknown()), (None, None, None));
    // A byte that begins no token is encoded as the unknown token, if there is one.
    metadata.set("tokenizer.ggml.unknown_token_id", 5u32);
    assert_eq!(build(&metadata).encode("中x", EncodeOptions::default()), [2, 5, 5]);
}

#[test]
fn ids_out_of_range_decode_to_nothing() {
    for tokenizer in all() {
        let ids = [u32::MAX, tokenizer.n_vocab() as u32];
        assert_eq!(tokenizer.decode(&ids, true), "");
        assert_eq!(tokenizer.token_text(ids[1]), None);
        assert_eq!(tokenizer.token_bytes(ids[0]), b"");
        assert!(!tokenizer.is_end_of_generation(ids[0]));
    }
}
