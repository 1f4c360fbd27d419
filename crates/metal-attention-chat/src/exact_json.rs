//! A JSON parser that keeps all digits of numbers.
//!
//! `serde_json` reads an integer of more than 64 bits as a float and refuses a float beyond the range of doubles. Here
//! such a number becomes an object with one special key, which [`number`] converts to a template value.

use minijinja::Value;
use serde_json::{Map, Value as Json};

use crate::python_str::ExactNumber;

/// The key of such an object. It begins with a noncharacter, so no other JSON has it.
const KEY: &str = "\u{10ffff}number";

/// Parses JSON. Numbers that `serde_json` cannot represent become objects with [`KEY`].
pub(crate) fn from_str(text: &str) -> serde_json::Result<Json> {
    match with_exact_numbers(text) {
        Some(rewritten) => serde_json::from_str(&rewritten),
        None => serde_json::from_str(text),
    }
}

/// `text` with the numbers that `serde_json` cannot represent replaced by objects; `None` if there are none.
fn with_exact_numbers(text: &str) -> Option<String> {
    let mut out = String::new();
    let (mut done, mut at) = (0, 0);
    let bytes = text.as_bytes();
    while at < bytes.len() {
        match bytes[at] {
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at += 1;
            }
            b'-' | b'0'..=b'9' => {
                let start = at;
                while at < bytes.len() && matches!(bytes[at], b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9') {
                    at += 1;
                }
                let number = &text[start..at];
                if !is_held(number) {
                    out += &text[done..start];
                    out.extend(["{\"", KEY, "\":\"", number, "\"}"]);
                    done = at;
                }
            }
            _ => at += 1,
        }
    }
    (done > 0).then(|| out + &text[done..])
}

/// Whether `serde_json` represents a number as Python does. True for text that is not a number, which `serde_json`
/// then refuses.
fn is_held(number: &str) -> bool {
    if !is_number(number) {
        return true;
    }
    if number.contains(['.', 'e', 'E']) {
        return number.parse().is_ok_and(f64::is_finite);
    }
    // Python's integer -0 is 0, but `serde_json` reads a float.
    number != "-0" && (number.parse::<i64>().is_ok() || number.parse::<u64>().is_ok())
}

/// Whether a text is a number in JSON's syntax.
fn is_number(text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let text = text.strip_prefix('-').unwrap_or(text);
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, "0"));
    digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && digits(fraction)
        && digits(exponent.strip_prefix(['-', '+']).unwrap_or(exponent))
}

/// The template value of the number that an object represents; `None` for other objects.
pub(crate) fn number(object: &Map<String, Json>) -> Option<Value> {
    let text = object.get(KEY).filter(|_| object.len() == 1)?.as_str().filter(|text| is_number(text))?;
    if text == "-0" {
        return Some(0.into());
    }
    Some(text.parse::<i128>().map_or_else(|_| Value::from_object(ExactNumber(text.to_owned())), Value::from))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_keep_their_digits() {
        let digits = "123456789012345678901234567890123456789012345678901234567890";
        let read = from_str(&format!("{{\"a\": [{digits}, -0, 1e400, 1.50], \"1e999\\\"2\": 18446744073709551615}}"));
        let exact = |text: &str| json!({ KEY: text });
        assert_eq!(
            read.unwrap(),
            json!({"a": [exact(digits), exact("-0"), exact("1e400"), 1.5], "1e999\"2": u64::MAX})
        );
        let value = |text: &str| number(exact(text).as_object().unwrap()).map(|value| value.to_string());
        assert_eq!(value(digits).unwrap(), digits);
        assert_eq!(value("-12345678901234567890").unwrap(), "-12345678901234567890");
        assert_eq!(value("-0").unwrap(), "0");
        for text in ["1x", "01", "", "<|im_end|>", "1e", "--1"] {
            assert_eq!(value(text), None);
        }
    }

    #[test]
    fn invalid_json_is_refused() {
        for text in ["{\"a\": 01}", "{\"a\": 1-2}", "[1", "\"\\", "-", "99999999999999999999x"] {
            assert!(from_str(text).is_err(), "{text}");
        }
    }
}
