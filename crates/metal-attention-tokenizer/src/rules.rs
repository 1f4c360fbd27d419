//! The rules that pre-tokenizers consist of, and the splitting of text by them.
//!
//! A model defines its pre-tokenizer as a regular expression: alternatives that are tried in order at each position.
//! Most models use the same few alternatives. Each is a [`SplitRule`] here, matched by hand-written code in time
//! linear in the length of its match. A [`SplitPass`] applies a list of rules to each piece; a pre-tokenizer is a list
//! of passes.

use crate::classes::{ASCII_DIGIT, BLANK, CLASSES, CRLF, ClassMask, Classes, LETTER, MARK, NUMBER, SPACE};

/// A set of characters: those in at least one of the classes `any` (all characters if `any` is 0), and in none of the
/// classes `none`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct CharSet {
    pub any: ClassMask,
    pub none: ClassMask,
}

/// The characters in at least one of these classes.
pub(crate) const fn any_of(any: ClassMask) -> CharSet {
    CharSet { any, none: 0 }
}

/// The characters in none of these classes.
pub(crate) const fn none_of(none: ClassMask) -> CharSet {
    CharSet { any: 0, none }
}

impl CharSet {
    pub(crate) const NOTHING: CharSet = CharSet { any: 1, none: 1 };
    pub(crate) const BLANK: CharSet = any_of(BLANK);

    /// This set without the characters of some classes.
    pub(crate) const fn without(self, none: ClassMask) -> CharSet {
        CharSet { any: self.any, none: self.none | none }
    }

    /// Whether a character with the classes `mask` is in the set.
    fn contains(self, mask: ClassMask) -> bool {
        (self.any == 0 || mask & self.any != 0) && mask & self.none == 0
    }
}

/// One alternative of a pre-tokenizer's regular expression.
#[derive(Clone, Copy)]
pub(crate) enum SplitRule {
    /// `'s|'t|'re|'ve|'m|'ll|'d`, in lower case only, or in any case.
    Contraction { any_case: bool },
    /// `lead? body{1,max} tail{0,tail_max}`
    Run { lead: CharSet, body: CharSet, max: usize, tail: CharSet, tail_max: usize },
    /// `set{count}`
    Exactly { count: usize, set: CharSet },
    /// `head body+`
    Headed { head: CharSet, body: CharSet },
    /// `lead? upper* lower+`, else `lead? upper+ lower*`; then, if `contraction`, an optional contraction in any case.
    CasedWord { lead: CharSet, upper: CharSet, lower: CharSet, contraction: bool },
    /// `\s*[\r
    /// ]+`: a run of white space, up to its last line break.
    LineBreaks,
    /// `\s+(?!\S)|\s+`: a run of white space, without its last character unless the text ends there or the run has
    /// only one.
    Spaces,
    /// A rule of a single model: its regular expression, and a function that returns the end of the match at a
    /// position.
    Special { expression: &'static str, matches: fn(ClassifiedText<'_>, usize) -> Option<usize> },
}

impl SplitRule {
    /// `lead? body+`
    pub(crate) const fn run(lead: CharSet, body: CharSet) -> SplitRule {
        SplitRule::Run { lead, body, max: usize::MAX, tail: CharSet::NOTHING, tail_max: 0 }
    }

    /// `body{1,max}`
    pub(crate) const fn up_to(max: usize, body: CharSet) -> SplitRule {
        SplitRule::Run { lead: CharSet::NOTHING, body, max, tail: CharSet::NOTHING, tail_max: 0 }
    }

    /// `lead? body+ tail*`
    pub(crate) const fn run_tail(lead: CharSet, body: CharSet, tail: CharSet) -> SplitRule {
        SplitRule::Run { lead, body, max: usize::MAX, tail, tail_max: usize::MAX }
    }

