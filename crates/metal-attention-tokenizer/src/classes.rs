//! Character classes: a bit mask per code point. A rule of a pre-tokenizer tests for any union of classes with one
//! table lookup.

use regex_syntax::hir::{Class, HirKind};
use std::ops::RangeInclusive;
use std::sync::LazyLock;

/// A set of character classes, one bit each.
pub(crate) type ClassMask = u32;

/// `\p{L}`
pub(crate) const LETTER: ClassMask = 1 << 0;
/// `\p{N}`
pub(crate) const NUMBER: ClassMask = 1 << 1;
/// `\p{M}`
pub(crate) const MARK: ClassMask = 1 << 2;
/// `\p{P}`
pub(crate) const PUNCTUATION: ClassMask = 1 << 3;
/// `\p{S}`
pub(crate) const SYMBOL: ClassMask = 1 << 4;
/// `\s`
pub(crate) const SPACE: ClassMask = 1 << 5;
/// The blank, U+0020.
pub(crate) const BLANK: ClassMask = 1 << 6;
/// `[\r\n]`
pub(crate) const CRLF: ClassMask = 1 << 7;
/// `\n`
pub(crate) const LF: ClassMask = 1 << 8;
/// `/`
pub(crate) const SLASH: ClassMask = 1 << 9;
/// `[A-Z]`
pub(crate) const ASCII_UPPER: ClassMask = 1 << 10;
/// `[a-z]`
pub(crate) const ASCII_LOWER: ClassMask = 1 << 11;
/// ASCII punctuation and symbols.
pub(crate) const ASCII_PUNCTUATION: ClassMask = 1 << 12;
/// `` ` ``
pub(crate) const BACKTICK: ClassMask = 1 << 13;
/// Han ideographs.
pub(crate) const HAN: ClassMask = 1 << 14;
/// Han ideographs, hiragana and katakana, in the ranges of deepseek-v3.
pub(crate) const HAN_KANA: ClassMask = 1 << 15;
/// The letters that deepseek-llm keeps together.
pub(crate) const DEEPSEEK_LETTER: ClassMask = 1 << 16;
/// The punctuation that deepseek-llm keeps together.
pub(crate) const DEEPSEEK_PUNCTUATION: ClassMask = 1 << 17;
/// The scripts that deepseek-llm and deepseek-coder split off.
pub(crate) const DEEPSEEK_CJK: ClassMask = 1 << 18;
/// The characters that end a word for bloom, poro-chat and viking, in addition to white space.
pub(crate) const BLOOM_STOP: ClassMask = 1 << 19;
/// Hangul syllables and jamo.
pub(crate) const HANGUL: ClassMask = 1 << 20;
/// CJK punctuation, in the ranges of youtu.
pub(crate) const CJK_PUNCTUATION: ClassMask = 1 << 21;
/// Bopomofo.
pub(crate) const BOPOMOFO: ClassMask = 1 << 22;
/// The scripts without spaces between words, in the ranges of afmoe.
pub(crate) const AFMOE_ASIAN: ClassMask = 1 << 23;
/// `[0-9]`
pub(crate) const ASCII_DIGIT: ClassMask = 1 << 24;
/// `[\t\n]`
pub(crate) const TAB_LF: ClassMask = 1 << 25;
/// `[\p{Cc}\p{Cf}\p{Co}]`: control, format and private characters.
pub(crate) const CONTROL: ClassMask = 1 << 26;

/// The definition of each class as a set in regex notation. Where a model's own set includes wide spaces, `&&[^\s]`
/// removes them: the model's tokenizer matches them as white space first. The notation is the common part of
/// `regex-syntax` and Oniguruma, because Oniguruma reads the exported tokenizers.
const DEFINITIONS: [(ClassMask, &str); 27] = [
    (LETTER, r"\p{L}"),
    (NUMBER, r"\p{N}"),
    (MARK, r"\p{M}"),
    (PUNCTUATION, r"\p{P}"),
    (SYMBOL, r"\p{S}"),
    (SPACE, r"\s"),
    (BLANK, r"[ ]"),
    (CRLF, r"[\r\n]"),
    (LF, r"[\n]"),
    (SLASH, r"[/]"),
    (ASCII_UPPER, r"[A-Z]"),
    (ASCII_LOWER, r"[a-z]"),
    (ASCII_PUNCTUATION, r"[!-/:-@\[-`{-~]"),
    (BACKTICK, r"[`]"),
    (
        HAN,
        r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]",
    ),
    (HAN_KANA, r"[一-龥\x{3040}-\x{309F}\x{30A0}-\x{30FF}]"),
    (
        DEEPSEEK_LETTER,
        r"[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]",
    ),
    (DEEPSEEK_PUNCTUATION, r"[!-/:-~！-／：-～‘-‟\x{3000}-。&&[^\s]]"),
    (DEEPSEEK_CJK, r"[一-龥\x{800}-一가-\x{D7FF}&&[^\s]]"),
    (BLOOM_STOP, r"[(|.,!?…。，、।۔،)]"),
    (HANGUL, r"[가-힣ㄱ-ㆎ]"),
    (CJK_PUNCTUATION, r"[！…“”‘’—：；，、-\x{303F}︰-﹏]"),
    (BOPOMOFO, r"[ㄅ-ㄯ]"),
    (
        AFMOE_ASIAN,
        r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}\x{E40}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]",
    ),
    (ASCII_DIGIT, r"[0-9]"),
    (TAB_LF, r"[\t\n]"),
    (CONTROL, r"[\p{Cc}\p{Cf}\p{Co}]"),
];

