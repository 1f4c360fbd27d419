//! Converts values between Python's notation and JSON.

use serde::de::IgnoredAny;
use serde_json::{Value, json};

/// The maximum nesting of containers.
const MAX_DEPTH: usize = 64;

/// The characters that may follow a string. A quote before any other character is part of the string, because models
/// are shown strings with unescaped quotes.
pub(super) const AFTER_TEXT: [char; 5] = [',', ')', ']', '}', ':'];

/// The JSON of a value in Python's notation: a string in quotes of any kind, a number, `True`, `False`, `None`, or a
/// list, tuple, set or dictionary of such; JSON is accepted, too. `None` for any other text.
pub(super) fn as_json(text: &str) -> Option<String> {
    let mut reader = PythonValueReader { rest: text, json: String::new() };
    reader.value(MAX_DEPTH)?;
    reader.rest.trim().is_empty().then_some(reader.json)
}

struct PythonValueReader<'t> {
    rest: &'t str,
    json: String,
}

impl PythonValueReader<'_> {
    /// Consumes `token` and the white space before it, if they come next.
    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '[' => self.list(']', depth),
            '(' => self.list(')', depth),
            '{' => self.braces(depth),
            _ => match self.text() {
                Some(text) => {
                    self.json += &json!(text).to_string();
                    Some(())
                }
                None => self.word(),
            },
        }
    }

    /// Reads a list or a tuple. A single value in parentheses is that value.
    fn list(&mut self, end: char, depth: usize) -> Option<()> {
        let begin = self.json.len();
        self.rest = &self.rest[1..];
        self.json.push('[');
        let (mut n, mut comma) = (0, true);
        loop {
            if self.take(end.encode_utf8(&mut [0; 4])) {
                break;
            }
            if !comma {
                return None;
            }
            if n > 0 {
                self.json += ", ";
            }
            self.value(depth)?;
            n += 1;
            comma = self.take(",");
        }
        if end == ')' && n == 1 && !comma {
            self.json.remove(begin);
        } else {
            self.json.push(']');
        }
        Some(())
    }

    /// Reads a dictionary, or a set, which becomes a list.
    fn braces(&mut self, depth: usize) -> Option<()> {
        let begin = self.json.len();
        self.rest = &self.rest[1..];
        self.json.push('{');
        let (mut n, mut comma, mut is_set) = (0, true, false);
        loop {
            if self.take("}") {
                break;
            }
            if !comma {
                return None;
            }
            if n > 0 {
                self.json += ", ";
            }
            let key = self.json.len();
            self.value(depth)?;
            let has_value = self.take(":");
            if n > 0 && has_value == is_set {
                return None;
            }
            if has_value {
                // JSON has only string keys.
                if !self.json[key..].starts_with('"') {
                    let text = json!(self.json[key..]).to_string();
                    self.json.replace_range(key.., &text);
                }
                self.json += ": ";
                self.value(depth)?;
            }
            is_set = !has_value;
            n += 1;
            comma = self.take(",");
        }
        if is_set {
            self.json.replace_range(begin..=begin, "[");
        }
        self.json.push(if is_set { ']' } else { '}' });
        Some(())
    }

    /// Reads a string with its prefix letters.
    fn text(&mut self) -> Option<String> {
        let start = self.rest.find(['"', '\''])?;
        let prefix = &self.rest[..start];
        if !is_prefix(prefix) {
            return None;
        }
        let raw = prefix.contains(['r', 'R']);
        let quoted = &self.rest[start..];
        let quote = &quoted[..1];
        let triple = quote.repeat(3);
        let (inside, end) = if quoted.starts_with(&triple) { (&quoted[3..], &*triple) } else { (&quoted[1..], quote) };
        let mut escaped = false;
        for (at, c) in inside.char_indices() {
            let ends = !escaped && inside[at..].starts_with(end);
            escaped = c == '\\' && !escaped;
            if !ends {
                continue;
            }
            let after = &inside[at + end.len()..];
            if end.len() == 3 || after.trim_start().is_empty() || after.trim_start().starts_with(AFTER_TEXT) {
                self.rest = after;
                return Some(if raw { inside[..at].to_owned() } else { unescaped(&inside[..at]) });
            }
        }
        None
    }

    /// Reads a number, a boolean or None.
    fn word(&mut self) -> Option<()> {
        let end = self.rest.find(AFTER_TEXT).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim() {
            "True" | "true" => self.json += "true",
            "False" | "false" => self.json += "false",
            "None" | "null" => self.json += "null",
            word => self.json += &number(word)?,
        }
        Some(())
    }
}

/// Whether a quote may follow `text`: it is empty or a string prefix such as `r`.
pub(super) fn is_prefix(text: &str) -> bool {
    text.len() <= 2 && text.chars().all(|c| "rRbBuUfF".contains(c))
}

/// A Python number in JSON's notation; `None` if it is not a number.
pub(super) fn number(word: &str) -> Option<String> {
    let (sign, digits) = match word.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", word.strip_prefix('+').unwrap_or(word)),
    };
    if !digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
        return None;
    }
    let digits = digits.replace('_', "");
    for (prefix, radix) in [("0x", 16), ("0X", 16), ("0o", 8), ("0O", 8), ("0b", 2), ("0B", 2)] {
        if let Some(digits) = digits.strip_prefix(prefix) {
            let is_digits = digits.chars().all(|c| c.is_digit(radix));
            return u64::from_str_radix(digits, radix).ok().filter(|_| is_digits).map(|n| format!("{sign}{n}"));
        }
    }
    // "1." and ".5" are not valid in JSON.
    let exponent = digits.find(['e', 'E']).unwrap_or(digits.len());
    let (mantissa, exponent) = digits.split_at(exponent);
    let before = if mantissa.starts_with('.') { "0" } else { "" };
    let after = if mantissa.ends_with('.') { "0" } else { "" };
    let number = format!("{sign}{before}{mantissa}{after}{exponent}");
    // JSON numbers have no maximum.
    let is_number = serde_json::from_str::<IgnoredAny>(&number).is_ok();
    is_number.then_some(number)
}

