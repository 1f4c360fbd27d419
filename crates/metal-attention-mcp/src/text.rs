//! Texts of servers: limited in length, and without control characters.

/// Returns the longest prefix of `text` of at most `most` bytes.
pub fn beginning(text: &str, most: usize) -> &str {
    let end = (0..=most.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

/// Removes control characters except line feeds and tabs; other line breaks become line feeds.
pub fn plain(text: &str) -> String {
    text.replace("\r\n", "\n").chars().filter(|&c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// Returns the beginning of `text` on one line, for an error.
pub fn excerpt(text: &[u8], most: usize) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(most)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!(
            (beginning("aé", 2), beginning("aé", 3), beginning("aé", 9), beginning("", 0)),
            ("a", "aé", "aé", "")
        );
    }

    #[test]
    fn control_characters_are_removed() {
        assert_eq!(plain("a\r\nb\tc\u{1b}[31m\u{9b}\0\u{7f}d"), "a\nb\tc[31md");
        assert_eq!(excerpt(b" a\nb\xffcd", 6), "a b\u{fffd}c");
    }
}