/// The first code point that is not in the table. From here on there are only variation selectors, tags, and
/// private-use and unassigned characters.
const TABLE_END: u32 = 0x34000;
/// The variation selectors supplement: the only marks from [`TABLE_END`] on.
const HIGH_MARKS: RangeInclusive<u32> = 0xE0100..=0xE01EF;
/// Tags and private-use characters: all are of class [`CONTROL`]. The unassigned code points between them make no
/// difference.
const HIGH_CONTROLS: RangeInclusive<u32> = 0xE0001..=0x10FFFF;

/// The classes of every code point.
pub(crate) struct Classes {
    table: Vec<ClassMask>,
}

/// The table of the process. It is built when the first tokenizer needs it.
pub(crate) static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::build);

impl Classes {
    fn build() -> Self {
        let mut table = vec![0; TABLE_END as usize];
        for (bit, set) in DEFINITIONS {
            for (start, end) in ranges(set) {
                for c in start..=end.min(TABLE_END - 1) {
                    table[c as usize] |= bit;
                }
            }
        }
        Self { table }
    }

    /// The classes of `c`.
    pub(crate) fn of(&self, c: char) -> ClassMask {
        let c = c as u32;
        match self.table.get(c as usize) {
            Some(&mask) => mask,
            None if HIGH_MARKS.contains(&c) => MARK,
            None if HIGH_CONTROLS.contains(&c) => CONTROL,
            None => 0,
        }
    }
}

/// The union of `classes` in regex notation.
pub(crate) fn set(classes: ClassMask) -> String {
    match DEFINITIONS.iter().find(|&&(bit, _)| bit == classes) {
        Some(&(_, set)) => set.to_owned(),
        None => format!("[{}]", members(classes)),
    }
}

/// The union of `classes` in regex notation, without the outer brackets.
pub(crate) fn members(classes: ClassMask) -> String {
    let named = DEFINITIONS.iter().filter(|&&(bit, _)| classes & bit != 0);
    named.map(|&(_, set)| without_brackets(set)).collect()
}

/// A set without its brackets, where it may stand inside another set without them. A set with `&&` keeps them.
fn without_brackets(set: &str) -> &str {
    let inner = set.strip_prefix('[').and_then(|set| set.strip_suffix(']'));
    inner.filter(|inner| !inner.contains("&&")).unwrap_or(set)
}

/// The code point ranges of a set in regex notation.
fn ranges(set: &str) -> Vec<(u32, u32)> {
    let hir = regex_syntax::parse(set).expect("the character sets above are valid");
    match hir.kind() {
        HirKind::Class(Class::Unicode(class)) => {
            class.ranges().iter().map(|r| (r.start() as u32, r.end() as u32)).collect()
        }
        // The parser simplifies a set of one character to a literal.
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).expect("a character is UTF-8");
            text.chars().map(|c| (c as u32, c as u32)).collect()
        }
        other => unreachable!("{set} is a character set, not {other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_characters_have_their_classes() {
        let of = |c| CLASSES.of(c);
        assert_eq!(of('é'), LETTER | DEEPSEEK_LETTER);
        // The range `:-~` of deepseek-llm includes letters.
        assert_eq!(of('Z'), LETTER | ASCII_UPPER | DEEPSEEK_LETTER | DEEPSEEK_PUNCTUATION);
        assert_eq!(of('7'), NUMBER | ASCII_DIGIT);
        assert_eq!(of('\n'), SPACE | CRLF | LF | TAB_LF | CONTROL);
        assert_eq!(of(' '), SPACE | BLANK);
        assert_eq!(of('\u{3000}'), SPACE);
        assert_eq!(of('\u{85}'), SPACE | CONTROL);
        assert_eq!(of('`'), SYMBOL | ASCII_PUNCTUATION | BACKTICK | DEEPSEEK_PUNCTUATION);
        assert_eq!(of('\u{301}'), MARK);
        assert_eq!(of('中'), LETTER | HAN | HAN_KANA | DEEPSEEK_CJK | AFMOE_ASIAN);
        assert_eq!(of('½'), NUMBER);
        assert_eq!(of('\u{FEFF}'), CONTROL);
        assert_eq!(of('\u{E0100}'), MARK);
        assert_eq!(of('\u{10FFFD}'), CONTROL);
        assert_eq!(of('\u{40000}'), 0);
    }

    #[test]
    fn only_variation_selectors_tags_and_private_characters_are_above_the_table() {
        for (bit, set) in DEFINITIONS {
            for (start, end) in ranges(set) {
                for c in start.max(TABLE_END)..=end {
                    let mark = bit == MARK && HIGH_MARKS.contains(&c);
                    let control = bit == CONTROL && HIGH_CONTROLS.contains(&c);
                    assert!(mark || control, "{c:x} in {set}");
                }
            }
        }
    }
}
