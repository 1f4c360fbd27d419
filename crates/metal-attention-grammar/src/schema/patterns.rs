//! The regular expressions of JSON Schema (`pattern`, `patternProperties`; ECMA-262 syntax) that a grammar can
//! enforce.

use regex_syntax::ast::{Ast, RepetitionKind, RepetitionRange};
use regex_syntax::hir::{Hir, HirKind, Look};

/// The maximum length of a pattern in bytes.
const MAX_PATTERN: usize = 4 << 10;

/// The size of a pattern in elements, repetitions expanded; `None` if the grammar cannot enforce it: it has
/// lookaround, backreferences or word boundaries, or is too long.
pub fn size_if_enforced(pattern: &str) -> Option<u64> {
    if pattern.len() > MAX_PATTERN {
        return None;
    }
    let parsed = regex_syntax::ast::parse::Parser::new().parse(pattern).ok()?;
    regex_syntax::parse(pattern).ok().filter(|hir| !has_boundary(hir)).map(|_| written_out(&parsed))
}

/// The number of elements of a pattern, repetitions expanded.
fn written_out(ast: &Ast) -> u64 {
    match ast {
        Ast::Empty(_)
        | Ast::Flags(_)
        | Ast::Literal(_)
        | Ast::Dot(_)
        | Ast::Assertion(_)
        | Ast::ClassUnicode(_)
        | Ast::ClassPerl(_)
        | Ast::ClassBracketed(_) => 1,
        Ast::Repetition(repetition) => {
            let times = match &repetition.op.kind {
                RepetitionKind::ZeroOrOne | RepetitionKind::ZeroOrMore | RepetitionKind::OneOrMore => 1,
                RepetitionKind::Range(
                    RepetitionRange::Exactly(n) | RepetitionRange::AtLeast(n) | RepetitionRange::Bounded(_, n),
                ) => u64::from(*n),
            };
            times.max(1).saturating_mul(written_out(&repetition.ast))
        }
        Ast::Group(group) => written_out(&group.ast),
        Ast::Alternation(alternation) => alternation.asts.iter().map(written_out).fold(0, u64::saturating_add),
        Ast::Concat(concat) => concat.asts.iter().map(written_out).fold(0, u64::saturating_add),
    }
}

/// Whether no text matches both patterns, because they require different literal prefixes.
pub fn begin_differently(a: &str, b: &str) -> bool {
    let (Some(a), Some(b)) = (beginning(a), beginning(b)) else { return false };
    a.chars().zip(b.chars()).any(|(a, b)| a != b)
}

/// The two patterns, each restricted so that no text matches both. Works if one requires a literal prefix and the
/// other one a literal suffix; else `None`.
pub fn kept_apart(a: &str, b: &str) -> Option<(String, String)> {
    let apart = |a: &str, b: &str| {
        let (start, end) = (beginning(a)?, ending(b)?);
        // Expressions for the texts that lack the prefix `start`, or the suffix `end`: they differ in one place.
        let prefix: Vec<_> = start.chars().collect();
        let suffix: Vec<_> = end.chars().collect();
        let literal = |chars: &[char]| regex_syntax::escape(&chars.iter().collect::<String>());
        let other = |c: char| format!("[^\\x{{{:X}}}]", u32::from(c));
        let before: Vec<_> =
            (0..prefix.len()).map(|i| format!("{}{}[\\s\\S]*", literal(&prefix[..i]), other(prefix[i]))).collect();
        let after: Vec<_> =
            (0..suffix.len()).map(|i| format!("[\\s\\S]*{}{}", other(suffix[i]), literal(&suffix[i + 1..]))).collect();
        Some((format!("(?:{a})(?:{})$", after.join("|")), format!("^(?:{})(?:{b})", before.join("|"))))
    };
    apart(a, b).or_else(|| apart(b, a).map(|(b, a)| (a, b)))
}

/// The literal prefix that `pattern` requires; `None` if it has none, or has other anchors.
fn beginning(pattern: &str) -> Option<String> {
    let hir = regex_syntax::parse(pattern).ok()?;
    let HirKind::Concat(parts) = hir.kind() else { return None };
    match parts.as_slice() {
        [start, literal, rest @ ..] if start.kind() == &HirKind::Look(Look::Start) => text_of(literal, rest),
        _ => None,
    }
}

/// The literal suffix that `pattern` requires; `None` if it has none, or has other anchors.
fn ending(pattern: &str) -> Option<String> {
    let hir = regex_syntax::parse(pattern).ok()?;
    let HirKind::Concat(parts) = hir.kind() else { return None };
    match parts.as_slice() {
        [rest @ .., literal, end] if end.kind() == &HirKind::Look(Look::End) => text_of(literal, rest),
        _ => None,
    }
}

/// The text of `literal`, if there are no anchors in `rest`.
fn text_of(literal: &Hir, rest: &[Hir]) -> Option<String> {
    let HirKind::Literal(literal) = literal.kind() else { return None };
    let is_free = rest.iter().all(|part| part.properties().look_set().is_empty());
    String::from_utf8(literal.0.to_vec()).ok().filter(|_| is_free)
}

/// Whether a pattern has word boundaries, which a grammar cannot enforce.
fn has_boundary(hir: &Hir) -> bool {
    let (words, seen) = (
        hir.properties().look_set(),
        [Look::Start, Look::End, Look::StartLF, Look::EndLF, Look::StartCRLF, Look::EndCRLF],
    );
    words.iter().any(|look| !seen.contains(&look))
}
