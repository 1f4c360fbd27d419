//! Lark grammars of clients: limits of size, and error messages. llguidance compiles them.

/// The maximum size of a grammar in bytes.
const MAX_BYTES: usize = 64 << 10;
/// The maximum number of lines and opening brackets together. llguidance recurses once for each rule and group on a
/// path.
const MAX_LEVELS: usize = 4000;

/// A regular expression as a terminal of a Lark grammar.
pub fn terminal(pattern: &str) -> String {
    format!("/{}/", pattern.replace('/', "\\/").replace('\n', "\\n").replace('\r', "\\r"))
}

/// Checks the size of a grammar: larger ones would take too much time or memory.
pub fn check(text: &str) -> Result<(), String> {
    if text.len() > MAX_BYTES {
        return Err(format!("it has {} bytes; at most {} KiB are allowed", text.len(), MAX_BYTES >> 10));
    }
    let levels: usize = text.lines().map(|line| 1 + line.matches(['(', '[']).count()).sum();
    if levels > MAX_LEVELS {
        return Err(format!("it has {levels} lines and groups; at most {MAX_LEVELS} are allowed"));
    }
    Ok(())
}

/// The error in a grammar, with its line, from an error message of llguidance; `None` if the message does not name
/// one. If the grammar `is_nested` in another one, it begins on the second line there.
pub fn explained(error: &str, is_nested: bool) -> Option<String> {
    let first = error.lines().next()?;
    let place = first.strip_prefix("at ").unwrap_or(first);
    let located = place.split_once('(').and_then(|(line, rest)| {
        let (column, problem) = rest.split_once("): ")?;
        column.parse::<usize>().ok()?;
        Some((line.parse::<usize>().ok()?, problem))
    });
    if let Some((line, problem)) = located {
        let line = line.saturating_sub(usize::from(is_nested)).max(1);
        return Some(format!("line {line}: {problem}"));
    }
    let is_about_names = ["unknown name", "rule ", "duplicate", "circular reference in token", "no start"];
    is_about_names.iter().any(|words| first.starts_with(words)).then(|| first.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_line() {
        let error = "at 3(5): expected ':', got a number\n   1 | start: a\n";
        assert_eq!(explained(error, false).unwrap(), "line 3: expected ':', got a number");
        assert_eq!(explained(error, true).unwrap(), "line 2: expected ':', got a number");
        assert_eq!(explained("unknown name: \"FOO\"", false).unwrap(), "unknown name: \"FOO\"");
        assert_eq!(explained("grammar size (number of symbols) too big", false), None);
    }

    #[test]
    fn oversized_grammars_are_refused() {
        assert_eq!(check("start: \"a\""), Ok(()));
        assert!(check(&"x".repeat(MAX_BYTES + 1)).is_err());
        assert!(check(&("start: ".to_owned() + &"(".repeat(MAX_LEVELS))).is_err());
    }
}
