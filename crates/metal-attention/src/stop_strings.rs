//! Ends a text at the first of several strings, although it comes in pieces.

/// Watches a text for strings that end it. However long these are, what a piece costs depends on its own length: each
/// string is compared byte by byte as the text comes (Knuth, Morris and Pratt), and nothing is done for the part of it
/// that the text has not reached.
#[derive(Debug)]
pub struct StopStrings {
    needles: Vec<Needle>,
    /// The text so far, without what was shown long ago.
    held: String,
    /// Bytes of `held` that were shown. The others may be the start of a stop string.
    shown: usize,
    /// The index in `needles` of the stop string that ended the text.
    found: Option<usize>,
}

impl StopStrings {
    /// Watches for any of `strings`; empty ones are left out.
    pub fn new(strings: Vec<String>) -> Self {
        let needles = strings.into_iter().filter(|s| !s.is_empty()).map(Needle::new).collect();
        Self { needles, held: String::new(), shown: 0, found: None }
    }

    /// Takes the next piece of the text. Returns what is safe to show now, and whether a stop string was found: then
    /// the text ended right before it. Of several the one that is complete first is found: reading on cannot change it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        for (i, byte) in piece.bytes().enumerate() {
            let complete = self.needles.iter_mut().enumerate().filter_map(|(i, needle)| Some((needle.take(byte)?, i)));
            if let Some((length, index)) = complete.max_by_key(|(length, _)| *length) {
                self.found = Some(index);
                self.held.push_str(&piece[..=i]);
                self.held.truncate(self.held.len() - length);
                return (self.rest(), true);
            }
        }
        self.held.push_str(piece);
        let begun = self.needles.iter().map(|needle| needle.begun).max().unwrap_or(0);
        (self.show(self.held.len() - begun), false)
    }

    /// The stop string that ended the text.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.needles[index].string.as_str())
    }

    /// Hands out what was held back. What follows is a new text.
    pub fn rest(&mut self) -> String {
        self.needles.iter_mut().for_each(|needle| needle.begun = 0);
        self.show(self.held.len())
    }

    /// The text up to `end` that was not shown yet.
    fn show(&mut self, end: usize) -> String {
        let text = self.held[self.shown..end].to_owned();
        self.shown = end;
        // Moving what is held costs no more than what was shown since it was moved last.
        if 2 * self.shown >= self.held.len() {
            self.held.drain(..self.shown);
            self.shown = 0;
        }
        text
    }
}

/// A string that is looked for, and how much of it the text ends with.
#[derive(Debug)]
struct Needle {
    string: String,
    /// Bytes of the string that the text ends with.
    begun: usize,
    /// `borders[n]`: how long the longest end of the first `n` bytes is that the string begins with, other than all of
    /// them. Known as far as the text ever got.
    borders: Vec<usize>,
    /// Comparisons so far.
    #[cfg(test)]
    n_compared: usize,
}

impl Needle {
    /// `string` is not empty.
    fn new(string: String) -> Self {
        Self {
            string,
            begun: 0,
            borders: vec![0, 0],
            #[cfg(test)]
            n_compared: 0,
        }
    }

    /// Takes the text's next byte. The string's length where the text ends with it now.
    fn take(&mut self, byte: u8) -> Option<usize> {
        self.begun = self.longer(self.begun, byte);
        if self.begun == self.string.len() {
            return Some(self.begun);
        }
        // One more border for each byte that the text got further than ever.
        if self.begun == self.borders.len() {
            let border = self.longer(self.borders[self.begun - 1], byte);
            self.borders.push(border);
        }
        None
    }

    /// The longest beginning of the string that the first `n` bytes of it and then `byte` end with.
    fn longer(&mut self, mut n: usize, byte: u8) -> usize {
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
    fn the_string_that_ended_the_text_is_known() {
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

    /// Needles of a megabyte that the text begins again and again, tokens of a few bytes: the work is a few comparisons a
    /// byte and needle, and what is kept is as long as the text.
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
            // The text follows the needle, fails, and begins anew.
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
        let mut shown = String::new();
        // One unit too many: the needle begins at the third byte.
        shown += &stop.push("ab").0;
        for piece in needle.as_bytes().chunks(7) {
            let (safe, stopped) = stop.push(std::str::from_utf8(piece).unwrap());
            shown += &safe;
            if stopped {
                assert_eq!(shown, "ab");
                return;
            }
        }
        panic!("it was not found");
    }

    #[test]
    fn what_follows_an_end_is_a_new_text() {
        let mut stop = watch(&["aba"]);
        assert_eq!(stop.push("xaba"), ("x".into(), true));
        assert_eq!(stop.push("ba"), ("b".into(), false));
        assert_eq!(stop.rest(), "a");
        assert_eq!(stop.push("ba"), ("b".into(), false));
    }

    /// Where the string that is complete first begins in `text`.
    fn find_first(strings: &[String], text: &str) -> Option<usize> {
        let found = strings.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at)));
        found.min().map(|(_end, at)| at)
    }

    proptest! {
        /// However the text is cut up, it ends where a search over the whole of it says.
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
