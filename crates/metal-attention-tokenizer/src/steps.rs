//! Tests that bound the work of encoding. Elementary steps are counted instead of time: for every vocabulary and every
//! text there is a maximum number of steps per byte.

use std::cell::Cell;

use metal_attention_gguf::{GgufFile, Metadata, StringArray};

use crate::pre::PRE_TOKENIZERS;
use crate::{EncodeOptions, Tokenizer, TokenizerError, TokenizerOptions, rules};

thread_local! {
    static STEPS: Cell<u64> = const { Cell::new(0) };
}

/// Counts one step: the lookup of a character, a trie node, a pair of symbols or a token.
pub(crate) fn count() {
    STEPS.set(STEPS.get() + 1);
}

/// The number of steps that `work` takes.
fn steps(work: impl FnOnce()) -> u64 {
    STEPS.set(0);
    work();
    STEPS.get()
}

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;

const MODELS: [&str; 7] = ["llama", "gpt2", "gemma4", "whitespace", "t5", "bert", "rwkv"];

/// Builds a tokenizer of a small vocabulary with the additional `tokens` (spelling and type) and the metadata of
/// `change`.
fn build(model: &str, tokens: &[(String, i32)], change: impl Fn(&mut Metadata)) -> Result<Tokenizer, TokenizerError> {
    let small = [("<unk>", UNKNOWN), ("a", NORMAL), ("b", NORMAL), ("\u{2581}a", NORMAL), ("\u{2581}", NORMAL)];
    let small = small.map(|(text, kind)| (text.to_owned(), kind));
    let all: Vec<_> = small.iter().chain(tokens).collect();
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", model);
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", all.iter().map(|(text, _)| text).collect::<StringArray>());
    metadata.set("tokenizer.ggml.token_type", all.iter().map(|(_, kind)| *kind).collect::<Vec<i32>>());
    metadata.set("tokenizer.ggml.scores", all.iter().map(|(text, _)| -1.0 / text.len() as f32).collect::<Vec<f32>>());
    metadata.set("tokenizer.ggml.merges", ["a b", "a a", "aa aa"].into_iter().collect::<StringArray>());
    metadata.set("tokenizer.ggml.unknown_token_id", 0u32);
    change(&mut metadata);
    Tokenizer::from_metadata(&metadata, &TokenizerOptions::default())
}

const PARSE: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };

/// Texts in which long tokens of a few letters almost match at every position.
fn texts() -> Vec<String> {
    const LEN: usize = 6000;
    let parts = ["a", "b", "ab", "a b", " ", "\n", "1", "aaaaaaac", "\u{e9}", "\u{2581}", "<unk>", "a\u{301}"];
    let mut texts: Vec<String> = parts.iter().map(|part| part.repeat(LEN / part.len())).collect();
    texts.push(format!("{}c", "a".repeat(1023)).repeat(LEN / 1024));
    texts.push(format!("{}b", "a".repeat(1023)).repeat(LEN / 1024));
    texts
}

/// Vocabularies with tokens of up to 1024 bytes: a single one, all prefixes of one, and tokens that differ only at one
/// end.
fn vocabularies(kind: i32) -> Vec<Vec<(String, i32)>> {
    let of = |texts: Vec<String>| texts.into_iter().map(|text| (text, kind)).collect();
    vec![
        of(vec!["a".repeat(1024)]),
        of((2..=1024).map(|n| "a".repeat(n)).collect()),
        of((1..=512).map(|n| "ab".repeat(n)).collect()),
        of((0..500).map(|n| format!("{}{n}", "a".repeat(1020))).collect()),
        of((0..500).map(|n| format!("{n}{}", "a".repeat(1020))).collect()),
        of(vec![format!("{}b", "a".repeat(1023)), format!("b{}", "a".repeat(1023)), " ".repeat(1024)]),
    ]
}

#[test]
fn special_tokens_take_a_bounded_number_of_steps_per_byte() {
    for kind in [CONTROL, USER_DEFINED, UNKNOWN] {
        for tokens in vocabularies(kind) {
            let tokenizer = build("whitespace", &tokens, |_| {}).unwrap();
            for text in texts() {
                let limit = 60 * text.len() as u64;
                let taken = steps(|| drop(tokenizer.encode(&text, PARSE)));
                assert!(taken < limit, "{taken} for {:?}", &text[..10]);
                // The end of the text may be a prefix of a token: this check is quadratic in the token's length.
                let taken = steps(|| drop(tokenizer.control_starts(&text)));
                assert!(taken < limit + 1024 * 1024, "{taken} for {:?}", &text[..10]);
            }
        }
    }
}

#[test]
fn literals_cost_at_most_the_length_of_a_token_per_byte() {
    for tokens in vocabularies(CONTROL) {
        let tokenizer = build("whitespace", &tokens, |_| {}).unwrap();
        for text in texts() {
            let literals: Vec<usize> = (0..text.len()).step_by(500).collect();
            let taken = steps(|| drop(tokenizer.encode_with_literals(&text, &literals, PARSE)));
            assert!(taken < 1100 * text.len() as u64, "{taken} for {:?}", &text[..10]);
        }
    }
}

