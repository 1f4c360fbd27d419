//! Regular expressions and choices of clients, converted to expressions that llguidance supports.

use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Capture, Hir, HirKind, Look, Repetition};

/// The maximum size in bytes of an expression, and of all strings of a choice together.
const MAX_BYTES: usize = 64 << 10;
/// The maximum nesting of groups.
const MAX_DEPTH: u32 = 100;

/// The regular expression `pattern` without anchors at its ends: it must match the whole text anyway. Returns an error
/// message for other anchors, word boundaries and unsupported syntax.
pub fn whole(pattern: &str) -> Result<String, String> {
    if pattern.len() > MAX_BYTES {
        return Err(format!("it has {} bytes; at most {} KiB are allowed", pattern.len(), MAX_BYTES >> 10));
    }
    let parsed =
        ParserBuilder::new().nest_limit(MAX_DEPTH).build().parse(pattern).map_err(|error| explained(&error))?;
    let hir = without_ends(&without_ends(&parsed, true), false);
    match hir.properties().look_set().iter().next() {
        None => Ok(written(&hir)),
        Some(look) => Err(format!("{} cannot be followed", name(look))),
    }
}

/// A regular expression that matches one of `choices`. Returns an error message if there are none, or too many bytes.
pub fn one_of(choices: &[String]) -> Result<String, String> {
    if choices.is_empty() {
        return Err("there is nothing to choose from".into());
    }
    let bytes: usize = choices.iter().map(String::len).sum();
    if bytes > MAX_BYTES {
        return Err(format!("its strings have {bytes} bytes; at most {} KiB are allowed", MAX_BYTES >> 10));
    }
    Ok(written(&Hir::alternation(choices.iter().map(|choice| Hir::literal(choice.as_bytes())).collect())))
}

/// The notation of `hir`. A repeated repetition is put in a group: `(a+)?` must not become `a+?`.
pub fn written(hir: &Hir) -> String {
    grouped(hir).to_string()
}

/// The expression with groups around repeated repetitions, and without other groups.
fn grouped(hir: &Hir) -> Hir {
    match hir.kind() {
        HirKind::Repetition(Repetition { min, max, sub, .. }) => {
            let mut inner = grouped(sub);
            if matches!(inner.kind(), HirKind::Repetition(_)) {
                inner = Hir::capture(Capture { index: 1, name: None, sub: Box::new(inner) });
            }
            Hir::repetition(Repetition { min: *min, max: *max, greedy: true, sub: Box::new(inner) })
        }
        HirKind::Concat(parts) => Hir::concat(parts.iter().map(grouped).collect()),
        HirKind::Alternation(parts) => Hir::alternation(parts.iter().map(grouped).collect()),
        HirKind::Capture(Capture { sub, .. }) => grouped(sub),
        HirKind::Empty | HirKind::Literal(_) | HirKind::Class(_) | HirKind::Look(_) => hir.clone(),
    }
}

/// The expression without the anchors at its beginning, or at its end.
fn without_ends(hir: &Hir, beginning: bool) -> Hir {
    let anchors = if beginning { [Look::Start, Look::StartLF] } else { [Look::End, Look::EndLF] };
    match hir.kind() {
        HirKind::Look(look) if anchors.contains(look) => Hir::empty(),
        HirKind::Concat(parts) => {
            let mut parts = parts.clone();
            if let Some(part) = if beginning { parts.first_mut() } else { parts.last_mut() } {
                *part = without_ends(part, beginning);
            }
            Hir::concat(parts)
        }
        HirKind::Alternation(parts) => {
            Hir::alternation(parts.iter().map(|part| without_ends(part, beginning)).collect())
        }
        HirKind::Capture(Capture { sub, .. }) => without_ends(sub, beginning),
        HirKind::Empty | HirKind::Literal(_) | HirKind::Class(_) | HirKind::Look(_) | HirKind::Repetition(_) => {
            hir.clone()
        }
    }
}

/// The error of the parser, with line and column.
fn explained(error: &regex_syntax::Error) -> String {
    let (kind, span) = match error {
        regex_syntax::Error::Parse(error) => (error.kind().to_string(), error.span()),
        regex_syntax::Error::Translate(error) => (error.kind().to_string(), error.span()),
        // The error type is non-exhaustive.
        other => return other.to_string().lines().last().unwrap_or_default().to_owned(),
    };
    let kind = match kind.as_str() {
        kind if kind.starts_with("look-around") => {
            "look-arounds, (?=...), (?!...), (?<=...) and (?<!...), cannot be followed"
        }
        kind if kind.starts_with("backreferences") => "references to earlier groups, as in \\1, cannot be followed",
        kind => kind,
    };
    format!("{kind} (line {}, column {})", span.start.line, span.start.column)
}

/// The name of an anchor or boundary, for error messages.
fn name(look: Look) -> &'static str {
    match look {
        Look::Start | Look::StartLF | Look::StartCRLF => "an anchor for the beginning, ^, elsewhere than there",
        Look::End | Look::EndLF | Look::EndCRLF => "an anchor for the end, $, elsewhere than there",
        Look::WordAscii
        | Look::WordAsciiNegate
        | Look::WordUnicode
        | Look::WordUnicodeNegate
        | Look::WordStartAscii
        | Look::WordEndAscii
        | Look::WordStartUnicode
        | Look::WordEndUnicode
        | Look::WordStartHalfAscii
        | Look::WordEndHalfAscii
        | Look::WordStartHalfUnicode
        | Look::WordEndHalfUnicode => "the boundary of a word, as in \\b,",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anchors_at_the_ends_are_dropped() {
        for (pattern, expected) in
            [("^ab$", "(?:ab)"), ("a|^b$", "[ab]"), ("(?:(a+)?b)*?", "(?:(a+)?b)*"), (r"\Aa\z", "a"), ("^$", "(?:)")]
        {
            assert_eq!(whole(pattern).unwrap_or_default(), expected, "{pattern}");
        }
    }

    #[test]
    fn unsupported_syntax_is_named() {
        let depths = "(".repeat(200) + "a" + &")".repeat(200);
        for (pattern, named) in [
            ("a(?=b)", "look-arounds"),
            ("a(?<!b)c", "(line 1, column 2)"),
            (r"(a)\1", "references to earlier groups"),
            ("a$b", "an anchor for the end"),
            ("b^a", "an anchor for the beginning"),
            (r"\bword", "the boundary of a word"),
            ("a\n[b", "(line 2, column 1)"),
            (&depths, "exceed the maximum number of nested parentheses"),
            (&"a".repeat(MAX_BYTES + 1), "at most 64 KiB"),
        ] {
            let error = whole(pattern).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn choices_are_taken_literally() {
        let choices = |choices: &[&str]| one_of(&choices.iter().map(|&choice| choice.to_owned()).collect::<Vec<_>>());
        assert_eq!(choices(&["a.b", "a"]).unwrap(), r"(?:(?:a\.b)|a)");
        assert_eq!(choices(&[]).unwrap_err(), "there is nothing to choose from");
    }
}
