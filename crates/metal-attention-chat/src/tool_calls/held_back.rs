//! Looking for strings in a text that comes in pieces.

/// Bytes at the end of `text` that may be the beginning of one of `strings`.
pub(super) fn held_back(text: &str, strings: &[&str]) -> usize {
    let longest = strings.iter().map(|s| s.len()).max().unwrap_or(0).saturating_sub(1);
    let from = text.len().saturating_sub(longest);
    let starts = |at: &usize| text.is_char_boundary(*at) && strings.iter().any(|s| s.starts_with(&text[*at..]));
    (from..text.len()).find(starts).map_or(0, |at| text.len() - at)
}

/// The earliest of `strings` in `text`, and where.
pub(super) fn first_of(text: &str, strings: &[&'static str]) -> Option<(usize, &'static str)> {
    strings.iter().filter_map(|string| Some((text.find(string)?, *string))).min_by_key(|found| found.0)
}

/// White space beside a mark belongs to it, up to so many characters.
pub(super) const MAX_BLANK: usize = 256;

/// Where the white space at the end of `text` begins, the last [`MAX_BLANK`] characters of it.
pub(super) fn blank_end(text: &str) -> usize {
    let last = text.char_indices().rev().take(MAX_BLANK);
    last.take_while(|(_, c)| c.is_whitespace()).last().map_or(text.len(), |(at, _)| at)
}

/// The bytes of white space that `text` begins with.
pub(super) fn leading_blank(text: &str) -> usize {
    text.len() - text.trim_start().len()
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
