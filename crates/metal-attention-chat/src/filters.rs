//! The Jinja2 filters that minijinja lacks or implements differently. Each takes its arguments as a slice: the value
//! that it is applied to, then the others.

use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value, filters};

use crate::arguments::{bind_arguments, integer, invalid, required_text};
use crate::printf::printf;
use crate::python_methods::{self, lines, stripped};
use crate::python_str::{repr, text};

type Result<T> = std::result::Result<T, Error>;

/// The value that the filter is applied to, and the other arguments.
fn subject(args: &[Value]) -> Result<(&Value, &[Value])> {
    args.split_first().ok_or_else(|| Error::new(ErrorKind::MissingArgument, "a filter needs a value"))
}

/// Like `subject`, with the value as Python's `str(value)`. An undefined value is the empty string.
fn subject_text(args: &[Value]) -> Result<(String, &[Value])> {
    let (value, others) = subject(args)?;
    Ok((text(value), others))
}

pub(crate) fn string(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments("string", others, [])
        .map(|[]| if value.as_str().is_some() { value.clone() } else { text(value).into() })
}

pub(crate) fn abs(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments("abs", others, []).map(drop)?;
    match value.kind() {
        ValueKind::Bool => Ok(i64::from(value.is_true()).into()),
        _ => filters::abs(value.clone()),
    }
}

pub(crate) fn center(args: &[Value]) -> Result<Value> {
    let (text, others) = subject_text(args)?;
    let [width] = bind_arguments("center", others, ["width"])?;
    python_methods::call(&text.into(), "center", &[width.unwrap_or_else(|| 80.into())])
}

pub(crate) fn default(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [default, boolean] = bind_arguments("default", others, ["default_value", "boolean"])?;
    let replaced = value.is_undefined() || (boolean.is_some_and(|b| b.is_true()) && !value.is_true());
    Ok(if replaced { default.unwrap_or_else(|| "".into()) } else { value.clone() })
}

pub(crate) fn dictsort(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [case_sensitive, by, reverse] = bind_arguments("dictsort", others, ["case_sensitive", "by", "reverse"])?;
    if let Some(by) = &by
        && !matches!(by.as_str(), Some("key" | "value"))
    {
        return Err(invalid("dictsort sorts by \"key\" or by \"value\""));
    }
    let named = [("case_sensitive", case_sensitive), ("by", by), ("reverse", reverse)];
    filters::dictsort(value, named.into_iter().filter_map(|(name, value)| Some((name, value?))).collect::<Kwargs>())
}

pub(crate) fn sort(state: &State<'_, '_>, args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [reverse, case_sensitive, attribute] =
        bind_arguments("sort", others, ["reverse", "case_sensitive", "attribute"])?;
    let named = [("case_sensitive", case_sensitive), ("attribute", attribute), ("reverse", reverse)];
    let named = named.into_iter().filter_map(|(name, value)| Some((name, value?)));
    filters::sort(state, value.clone(), named.collect::<Kwargs>())
}

pub(crate) fn unique(state: &State<'_, '_>, args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [case_sensitive, attribute] = bind_arguments("unique", others, ["case_sensitive", "attribute"])?;
    let named = [("case_sensitive", case_sensitive), ("attribute", attribute)];
    let named = named.into_iter().filter_map(|(name, value)| Some((name, value?)));
    filters::unique(state, value.clone(), named.collect::<Kwargs>())
}

/// The first or the last item, or character; undefined if there is none.
pub(crate) fn at_end(args: &[Value], last: bool) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments(if last { "last" } else { "first" }, others, []).map(drop)?;
    if let Some(text) = value.as_str() {
        let found = if last { text.chars().next_back() } else { text.chars().next() };
        return Ok(found.map_or(Value::UNDEFINED, Value::from));
    }
    let mut items = value.try_iter()?;
    Ok(if last { items.last() } else { items.next() }.unwrap_or(Value::UNDEFINED))
}

