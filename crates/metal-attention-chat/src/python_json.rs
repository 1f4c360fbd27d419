//! JSON as Python's `json.dumps` writes it, which is what models were trained on.

use std::fmt::Write;

use serde_json::Value;

/// How to write.
#[derive(Debug, Clone)]
pub(crate) struct Format {
    /// One level of indentation; `None`: all in one line.
    pub indent: Option<String>,
    /// What stands between items.
    pub item_separator: String,
    /// What stands between a key and its value.
    pub key_separator: String,
    /// Write other characters than ASCII as `\uXXXX`.
    pub ensure_ascii: bool,
    /// Order keys by name.
    pub sort_keys: bool,
}

impl Format {
    /// The format with Python's default separators.
    pub fn new(indent: Option<String>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " }.into();
        Self { indent, item_separator, key_separator: ": ".into(), ensure_ascii: false, sort_keys: false }
    }
}

/// `value` as text.
pub(crate) fn dumps(value: &Value, format: &Format) -> String {
    let mut out = String::new();
    write_value(&mut out, value, format, 0);
    out
}

fn write_value(out: &mut String, value: &Value, format: &Format, depth: usize) {
    match value {
        Value::Null => *out += "null",
        Value::Bool(flag) => *out += if *flag { "true" } else { "false" },
        Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
            Some(number) => *out += &float(number),
            None => *out += &number.to_string(),
        },
        Value::String(text) => string(out, text, format),
        Value::Array(values) => {
            list(out, '[', ']', values.len(), format, depth, |out, i| write_value(out, &values[i], format, depth + 1));
        }
        Value::Object(map) => {
            let mut pairs: Vec<_> = map.iter().collect();
            if format.sort_keys {
                pairs.sort_by_key(|&(key, _)| key);
            }
            list(out, '{', '}', pairs.len(), format, depth, |out, i| {
                let (key, value) = pairs[i];
                string(out, key, format);
                *out += &format.key_separator;
                write_value(out, value, format, depth + 1);
            });
        }
    }
}

/// Brackets around `n` items.
fn list(
    out: &mut String,
    open: char,
    close: char,
    n: usize,
    format: &Format,
    depth: usize,
    item: impl Fn(&mut String, usize),
) {
    let new_line = |out: &mut String, depth| {
        if let Some(indent) = format.indent.as_ref().filter(|_| n > 0) {
            out.push('\n');
            *out += &indent.repeat(depth);
        }
    };
    out.push(open);
    for i in 0..n {
        if i > 0 {
            *out += &format.item_separator;
        }
        new_line(out, depth + 1);
        item(out, i);
    }
    new_line(out, depth);
    out.push(close);
}

fn string(out: &mut String, text: &str, format: &Format) {
    // A text always has a JSON form.
    let quoted = serde_json::to_string(text).unwrap_or_default();
    if !format.ensure_ascii {
        *out += &quoted;
        return;
    }
    for c in quoted.chars() {
        if c < '\u{7f}' {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                // Writing to a text cannot fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
}

/// A float as Python's `repr` writes it.
fn float(number: f64) -> String {
    let text = format!("{number:?}");
    match text.split_once('e') {
        // Rust and Python agree on when to use exponents, but not on how to write them.
        Some((mantissa, exponent)) => {
            let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_same_text_as_python() {
        let value =
            json!({"b": [1, 2.0, -0.5, 1e16, 1e-5, 0.0001, 1.5e300], "a": {}, "é\"\n\u{1}": [], "t": [true, null]});
        assert_eq!(
            dumps(&value, &Format::new(None)),
            r#"{"b": [1, 2.0, -0.5, 1e+16, 1e-05, 0.0001, 1.5e+300], "a": {}, "é\"\n\u0001": [], "t": [true, null]}"#
        );
        let sorted = Format { sort_keys: true, ensure_ascii: true, ..Format::new(Some("  ".into())) };
        let value = json!({"b": [1, {"c": "é😀"}], "a": {}});
        assert_eq!(
            dumps(&value, &sorted),
            "{\n  \"a\": {},\n  \"b\": [\n    1,\n    {\n      \"c\": \"\\u00e9\\ud83d\\ude00\"\n    }\n  ]\n}"
        );
    }
}
