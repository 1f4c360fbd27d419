//! The pre-tokenizers: how each family of byte-pair vocabularies splits a text into pieces. `bpe.rs` then merges
//! within each piece.
//!
//! A pre-tokenizer is selected by the value of `tokenizer.ggml.pre`. To add one, add an entry to [`PRE_TOKENIZERS`];
//! most are a new order of the rules below.

use crate::classes::{
    AFMOE_ASIAN, ASCII_DIGIT, ASCII_LOWER, ASCII_PUNCTUATION, ASCII_UPPER, BACKTICK, BLOOM_STOP, BOPOMOFO,
    CJK_PUNCTUATION, CRLF, DEEPSEEK_CJK, DEEPSEEK_LETTER, DEEPSEEK_PUNCTUATION, HAN, HAN_KANA, HANGUL, LETTER, LF,
    MARK, NUMBER, PUNCTUATION, SLASH, SPACE, SYMBOL,
};
use crate::rules::{
    CharSet, IMAGE_CODE, INDENTATION, PHRASE, SENTINEL, SPACES_BY_POWERS_OF_TWO, SplitPass, SplitRule, any_of, none_of,
};

/// The form in which the vocabulary spells the pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Spelling {
    /// Each byte is a character of GPT-2's byte alphabet: " the" is "Ġthe".
    ByteAlphabet,
    /// The text itself, with "▁" for the blank. Bytes that no token covers become byte-fallback tokens, `<0xXX>`.
    EscapedBlank,
    /// The text itself.
    Plain,
}

/// The pieces that become one token without merges, if the vocabulary has a token of that spelling. `tokenizer.json`
/// calls this `ignore_merges`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WholePieces {
    None,
    LineBreaks,
    All,
}

/// Whether BOS is put before an encoded text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Bos {
    /// Only if `tokenizer.ggml.add_bos_token` is true.
    OnRequest,
    /// Unless `tokenizer.ggml.add_bos_token` is false.
    ByDefault,
    /// Always.
    Always,
}

/// A pre-tokenizer, with the other properties that its name implies.
pub(crate) struct PreTokenizer {
    /// The values of `tokenizer.ggml.pre` that select it.
    pub names: &'static [&'static str],
    /// The passes, in order. Each splits the pieces of the one before.
    pub passes: &'static [SplitPass],
    /// The pieces that are looked up as whole tokens before any merge.
    pub whole: WholePieces,
    /// Whether BOS is put first.
    pub bos: Bos,
    /// Whether the vocabulary has no BOS token unless the metadata names one. Otherwise the default is token 11, as in
    /// llama.cpp.
    pub no_default_bos: bool,
    /// The form in which the vocabulary spells pieces.
    pub spelling: Spelling,
}

const BASE: PreTokenizer = PreTokenizer {
    names: &[],
    passes: &[],
    whole: WholePieces::None,
    bos: Bos::OnRequest,
    no_default_bos: false,
    spelling: Spelling::ByteAlphabet,
};

/// The pre-tokenizer that `tokenizer.ggml.pre` calls `name`.
pub(crate) fn find(name: &str) -> Option<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|pre| pre.names.contains(&name))
}

/// The names of all pre-tokenizers.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    PRE_TOKENIZERS.iter().flat_map(|pre| pre.names.iter().copied())
}

// Rules that several models share. Each name says what the rule matches; the comment is its regular expression.

const CONTRACTION: SplitRule = SplitRule::Contraction { any_case: false };
const CONTRACTION_ANY_CASE: SplitRule = SplitRule::Contraction { any_case: true };
/// ` ?\p{L}+`
const BLANK_LETTERS: SplitRule = SplitRule::run(CharSet::BLANK, any_of(LETTER));
/// ` ?\p{N}+`
const BLANK_NUMBERS: SplitRule = SplitRule::run(CharSet::BLANK, any_of(NUMBER));
/// ` ?[^\s\p{L}\p{N}]+`
const BLANK_OTHERS: SplitRule = SplitRule::run(CharSet::BLANK, none_of(SPACE | LETTER | NUMBER));
/// `[^\r\n\p{L}\p{N}]?`
const LEAD: CharSet = none_of(CRLF | LETTER | NUMBER);
/// `[^\r\n\p{L}\p{N}]?\p{L}+`
const LEAD_LETTERS: SplitRule = SplitRule::run(LEAD, any_of(LETTER));
/// ` ?[^\s\p{L}\p{N}]+[\r\n]*`
const BLANK_OTHERS_BREAKS: SplitRule =
    SplitRule::run_tail(CharSet::BLANK, none_of(SPACE | LETTER | NUMBER), any_of(CRLF));