pub(crate) fn items(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments("items", others, []).map(drop)?;
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => python_methods::call(value, "items", &[]),
        kind => Err(invalid(format!("only a dictionary has pairs, not a value of type {kind}"))),
    }
}

pub(crate) fn reverse(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments("reverse", others, []).map(drop)?;
    if let Some(text) = value.as_str() {
        return Ok(text.chars().rev().collect::<String>().into());
    }
    let mut items: Vec<Value> = value.try_iter()?.collect();
    items.reverse();
    Ok(items.into())
}

pub(crate) fn join(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [separator, attribute] = bind_arguments("join", others, ["d", "attribute"])?;
    let separator = separator.as_ref().map(text).unwrap_or_default();
    let mut out = String::new();
    for (i, item) in value.try_iter()?.enumerate() {
        out += if i > 0 { &separator } else { "" };
        out += &match &attribute {
            None => text(&item),
            Some(path) => text(&at_path(item, path)?),
        };
    }
    Ok(out.into())
}

/// The value at the path `a.b.0`, or the item with a number as index.
fn at_path(mut value: Value, path: &Value) -> Result<Value> {
    let Some(path) = path.as_str() else { return value.get_item(path) };
    for part in path.split('.') {
        value = match part.parse::<usize>() {
            Ok(place) => value.get_item(&place.into())?,
            Err(_) => value.get_attr(part)?,
        };
    }
    Ok(value)
}

pub(crate) fn int(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [default, base] = bind_arguments("int", others, ["default", "base"])?;
    let default = default.unwrap_or_else(|| 0.into());
    let base = integer(base.as_ref())?.unwrap_or(10);
    if let Some(text) = value.as_str() {
        if let Some(number) = integer_of_text(text, base) {
            return Ok(narrow(number));
        }
        return match float_of_text(text) {
            Some(number) if number.is_finite() => Ok(narrow(number as i128)),
            Some(_) => Err(invalid("an infinite number cannot be an integer")),
            None => Ok(default),
        };
    }
    match value.kind() {
        ValueKind::Bool => Ok(i64::from(value.is_true()).into()),
        ValueKind::Number if value.is_integer() => Ok(value.clone()),
        ValueKind::Number => {
            let number = f64::try_from(value.clone())?;
            if number.is_finite() { Ok(narrow(number as i128)) } else { Err(invalid("it cannot be an integer")) }
        }
        ValueKind::Undefined => Err(undefined()),
        _ => Ok(default),
    }
}

pub(crate) fn to_float(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [default] = bind_arguments("float", others, ["default"])?;
    if let Some(text) = value.as_str() {
        return Ok(float_of_text(text).map_or(default.unwrap_or_else(|| 0.0.into()), Value::from));
    }
    match value.kind() {
        ValueKind::Bool => Ok(f64::from(u8::from(value.is_true())).into()),
        ValueKind::Number => Ok(number(value)?.into()),
        ValueKind::Undefined => Err(undefined()),
        _ => Ok(default.unwrap_or_else(|| 0.0.into())),
    }
}

fn undefined() -> Error {
    Error::new(ErrorKind::UndefinedError, "an undefined value is no number")
}

/// An integer value, of 64 bits if it fits.
fn narrow(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| number.into(), Value::from)
}

/// A numeric value as a float.
fn number(value: &Value) -> Result<f64> {
    f64::try_from(value.clone()).or_else(|_| i128::try_from(value.clone()).map(|number| number as f64))
}

/// Digits without the underscores between them; `None` if underscores are misplaced.
fn without_underscores(digits: &str) -> Option<String> {
    let misplaced = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    (!misplaced).then(|| digits.replace('_', ""))
}