#[test]
fn each_byte_takes_at_most_as_many_steps_as_the_longest_token_has_bytes() {
    for model in MODELS {
        for tokens in vocabularies(NORMAL) {
            let tokenizer = build(model, &tokens, |_| {}).unwrap();
            for text in texts() {
                // The first three models search for tokens at every byte, the others read the text once.
                let limit = if matches!(model, "t5" | "bert" | "rwkv") { 1100 } else { 60 };
                let taken = steps(|| drop(tokenizer.encode(&text, PARSE)));
                assert!(taken < limit * text.len() as u64, "{model}: {taken} for {:?}", &text[..10]);
            }
        }
    }
}

#[test]
fn real_vocabularies_take_few_steps_per_byte() {
    for name in ["gpt-2", "llama-bpe", "llama-spm", "gemma-4", "nomic-bert-moe", "bert-bge", "rwkv"] {
        let file =
            GgufFile::from_bytes(&metal_attention_testing::vocabulary::bytes(&format!("{name}-cut.gguf"))).unwrap();
        let tokenizer = Tokenizer::from_metadata(file.metadata(), &TokenizerOptions::default()).unwrap();
        for unit in ["a", " ", "7", "\n", "\u{4e2d}", "\u{1f600}", "!", "<", "\u{2581}", "<s>", "\u{e9}", "a "] {
            let text = unit.repeat(100_000 / unit.len());
            let taken = steps(|| drop(tokenizer.encode(&text, PARSE)));
            assert!(taken < 60 * text.len() as u64, "{name} {unit:?}: {taken}");
        }
    }
}

#[test]
fn longer_tokens_are_refused_with_their_id() {
    for model in MODELS {
        for kind in [NORMAL, UNKNOWN, CONTROL, USER_DEFINED, 5, 6, 99] {
            let mut bytes = 1025;
            for text in ["a".repeat(bytes), "<0x00>".repeat(1 << 18)] {
                bytes = text.len();
                let found = build(model, &[("b".into(), NORMAL), (text, kind)], |_| {});
                let merged = matches!(model, "gpt2" | "gemma4" | "whitespace");
                if merged && ![UNKNOWN, CONTROL, USER_DEFINED].contains(&kind) {
                    // The length of tokens that are made by merges does not matter.
                    assert!(found.is_ok(), "{model} {kind}");
                } else {
                    let error = found.unwrap_err();
                    let named =
                        matches!(error, TokenizerError::TokenTooLong { id: 6, bytes: n, limit: 1024 } if n == bytes);
                    assert!(named, "{model} {kind}: {error}");
                }
            }
        }
    }
    let many: Vec<_> = (0..17 << 10).map(|i| (format!("{i:01024}"), CONTROL)).collect();
    let error = build("gpt2", &many, |_| {}).unwrap_err();
    assert!(matches!(error, TokenizerError::TooLarge { what: "tokens", limit: 0x100_0000, .. }), "{error}");
}

#[test]
fn circular_characters_maps_end() {
    // A map in which every node leads back to itself: base 0, and the label of the byte on the edge.
    let mut nodes: Vec<u32> = (0..256).collect();
    nodes[0] = 0;
    let mut map = (nodes.len() as u32 * 4).to_le_bytes().to_vec();
    map.extend(nodes.iter().flat_map(|node| node.to_le_bytes()));
    let with = |end: Vec<u8>| {
        let map: Vec<u8> = map.iter().copied().chain(end).collect();
        build("t5", &[], |m| m.set("tokenizer.ggml.precompiled_charsmap", map.clone()))
    };
    let tokenizer = with(b"x\0".to_vec()).unwrap();
    for text in texts() {
        let taken = steps(|| drop(tokenizer.encode(&text, PARSE)));
        assert!(taken < 300 * text.len() as u64, "{taken} for {:?}", &text[..10]);
    }
    // Replacements must be short, including one without an end.
    for end in [vec![b'x'; 1 << 20], [vec![b'x'; 257], vec![0]].concat(), [vec![0], vec![b'x'; 257]].concat()] {
        assert!(matches!(with(end), Err(TokenizerError::CharsMap { .. })));
    }
}

#[test]
fn no_rule_of_a_pre_tokenizer_is_quadratic() {
    const LEN: usize = 400;
    let parts = [
        " ",
        "\n",
        "\r",
        "\t",
        "a",
        "A",
        "1",
        "'",
        ".",
        "/",
        "_",
        "`",
        "\u{e9}",
        "\u{301}",
        "\u{4e2d}",
        "\u{ac00}",
        "\u{3000}",
        "\u{85}",
        "<sentinel:",
        "IMGIMGA",
        "'l",
        " a",
        "\u{1f600}",
        "\0",
    ];
    for pre in PRE_TOKENIZERS {
        for first in parts {
            for second in parts {
                let run = first.repeat(LEN / first.len());
                for text in [
                    run.clone() + second,
                    (first.to_owned() + second).repeat(LEN / 2 / first.len()),
                    second.to_owned() + &run,
                ] {
                    let taken = steps(|| rules::split(pre.passes, &text, &mut |_| ()));
                    let limit = 80 * text.len() as u64;
                    assert!(taken < limit, "{:?}: {taken} for {first:?} and {second:?}", pre.names);
                }
            }
        }
    }
}
