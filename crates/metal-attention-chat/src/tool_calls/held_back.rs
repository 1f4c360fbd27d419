//! Looking for strings in a text that comes in pieces.

/// Bytes at the end of `text` that may be the beginning of one of `strings`.
pub(super) fn held_back(text: &str, strings: &[&str]) -> usize {
    let longest = strings.iter().map(|s| s.len()).max().unwrap_or(0).saturating_sub(1);
    let from = text.len().saturating_sub(longest);
    let starts = |at: &usize| text.is_char_boundary(*at) && strings.iter().any(|s| s.starts_with(&text[*at..]));
    (from..text.len()).find(starts).map_or(0, |at| text.len() - at)
}

#[cfg(test)]
mod tests {
    use super::held_back;

    #[test]
    fn beginnings_are_held_back() {
        let strings = ["<tool_call>", "</think>"];
        for (text, n) in
            [("", 0), ("a<", 1), ("a</th", 4), ("<tool_call", 10), ("<tool_call>", 0), ("é<x", 0), ("<<", 1)]
        {
            assert_eq!(held_back(text, &strings), n, "{text}");
        }
    }
}
