//! The Jinja environment in which chat templates run. It has the functions and filters that Python's `transformers`
//! provides.

use jiff::Zoned;
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use crate::arguments::{bind_arguments, integer};
use crate::builtins::{add_builtins, priced_method};
use crate::error::RaisedException;
use crate::exact_json;
use crate::measured::{Size, from_json as from_parsed, measure, printed};
use crate::meter::{MAX_STEPS, charge};
use crate::operators::add_operators;
use crate::prices;
use crate::python_json::{self, JsonFormat};

/// The name of the variable with the time of the rendering, in seconds since 1970. `strftime_now` reads it.
pub(crate) const NOW: &str = "__now";
/// The maximum nesting of loops; the call of a macro counts as several. Each level makes the lookup of a variable
/// slower. A macro that recurses over a schema reaches about 25 levels.
const MAX_RECURSION: usize = 200;
/// The maximum length in bytes of a format for `strftime_now`. Published templates use fewer than 20.
const MAX_TIME_FORMAT: usize = 256;

/// Builds the environment, with the limits of minijinja's own counters.
pub(crate) fn environment() -> Environment<'static> {
    let mut env = Environment::empty();
    env.set_debug(false);
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(MAX_RECURSION);
    env.set_unknown_method_callback(|_, value, method, args| priced_method(value, method, args));
    add_operators(&mut env);
    add_builtins(&mut env);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.add_filter("tojson", tojson);
    env.add_filter("from_json", from_json);
    env
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(RaisedException(message.to_owned())))
}

/// The time of the rendering in the format `format`, like Python's `strftime`. Without the variable [`NOW`] it is the
/// current time.
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

/// The filter `tojson`: Python's `json.dumps` with `ensure_ascii=False` as the default.
fn tojson(value: &Value, options: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "an undefined value has no JSON form"));
    }
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let options = bind_arguments("tojson", &options.into_values(), names)?;
    let [ensure_ascii, indent, separators, sort_keys] = options.map(|option| option.filter(|value| !value.is_none()));
    let indent = match &indent {
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(integer(Some(indent))?.unwrap_or_default().clamp(0, 64) as usize),
        }),
        None => None,
    };
    let mut format = JsonFormat::new(indent);
    if let Some(separators) = separators {
        (format.item_separator, format.key_separator) = pair(&separators)?;
    }
    format.ensure_ascii = ensure_ascii.is_some_and(|flag| flag.is_true());
    format.sort_keys = sort_keys.is_some_and(|flag| flag.is_true());
    let value = measure(value.clone())?;
    let indent = format.indent.as_ref().map_or(0, String::len) as u64;
    charge(prices::json(&value, indent, (format.item_separator.len() + format.key_separator.len()) as u64)?)?;
    let text = python_json::dumps(&value, &format)?;
    charge(text.len() as u64)?;
    Ok(text.into())
}

/// The filter `from_json`: parses a JSON text. Some templates parse arguments of tool calls with it.
fn from_json(text: &str) -> Result<Value, Error> {
    charge(text.len() as u64)?;
    let value = exact_json::from_str(text)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("from_json: the text is no JSON: {e}")))?;
    let value = from_parsed(&value)?;
    charge(Size::of(&value)?.weight)?;
    Ok(value)
}

fn pair(separators: &Value) -> Result<(String, String), Error> {
    let item = |i: usize| {
        let item = separators.get_item(&i.into())?;
        charge(printed(&item)?)?;
        Ok::<_, Error>(item.to_string())
    };
    Ok((item(0)?, item(1)?))
}

#[cfg(test)]
mod tests {
    use crate::{ChatTemplate, RenderRequest};

    fn render(source: &str) -> String {
        let template = ChatTemplate::new(source).unwrap_or_else(|e| panic!("{source}: {e}"));
        template.render(&RenderRequest::default()).unwrap_or_else(|e| panic!("{source}: {e}")).text
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
