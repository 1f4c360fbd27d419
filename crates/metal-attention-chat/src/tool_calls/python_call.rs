//! Calls that Llama 3 writes in Python's notation after `<|python_tag|>`.

use serde_json::{Map, Value, json};

/// The name and the arguments of `name.call(key="value", ...)`. Any other text is code for the tool `python`.
pub(super) fn python_call(text: &str) -> (String, String) {
    let text = text.trim();
    built_in(text).unwrap_or_else(|| ("python".into(), json!({ "code": text }).to_string()))
}

fn built_in(text: &str) -> Option<(String, String)> {
    let (name, rest) = text.split_once(".call(")?;
    let mut rest = rest.strip_suffix(')')?.trim();
    if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
        return None;
    }
    let mut arguments = Map::new();
    while !rest.is_empty() {
        let (key, after) = rest.split_once('=')?;
        let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        let value = values.next()?.ok()?;
        let end = values.byte_offset();
        arguments.insert(key.trim().to_owned(), value);
        rest = after[end..].trim_start();
        rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
    }
    Some((name.to_owned(), Value::from(arguments).to_string()))
}

#[cfg(test)]
mod tests {
    use super::python_call;

    #[test]
    fn built_in_tools_and_code() {
        for (text, name, arguments) in [
            ("brave_search.call(query=\"a, b=c\", n=3)", "brave_search", r#"{"query":"a, b=c","n":3}"#),
            (" x.call() ", "x", "{}"),
            ("print(1)\nprint(2)", "python", r#"{"code":"print(1)\nprint(2)"}"#),
            ("f.call(x)", "python", r#"{"code":"f.call(x)"}"#),
        ] {
            assert_eq!(python_call(text), (name.to_owned(), arguments.to_owned()), "{text}");
        }
    }
}