/// Python's `int(text, base)`; `None` if the text is not such an integer.
fn integer_of_text(text: &str, base: i64) -> Option<i128> {
    let text = stripped(text, None, true, true);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefixed = |prefix: &str| {
        let has_prefix = digits.get(..2).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
        has_prefix.then(|| digits[2..].strip_prefix('_').unwrap_or(&digits[2..]))
    };
    let (base, digits) = match base {
        0 | 2 | 8 | 16 => [("0x", 16), ("0o", 8), ("0b", 2)]
            .into_iter()
            .filter(|&(_, of)| base == 0 || base == of)
            .find_map(|(prefix, of)| Some((of, prefixed(prefix)?)))
            .unwrap_or((if base == 0 { 10 } else { base }, digits)),
        2..=36 => (base, digits),
        _ => return None,
    };
    let digits = without_underscores(digits)?;
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let number = i128::from_str_radix(&digits, u32::try_from(base).ok()?).ok()?;
    Some(if negative { -number } else { number })
}

/// Python's `float(text)`; `None` if the text is not a number.
fn float_of_text(text: &str) -> Option<f64> {
    without_underscores(stripped(text, None, true, true))?.parse().ok()
}

pub(crate) fn round(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [precision, method] = bind_arguments("round", others, ["precision", "method"])?;
    let precision = integer(precision.as_ref())?.unwrap_or(0).clamp(-400, 400) as i32;
    let method = method.as_ref().map_or(Ok("common"), |method| required_text("round", Some(method)))?;
    if !matches!(value.kind(), ValueKind::Number | ValueKind::Bool) {
        return Err(invalid(format!("a value of type {} cannot be rounded", value.kind())));
    }
    let whole = value.kind() == ValueKind::Bool || value.is_integer();
    let scale = 10f64.powi(precision);
    match method {
        "common" if whole => {
            let number = i128::try_from(value.clone())?;
            let unit = u32::try_from(-precision).ok().and_then(|digits| 10i128.checked_pow(digits));
            Ok(match unit {
                _ if precision >= 0 => narrow(number),
                None => 0.into(),
                Some(unit) => {
                    let (below, rest) = (number.div_euclid(unit), number.rem_euclid(unit));
                    let up = rest * 2 > unit || (rest * 2 == unit && below % 2 != 0);
                    narrow((below + i128::from(up)).saturating_mul(unit))
                }
            })
        }
        "common" => {
            let number = f64::try_from(value.clone())?;
            Ok(match usize::try_from(precision) {
                // Formatting rounds the exact decimal expansion, as Python does.
                Ok(digits) => format!("{number:.digits$}").parse().unwrap_or(number),
                Err(_) => (number * scale).round_ties_even() / scale,
            }
            .into())
        }
        "ceil" => Ok(((number(value)? * scale).ceil() / scale).into()),
        "floor" => Ok(((number(value)? * scale).floor() / scale).into()),
        _ => Err(invalid("round rounds by \"common\", \"ceil\" or \"floor\"")),
    }
}

pub(crate) fn indent(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [width, first, blank] = bind_arguments("indent", others, ["width", "first", "blank"])?;
    let source = required_text("indent", Some(value))?;
    let by = match &width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(integer(Some(width))?.and_then(|n| usize::try_from(n).ok()).unwrap_or_default()),
        },
    };
    let blank = blank.is_some_and(|blank| blank.is_true());
    let source = format!("{source}\n");
    let mut out = String::new();
    if first.is_some_and(|first| first.is_true()) {
        out += &by;
    }
    for (i, line) in lines(&source, false).into_iter().enumerate() {
        if i > 0 {
            out.push('\n');
            out += if blank || !line.is_empty() { &by } else { "" };
        }
        out += line;
    }
    Ok(out.into())
}

pub(crate) fn truncate(args: &[Value]) -> Result<Value> {
    let (text, others) = subject_text(args)?;
    let [length, kill_words, end, leeway] =
        bind_arguments("truncate", others, ["length", "killwords", "end", "leeway"])?;
    let count = |value: Option<&Value>, default: usize| {
        Ok::<_, Error>(integer(value)?.map_or(default, |n| usize::try_from(n).unwrap_or_default()))
    };
    let (length, leeway) = (count(length.as_ref(), 255)?, count(leeway.as_ref(), 5)?);
    let end = end.as_ref().map_or(Ok("..."), |end| required_text("truncate", Some(end)))?;
    let n_kept = length
        .checked_sub(end.chars().count())
        .ok_or_else(|| invalid("truncate needs a length for at least the text at the end"))?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.into());
    }
    let mut kept: String = text.chars().take(n_kept).collect();
    if !kill_words.is_some_and(|kill| kill.is_true())
        && let Some(last_word) = kept.rfind(' ')
    {
        kept.truncate(last_word);
    }
    Ok((kept + end).into())
}

