//! Values of GGUF metadata as text and JSON: shortened, and without characters that control a terminal.
//!
//! [`safe`] and its siblings are also used for all other text that comes from files or models and is printed.

use std::path::Path;

use metal_attention::gguf::{Array, Value};
use serde_json::json;

/// The number of elements of an array that are shown.
const SHOWN: usize = 8;
/// The number of characters of a string that are shown.
const SHOWN_CHARS: usize = 60;

/// `text` in one line for a terminal. Escaped are control characters, and characters that change the direction, order or look
/// of others without being visible.
pub fn safe(text: &str) -> String {
    escaped(text, |c| c.escape_default().to_string(), steers)
}

/// The name of a file without its folders, as [`safe`] text.
pub fn file_name(file: &Path) -> String {
    safe(&file.file_name().unwrap_or_default().to_string_lossy())
}

/// [`safe`], but keeps line breaks and tabs.
pub fn safe_lines(text: &str) -> String {
    escaped(text, |c| c.escape_default().to_string(), |c| steers(c) && !matches!(c, '\n' | '\t'))
}

/// `value` as indented JSON, in which the characters that [`safe`] escapes are `\u` escapes.
pub fn safe_json(value: &serde_json::Value) -> String {
    let escape = |c: char| {
        let units: Vec<_> = c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect();
        units.concat()
    };
    // Such characters occur in strings only, except for the line breaks between values.
    escaped(&format!("{value:#}"), escape, |c| steers(c) && c != '\n')
}

/// `text` with each character that `is_escaped` replaced by its `escape`.
fn escaped(text: &str, escape: impl Fn(char) -> String, is_escaped: impl Fn(char) -> bool) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        if is_escaped(c) {
            safe += &escape(c);
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Whether a character is escaped: control characters; marks, overrides and isolates of the writing direction; separators of
/// lines; invisible characters, except for the joiners, which scripts need.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'
                | '\u{200e}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

/// A metadata value in one line.
pub fn text(value: &Value) -> String {
    match value {
        Value::String(s) => quoted(s),
        Value::Array(array) => array_text(array),
        Value::F32(v) => v.to_string(),
        other => json(other).to_string(),
    }
}

/// A metadata value as JSON. An array becomes its type, its length and its first [`SHOWN`] elements.
pub fn json(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Array(a) => json!({"type": a.element_type().name(), "length": a.len(), "first": first(a)}),
    }
}

/// The first [`SHOWN`] elements as JSON.
fn first(array: &Array) -> Vec<serde_json::Value> {
    fn take<T: serde::Serialize>(values: &[T]) -> Vec<serde_json::Value> {
        values.iter().take(SHOWN).map(|v| json!(v)).collect()
    }
    match array {
        Array::U8(v) => take(v),
        Array::I8(v) => take(v),
        Array::U16(v) => take(v),
        Array::I16(v) => take(v),
        Array::U32(v) => take(v),
        Array::I32(v) => take(v),
        Array::F32(v) => take(v),
        Array::Bool(v) => take(v),
        Array::String(v) => v.iter().take(SHOWN).map(|v| json!(v)).collect(),
        Array::U64(v) => take(v),
        Array::I64(v) => take(v),
        Array::F64(v) => take(v),
        Array::Array(v) => v.iter().take(SHOWN).map(|a| json!({"length": a.len(), "first": first(a)})).collect(),
    }
}

/// An array in one line: its first elements, length and type.
fn array_text(array: &Array) -> String {
    let shown: Vec<_> = first(array).iter().map(|v| v.as_str().map_or_else(|| v.to_string(), quoted)).collect();
    let (ty, n) = (array.element_type().name(), array.len());
    let more = if n > SHOWN { ", ..." } else { "" };
    format!("[{}{more}] ({n} of type {ty})", shown.join(", "))
}

/// `s` in quotes, escaped, cut off after [`SHOWN_CHARS`] characters.
fn quoted(s: &str) -> String {
    match s.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("\"{}...\" ({} bytes)", safe(&s[..end]), s.len()),
        None => format!("\"{}\"", safe(s)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shortened_and_escaped() {
        assert_eq!(text(&Value::U32(7)), "7");
        assert_eq!(text(&Value::F32(1e-5)), "0.00001");
        assert_eq!(text(&"a\u{1b}[2Jb\n".into()), "\"a\\u{1b}[2Jb\\n\"");
        assert_eq!(safe("a\u{202e}b\u{9b}c\u{2066}\u{200d}\n"), "a\\u{202e}b\\u{9b}c\\u{2066}\u{200d}\\n");
        assert_eq!(safe_lines("a\n\tb\r\u{1b}"), "a\n\tb\\r\\u{1b}");
        let odd = json!({"a\u{9b}": "\u{202e}\u{e0041}\n\u{7f}é"});
        assert_eq!(safe_json(&odd), "{\n  \"a\\u009b\": \"\\u202e\\udb40\\udc41\\n\\u007fé\"\n}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe_json(&odd)).unwrap(), odd);
        assert_eq!(text(&"é".repeat(61).into()), format!("\"{}...\" (122 bytes)", "é".repeat(60)));
        assert_eq!(text(&vec![1u32, 2].into()), "[1, 2] (2 of type u32)");
        assert!(text(&vec![0.0f32; 9].into()).ends_with(", ...] (9 of type f32)"));
        assert_eq!(json(&f32::NAN.into()), serde_json::Value::Null);
        let nested = Array::Array(vec![Array::U8(vec![1]), Array::U8(vec![])]);
        assert_eq!(json(&nested.into())["first"][0], json!({"length": 1, "first": [1]}));
    }
}