    /// The end of the match that starts at `at`; `None` if the rule does not match there.
    fn matches(&self, text: ClassifiedText<'_>, at: usize) -> Option<usize> {
        match *self {
            SplitRule::Contraction { any_case } => text.contraction(at, any_case),
            SplitRule::Run { lead, body, max, tail, tail_max } => {
                let start = text.after(at, lead).filter(|&p| text.is(p, body)).unwrap_or(at);
                let end = text.skip(start, body, max);
                (end > start).then(|| text.skip(end, tail, tail_max))
            }
            SplitRule::Exactly { count, set } => (0..count).try_fold(at, |p, _| text.after(p, set)),
            SplitRule::Headed { head, body } => {
                let start = text.after(at, head)?;
                let end = text.skip(start, body, usize::MAX);
                (end > start).then_some(end)
            }
            SplitRule::CasedWord { lead, upper, lower, contraction } => {
                let after_lead = text.after(at, lead);
                let starts = [after_lead, Some(at)];
                let mut starts = starts.iter().flatten();
                let end = starts
                    .clone()
                    .find_map(|&p| text.upper_then_lower(p, upper, lower))
                    .or_else(|| starts.find_map(|&p| text.upper_first(p, upper, lower)))?;
                Some(if contraction { text.contraction(end, true).unwrap_or(end) } else { end })
            }
            SplitRule::LineBreaks => text.line_breaks(at),
            SplitRule::Spaces => text.spaces(at),
            SplitRule::Special { matches, .. } => matches(text, at),
        }
    }
}

/// One pass of a pre-tokenizer. It splits every piece that the pass before it produced.
#[derive(Clone, Copy)]
pub(crate) enum SplitPass {
    /// At each position the first rule that matches makes a piece. The text between two matches is a piece, too.
    Rules(&'static [SplitRule]),
    /// The white space at the end of a piece becomes a piece of its own.
    TrailingSpace,
    /// Runs of digits are split into groups of three, counted from the right. The text before a number stays with its
    /// first group.
    DigitGroups,
    /// The piece is split before every group of three ASCII digits, counted from the right.
    Thousands,
}

/// Splits `text` by `passes` and calls `emit` with the pieces, in order. Their concatenation is `text`.
pub(crate) fn split<'t>(passes: &[SplitPass], text: &'t str, emit: &mut dyn FnMut(&'t str)) {
    let Some((pass, rest)) = passes.split_first() else {
        if !text.is_empty() {
            emit(text);
        }
        return;
    };
    pass.split(text, &mut |piece| split(rest, piece, emit));
}

impl SplitPass {
    fn split<'t>(self, piece: &'t str, emit: &mut dyn FnMut(&'t str)) {
        let text = ClassifiedText::new(piece);
        match self {
            SplitPass::Rules(rules) => {
                let (mut start, mut at) = (0, 0);
                while let Some((_, next)) = text.at(at) {
                    match rules.iter().find_map(|rule| rule.matches(text, at)) {
                        Some(end) => {
                            if start < at {
                                emit(&piece[start..at]);
                            }
                            emit(&piece[at..end]);
                            (start, at) = (end, end);
                        }
                        None => at = next,
                    }
                }
                emit(&piece[start..]);
            }
            SplitPass::TrailingSpace => {
                let is_space = |c| CLASSES.of(c) & SPACE != 0;
                let end = piece.trim_end_matches(is_space).len();
                emit(&piece[..end]);
                emit(&piece[end..]);
            }
            SplitPass::DigitGroups => {
                let (mut start, mut at) = (0, 0);
                while let Some((mask, next)) = text.at(at) {
                    if mask & NUMBER == 0 {
                        at = next;
                        continue;
                    }
                    let end = text.skip(at, any_of(NUMBER), usize::MAX);
                    let digits = piece[at..end].chars().count();
                    if !digits.is_multiple_of(3) {
                        at = text.skip(at, any_of(NUMBER), digits % 3);
                        emit(&piece[start..at]);
                        start = at;
                    }
                    while at < end {
                        at = text.skip(at, any_of(NUMBER), 3);
                        emit(&piece[start..at]);
                        start = at;
                    }
                }
                emit(&piece[start..]);
            }
            SplitPass::Thousands => {
                let (mut start, mut at) = (0, 0);
                while let Some((mask, next)) = text.at(at) {
                    if mask & ASCII_DIGIT == 0 {
                        at = next;
                        continue;
                    }
                    let end = text.skip(at, any_of(ASCII_DIGIT), usize::MAX);
                    let first = at + (end - at) % 3;
                    for cut in (first..end).step_by(3) {
                        emit(&piece[start..cut]);
                        start = cut;
                    }
                    at = end;
                }
                emit(&piece[start..]);
            }
        }
    }
}

/// A piece of text, with access to the classes of its characters. Positions are byte offsets at character boundaries.
#[derive(Clone, Copy)]
pub(crate) struct ClassifiedText<'t> {
    text: &'t str,
    classes: &'static Classes,
}