pub(crate) fn word_count(args: &[Value]) -> Result<Value> {
    let (text, others) = subject_text(args)?;
    bind_arguments("wordcount", others, []).map(drop)?;
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    Ok(words.count().into())
}

/// The filter `wordwrap`: lines of at most `width` characters, broken at blanks and after hyphens.
pub(crate) fn word_wrap(args: &[Value]) -> Result<Value> {
    let (text, others) = subject_text(args)?;
    let names = ["width", "break_long_words", "wrapstring", "break_on_hyphens"];
    let [width, break_long_words, wrap, break_on_hyphens] = bind_arguments("wordwrap", others, names)?;
    let width = integer(width.as_ref())?.unwrap_or(79);
    let width = usize::try_from(width).ok().filter(|&width| width > 0);
    let width = width.ok_or_else(|| invalid("wordwrap needs a width above 0"))?;
    let wrap = wrap.as_ref().filter(|wrap| !wrap.is_none());
    let wrap = wrap.map_or(Ok("\n"), |wrap| required_text("wordwrap", Some(wrap)))?;
    let is_on = |flag: Option<Value>| flag.is_none_or(|flag| flag.is_true());
    let (long, hyphens) = (is_on(break_long_words), is_on(break_on_hyphens));
    let wrapped = lines(&text, false).into_iter().map(|line| wrapped_line(line, width, long, hyphens).join(wrap));
    Ok(wrapped.collect::<Vec<_>>().join(wrap).into())
}

fn wrapped_line(line: &str, width: usize, break_long_words: bool, break_on_hyphens: bool) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let (mut current, mut n) = (String::new(), 0);
    let mut finish = |current: &mut String, n: &mut usize| {
        let kept = current.trim_end();
        if !kept.is_empty() {
            out.push(kept.to_owned());
        }
        current.clear();
        *n = 0;
    };
    let mut begun = false;
    for chunk in chunks(line, break_on_hyphens) {
        let mut chunk = chunk;
        let mut length = chunk.chars().count();
        if n + length > width && chunk.trim().is_empty() {
            finish(&mut current, &mut n);
            continue;
        }
        if n + length > width && length <= width || n > 0 && n + length > width && !break_long_words {
            finish(&mut current, &mut n);
        }
        while break_long_words && n + length > width {
            let split_at = chunk.char_indices().nth(width - n).map_or(chunk.len(), |(at, _)| at);
            let (head, tail) = chunk.split_at(split_at);
            current += head;
            finish(&mut current, &mut n);
            chunk = tail;
            length = chunk.chars().count();
        }
        // A line does not begin with blanks, except the first one.
        if n == 0 && begun && chunk.trim().is_empty() {
            continue;
        }
        begun = true;
        current += chunk;
        n += length;
    }
    finish(&mut current, &mut n);
    out
}

/// The line split into runs of white space and words. A word ends after a hyphen between letters.
fn chunks(line: &str, break_on_hyphens: bool) -> Vec<&str> {
    let mut chunks = Vec::new();
    let mut start = 0;
    let chars: Vec<(usize, char)> = line.char_indices().collect();
    for (i, &(at, c)) in chars.iter().enumerate().skip(1) {
        let before = chars[i - 1].1;
        let after_hyphen =
            break_on_hyphens && before == '-' && c.is_alphabetic() && i > 1 && chars[i - 2].1.is_alphabetic();
        if c.is_whitespace() != before.is_whitespace() || after_hyphen {
            chunks.push(&line[start..at]);
            start = at;
        }
    }
    if start < line.len() {
        chunks.push(&line[start..]);
    }
    chunks
}