/// The content of a string literal with escapes resolved. Invalid escapes are kept.
pub(super) fn unescaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out += &rest[..at];
        let (c, length) = escaped(&rest[at + 1..]);
        out.extend(c);
        rest = &rest[at + 1 + length..];
    }
    out + rest
}

/// The character that `escape`, the text after a backslash, stands for, and the length of the escape in bytes.
pub(super) fn escaped(escape: &str) -> (Option<char>, usize) {
    let code = |digits: usize, at: usize| {
        let digits = escape.get(at..at + digits).filter(|text| text.bytes().all(|b| b.is_ascii_hexdigit()))?;
        u32::from_str_radix(digits, 16).ok()
    };
    match escape.chars().next() {
        Some('\n') => (None, 1),
        Some('n') => (Some('\n'), 1),
        Some('t') => (Some('\t'), 1),
        Some('r') => (Some('\r'), 1),
        Some('a') => (Some('\x07'), 1),
        Some('b') => (Some('\x08'), 1),
        Some('f') => (Some('\x0c'), 1),
        Some('v') => (Some('\x0b'), 1),
        Some(c @ ('\\' | '\'' | '"' | '/')) => (Some(c), 1),
        Some('0'..='7') => {
            let length = escape.bytes().take(3).take_while(|b| matches!(b, b'0'..=b'7')).count();
            (u32::from_str_radix(&escape[..length], 8).ok().and_then(char::from_u32), length)
        }
        Some(kind @ ('x' | 'u' | 'U')) => {
            let digits = match kind {
                'x' => 2,
                'u' => 4,
                _ => 8,
            };
            let first = code(digits, 1);
            // A surrogate pair, as in JSON.
            let second = Some(()).filter(|()| kind == 'u' && escape.get(5..7) == Some("\\u")).and_then(|()| code(4, 7));
            match (first, second) {
                (Some(high @ 0xd800..=0xdbff), Some(low @ 0xdc00..=0xdfff)) => {
                    (char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00)), 11)
                }
                (Some(code), _) => (Some(char::from_u32(code).unwrap_or('\u{fffd}')), 1 + digits),
                (None, _) => (Some('\\'), 0),
            }
        }
        Some(_) | None => (Some('\\'), 0),
    }
}

/// A value in Python's notation, with strings in double quotes.
pub(super) fn as_python(value: &Value) -> String {
    match value {
        Value::Null => "None".into(),
        Value::Bool(true) => "True".into(),
        Value::Bool(false) => "False".into(),
        Value::Number(_) | Value::String(_) => value.to_string(),
        Value::Array(values) => format!("[{}]", values.iter().map(as_python).collect::<Vec<_>>().join(", ")),
        Value::Object(members) => {
            let member = |(key, value): (&String, &Value)| format!("{}: {}", json!(key), as_python(value));
            format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_python_and_of_json_are_read() {
        for (text, json) in [
            ("\"Bern\"", "\"Bern\""),
            ("'it\\'s \"so\"'", "\"it's \\\"so\\\"\""),
            ("'it's so'", "\"it's so\""),
            ("\"a\nb\\n\\t\\\\\\x41\\u00e9\\U0001f600\\ud83d\\ude00\\/\\q\"", "\"a\\nb\\n\\t\\\\Aé😀😀/\\\\q\""),
            ("'''a 'b' \"c\",\n'''", "\"a 'b' \\\"c\\\",\\n\""),
            ("r'\\d+' ", "\"\\\\d+\""),
            ("''", "\"\""),
            ("\"\"\"\"\"\"", "\"\""),
            (" 12 ", "12"),
            ("-1.5e3", "-1.5e3"),
            ("+1_000", "1000"),
            ("1.", "1.0"),
            (".5", "0.5"),
            ("0xff", "255"),
            ("True", "true"),
            ("false", "false"),
            ("None", "null"),
            ("[1, 'a', [True, None],]", "[1, \"a\", [true, null]]"),
            ("(1, 2)", "[1, 2]"),
            ("(1,)", "[1]"),
            ("(1)", "1"),
            ("()", "[]"),
            ("{'a': {\"b\": [.5]}, 1: 'x'}", "{\"a\": {\"b\": [0.5]}, \"1\": \"x\"}"),
            ("{}", "{}"),
            ("{1, 2}", "[1, 2]"),
            ("{\"a\": true, \"b\": null}", "{\"a\": true, \"b\": null}"),
        ] {
            assert_eq!(as_json(text).as_deref(), Some(json), "{text}");
            assert!(serde_json::from_str::<Value>(json).is_ok(), "{json}");
        }
    }

    #[test]
    fn other_texts_are_not_values() {
        for text in [
            "",
            "Bern",
            "2024-05-01",
            "1 2",
            "[1",
            "[1 2]",
            "[,]",
            "{'a': 1, 2}",
            "'a",
            "\"a\" + b",
            "nan",
            "1j",
            "01",
            "0x",
            "f(1)",
            "]",
        ] {
            assert_eq!(as_json(text), None, "{text}");
        }
        assert_eq!(as_json(&"[".repeat(100_000)), None);
    }

    #[test]
    fn written_values_are_read_back() {
        let value = json!({"a": [1, -2.5, true, null, "x\"'\\\n\u{1}é😀"], "b": {}, "c": false});
        let text = as_python(&value);
        assert_eq!(serde_json::from_str::<Value>(&as_json(&text).unwrap()).unwrap(), value, "{text}");
    }
}
