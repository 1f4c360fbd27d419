//! Names of models in requests.

/// Returns `name` without the tag `latest`, which ollama's clients append to names without a tag.
pub fn without_latest(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

/// Whether `name` matches `pattern`, in which each `*` stands for any text.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let mut last = None;
    for part in parts {
        // The text before this part may be anything; the last part must be the end.
        if let Some(part) = last.replace(part) {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
    }
    last.map_or(rest.is_empty(), |last| rest.ends_with(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, name) in [
            ("a", "a"),
            ("claude-*", "claude-sonnet-5"),
            ("claude-*", "claude-"),
            ("*", ""),
            ("*", "anything"),
            ("a*b*c", "abc"),
            ("a*b*c", "a-bb-b-c"),
            ("*-latest", "x-latest"),
            ("ab*ba", "abba"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in
            [("a", "ab"), ("claude-*", "gpt-4"), ("a*b*c", "acb"), ("ab*ba", "aba"), ("", "a"), ("*x", "xy")]
        {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
        assert_eq!(
            (without_latest("a:latest"), without_latest("a:1b"), without_latest("latest")),
            ("a", "a:1b", "latest")
        );
    }
}