/// ` ?[^\s\p{L}\p{N}]+[\r\n/]*`
const BLANK_OTHERS_BREAKS_SLASHES: SplitRule =
    SplitRule::run_tail(CharSet::BLANK, none_of(SPACE | LETTER | NUMBER), any_of(CRLF | SLASH));
/// `\p{N}`
const DIGIT: SplitRule = SplitRule::up_to(1, any_of(NUMBER));
/// `\p{N}{1,3}`
const DIGITS_3: SplitRule = SplitRule::up_to(3, any_of(NUMBER));
/// `\p{N}+`
const DIGITS: SplitRule = SplitRule::up_to(usize::MAX, any_of(NUMBER));
/// `[\r\n]`
const LINE_BREAK: SplitRule = SplitRule::up_to(1, any_of(CRLF));
/// `[!-/:-@\[-{-~][A-Za-z]+`
const PUNCTUATED_ASCII_LETTERS: SplitRule =
    SplitRule::Headed { head: any_of(ASCII_PUNCTUATION), body: any_of(ASCII_UPPER | ASCII_LOWER) };
/// `[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+`
const LEAD_LETTERS_MARKS: SplitRule =
    SplitRule::run(none_of(CRLF | LETTER | PUNCTUATION | SYMBOL), any_of(LETTER | MARK));

/// GPT-2's pass: `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
const GPT2: SplitPass = SplitPass::Rules(&[CONTRACTION, BLANK_LETTERS, BLANK_NUMBERS, BLANK_OTHERS, SplitRule::Spaces]);
/// Llama 3's pass: GPT-2's, but contractions are matched in any case, any character may lead a word, and digits are
/// split in threes.
const LLAMA3: &[SplitPass] = &[SplitPass::Rules(&[
    CONTRACTION_ANY_CASE,
    LEAD_LETTERS,
    DIGITS_3,
    BLANK_OTHERS_BREAKS,
    SplitRule::LineBreaks,
    SplitRule::Spaces,
])];
/// Qwen 2's pass: Llama 3's with single digits.
const QWEN2: SplitPass = SplitPass::Rules(&[
    CONTRACTION_ANY_CASE,
    LEAD_LETTERS,
    DIGIT,
    BLANK_OTHERS_BREAKS,
    SplitRule::LineBreaks,
    SplitRule::Spaces,
]);
/// Single digits are split off, then GPT-2's pass follows.
const STARCODER: &[SplitPass] = &[SplitPass::Rules(&[DIGIT]), GPT2];
/// The last pass of deepseek-v3.
const DEEPSEEK_V3: SplitPass = SplitPass::Rules(&[
    PUNCTUATED_ASCII_LETTERS,
    LEAD_LETTERS_MARKS,
    SplitRule::run_tail(CharSet::BLANK, any_of(PUNCTUATION | SYMBOL), any_of(CRLF)),
    SplitRule::LineBreaks,
    SplitRule::Spaces,
]);
const HAN_KANA_RUN: SplitRule = SplitRule::up_to(usize::MAX, any_of(HAN_KANA));
/// `[^\n]+|[\n]+`
const LINES: SplitPass =
    SplitPass::Rules(&[SplitRule::up_to(usize::MAX, none_of(LF)), SplitRule::up_to(usize::MAX, any_of(LF))]);
/// A word that ends where its lower-case letters end. Letters outside ASCII are in both cases.
const fn cased_word(letters: u32, contraction: bool) -> SplitRule {
    SplitRule::CasedWord {
        lead: LEAD,
        upper: any_of(letters).without(ASCII_LOWER),
        lower: any_of(letters).without(ASCII_UPPER),
        contraction,
    }
}
/// `[^\r
/// \p{L}\p{N}]?[\p{L}\p{M}]+` with an optional contraction.
const MARKED_WORD: SplitRule =
    SplitRule::CasedWord { lead: LEAD, upper: any_of(LETTER | MARK), lower: any_of(LETTER | MARK), contraction: true };
/// ` ?[^(\s|.,!?…。，、।۔،)]+`
const BLOOM: SplitPass = SplitPass::Rules(&[SplitRule::run(CharSet::BLANK, none_of(SPACE | BLOOM_STOP))]);

