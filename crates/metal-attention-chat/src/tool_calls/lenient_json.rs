//! [`LenientJson`]: reads one JSON value as models write it, and repairs it character by character.
//!
//! Repaired are: raw control characters and invalid escapes in strings, single quotes, bare keys, `True`, `False`,
//! `None`, `NaN` (to `null`), numbers such as `01` and `.5`, missing and superfluous commas, and missing closing
//! brackets. Valid JSON passes unchanged, including numbers of any size.

use super::python_value::number;

/// The result of reading a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JsonStep {
    /// The value continues.
    More,
    /// The value ends with this character.
    Done,
    /// The value ended before this character, which is not part of it.
    Before,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Container {
    Object,
    List,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum JsonState {
    /// Before a key or the end of an object.
    Key,
    /// Between a key and its colon.
    Colon,
    Value,
    /// After a value in a list or an object.
    Next,
    /// In a string.
    Text {
        quote: char,
        is_key: bool,
    },
    /// After a single quote that may end a string.
    MaybeAfter {
        is_key: bool,
    },
    /// In a number or a bare word.
    Word {
        is_key: bool,
    },
    Done,
}

/// The reader of one value.
#[derive(Debug)]
pub(super) struct LenientJson {
    /// The JSON that [`take`](Self::take) has not returned yet.
    out: String,
    state: JsonState,
    open: Vec<Container>,
    /// A comma, key, colon and white space, which are written when a value follows.
    gap: String,
    /// Whether the innermost container has an item.
    has_item: bool,
    /// The escape sequence, word or possible end of a string that is being read.
    held: String,
}

impl LenientJson {
    /// A new reader.
    pub fn new() -> Self {
        Self {
            out: String::new(),
            state: JsonState::Value,
            open: Vec::new(),
            gap: String::new(),
            has_item: false,
            held: String::new(),
        }
    }

    /// Removes and returns the JSON written so far.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.out)
    }

    /// Reads the next character.
    pub fn push(&mut self, c: char) -> JsonStep {
        match self.state {
            JsonState::Key => self.in_key(c),
            JsonState::Colon => self.in_colon(c),
            JsonState::Value => self.in_value(c),
            JsonState::Next => self.in_next(c),
            JsonState::Text { quote, is_key } => self.in_text(c, quote, is_key),
            JsonState::MaybeAfter { is_key } => self.maybe_after(c, is_key),
            JsonState::Word { is_key } => self.in_word(c, is_key),
            JsonState::Done => JsonStep::Before,
        }
    }

    /// The text ends here: closes all containers. An incomplete key or word is left out.
    pub fn finish(&mut self) {
        match self.state {
            JsonState::Text { is_key: false, .. } | JsonState::MaybeAfter { is_key: false } => self.out.push('"'),
            JsonState::Word { is_key: false } => {
                if let Some(scalar) = scalar(&self.held) {
                    self.item(&scalar);
                }
            }
            JsonState::Text { is_key: true, .. }
            | JsonState::MaybeAfter { is_key: true }
            | JsonState::Word { is_key: true }
            | JsonState::Key
            | JsonState::Colon
            | JsonState::Value
            | JsonState::Next
            | JsonState::Done => {}
        }
        self.close_all();
    }

    fn close_all(&mut self) {
        self.gap.clear();
        while let Some(open) = self.open.pop() {
            self.out.push(closer(open));
        }
        self.state = JsonState::Done;
    }

    /// Ends the value before a character that is not part of it.
    fn before(&mut self) -> JsonStep {
        self.close_all();
        JsonStep::Before
    }

    fn in_key(&mut self, c: char) -> JsonStep {
        match c {
            '"' | '\'' => {
                self.begin_item();
                self.gap.push('"');
                self.state = JsonState::Text { quote: c, is_key: true };
            }
            '}' | ']' => return self.leave(c),
            c if c.is_whitespace() => self.blank(c),
            ',' => {}
            c if begins_word(c) => {
                self.begin_item();
                self.held.push(c);
                self.state = JsonState::Word { is_key: true };
            }
            _ => return self.before(),
        }
        JsonStep::More
    }

    fn in_colon(&mut self, c: char) -> JsonStep {
        match c {
            ':' => {
                self.gap.push(':');
                self.state = JsonState::Value;
            }
            ',' | '}' | ']' => {
                self.gap.clear();
                self.state = JsonState::Next;
                return self.in_next(c);
            }
            c if c.is_whitespace() => self.blank(c),
            c => {
                self.gap.push(':');
                self.state = JsonState::Value;
                return self.in_value(c);
            }
        }
        JsonStep::More
    }

    fn in_value(&mut self, c: char) -> JsonStep {
        let in_list = self.open.last() == Some(&Container::List);
        match c {
            '{' | '[' => {
                self.begin_value();
                self.out.push(c);
                let open = if c == '{' { Container::Object } else { Container::List };
                self.open.push(open);
                self.has_item = false;
                self.state = if open == Container::Object { JsonState::Key } else { JsonState::Value };
            }
            '"' | '\'' => {
                self.begin_value();
                self.out.push('"');
                self.state = JsonState::Text { quote: c, is_key: false };
            }
            c if c.is_whitespace() => self.blank(c),
            ',' | '}' | ']' if !self.open.is_empty() => {
                if !in_list {
                    // A key without a value is left out.
                    self.gap.clear();
                }
                self.state = JsonState::Next;
                return self.in_next(c);
            }
            c if begins_word(c) => {
                self.held.push(c);
                self.state = JsonState::Word { is_key: false };
            }
            _ => return self.before(),
        }
        JsonStep::More
    }

    fn in_next(&mut self, c: char) -> JsonStep {
        match c {
            ',' => {
                if self.has_item && !self.gap.contains(',') {
                    self.gap.push(',');
                }
                self.state =
                    if self.open.last() == Some(&Container::Object) { JsonState::Key } else { JsonState::Value };
                JsonStep::More
            }
            '}' | ']' => self.leave(c),
            c if c.is_whitespace() => {
                self.blank(c);
                JsonStep::More
            }
            // A comma is missing.
            '"' => match self.open.last() {
                Some(Container::Object) => self.in_key(c),
                Some(Container::List) => self.in_value(c),
                None => self.before(),
            },
            _ => self.before(),
        }
    }

    fn in_text(&mut self, c: char, quote: char, is_key: bool) -> JsonStep {
        if !self.held.is_empty() {
            self.held.push(c);
            match escape(&self.held) {
                Escape::Incomplete => {}
                Escape::Is(json) => {
                    self.held.clear();
                    self.text(&json, is_key);
                }
                Escape::Not(json, rest) => {
                    self.held.clear();
                    self.text(json, is_key);
                    let mut step = JsonStep::More;
                    for c in rest.chars() {
                        step = self.push(c);
                    }
                    return step;
                }
            }
            return JsonStep::More;
        }
        match c {
            '\\' => self.held.push(c),
            '\'' if quote == c => {
                self.held.push(c);
                self.state = JsonState::MaybeAfter { is_key };
            }
            '"' if quote == c => return self.end_text(is_key),
            '"' => self.text("\\\"", is_key),
            c if c < ' ' => {
                let json = serde_json::Value::from(c.to_string()).to_string();
                self.text(&json[1..json.len() - 1], is_key);
            }
            c => self.text(c.encode_utf8(&mut [0; 4]), is_key),
        }
        JsonStep::More
    }

    fn maybe_after(&mut self, c: char, is_key: bool) -> JsonStep {
        if c.is_whitespace() && self.held.len() < 256 {
            self.held.push(c);
            return JsonStep::More;
        }
        let is_alone = self.open.is_empty();
        let ends = if is_key { c == ':' } else { matches!(c, ',' | '}' | ']') || (is_alone && c == ':') };
        let held = std::mem::take(&mut self.held);
        if ends {
            return match self.end_text(is_key) {
                JsonStep::More => self.push(c),
                JsonStep::Done | JsonStep::Before => JsonStep::Before,
            };
        }
        // The quote was an apostrophe.
        self.text("'", is_key);
        self.state = JsonState::Text { quote: '\'', is_key };
        for c in held[1..].chars().chain([c]) {
            self.push(c);
        }
        JsonStep::More
    }

    fn end_text(&mut self, is_key: bool) -> JsonStep {
        self.text("\"", is_key);
        self.after_item(is_key)
    }

    fn in_word(&mut self, c: char, is_key: bool) -> JsonStep {
        let ends = c.is_whitespace() || matches!(c, ',' | '}' | ']' | '{' | '[' | '"' | '\'' | '<' | '`');
        if !(ends || is_key && c == ':') {
            self.held.push(c);
            return JsonStep::More;
        }
        let word = std::mem::take(&mut self.held);
        let text = || serde_json::Value::from(&*word).to_string();
        if is_key {
            self.gap += &text();
        } else {
            let json = scalar(&word).unwrap_or_else(text);
            self.item(&json);
        }
        match self.after_item(is_key) {
            JsonStep::More => self.push(c),
            JsonStep::Done | JsonStep::Before => JsonStep::Before,
        }
    }

    /// The state after a key or a value.
    fn after_item(&mut self, is_key: bool) -> JsonStep {
        self.state = match (is_key, self.open.is_empty()) {
            (true, _) => JsonState::Colon,
            (false, false) => JsonState::Next,
            (false, true) => JsonState::Done,
        };
        if self.state == JsonState::Done { JsonStep::Done } else { JsonStep::More }
    }

    fn leave(&mut self, c: char) -> JsonStep {
        let wanted = if c == '}' { Container::Object } else { Container::List };
        if !self.open.contains(&wanted) {
            return self.before();
        }
        // White space before the bracket is kept, a comma is dropped.
        let gap = std::mem::take(&mut self.gap);
        self.out.extend(gap.chars().filter(|c| *c != ','));
        while let Some(open) = self.open.pop() {
            self.out.push(closer(open));
            if open == wanted {
                break;
            }
        }
        self.has_item = true;
        self.after_item(false)
    }

    /// Adds a missing comma before the next item.
    fn begin_item(&mut self) {
        if self.has_item && !self.gap.contains(',') {
            self.gap.insert(0, ',');
        }
    }

    fn begin_value(&mut self) {
        if self.open.last() == Some(&Container::List) {
            self.begin_item();
        }
        self.out += &self.gap;
        self.gap.clear();
        self.has_item = true;
    }

    /// Writes a complete scalar.
    fn item(&mut self, json: &str) {
        self.begin_value();
        self.out += json;
    }

    fn text(&mut self, json: &str, is_key: bool) {
        if is_key { self.gap += json } else { self.out += json }
    }

    fn blank(&mut self, c: char) {
        // Other white space is invalid in JSON; white space around the outermost value is dropped.
        if matches!(c, ' ' | '\t' | '\n' | '\r') && !self.open.is_empty() {
            self.gap.push(c);
        }
    }
}