impl<'t> ClassifiedText<'t> {
    fn new(text: &'t str) -> Self {
        Self { text, classes: &CLASSES }
    }

    pub(crate) fn bytes(self) -> &'t [u8] {
        self.text.as_bytes()
    }

    /// The classes of the character at `at` and the position after it; `None` at the end.
    fn at(self, at: usize) -> Option<(ClassMask, usize)> {
        #[cfg(test)]
        crate::steps::count();
        let &byte = self.text.as_bytes().get(at)?;
        if byte < 0x80 {
            return Some((self.classes.of(byte as char), at + 1));
        }
        let c = self.text[at..].chars().next()?;
        Some((self.classes.of(c), at + c.len_utf8()))
    }

    /// Whether the character at `at` is in `set`.
    pub(crate) fn is(self, at: usize, set: CharSet) -> bool {
        self.at(at).is_some_and(|(mask, _)| set.contains(mask))
    }

    /// The position after the character at `at`; `None` if that character is not in `set`.
    pub(crate) fn after(self, at: usize, set: CharSet) -> Option<usize> {
        self.at(at).filter(|&(mask, _)| set.contains(mask)).map(|(_, next)| next)
    }

    /// The position after the run of characters of `set` at `at`, of which at most `max` are skipped.
    pub(crate) fn skip(self, mut at: usize, set: CharSet, max: usize) -> usize {
        for _ in 0..max {
            let Some(next) = self.after(at, set) else { break };
            at = next;
        }
        at
    }

    /// The end of a contraction (`'s`, `'re`, ...) at `at`.
    fn contraction(self, at: usize, any_case: bool) -> Option<usize> {
        let rest = &self.bytes()[at..];
        if rest.first() != Some(&b'\'') {
            return None;
        }
        let lower = |i: usize| {
            let byte = *rest.get(i)?;
            Some(if any_case { byte.to_ascii_lowercase() } else { byte })
        };
        match (lower(1)?, lower(2)) {
            (b's' | b't' | b'm' | b'd', _) => Some(at + 2),
            (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(at + 3),
            _ => None,
        }
    }

    /// The end of `upper* lower+` at `start`. If no lower character follows the run of upper ones, the match ends at
    /// the last character of the run that is in both sets; letters without case are.
    fn upper_then_lower(self, start: usize, upper: CharSet, lower: CharSet) -> Option<usize> {
        let mut at = start;
        let mut last_both = None;
        while let Some((mask, next)) = self.at(at)
            && upper.contains(mask)
        {
            if lower.contains(mask) {
                last_both = Some(next);
            }
            at = next;
        }
        let end = self.skip(at, lower, usize::MAX);
        if end > at { Some(end) } else { last_both }
    }

    /// The end of `upper+ lower*` at `start`.
    fn upper_first(self, start: usize, upper: CharSet, lower: CharSet) -> Option<usize> {
        let at = self.skip(start, upper, usize::MAX);
        (at > start).then(|| self.skip(at, lower, usize::MAX))
    }

    /// The end of [`SplitRule::LineBreaks`] at `start`.
    fn line_breaks(self, start: usize) -> Option<usize> {
        let mut at = start;
        let mut end = None;
        while let Some((mask, next)) = self.at(at)
            && mask & SPACE != 0
        {
            if mask & CRLF != 0 {
                end = Some(next);
            }
            at = next;
        }
        end
    }

    /// The end of [`SplitRule::Spaces`] at `start`.
    fn spaces(self, start: usize) -> Option<usize> {
        let (mut last, mut at) = (start, start);
        while let Some(next) = self.after(at, any_of(SPACE)) {
            (last, at) = (at, next);
        }
        if at == start {
            None
        } else if at == self.text.len() || last == start {
            Some(at)
        } else {
            Some(last)
        }
    }
}

