//! Ends a text at the first of several strings, although it comes in pieces.

/// Watches a text for strings that end it.
#[derive(Debug)]
pub struct StopStrings {
    strings: Vec<String>,
    /// The end of the text so far that may be the start of a stop string.
    held: String,
}

impl StopStrings {
    /// Watches for any of `strings`; empty ones are left out.
    pub fn new(mut strings: Vec<String>) -> Self {
        strings.retain(|s| !s.is_empty());
        Self { strings, held: String::new() }
    }

    /// Takes the next piece of the text. Returns what is safe to show now, and whether a stop string was found:
    /// then the text ended right before it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        if let Some(at) = find_first(&self.strings, &self.held) {
            self.held.truncate(at);
            return (self.rest(), true);
        }
        let safe = self.held.len() - self.longest_start();
        let later = self.held.split_off(safe);
        (std::mem::replace(&mut self.held, later), false)
    }

    /// Hands out what was held back.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes at the end of the held text that start a stop string.
    fn longest_start(&self) -> usize {
        let starts_here = |at: &usize| self.strings.iter().any(|s| s.starts_with(&self.held[*at..]));
        let start = self.held.char_indices().map(|(at, _)| at).find(starts_here);
        self.held.len() - start.unwrap_or(self.held.len())
    }
}

/// Where the string that is complete first begins in `text`: reading on cannot change it.
fn find_first(strings: &[String], text: &str) -> Option<usize> {
    let found = strings.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at)));
    found.min().map(|(_end, at)| at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn watch(strings: &[&str]) -> StopStrings {
        StopStrings::new(strings.iter().map(|&s| s.to_owned()).collect())
    }

    #[test]
    fn holds_back_what_may_become_a_stop_string() {
        let mut stop = watch(&["\nUser:", "END"]);
        assert_eq!(stop.push("Hello\nU"), ("Hello".into(), false));
        assert_eq!(stop.push("n"), ("\nUn".into(), false));
        assert_eq!(stop.push(" E"), (" ".into(), false));
        assert_eq!(stop.push("N"), (String::new(), false));
        assert_eq!(stop.push("D of it"), (String::new(), true));
    }

    #[test]
    fn the_string_that_is_complete_first_ends_the_text() {
        assert_eq!(watch(&["two", "one"]).push("zero one two"), ("zero ".into(), true));
        assert_eq!(watch(&["abc", "b"]).push("abc"), ("a".into(), true));
    }

    #[test]
    fn nothing_is_lost_when_the_text_ends_early() {
        let mut stop = watch(&["abcd"]);
        assert_eq!(stop.push("xxabc"), ("xx".into(), false));
        assert_eq!(stop.rest(), "abc");
        assert_eq!(stop.rest(), "");
    }

    #[test]
    fn empty_stop_strings_are_left_out() {
        assert_eq!(watch(&[""]).push("text"), ("text".into(), false));
    }

    proptest! {
        /// However the text is cut up, it ends where a search over the whole of it says.
        #[test]
        fn pieces_make_no_difference(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            strings in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let text = pieces.concat();
            let end = find_first(&strings, &text);
            let mut stop = StopStrings::new(strings);
            let mut got = String::new();
            let mut stopped = false;
            for piece in &pieces {
                let (safe, ended) = stop.push(piece);
                got += &safe;
                if ended {
                    stopped = true;
                    break;
                }
            }
            got += &stop.rest();
            prop_assert_eq!(stopped, end.is_some());
            prop_assert_eq!(got, &text[..end.unwrap_or(text.len())]);
        }
    }
}