pub(crate) fn strip_tags(args: &[Value]) -> Result<Value> {
    let (text, others) = subject_text(args)?;
    bind_arguments("striptags", others, []).map(drop)?;
    let without = |text: &str, start: &str, end: &str| {
        let (mut out, mut rest) = (String::with_capacity(text.len()), text);
        while let Some((before, after)) = rest.split_once(start)
            && let Some((_, after)) = after.split_once(end)
        {
            out += before;
            rest = after;
        }
        out + rest
    };
    let plain = without(&without(&text, "<!--", "-->"), "<", ">");
    let words: Vec<&str> = plain.split(python_methods::is_space).filter(|word| !word.is_empty()).collect();
    Ok(unescaped(&words.join(" ")).into())
}

/// A text with the HTML entities that `escape` writes decoded.
fn unescaped(text: &str) -> String {
    let entities = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#34;", "\""), ("&#39;", "'"), ("&amp;", "&")];
    entities.into_iter().fold(text.to_owned(), |text, (entity, c)| text.replace(entity, c))
}

pub(crate) fn url_encode(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments("urlencode", others, []).map(drop)?;
    let pairs = match value.kind() {
        ValueKind::Map => python_methods::call(value, "items", &[])?,
        ValueKind::Seq | ValueKind::Iterable => value.clone(),
        _ => return Ok(quoted(&text(value), false).into()),
    };
    let mut parts = Vec::new();
    for pair in pairs.try_iter()? {
        let part = |place: usize| Ok::<_, Error>(quoted(&text(&pair.get_item(&place.into())?), true));
        parts.push(format!("{}={}", part(0)?, part(1)?));
    }
    Ok(parts.join("&").into())
}

/// A percent-encoded text, for a URL path or for a query string.
fn quoted(text: &str, in_query: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => out.push(byte.into()),
            b'/' if !in_query => out.push('/'),
            b' ' if in_query => out.push('+'),
            _ => {
                out.push('%');
                out.extend([byte >> 4, byte & 15].map(|digit| char::from(b"0123456789ABCDEF"[usize::from(digit)])));
            }
        }
    }
    out
}

/// The filter `escape`: HTML-escapes a text, unless it is marked as safe.
pub(crate) fn escape(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments("escape", others, []).map(drop)?;
    if value.is_safe() {
        return Ok(value.clone());
    }
    force_escape(args)
}

pub(crate) fn force_escape(args: &[Value]) -> Result<Value> {
    let (text, others) = subject_text(args)?;
    bind_arguments("forceescape", others, []).map(drop)?;
    Ok(Value::from_safe_string(escaped(&text)))
}

fn escaped(text: &str) -> String {
    let entities = [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("\"", "&#34;"), ("'", "&#39;")];
    entities.into_iter().fold(text.to_owned(), |text, (c, entity)| text.replace(c, entity))
}

pub(crate) fn xml_attributes(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [space] = bind_arguments("xmlattr", others, ["autospace"])?;
    let mut parts = Vec::new();
    for pair in items(std::slice::from_ref(value))?.try_iter()? {
        let (key, value) = (pair.get_item(&0.into())?, pair.get_item(&1.into())?);
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let key = text(&key);
        if key.contains(|c: char| c.is_whitespace() || matches!(c, '/' | '>' | '=')) {
            return Err(invalid("the name of an attribute has a character that ends it"));
        }
        parts.push(format!("{}=\"{}\"", escaped(&key), escaped(&text(&value))));
    }
    let space = if parts.is_empty() || space.is_some_and(|space| !space.is_true()) { "" } else { " " };
    Ok(format!("{space}{}", parts.join(" ")).into())
}

/// The filter `pprint`, like Python's `pprint.pformat`: one line if it is short enough.
pub(crate) fn pretty(args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    bind_arguments("pprint", others, []).map(drop)?;
    let line = repr(value);
    Ok(if line.chars().count() <= 80 { line.into() } else { filters::pprint(value).into() })
}

