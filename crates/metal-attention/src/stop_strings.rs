//! Stop strings: ends a text that arrives in pieces at the first of several strings.

/// Searches a text for strings that end it. The cost of a piece depends on its own length, however long the strings
/// are: each string is matched byte by byte as the text arrives (Knuth, Morris and Pratt), and its failure table grows
/// only as far as the text matched.
#[derive(Debug)]
pub struct StopStrings {
    /// The stop strings.
    needles: Vec<Needle>,
    /// The end of the text so far. What precedes it was returned long ago.
    held: String,
    /// Bytes of `held` that were returned. The others may be the start of a stop string.
    returned: usize,
    /// Index in `needles` of the stop string that ended the text.
    found: Option<usize>,
}

impl StopStrings {
    /// Searches for any of `strings`; empty ones are ignored.
    pub fn new(strings: Vec<String>) -> Self {
        let needles = strings.into_iter().filter(|s| !s.is_empty()).map(Needle::new).collect();
        Self { needles, held: String::new(), returned: 0, found: None }
    }

    /// Adds the next piece of the text. Returns the text that is certain now, and whether a stop string was found: the
    /// text then ends right before it. Of several stop strings, the one that is complete first counts; of those, the
    /// longest.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        for (i, byte) in piece.bytes().enumerate() {
            let complete =
                self.needles.iter_mut().enumerate().filter_map(|(i, needle)| Some((needle.push_byte(byte)?, i)));
            if let Some((length, index)) = complete.max_by_key(|(length, _)| *length) {
                self.found = Some(index);
                self.held.push_str(&piece[..=i]);
                self.held.truncate(self.held.len() - length);
                return (self.rest(), true);
            }
        }
        self.held.push_str(piece);
        let matched = self.needles.iter().map(|needle| needle.matched).max().unwrap_or(0);
        (self.release(self.held.len() - matched), false)
    }

    /// The stop string that ended the text.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.needles[index].string.as_str())
    }

    /// Returns the withheld text. What is added afterwards is a new text.
    pub fn rest(&mut self) -> String {
        self.needles.iter_mut().for_each(|needle| needle.matched = 0);
        self.release(self.held.len())
    }

    /// Returns the text up to byte `end` of `held` that was not returned yet.
    fn release(&mut self, end: usize) -> String {
        let text = self.held[self.returned..end].to_owned();
        self.returned = end;
        // Draining moves no more bytes than were returned since the last time.
        if 2 * self.returned >= self.held.len() {
            self.held.drain(..self.returned);
            self.returned = 0;
        }
        text
    }
}

/// A stop string, with the state of its search.
#[derive(Debug)]
struct Needle {
    /// The stop string.
    string: String,
    /// Length of the string's longest prefix that the text ends with.
    matched: usize,
    /// `borders[n]`: length of the longest proper suffix of the first `n` bytes that is also a prefix of the string
    /// (the failure table). Computed as far as the text ever matched.
    borders: Vec<usize>,
    /// Byte comparisons so far.
    #[cfg(test)]
    n_compared: usize,
}

impl Needle {
    /// A search for `string`, which is not empty.
    fn new(string: String) -> Self {
        Self {
            string,
            matched: 0,
            borders: vec![0, 0],
            #[cfg(test)]
            n_compared: 0,
        }
    }

    /// Adds the next byte of the text. `Some(length of the string)` if the text now ends with it.
    fn push_byte(&mut self, byte: u8) -> Option<usize> {
        self.matched = self.extend_match(self.matched, byte);
        if self.matched == self.string.len() {
            return Some(self.matched);
        }
        // The text has matched further than ever before: one more entry of the table.
        if self.matched == self.borders.len() {
            let border = self.extend_match(self.borders[self.matched - 1], byte);
            self.borders.push(border);
        }
        None
    }

    /// Length of the longest prefix of the string that is a suffix of its first `n` bytes followed by `byte`.
    fn extend_match(&mut self, mut n: usize, byte: u8) -> usize {
        loop {
            #[cfg(test)]
            {
                self.n_compared += 1;
            }
            if self.string.as_bytes()[n] == byte {
                return n + 1;
            }
            if n == 0 {
                return 0;
            }
            n = self.borders[n];
        }
    }
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
    fn the_string_that_ended_the_text_is_reported() {
        let found = |strings: &[&str], text: &str| {
            let mut stop = watch(strings);
            stop.push(text);
            stop.found().map(str::to_owned)
        };
        assert_eq!(found(&["", "two", "one"], "zero one two").as_deref(), Some("one"));
        assert_eq!(found(&["b", "ab"], "ab").as_deref(), Some("ab"));
        assert_eq!(found(&["x"], "ab"), None);
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

    /// Stop strings of a megabyte whose prefix the text repeats, in tokens of a few bytes: the work is a few
    /// comparisons for each byte and stop string, and the tables are as long as the text.
    #[test]
    fn long_stop_strings_cost_no_more_than_short_ones() {
        let long = |unit: &str, end: &str| unit.repeat((1 << 20) / unit.len()) + end;
        let cases = [
            ("a", long("a", "b")),
            ("a", "a".repeat(1000) + "b"),
            ("ab", long("ab", "!")),
            ("aab", long("aab", "aaa")),
            ("é", long("é", "e")),
            ("abacabadabacaba", long("abacabadabacaba", "x")),
            ("xyz", long("a", "b")),
        ];
        for (unit, needle) in cases {
            let mut stop = StopStrings::new(vec![needle.clone(); 16]);
            let mut n = 0;
            let mut text = String::new();
            // The text matches the stop string, fails, and starts again.
            for _ in 0..20 {
                for piece in std::iter::repeat_n(unit, 500).chain(["?"]) {
                    let (safe, stopped) = stop.push(piece);
                    assert!(!stopped);
                    text += &safe;
                    n += piece.len();
                }
            }
            assert!(text.ends_with('?') && text.len() == n, "{unit}");
            for one in &stop.needles {
                assert!(one.n_compared <= 4 * n, "{unit}: {} comparisons for {n} bytes", one.n_compared);
                assert!(one.borders.len() <= 500 * unit.len() + 2, "{unit}: {}", one.borders.len());
            }
            assert!(stop.held.capacity() <= 8 * 500 * unit.len() + 64, "{unit}: {}", stop.held.capacity());
        }
    }

    #[test]
    fn a_long_stop_string_is_found() {
        let needle = "ab".repeat(1 << 19) + "c";
        let mut stop = watch(&[&needle]);
        let mut returned = String::new();
        // The stop string begins at the third byte.
        returned += &stop.push("ab").0;
        for piece in needle.as_bytes().chunks(7) {
            let (safe, stopped) = stop.push(std::str::from_utf8(piece).unwrap());
            returned += &safe;
            if stopped {
                assert_eq!(returned, "ab");
                return;
            }
        }
        panic!("it was not found");
    }

    #[test]
    fn text_after_the_end_is_a_new_text() {
        let mut stop = watch(&["aba"]);
        assert_eq!(stop.push("xaba"), ("x".into(), true));
        assert_eq!(stop.push("ba"), ("b".into(), false));
        assert_eq!(stop.rest(), "a");
        assert_eq!(stop.push("ba"), ("b".into(), false));
    }

    /// Position of the string in `text` that is complete first.
    fn find_first(strings: &[String], text: &str) -> Option<usize> {
        let found = strings.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at)));
        found.min().map(|(_end, at)| at)
    }

    proptest! {
        /// The text ends where a search in the whole text finds the string, however it is divided.
        #[test]
        fn pieces_make_no_difference(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            strings in prop::collection::vec("[abé]{1,6}", 0..4),
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