fn closer(open: Container) -> char {
    match open {
        Container::Object => '}',
        Container::List => ']',
    }
}

fn begins_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '-' | '+' | '.' | '_' | '$')
}

/// The JSON of a number or a literal such as `True`; `None` for other words.
pub(super) fn scalar(word: &str) -> Option<String> {
    let json = match word {
        "true" | "True" | "TRUE" => "true",
        "false" | "False" | "FALSE" => "false",
        // JSON cannot represent NaN and infinities.
        "null" | "None" | "NULL" | "undefined" | "NaN" | "nan" | "Infinity" | "-Infinity" | "+Infinity" => "null",
        _ => {
            let (sign, digits) = word.strip_prefix('-').map_or(("", word), |digits| ("-", digits));
            let significant = digits.trim_start_matches('0');
            let is_padded = digits.len() > significant.len() && significant.starts_with(|c: char| c.is_ascii_digit());
            let zeros = !digits.is_empty() && significant.is_empty();
            return match (zeros, is_padded) {
                (true, _) => Some(format!("{sign}0")),
                (false, true) => number(&format!("{sign}{significant}")),
                (false, false) => number(word),
            };
        }
    };
    Some(json.to_owned())
}

enum Escape {
    /// More characters are needed.
    Incomplete,
    /// A complete escape, in JSON's notation.
    Is(String),
    /// Not a valid escape: the JSON of its first part, and the text that remains to be read.
    Not(&'static str, String),
}

/// Classifies the escape sequence `text`, which begins with a backslash.
fn escape(text: &str) -> Escape {
    const REPLACEMENT: &str = "\\ufffd";
    let not = || Escape::Not("\\\\", text[1..].to_owned());
    match text[1..].chars().next() {
        None => Escape::Incomplete,
        Some('"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::Is(text.to_owned()),
        Some('\'') => Escape::Is("'".into()),
        Some('u') => match unicode(text) {
            Unicode::Incomplete => Escape::Incomplete,
            Unicode::None => not(),
            // The second half of a surrogate pair must follow.
            Unicode::Is(0xd800..=0xdbff) if text.len() == 6 => Escape::Incomplete,
            Unicode::Is(0xd800..=0xdbff) => {
                let second = &text[6..];
                match unicode(second) {
                    Unicode::Incomplete => Escape::Incomplete,
                    Unicode::Is(0xdc00..=0xdfff) => Escape::Is(text.to_owned()),
                    Unicode::Is(_) | Unicode::None => Escape::Not(REPLACEMENT, second.to_owned()),
                }
            }
            Unicode::Is(0xdc00..=0xdfff) => Escape::Is(REPLACEMENT.into()),
            Unicode::Is(_) => Escape::Is(text.to_owned()),
        },
        Some(_) => not(),
    }
}

enum Unicode {
    Incomplete,
    Is(u32),
    None,
}

/// The UTF-16 code unit of the `\uXXXX` at the start of `text`.
fn unicode(text: &str) -> Unicode {
    let digits = text.strip_prefix("\\u").unwrap_or_default();
    let n = digits.bytes().take(4).take_while(u8::is_ascii_hexdigit).count();
    if n == 4 {
        return u32::from_str_radix(&digits[..4], 16).map_or(Unicode::None, Unicode::Is);
    }
    if "\\u".starts_with(text) || (text.starts_with("\\u") && n == digits.len()) {
        Unicode::Incomplete
    } else {
        Unicode::None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The JSON of `text`, and the text that follows the value.
    fn read(text: &str) -> (String, String) {
        let mut json = LenientJson::new();
        for (at, c) in text.char_indices() {
            match json.push(c) {
                JsonStep::More => {}
                JsonStep::Done => return (json.take(), text[at + c.len_utf8()..].to_owned()),
                JsonStep::Before => return (json.take(), text[at..].to_owned()),
            }
        }
        json.finish();
        (json.take(), String::new())
    }

    #[test]
    fn valid_json_is_unchanged() {
        for text in [
            r#"{"a": "}\"\u00e9\ud83d\ude00\\", "b" : [1, {} , [ ],-0.5e3], "c":null }"#,
            r#"{"n":123456789012345678901234567890,"x":1e400,"y":-1E-999}"#,
            "{\n  \"a\": [\n    true,\n    false\n  ]\n}",
            r#""text""#,
        ] {
            assert_eq!(read(text), (text.to_owned(), String::new()));
        }
    }

    #[test]
    fn faults_are_mended() {
        for (text, json, rest) in [
            ("{\"a\": \"x\ny\tz\u{1}\"}", r#"{"a": "x\ny\tz\u0001"}"#, ""),
            (r#"{"a": "C:\dir\d+\"}"#, r#"{"a": "C:\\dir\\d+\"}"}"#, ""),
            (r#"{"a": "\u12g\ud83d\ud83dx\ude00"}"#, r#"{"a": "\\u12g\ufffd\ufffdx\ufffd"}"#, ""),
            (r#"{"a": "\u123é\uéx\ud83d\ué"}"#, r#"{"a": "\\u123é\\uéx\ufffd\\ué"}"#, ""),
            (r#"{"a": 1,, "b": [1,],}"#, r#"{"a": 1, "b": [1]}"#, ""),
            (
                r#"{"a": True, "b": None, "c": FALSE, "d": NaN, "e": -Infinity}"#,
                r#"{"a": true, "b": null, "c": false, "d": null, "e": null}"#,
                "",
            ),
            (
                r#"{"a": 01, "b": .5, "c": 1., "d": +2, "e": 00, "f": -007}"#,
                r#"{"a": 1, "b": 0.5, "c": 1.0, "d": 2, "e": 0, "f": -7}"#,
                "",
            ),
            (r#"{'a': 'it's "so"', 'b': ['x', 'y']}"#, r#"{"a": "it's \"so\"", "b": ["x", "y"]}"#, ""),
            (r#"{a: "x", b_c: word}"#, r#"{"a": "x", "b_c": "word"}"#, ""),
            (r#"{"a": 1 "b": ["x" "y"]}"#, r#"{"a": 1, "b": ["x", "y"]}"#, ""),
            (r#"{"a": [1, {"b": 2</tool_call>"#, r#"{"a": [1, {"b": 2}]}"#, "</tool_call>"),
            (r#"{"a": [1, 2}, x"#, r#"{"a": [1, 2]}"#, ", x"),
            (r#"{"a", "b": 1, "c": }"#, r#"{ "b": 1}"#, ""),
            (r#"{"a": "x", "ke"#, r#"{"a": "x"}"#, ""),
            (r#"{"a": "x\"#, r#"{"a": "x"}"#, ""),
            (r#"{"a": 12"#, r#"{"a": 12}"#, ""),
            (r#"{"a": tr"#, "{}", ""),
            ("12, 3", "12", ", 3"),
            ("<x", "", "<x"),
        ] {
            assert_eq!(read(text), (json.to_owned(), rest.to_owned()), "{text}");
            if !json.is_empty() {
                serde_json::from_str::<serde::de::IgnoredAny>(json).unwrap();
            }
        }
    }
}