pub(crate) fn format(args: &[Value]) -> Result<Value> {
    let (value, others) = subject_text(args)?;
    let values = match others {
        [named] if named.is_kwargs() => Value::from_pairs(items_of(named)),
        _ => Value::from(Tuple::from(others.to_vec())),
    };
    printf(&value, &values).map(Value::from)
}

/// The names and values of named arguments.
fn items_of(named: &Value) -> Vec<(Value, Value)> {
    let names = named.try_iter().into_iter().flatten();
    names.map(|name| (name.clone(), named.get_item(&name).unwrap_or_default())).collect()
}

pub(crate) fn replace(args: &[Value]) -> Result<Value> {
    let (source, others) = subject_text(args)?;
    let [old, new, count] = bind_arguments("replace", others, ["old", "new", "count"])?;
    let needed = |value: Option<Value>| {
        let missing = || Error::new(ErrorKind::MissingArgument, "replace needs an old and a new text");
        value.as_ref().map(text).ok_or_else(missing)
    };
    let mut args = vec![Value::from(needed(old)?), needed(new)?.into()];
    args.extend(count);
    python_methods::call(&source.into(), "replace", &args)
}

/// Python's `dict()`: the pairs of a dictionary or of a list of pairs, and the named arguments.
pub(crate) fn dictionary(args: &[Value]) -> Result<Value> {
    let (named, positional) = match args.split_last() {
        Some((last, others)) if last.is_kwargs() => (Some(last), others),
        _ => (None, args),
    };
    if positional.len() > 1 {
        return Err(Error::new(ErrorKind::TooManyArguments, "dict takes at most one value"));
    }
    let mut pairs: Vec<(Value, Value)> = Vec::new();
    if let Some(source) = positional.first() {
        let listed = if source.kind() == ValueKind::Map { items(positional)? } else { source.clone() };
        for pair in listed.try_iter()? {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            let [key, value] = <[Value; 2]>::try_from(pair).map_err(|_| invalid("dict takes pairs"))?;
            pairs.push((key, value));
        }
    }
    for (name, value) in named.map(items_of).into_iter().flatten() {
        match pairs.iter_mut().find(|(key, _)| *key == name) {
            Some((_, old)) => *old = value,
            None => pairs.push((name, value)),
        }
    }
    Ok(Value::from_pairs(pairs))
}

/// The filter `groupby`: pairs of a value of the attribute and the list of items that have it.
pub(crate) fn group_by(state: &State<'_, '_>, args: &[Value]) -> Result<Value> {
    let (value, others) = subject(args)?;
    let [attribute, default, case_sensitive] =
        bind_arguments("groupby", others, ["attribute", "default", "case_sensitive"])?;
    let path = attribute.ok_or_else(|| Error::new(ErrorKind::MissingArgument, "groupby needs an attribute"))?;
    let case_sensitive = case_sensitive.is_some_and(|flag| flag.is_true());
    let mut keyed = Vec::new();
    for item in value.try_iter()? {
        let key = at_path(item.clone(), &path)?;
        let key = if key.is_undefined() { default.clone().unwrap_or(key) } else { key };
        let folded = match key.as_str() {
            Some(text) if !case_sensitive => text.to_lowercase().into(),
            _ => key.clone(),
        };
        keyed.push(Value::from(vec![folded, key, item]));
    }
    let named: Kwargs = [("attribute", Value::from("0")), ("case_sensitive", true.into())].into_iter().collect();
    let sorted = filters::sort(state, keyed.into(), named)?;
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for entry in sorted.try_iter()? {
        let part = |place: usize| entry.get_item(&place.into());
        let (folded, key, item) = (part(0)?, part(1)?, part(2)?);
        match groups.last_mut() {
            Some((last, _, items)) if *last == folded => items.push(item),
            _ => groups.push((folded, key, vec![item])),
        }
    }
    Ok(groups.into_iter().map(|(_, key, items)| Value::from(Tuple::from([key, items.into()]))).collect())
}
