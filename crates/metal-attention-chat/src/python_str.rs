//! Python's `str` and `repr` of template values, and numbers of arbitrary size.

use std::fmt::{self, Write};
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr, ValueKind};

use crate::measured::{is_measured, is_tuple};

/// A JSON number that the template engine cannot represent, in text form.
#[derive(Debug)]
pub(crate) struct ExactNumber(pub String);

impl ExactNumber {
    /// Whether the number is an integer.
    pub fn is_integer(&self) -> bool {
        !self.0.contains(['.', 'e', 'E'])
    }
}

impl Object for ExactNumber {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Python's `str(value)`. An undefined value is the empty string.
pub(crate) fn text(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => repr(value),
    }
}

/// Python's `repr(value)`.
pub(crate) fn repr(value: &Value) -> String {
    let mut out = String::new();
    write_repr(&mut out, value);
    out
}

fn write_repr(out: &mut String, value: &Value) {
    if let Some(text) = value.as_str() {
        return quoted(out, text);
    }
    match value.kind() {
        ValueKind::Undefined => *out += "Undefined",
        ValueKind::Number if !value.is_integer() => *out += &float(f64::try_from(value.clone()).unwrap_or(f64::NAN)),
        ValueKind::Seq | ValueKind::Iterable if is_measured(value) => {
            let is_tuple = is_tuple(value);
            out.push(if is_tuple { '(' } else { '[' });
            let mut n = 0;
            for item in value.try_iter().into_iter().flatten() {
                *out += if n > 0 { ", " } else { "" };
                write_repr(out, &item);
                n += 1;
            }
            *out += match (is_tuple, n) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            };
        }
        ValueKind::Map if is_measured(value) => {
            out.push('{');
            let pairs = value.as_object().and_then(minijinja::value::DynObject::try_iter_pairs);
            for (i, (key, value)) in pairs.into_iter().flatten().enumerate() {
                *out += if i > 0 { ", " } else { "" };
                write_repr(out, &key);
                *out += ": ";
                write_repr(out, &value);
            }
            out.push('}');
        }
        // Values that minijinja prints as Python does, and objects such as macros and namespaces.
        _ => {
            // Writing to a String does not fail.
            let _ = write!(out, "{value}");
        }
    }
}

/// Python's `repr` of a float.
pub(crate) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    let text = format!("{number:?}");
    match text.split_once('e') {
        // Rust and Python use exponents for the same numbers, but in different notation.
        Some((mantissa, exponent)) => {
            let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |digits| ('-', digits));
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None => text,
    }
}

/// Writes Python's `repr` of a string.
fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => *out += "\\\\",
            '\n' => *out += "\\n",
            '\r' => *out += "\\r",
            '\t' => *out += "\\t",
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                // Writing to a String does not fail.
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable` for one character.
pub(crate) fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // Rust's escape_debug escapes a combining character only at the start of a string.
    let after_letter = ['a', c].iter().collect::<String>();
    after_letter.escape_debug().nth(1) != Some('\\')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_as_in_python() {
        let found = [1e16, 1e15, 1e-5, 0.0001, -0.0, 1.5e300, 5e-324, f64::NAN, f64::NEG_INFINITY].map(float);
        let expected = ["1e+16", "1000000000000000.0", "1e-05", "0.0001", "-0.0", "1.5e+300", "5e-324", "nan", "-inf"];
        assert_eq!(found, expected);
    }

    #[test]
    fn texts_are_quoted_as_in_python() {
        for (text, expected) in [
            ("a\n\t\r\\", r"'a\n\t\r\\'"),
            ("it's", "\"it's\""),
            ("\"'", "'\"\\''"),
            ("\0\u{7f}\u{a0}\u{200b}\u{10ffff}", r"'\x00\x7f\xa0\u200b\U0010ffff'"),
            ("é\u{301}😀", "'é\u{301}😀'"),
        ] {
            assert_eq!(repr(&Value::from(text)), expected);
        }
    }
}
