//! The Jinja that chat templates are written in: what Python's `transformers` gives them.

use jiff::Zoned;
use minijinja::value::{Kwargs, Tuple, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use crate::builtins::{add_builtins, priced_method};
use crate::error::Raised;
use crate::measured::{made, printed};
use crate::meter::{MAX_STEPS, charge};
use crate::operators::add_operators;
use crate::prices;
use crate::python_json::{self, Format};

/// The variable that has the time of the rendering, for `strftime_now`.
pub(crate) const NOW: &str = "__now";
/// Loops in each other, each of which makes a look at a variable longer; the call of a macro counts as some. A macro that
/// goes through a schema by calling itself gets some 25 levels deep.
const MAX_RECURSION: usize = 200;
/// Bytes of a form for `strftime_now`; models ask for less than 20.
const MAX_TIME_FORMAT: usize = 256;

/// What templates run in.
pub(crate) fn environment() -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_debug(false);
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(MAX_RECURSION);
    env.set_unknown_method_callback(|state, value, method, args| {
        priced_method(state, value, method, args, python_method)
    });
    add_operators(&mut env);
    add_builtins(&mut env);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.add_filter("tojson", tojson);
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
    if format.len() > MAX_TIME_FORMAT {
        return Err(Error::new(ErrorKind::InvalidOperation, "strftime_now: the form of the time is too long"));
    }
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
    let value = made(value.clone())?;
    let indent = format.indent.as_ref().map_or(0, String::len) as u64;
    charge(prices::json(&value, indent, (format.item_separator.len() + format.key_separator.len()) as u64)?)?;
    let value = serde_json::to_value(&value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, format!("cannot be written as JSON: {e}")))?;
    let text = python_json::dumps(&value, &format);
    charge(text.len() as u64)?;
    Ok(text.into())
}

fn pair(separators: &Value) -> Result<(String, String), Error> {
    let item = |i: usize| {
        let item = separators.get_item(&i.into())?;
        charge(printed(&item)?)?;
        Ok::<_, Error>(item.to_string())
    };
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
    use crate::{ChatTemplate, RenderRequest};

    fn render(source: &str) -> String {
        let template = ChatTemplate::new(source).unwrap_or_else(|e| panic!("{source}: {e}"));
        template.render(&RenderRequest::default()).unwrap_or_else(|e| panic!("{source}: {e}")).text
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
                "{{ 'x' is sequence }} {{ 'x' is iterable }} {{ {} is sequence }} {{ 1 is iterable }} {{ none is iterable }}",
                "True True True False False",
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
                "{{ no | upper }}{{ no | lower }}{{ no | title }}{{ no | capitalize }}{{ no | trim }}.{{ no | length }} \
                 {{ no | replace('a', 'b') }}{{ no | string }}{{ no | list }}{{ no | join }}{{ none | upper }}{{ 1.5 | trim }}",
                ".0 []NONE1.5",
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
