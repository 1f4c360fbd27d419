//! Searches for strings in text that arrives in pieces. A suffix that may be the beginning of a string has to be held
//! back.

/// The length in bytes of the longest suffix of `text` that is a prefix of one of `strings`.
pub(super) fn held_back(text: &str, strings: &[&str]) -> usize {
    let longest = strings.iter().map(|s| s.len()).max().unwrap_or(0).saturating_sub(1);
    let from = text.len().saturating_sub(longest);
    let starts = |at: &usize| text.is_char_boundary(*at) && strings.iter().any(|s| s.starts_with(&text[*at..]));
    (from..text.len()).find(starts).map_or(0, |at| text.len() - at)
}

/// The first occurrence of one of `strings` in `text`: its offset and the string.
pub(super) fn first_of(text: &str, strings: &[&'static str]) -> Option<(usize, &'static str)> {
    strings.iter().filter_map(|string| Some((text.find(string)?, *string))).min_by_key(|found| found.0)
}

/// The maximum number of white space characters that belong to a mark beside them.
pub(super) const MAX_BLANK: usize = 256;

/// The offset of the white space at the end of `text`, of which at most [`MAX_BLANK`] characters count.
pub(super) fn blank_end(text: &str) -> usize {
    let last = text.char_indices().rev().take(MAX_BLANK);
    last.take_while(|(_, c)| c.is_whitespace()).last().map_or(text.len(), |(at, _)| at)
}

/// The length in bytes of the white space at the start of `text`.
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
