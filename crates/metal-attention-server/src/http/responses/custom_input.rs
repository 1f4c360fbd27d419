//! Extracts the input of a custom tool from the arguments of the function that stands for it.
//!
//! The model calls a function with the arguments `{"input": TEXT}`; the interface streams TEXT alone.

use serde_json::Value;

/// Reads `{"input": TEXT}` while it is generated.
#[derive(Debug, Default)]
pub struct CustomInput {
    /// The arguments so far.
    arguments: String,
    /// Bytes of the arguments that were decoded; `None`: TEXT has not started.
    read: Option<usize>,
    /// The part of TEXT that was returned.
    text: String,
}

impl CustomInput {
    /// Adds a piece of the arguments. Returns what it adds to TEXT.
    pub fn push(&mut self, piece: &str) -> String {
        self.arguments += piece;
        let Some(from) = self.read.or_else(|| begun(&self.arguments)) else { return String::new() };
        let rest = &self.arguments[from..];
        let end = whole_characters(rest);
        let more: String = serde_json::from_str(&format!("\"{}\"", &rest[..end])).unwrap_or_default();
        self.read = Some(from + end);
        self.text += &more;
        more
    }

    /// Returns the whole TEXT, and its part that was not returned before. Arguments of another form count as TEXT
    /// themselves.
    pub fn finish(self) -> (String, String) {
        let text = match serde_json::from_str::<Value>(&self.arguments) {
            Ok(Value::Object(fields)) => match (fields.get("input"), fields.len(), fields.values().next()) {
                (Some(Value::String(text)), _, _) | (None, 1, Some(Value::String(text))) => text.clone(),
                (None, 0, _) => String::new(),
                (Some(_) | None, _, _) => self.arguments,
            },
            Ok(Value::String(text)) => text,
            // The arguments were cut off within TEXT.
            Err(_) if self.read.is_some() => self.text.clone(),
            Ok(Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_)) | Err(_) => self.arguments,
        };
        let rest = text.strip_prefix(&self.text).unwrap_or_default().to_owned();
        (text, rest)
    }
}

/// Returns the byte where TEXT starts; `None` if that is not known yet.
fn begun(arguments: &str) -> Option<usize> {
    let mut rest = arguments;
    for word in ["{", "\"input\"", ":", "\""] {
        rest = rest.trim_start().strip_prefix(word)?;
    }
    Some(arguments.len() - rest.len())
}

/// Returns the number of bytes at the start of a JSON string (without its quotes) that are whole characters: it may end
/// within an escape.
fn whole_characters(json: &str) -> usize {
    let bytes = json.as_bytes();
    let escape = |at: usize| match bytes.get(at + 1)? {
        b'u' => Some((6, u16::from_str_radix(json.get(at + 2..at + 6)?, 16).ok()?)),
        _ => Some((2, 0)),
    };
    let mut at = 0;
    loop {
        match bytes.get(at) {
            None | Some(b'"') => return at,
            Some(b'\\') => match escape(at) {
                None => return at,
                // The first half of a surrogate pair.
                Some((length, 0xd800..0xdc00)) => match bytes.get(at + length) {
                    None => return at,
                    Some(_) if escape(at + length).is_none() => return at,
                    Some(_) => at += 2 * length,
                },
                Some((length, _)) => at += length,
            },
            Some(_) => at += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces of TEXT for arguments that arrive in pieces of `n` bytes, and the whole TEXT.
    fn read(arguments: &str, n: usize) -> (String, String) {
        let (mut input, mut pieces, mut rest) = (CustomInput::default(), String::new(), arguments);
        while !rest.is_empty() {
            let end = (n.min(rest.len())..=rest.len()).find(|&end| rest.is_char_boundary(end)).unwrap();
            pieces += &input.push(&rest[..end]);
            rest = &rest[end..];
        }
        let (text, last) = input.finish();
        (pieces + &last, text)
    }

    #[test]
    fn inputs_are_read_in_pieces() {
        let text = "a\n\"b\" \\ \u{e9}\u{1f642}\u{7}";
        let escaped = r#"{ "input" :"a\n\"b\" \\ \u00e9\ud83d\ude42\u0007"} "#;
        let plain = serde_json::json!({"input": text}).to_string();
        for arguments in [escaped, &plain] {
            for n in 1..12 {
                assert_eq!(read(arguments, n), (text.into(), text.into()), "{n}");
            }
        }
        let mut input = CustomInput::default();
        let pieces =
            ["{\"in", "put\": ", "\"a", "b\\", "nc\\ud83d", "\\ude42", "\"", "}"].map(|piece| input.push(piece));
        assert_eq!(pieces, ["", "", "a", "b", "\nc", "\u{1f642}", "", ""]);
    }

    #[test]
    fn other_arguments_are_the_input() {
        for (arguments, text) in [
            ("{}", ""),
            ("", ""),
            ("ls -l", "ls -l"),
            ("\"ls\"", "ls"),
            ("{\"patch\": \"x\"}", "x"),
            ("{\"a\": \"x\", \"b\": \"y\"}", "{\"a\": \"x\", \"b\": \"y\"}"),
            ("{\"input\": 1}", "{\"input\": 1}"),
            ("{\"input\": \"cut o", "cut o"),
            ("[1]", "[1]"),
        ] {
            assert_eq!(read(arguments, 3), (text.into(), text.into()), "{arguments}");
        }
    }
}
