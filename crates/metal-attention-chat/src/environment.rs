//! The Jinja that chat templates are written in: what Python's `transformers` gives them.

use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use crate::error::Raised;
use crate::python_json::{self, Format};

/// The variable that has the time of the rendering, for `strftime_now`.
pub(crate) const NOW: &str = "__now";

/// An environment without templates.
pub(crate) fn environment(fuel: u64) -> Environment<'static> {
    let mut env = Environment::new();
    // These delimiters are the default ones, which always build.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_fuel(Some(fuel));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(python_method);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.add_filter("tojson", tojson);
    // As Jinja2 has them: whatever has a length and items is a sequence, texts too.
    env.add_test("sequence", |v: &Value| matches!(v.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map));
    env.add_test("iterable", |v: &Value| v.kind() == ValueKind::String || v.try_iter().is_ok());
    env
}

/// `source` without `{% generation %}` and its end, which mark the model's words for training: a condition that always
/// holds is the same, white space included.
pub(crate) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out += before;
        let control = if tag.starts_with(['-', '+']) { &tag[..1] } else { "" };
        let body = tag[control.len()..].trim_start();
        let word = body.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap_or_default();
        let replacement = match word {
            "generation" => " if true",
            "endgeneration" => " endif",
            _ => {
                rest = tag;
                continue;
            }
        };
        out += control;
        out += replacement;
        rest = &body[word.len()..];
    }
    out + rest
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(Raised(message.to_owned())))
}

/// The time of the rendering in the form `format`, as Python's `strftime`.
fn strftime_now(state: &State, format: &str) -> Result<String, Error> {
    let invalid = |e: jiff::Error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}"));
    let now = state.lookup(NOW).and_then(|now| i64::try_from(now).ok());
    let now = match now {
        Some(seconds) => jiff::Timestamp::from_second(seconds).map_err(invalid)?.to_zoned(jiff::tz::TimeZone::system()),
        None => Zoned::now(),
    };
    jiff::fmt::strtime::format(format, &now).map_err(invalid)
}

/// Python's `json.dumps`, with `ensure_ascii=False` unless asked for.
#[allow(clippy::needless_pass_by_value)] // filters take their arguments so
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "an undefined value has no JSON form"));
    }
    let value = serde_json::to_value(value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, format!("cannot be written as JSON: {e}")))?;
    let indent = match options.get::<Option<Value>>("indent")? {
        Some(indent) if !indent.is_none() => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
        _ => None,
    };
    let mut format = Format::new(indent);
    if let Some(separators) = options.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
        (format.item_separator, format.key_separator) = pair(&separators)?;
    }
    format.ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    format.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    Ok(python_json::dumps(&value, &format).into())
}

fn pair(separators: &Value) -> Result<(String, String), Error> {
    let item = |i: usize| separators.get_item(&i.into()).map(|v| v.to_string());
    Ok((item(0)?, item(1)?))
}

/// Methods of Python's texts, lists and dictionaries.
fn python_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match method {
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(text.strip_prefix(prefix).unwrap_or(text).into());
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(text.strip_suffix(suffix).unwrap_or(text).into());
            }
            "partition" | "rpartition" => {
                let (separator,): (&str,) = from_args(args)?;
                let (found, missing) = match method {
                    "partition" => (text.split_once(separator), [text, "", ""]),
                    _ => (text.rsplit_once(separator), ["", "", text]),
                };
                let parts = found.map_or(missing, |(before, after)| [before, separator, after]);
                return Ok(Tuple::from(parts.map(Value::from)).into());
            }
            "rsplit" => {
                let (separator, most): (&str, Option<usize>) = from_args(args)?;
                let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
                let mut parts: Vec<Value> = text.rsplitn(most, separator).map(Value::from).collect();
                parts.reverse();
                return Ok(parts.into());
            }
            _ => {}
        }
    }
    pycompat::unknown_method_callback(state, value, method, args)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> String {
        environment(100_000)
            .render_str(&without_generation_tags(source), ())
            .unwrap_or_else(|e| panic!("{source}: {e:#}"))
    }

    #[test]
    fn generation_tags_are_conditions() {
        let source =
            "a\n{%- generation %}b{%generation-%} c {%- endgeneration -%}\n{% endgeneration %}\n{% if 1 %}d{% endif %}";
        assert_eq!(
            without_generation_tags(source),
            "a\n{%- if true %}b{% if true-%} c {%- endif -%}\n{% endif %}\n{% if 1 %}d{% endif %}"
        );
        assert_eq!(render(source), "abcd");
        assert_eq!(without_generation_tags("{% set generation = 1 %}{%"), "{% set generation = 1 %}{%");
    }

    #[test]
    fn python_methods_and_tests() {
        for (source, expected) in [
            ("{{ 'a-b-c'.removeprefix('a-') ~ 'abc'.removesuffix('bc') }}", "b-ca"),
            ("{{ 'a-b-c'.partition('-') }}{{ 'a-b-c'.rpartition('-') }}", "('a', '-', 'b-c')('a-b', '-', 'c')"),
            ("{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a-b'.rsplit('-') }}", "['a-b', 'c']['a', 'b']"),
            (
                "{{ 'x' is sequence }} {{ 'x' is iterable }} {{ {} is sequence }} {{ 1 is iterable }}",
                "True True True False",
            ),
            (
                "{{ {'b': 1.0, 'a': none}|tojson }} {{ [true]|tojson(indent=2) }}",
                "{\"b\": 1.0, \"a\": null} [\n  true\n]",
            ),
            (
                "{{ {'b': [1, 2]}|tojson(separators=(',', ':')) }} {{ 'é'|tojson(ensure_ascii=true) }}",
                "{\"b\":[1,2]} \"\\u00e9\"",
            ),
            (
                "{{ none }} {{ true }} {{ {'a': 'b\\'c', 'd': [1.5]} }} {{ missing }}",
                "None True {'a': \"b'c\", 'd': [1.5]} ",
            ),
            (
                "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ loop.previtem }}{{ i }}{% endfor %}",
                "00112",
            ),
        ] {
            assert_eq!(render(source), expected, "{source}");
        }
    }
}