/// All pre-tokenizers. The regular expressions are those of the models' `tokenizer.json`, except that only ASCII
/// letters have a case, as in llama.cpp.
#[rustfmt::skip]
pub(crate) const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["default"],
        passes: &[
            SplitPass::Rules(&[SplitRule::up_to(usize::MAX, any_of(PUNCTUATION | ASCII_PUNCTUATION).without(BACKTICK))]),
            GPT2,
            SplitPass::Rules(&[DIGITS]),
            SplitPass::Rules(&[SplitRule::Exactly { count: 3, set: any_of(ASCII_DIGIT) }]),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &[
            "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
            "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion",
            "granite-docling",
        ],
        passes: &[GPT2],
        ..BASE
    },
    PreTokenizer {
        names: &[
            "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
        ],
        passes: LLAMA3,
        whole: WholePieces::All,
        bos: Bos::ByDefault,
        ..BASE
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe"], passes: LLAMA3, ..BASE },
    PreTokenizer { names: &["chatglm-bpe"], passes: LLAMA3, no_default_bos: true, ..BASE },
    PreTokenizer { names: &["glm4", "glm5"], passes: LLAMA3, no_default_bos: true, whole: WholePieces::All, ..BASE },
    PreTokenizer {
        names: &["minicpm5"],
        passes: &[
            SplitPass::Rules(&[DIGITS_3]),
            SplitPass::Rules(&[
                CONTRACTION_ANY_CASE, LEAD_LETTERS, DIGITS, BLANK_OTHERS_BREAKS, SplitRule::LineBreaks, SplitRule::Spaces,
            ]),
        ],
        whole: WholePieces::All,
        ..BASE
    },
    PreTokenizer {
        names: &["jais-2"],
        passes: &[SplitPass::Rules(&[
            CONTRACTION_ANY_CASE, LEAD_LETTERS, DIGITS_3, BLANK_OTHERS_BREAKS, SplitRule::LineBreaks,
            SPACES_BY_POWERS_OF_TWO,
        ])],
        ..BASE
    },
    PreTokenizer {
        names: &[
            "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2",
        ],
        passes: &[QWEN2],
        ..BASE
    },
    PreTokenizer {
        names: &["qwen35"],
        passes: &[SplitPass::Rules(&[
            CONTRACTION_ANY_CASE,
            SplitRule::run(LEAD, any_of(LETTER | MARK)),
            DIGIT,
            SplitRule::run_tail(CharSet::BLANK, none_of(SPACE | LETTER | MARK | NUMBER), any_of(CRLF)),
            SplitRule::LineBreaks,
            SplitRule::Spaces,
        ])],
        ..BASE
    },
    PreTokenizer {
        names: &["ufakzeka"],
        passes: &[SplitPass::Rules(&[LEAD_LETTERS, DIGIT, BLANK_OTHERS_BREAKS, SplitRule::LineBreaks, SplitRule::Spaces])],
        ..BASE
    },
    PreTokenizer { names: &["laguna"], passes: &[LINES, QWEN2], ..BASE },
    PreTokenizer {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        passes: &[QWEN2],
        ..BASE
    },
    PreTokenizer {
        names: &["seed-coder"],
        passes: &[SplitPass::Rules(&[
            CONTRACTION_ANY_CASE, LEAD_LETTERS, DIGIT, BLANK_OTHERS, SplitRule::LineBreaks, SplitRule::Spaces,
        ])],
        ..BASE
    },
    PreTokenizer {
        names: &["exaone-moe"],
        passes: &[SplitPass::Rules(&[
            CONTRACTION_ANY_CASE,
            PHRASE,
            DIGIT,
            SplitRule::Run {
                lead: CharSet::BLANK, body: none_of(SPACE | LETTER | NUMBER), max: usize::MAX, tail: any_of(CRLF | SLASH), tail_max: 1,
            },
            SplitRule::LineBreaks,
            SplitRule::Spaces,
        ])],
        ..BASE
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"],
        passes: STARCODER,
        ..BASE
    },
    PreTokenizer {
        names: &["falcon"],
        passes: &[
            SplitPass::Rules(&[SplitRule::up_to(usize::MAX, any_of(PUNCTUATION | ASCII_PUNCTUATION))]),
            GPT2,
            SplitPass::Rules(&[SplitRule::Exactly { count: 3, set: any_of(ASCII_DIGIT) }]),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["deepseek-llm"],
        passes: &[
            SplitPass::Rules(&[LINE_BREAK]),
            SplitPass::Rules(&[SplitRule::run(any_of(SPACE), any_of(DEEPSEEK_LETTER))]),
            SplitPass::Rules(&[SplitRule::run(any_of(SPACE), any_of(DEEPSEEK_PUNCTUATION))]),
            SplitPass::TrailingSpace,
            SplitPass::Rules(&[SplitRule::up_to(usize::MAX, any_of(DEEPSEEK_CJK))]),
            SplitPass::Rules(&[DIGITS]),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        passes: &[
            SplitPass::Rules(&[LINE_BREAK]),
            SplitPass::Rules(&[SplitRule::run(any_of(SPACE), any_of(LETTER))]),
            SplitPass::Rules(&[SplitRule::run(any_of(SPACE), any_of(PUNCTUATION))]),
            SplitPass::Rules(&[SplitRule::up_to(usize::MAX, any_of(DEEPSEEK_CJK))]),
            SplitPass::Rules(&[DIGIT]),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        passes: &[SplitPass::Rules(&[DIGITS_3]), SplitPass::Rules(&[HAN_KANA_RUN]), DEEPSEEK_V3],
        ..BASE
    },
    PreTokenizer {
        names: &["spark2_5"],
        passes: &[
            SplitPass::Rules(&[DIGITS_3]),
            SplitPass::Rules(&[HAN_KANA_RUN]),
            SplitPass::Rules(&[
                PUNCTUATED_ASCII_LETTERS, LEAD_LETTERS_MARKS, SplitRule::run(CharSet::BLANK, any_of(PUNCTUATION | SYMBOL)),
                LINE_BREAK, SplitRule::Spaces,
            ]),
            SplitPass::Rules(&[DIGIT]),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["afmoe"],
        passes: &[SplitPass::DigitGroups, SplitPass::Rules(&[SplitRule::up_to(usize::MAX, any_of(AFMOE_ASIAN))]), DEEPSEEK_V3],
        ..BASE
    },
    PreTokenizer {
        names: &["youtu"],
        passes: &[
            SplitPass::Rules(&[
                SplitRule::up_to(usize::MAX, any_of(HANGUL)), SplitRule::up_to(usize::MAX, any_of(CJK_PUNCTUATION)),
                SplitRule::up_to(usize::MAX, any_of(BOPOMOFO)), HAN_KANA_RUN,
            ]),
            SplitPass::Rules(&[MARKED_WORD, DIGIT, BLANK_OTHERS_BREAKS_SLASHES, SplitRule::LineBreaks, SplitRule::Spaces]),
        ],
        whole: WholePieces::All,
        ..BASE
    },
    PreTokenizer {
        names: &["tiny_aya", "cohere2moe"],
        passes: &[
            SplitPass::DigitGroups,
            SplitPass::Rules(&[MARKED_WORD, DIGITS_3, BLANK_OTHERS_BREAKS_SLASHES, SplitRule::LineBreaks, SplitRule::Spaces]),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["tekken"],
        passes: &[SplitPass::Rules(&[
            cased_word(LETTER, false), DIGIT, BLANK_OTHERS_BREAKS_SLASHES, SplitRule::LineBreaks, SplitRule::Spaces,
        ])],
        whole: WholePieces::All,
        bos: Bos::ByDefault,
        ..BASE
    },
    PreTokenizer {
        names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        passes: &[SplitPass::Rules(&[
            cased_word(LETTER, true), DIGITS_3, BLANK_OTHERS_BREAKS_SLASHES, SplitRule::LineBreaks, SplitRule::Spaces,
        ])],
        ..BASE
    },
    PreTokenizer {
        names: &["granite-embed-multi-97m"],
        passes: &[SplitPass::Rules(&[
            cased_word(LETTER | MARK, true), DIGITS_3, BLANK_OTHERS_BREAKS_SLASHES, SplitRule::LineBreaks, SplitRule::Spaces,
        ])],
        whole: WholePieces::All,
        ..BASE
    },
    PreTokenizer {
        names: &["kimi-k2"],
        passes: &[SplitPass::Rules(&[
            SplitRule::up_to(usize::MAX, any_of(HAN)),
            SplitRule::CasedWord {
                lead: LEAD, upper: any_of(LETTER).without(HAN), lower: any_of(LETTER).without(HAN), contraction: true,
            },
            DIGITS_3, BLANK_OTHERS_BREAKS, SplitRule::LineBreaks, SplitRule::Spaces,
        ])],
        ..BASE
    },
    PreTokenizer { names: &["bloom", "poro-chat", "gpt3-finnish"], passes: &[BLOOM], ..BASE },
    PreTokenizer { names: &["viking"], passes: &[BLOOM, SplitPass::Rules(&[DIGIT])], ..BASE },
    PreTokenizer { names: &["superbpe"], passes: &[SplitPass::Rules(&[DIGITS]), SplitPass::Thousands], ..BASE },
    PreTokenizer {
        names: &["chameleon"],
        passes: &[
            SplitPass::Rules(&[SENTINEL]),
            SplitPass::Rules(&[IMAGE_CODE]),
            SplitPass::Rules(&[INDENTATION]),
            SplitPass::Rules(&[DIGIT]),
            SplitPass::Rules(&[SplitRule::up_to(1, any_of(PUNCTUATION | ASCII_PUNCTUATION))]),
            GPT2,
        ],
        bos: Bos::ByDefault,
        ..BASE
    },
    PreTokenizer {
        names: &["gemma4", "gemma-4", "granite-embed-multi-311m"],
        passes: &[LINES],
        bos: Bos::Always,
        whole: WholePieces::LineBreaks,
        spelling: Spelling::EscapedBlank,
        ..BASE
    },
    PreTokenizer { names: &["sarvam-moe"], passes: &[LINES], spelling: Spelling::EscapedBlank, ..BASE },
    PreTokenizer {
        names: &["whitespace"],
        passes: &[SplitPass::Rules(&[SplitRule::up_to(usize::MAX, none_of(SPACE))])],
        spelling: Spelling::Plain,
        ..BASE
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::split;

    fn pieces<'t>(pre: &str, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        split(find(pre).unwrap().passes, text, &mut |piece| pieces.push(piece));
        assert_eq!(pieces.concat(), text);
        pieces
    }

    #[test]
    fn names_are_unique() {
        let mut all: Vec<_> = names().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn gpt2_splits_words_numbers_and_spaces() {
        assert_eq!(
            pieces("gpt-2", "I'll  pay 100€,\n ok?  "),
            ["I", "'ll", " ", " pay", " 100", "€,", "\n", " ok", "?", "  "]
        );
        assert_eq!(pieces("gpt-2", "IT'S"), ["IT", "'", "S"]);
    }

    #[test]
    fn starcoder_takes_digits_one_by_one() {
        assert_eq!(pieces("starcoder", " 123a"), [" ", "1", "2", "3", "a"]);
    }

    #[test]
    fn llama3_takes_three_digits_and_line_breaks_with_punctuation() {
        assert_eq!(pieces("llama-bpe", "12345 IT'S"), ["123", "45", " IT", "'S"]);
        assert_eq!(pieces("llama-bpe", "a.\n\n  \n b"), ["a", ".\n\n", "  \n", " b"]);
        assert_eq!(pieces("llama-bpe", "(a   b"), ["(a", "  ", " b"]);
    }

    #[test]
    fn qwen35_keeps_marks_with_letters() {
        assert_eq!(pieces("qwen2", "e\u{301}a"), ["e", "\u{301}a"]);
        assert_eq!(pieces("qwen35", "e\u{301}a"), ["e\u{301}a"]);
    }

    #[test]
    fn cased_words_end_with_lower_case() {
        assert_eq!(pieces("gpt-4o", "helloWorld's HTTPServer"), ["hello", "World's", " HTTPServer"]);
        assert_eq!(pieces("tekken", "ABCéDE"), ["ABCé", "DE"]);
        assert_eq!(pieces("tekken", "12"), ["1", "2"]);
    }

    #[test]
    fn digits_are_grouped_from_the_right() {
        assert_eq!(pieces("superbpe", "a 1234567 b"), ["a ", "1", "234", "567", " b"]);
        assert_eq!(pieces("tiny_aya", "1234"), ["1", "234"]);
        assert_eq!(pieces("default", "12345"), ["123", "45"]);
    }

    #[test]
    fn deepseek_v3_splits_scripts() {
        assert_eq!(pieces("deepseek-v3", "日本x(foo) 1234"), ["日本", "x", "(foo", ")", " ", "123", "4"]);
    }

    #[test]
    fn chameleon_takes_image_codes_whole() {
        assert_eq!(
            pieces("chameleon", "xIMGIMGABZ<sentinel:12>"),
            ["x", "IMGIMGABZ", "<", "sentinel", ":", "1", "2", ">"]
        );
    }

    #[test]
    fn every_pre_tokenizer_keeps_every_byte_in_linear_time() {
        let long = ["a", "A", " ", "7", "\n", "中", "😀", "'", "Aé", "é!", " \n", "e\u{301}", "IMGIMGA", "\t  "];
        for pre in PRE_TOKENIZERS {
            for unit in long {
                let text = unit.repeat(100_000 / unit.len());
                let mut total = 0;
                split(pre.passes, &text, &mut |piece| total += piece.len());
                assert_eq!(total, text.len());
                let text = text + "x";
                total = 0;
                split(pre.passes, &text, &mut |piece| total += piece.len());
                assert_eq!(total, text.len());
            }
        }
    }
}