/// White space as jais-2 splits it: runs of a power of two.
pub(crate) const SPACES_BY_POWERS_OF_TWO: SplitRule = SplitRule::Special {
    expression: r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s",
    matches: spaces_by_powers_of_two,
};

fn spaces_by_powers_of_two(text: ClassifiedText<'_>, at: usize) -> Option<usize> {
    const LENGTHS: [usize; 9] = [512, 256, 128, 64, 32, 16, 8, 4, 2];
    let single = text.after(at, any_of(SPACE))?;
    // A length matches only if white space or the end of the text follows it: (?!\S).
    let fits = |&length: &usize| {
        let end = (0..length).try_fold(at, |p, _| text.after(p, any_of(SPACE)))?;
        (end == text.text.len() || text.is(end, any_of(SPACE))).then_some(end)
    };
    Some(LENGTHS.iter().find_map(fits).unwrap_or(single))
}

/// A phrase of exaone-moe: words of letters with their marks, joined by single blanks.
pub(crate) const PHRASE: SplitRule =
    SplitRule::Special { expression: r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", matches: phrase };

fn phrase(text: ClassifiedText<'_>, at: usize) -> Option<usize> {
    let letter = any_of(LETTER);
    let lead = text.after(at, none_of(CRLF | LETTER | NUMBER)).filter(|&p| text.is(p, letter));
    let start = lead.unwrap_or(at);
    let mut end = start;
    loop {
        let blank = text.after(end, CharSet::BLANK).filter(|_| end > start);
        let Some(next) = text.after(blank.unwrap_or(end), letter) else { break };
        end = text.skip(next, any_of(MARK), usize::MAX);
    }
    (end > start).then_some(end)
}

/// A special token of chameleon, in the text.
pub(crate) const SENTINEL: SplitRule = SplitRule::Special { expression: "<sentinel:[0-9]+>", matches: sentinel };

fn sentinel(text: ClassifiedText<'_>, at: usize) -> Option<usize> {
    const OPEN: &[u8] = b"<sentinel:";
    let start = text.bytes()[at..].starts_with(OPEN).then_some(at + OPEN.len())?;
    let end = text.skip(start, any_of(ASCII_DIGIT), usize::MAX);
    (end > start && text.bytes().get(end) == Some(&b'>')).then_some(end + 1)
}

/// An image token of chameleon, in the text.
pub(crate) const IMAGE_CODE: SplitRule = SplitRule::Special { expression: "IMGIMG[A-I]{1,4}Z", matches: image_code };

fn image_code(text: ClassifiedText<'_>, at: usize) -> Option<usize> {
    let code = text.bytes()[at..].strip_prefix(b"IMGIMG")?;
    let letters = code.iter().take(4).take_while(|b| (b'A'..=b'I').contains(b)).count();
    (letters > 0 && code.get(letters) == Some(&b'Z')).then_some(at + 6 + letters + 1)
}

/// White space as chameleon splits it.
pub(crate) const INDENTATION: SplitRule = SplitRule::Special { expression: r"[\t\n]|    |  ", matches: indentation };

fn indentation(text: ClassifiedText<'_>, at: usize) -> Option<usize> {
    let rest = &text.bytes()[at..];
    let found = [&b"\t"[..], b"\n", b"    ", b"  "].into_iter().find(|s| rest.starts_with(s))?;
    Some(at + found.len())
}
