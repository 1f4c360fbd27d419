//! JSON in the format of Python's `json.dumps`, which models were trained on.

use std::fmt::Write;

use minijinja::value::{ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::python_str::{ExactNumber, float};

/// The options of `json.dumps`.
#[derive(Debug, Clone)]
pub(crate) struct JsonFormat {
    /// The indentation of one level; `None` for a single line.
    pub indent: Option<String>,
    /// The separator between items.
    pub item_separator: String,
    /// The separator between a key and its value.
    pub key_separator: String,
    /// Whether characters outside ASCII are written as `\uXXXX`.
    pub ensure_ascii: bool,
    /// Whether keys are sorted by name.
    pub sort_keys: bool,
}

impl JsonFormat {
    /// The defaults of Python.
    pub fn new(indent: Option<String>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " }.into();
        Self { indent, item_separator, key_separator: ": ".into(), ensure_ascii: false, sort_keys: false }
    }
}

/// `value` as JSON. An error for values without a JSON form: undefined values, functions, and lists as keys.
pub(crate) fn dumps(value: &Value, format: &JsonFormat) -> Result<String, Error> {
    let mut out = String::new();
    write_value(&mut out, value, format, 0)?;
    Ok(out)
}

fn write_value(out: &mut String, value: &Value, format: &JsonFormat, depth: usize) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        string(out, text, format);
        return Ok(());
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let values: Vec<Value> = value.try_iter()?.collect();
            list(out, '[', ']', &values, format, depth, |out, value| write_value(out, value, format, depth + 1))
        }
        ValueKind::Map => {
            let pairs = value.as_object().and_then(minijinja::value::DynObject::try_iter_pairs);
            let pairs = pairs.into_iter().flatten().map(|(key, value)| Ok((key_text(&key)?, value)));
            let mut pairs = pairs.collect::<Result<Vec<_>, Error>>()?;
            if format.sort_keys {
                pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
            }
            list(out, '{', '}', &pairs, format, depth, |out, (key, value)| {
                string(out, key, format);
                *out += &format.key_separator;
                write_value(out, value, format, depth + 1)
            })
        }
        _ => {
            *out += &scalar(value)?;
            Ok(())
        }
    }
}

/// The text of a dictionary key.
fn key_text(key: &Value) -> Result<String, Error> {
    key.as_str().map_or_else(|| scalar(key), |text| Ok(text.to_owned()))
}

/// The JSON of a value that is neither a string nor a container.
fn scalar(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if value.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number if value.is_integer() => Ok(value.to_string()),
        ValueKind::Number => {
            let number = f64::try_from(value.clone())?;
            Ok(match float(number).as_str() {
                "nan" => "NaN".into(),
                "inf" => "Infinity".into(),
                "-inf" => "-Infinity".into(),
                text => text.to_owned(),
            })
        }
        _ if value.downcast_object_ref::<ExactNumber>().is_some() => Ok(value.to_string()),
        _ => {
            let is_object = value.as_object().is_some_and(|object| object.repr() == ObjectRepr::Plain);
            let what = if is_object { "a function".to_owned() } else { format!("a value of type {}", value.kind()) };
            Err(Error::new(ErrorKind::BadSerialization, format!("{what} has no JSON form here")))
        }
    }
}

/// Writes a list or an object: brackets, separators and indentation around `items`.
fn list<T>(
    out: &mut String,
    open: char,
    close: char,
    items: &[T],
    format: &JsonFormat,
    depth: usize,
    write: impl Fn(&mut String, &T) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth| {
        if let Some(indent) = format.indent.as_ref().filter(|_| !items.is_empty()) {
            out.push('\n');
            *out += &indent.repeat(depth);
        }
    };
    out.push(open);
    for (i, item) in items.iter().enumerate() {
        if i > 0 {
            *out += &format.item_separator;
        }
        new_line(out, depth + 1);
        write(out, item)?;
    }
    new_line(out, depth);
    out.push(close);
    Ok(())
}

fn string(out: &mut String, text: &str, format: &JsonFormat) {
    // Serialising a string does not fail.
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
                // Writing to a String does not fail.
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use minijinja::value::Serde;
    use serde_json::json;

    use super::*;

    #[test]
    fn the_same_text_as_python() {
        let value =
            json!({"b": [1, 2.0, -0.5, 1e16, 1e-5, 0.0001, 1.5e300], "a": {}, "é\"\n\u{1}": [], "t": [true, null]});
        assert_eq!(
            dumps(&Value::from(Serde(&value)), &JsonFormat::new(None)).unwrap(),
            r#"{"b": [1, 2.0, -0.5, 1e+16, 1e-05, 0.0001, 1.5e+300], "a": {}, "é\"\n\u0001": [], "t": [true, null]}"#
        );
        let sorted = JsonFormat { sort_keys: true, ensure_ascii: true, ..JsonFormat::new(Some("  ".into())) };
        let value = json!({"b": [1, {"c": "é😀"}], "a": {}});
        assert_eq!(
            dumps(&Value::from(Serde(&value)), &sorted).unwrap(),
            "{\n  \"a\": {},\n  \"b\": [\n    1,\n    {\n      \"c\": \"\\u00e9\\ud83d\\ude00\"\n    }\n  ]\n}"
        );
    }
}
