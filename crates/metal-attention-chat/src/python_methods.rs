//! The methods of Python's strings, lists, dictionaries and numbers.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use crate::arguments::{bind_arguments, integer, invalid, required_text};
use crate::measured::is_measured;
use crate::python_str::is_printable;

/// The names of the methods of strings.
const OF_TEXT: &[&str] = &[
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
/// The names of the methods of lists. Methods that modify a list exist, but cannot be called.
const OF_LIST: &[&str] =
    &["append", "clear", "copy", "count", "extend", "index", "insert", "pop", "remove", "reverse", "sort"];
/// The names of the methods of dictionaries. Methods that modify a dictionary exist, but cannot be called.
const OF_DICTIONARY: &[&str] =
    &["clear", "copy", "fromkeys", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"];

/// Whether any type has a method of this name.
pub(crate) fn is_name_of_method(name: &str) -> bool {
    [OF_TEXT, OF_LIST, OF_DICTIONARY].iter().any(|names| names.contains(&name))
}

/// Whether `value` has a method of this name.
pub(crate) fn has_method(value: &Value, name: &str) -> bool {
    match value.kind() {
        ValueKind::String => OF_TEXT.contains(&name),
        ValueKind::Seq if is_measured(value) => OF_LIST.contains(&name),
        ValueKind::Map if is_measured(value) => OF_DICTIONARY.contains(&name),
        _ => false,
    }
}

/// Calls the method of a value.
pub(crate) fn call(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        return of_text(text, method, args);
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => of_list(value, method, args),
        ValueKind::Map => of_dictionary(value, method, args),
        ValueKind::Number | ValueKind::Bool => of_number(value, method, args),
        _ => Err(unknown()),
    }
}

/// The error for an unknown method. minijinja adds the method and the type.
fn unknown() -> Error {
    Error::from(ErrorKind::UnknownMethod)
}

/// Whether `str.isspace` counts a character as white space.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn of_text(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let none = || bind_arguments(method, args, []).map(drop);
    Ok(match method {
        "capitalize" => {
            none()?;
            capitalized(text).into()
        }
        "casefold" => {
            none()?;
            text.to_lowercase().replace('ß', "ss").replace('ſ', "s").replace('ς', "σ").into()
        }
        "lower" => {
            none()?;
            text.to_lowercase().into()
        }
        "upper" => {
            none()?;
            text.to_uppercase().into()
        }
        "swapcase" => {
            none()?;
            let swapped = |c: char| {
                if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect::<String>() }
            };
            text.chars().map(swapped).collect::<String>().into()
        }
        "title" => {
            none()?;
            title(text).into()
        }
        "center" | "ljust" | "rjust" | "zfill" => padded(text, method, args)?.into(),
        "count" | "find" | "index" | "rfind" | "rindex" => search(text, method, args)?,
        "startswith" | "endswith" => ends(text, method, args)?.into(),
        "expandtabs" => {
            expanded_tabs(text, integer(bind_arguments(method, args, ["tabsize"])?[0].as_ref())?.unwrap_or(8)).into()
        }
        "format" => format(FormatStyle::StrFormat, text, args)?.into(),
        "join" => joined(text, args)?.into(),
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = bind_arguments(method, args, [""])?;
            let chars = chars.filter(|chars| !chars.is_none());
            let chars = chars.as_ref().map(|chars| required_text(method, Some(chars))).transpose()?;
            stripped(text, chars, method != "rstrip", method != "lstrip").into()
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = bind_arguments(method, args, [""])?;
            let affix = required_text(method, affix.as_ref())?;
            let rest = if method == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            rest.unwrap_or(text).into()
        }
        "partition" | "rpartition" => {
            let [separator] = bind_arguments(method, args, [""])?;
            let separator = required_text(method, separator.as_ref())?;
            if separator.is_empty() {
                return Err(invalid(format!("{method} needs a separator that is not empty")));
            }
            let (found, missing) = match method {
                "partition" => (text.split_once(separator), [text, "", ""]),
                _ => (text.rsplit_once(separator), ["", "", text]),
            };
            let parts = found.map_or(missing, |(before, after)| [before, separator, after]);
            Tuple::from(parts.map(Value::from)).into()
        }
        "replace" => {
            let [old, new, count] = bind_arguments(method, args, ["", "", "count"])?;
            let (old, new) = (required_text(method, old.as_ref())?, required_text(method, new.as_ref())?);
            match integer(count.as_ref())?.and_then(|count| usize::try_from(count).ok()) {
                Some(count) => text.replacen(old, new, count),
                None => text.replace(old, new),
            }
            .into()
        }
        "split" | "rsplit" => split(text, method, args)?.into(),
        "splitlines" => {
            let [keep_ends] = bind_arguments(method, args, ["keepends"])?;
            lines(text, keep_ends.is_some_and(|keep| keep.is_true())).into_iter().map(Value::from).collect()
        }
        _ => {
            let result = question(text, method).ok_or_else(unknown)?;
            none()?;
            result.into()
        }
    })
}

/// The methods of strings that return a boolean; `None` for other methods.
fn question(text: &str, method: &str) -> Option<bool> {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    let cased = || text.chars().filter(|c| c.is_lowercase() || c.is_uppercase());
    Some(match method {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => text.is_ascii(),
        "isdecimal" | "isdigit" => all(|c| c.is_ascii_digit() || is_decimal(c)),
        "isnumeric" => all(char::is_numeric),
        "isidentifier" => {
            text.starts_with(|c: char| c.is_alphabetic() || c == '_')
                && text.chars().all(|c| c.is_alphanumeric() || c == '_')
        }
        "islower" => cased().next().is_some() && cased().all(char::is_lowercase),
        "isupper" => cased().next().is_some() && cased().all(char::is_uppercase),
        "isprintable" => text.chars().all(is_printable),
        "isspace" => all(is_space),
        "istitle" => cased().next().is_some() && title(text) == text,
        _ => return None,
    })
}

/// Whether a character is a decimal digit of one of the scripts whose digits begin at these code points.
fn is_decimal(c: char) -> bool {
    const ZEROS: [u32; 12] = [0x660, 0x6f0, 0x7c0, 0x966, 0x9e6, 0xa66, 0xae6, 0xb66, 0xbe6, 0xe50, 0xed0, 0xff10];
    ZEROS.iter().any(|zero| (*zero..zero + 10).contains(&u32::from(c)))
}

/// The text with its first character in upper case and the others in lower case.
fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(char::to_uppercase);
    first.into_iter().flatten().chain(chars.as_str().to_lowercase().chars()).collect()
}

/// The text with the first letter of each word in upper case and the others in lower case.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_letter = false;
    for c in text.chars() {
        if after_letter {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        after_letter = c.is_alphabetic();
    }
    out
}

fn padded(text: &str, method: &str, args: &[Value]) -> Result<String, Error> {
    let [width, fill] = if method == "zfill" {
        let [width] = bind_arguments(method, args, [""])?;
        [width, Some("0".into())]
    } else {
        bind_arguments(method, args, ["", ""])?
    };
    let width = integer(width.as_ref())?
        .ok_or_else(|| Error::new(ErrorKind::MissingArgument, format!("{method} needs a width")))?;
    let fill = fill.as_ref().map_or(Ok(" "), |fill| required_text(method, Some(fill)))?;
    if fill.chars().count() != 1 {
        return Err(invalid(format!("{method} fills with exactly one character")));
    }
    let width = usize::try_from(width).unwrap_or_default();
    let missing = width.saturating_sub(text.chars().count());
    let (left, right) = match method {
        "ljust" => (0, missing),
        "rjust" | "zfill" => (missing, 0),
        // As in CPython: if the padding is uneven, the side depends on whether the width is odd.
        _ => {
            let left = missing / 2 + (missing & width & 1);
            (left, missing - left)
        }
    };
    let sign = if method == "zfill" { text.len() - text.trim_start_matches(['+', '-']).len() } else { 0 }.min(1);
    Ok([&text[..sign], &fill.repeat(left), &text[sign..], &fill.repeat(right)].concat())
}

/// The part of a text between two character positions, and its start position; `None` if the start is after the end.
fn window<'t>(text: &'t str, start: Option<&Value>, end: Option<&Value>) -> Result<Option<(usize, &'t str)>, Error> {
    let (start, end) = (integer(start)?, integer(end)?);
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text)));
    }
    let n = text.chars().count();
    let place = |bound: i64| {
        let back = usize::try_from(bound.unsigned_abs()).unwrap_or(usize::MAX);
        if bound < 0 { n.saturating_sub(back) } else { back }
    };
    let (start, end) = (start.map_or(0, place), end.map_or(n, place).min(n));
    if start > end {
        return Ok(None);
    }
    let byte = |place: usize| text.char_indices().nth(place).map_or(text.len(), |(byte, _)| byte);
    Ok(Some((start, &text[byte(start)..byte(end)])))
}

/// Finds or counts a substring. Positions are in characters.
fn search(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let [part, start, end] = bind_arguments(method, args, ["", "", ""])?;
    let part = required_text(method, part.as_ref())?;
    let within = window(text, start.as_ref(), end.as_ref())?;
    if method == "count" {
        return Ok(within.map_or(0, |(_, within)| within.matches(part).count()).into());
    }
    let found = within.and_then(|(start, within)| {
        let byte = if method.starts_with('r') { within.rfind(part) } else { within.find(part) }?;
        Some(start + within[..byte].chars().count())
    });
    match found {
        Some(place) => Ok(place.into()),
        None if method.ends_with("index") => Err(invalid("substring not found")),
        None => Ok((-1).into()),
    }
}

/// `startswith` and `endswith`, with one affix or a tuple of them.
fn ends(text: &str, method: &str, args: &[Value]) -> Result<bool, Error> {
    let [affix, start, end] = bind_arguments(method, args, ["", "", ""])?;
    let Some((_, within)) = window(text, start.as_ref(), end.as_ref())? else { return Ok(false) };
    let one = |affix: &Value| {
        let affix = required_text(method, Some(affix))?;
        Ok(if method == "startswith" { within.starts_with(affix) } else { within.ends_with(affix) })
    };
    match affix {
        Some(affixes) if matches!(affixes.kind(), ValueKind::Seq | ValueKind::Iterable) => {
            affixes.try_iter()?.try_fold(false, |found, affix| Ok(found || one(&affix)?))
        }
        affix => one(&affix.unwrap_or_default()),
    }
}

fn expanded_tabs(text: &str, size: i64) -> String {
    let size = usize::try_from(size).unwrap_or_default();
    let (mut out, mut column) = (String::with_capacity(text.len()), 0);
    for c in text.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let width = size - column % size;
                out.extend(std::iter::repeat_n(' ', width));
                column += width;
            }
            _ => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}

fn joined(separator: &str, args: &[Value]) -> Result<String, Error> {
    let [items] = bind_arguments("join", args, [""])?;
    let items = items.ok_or_else(|| Error::new(ErrorKind::MissingArgument, "join needs a list"))?;
    let mut out = String::new();
    for (i, item) in items.try_iter()?.enumerate() {
        out += if i > 0 { separator } else { "" };
        out += required_text("join", Some(&item))?;
    }
    Ok(out)
}

/// The text without the characters `chars` (white space if `None`) at its ends.
pub(crate) fn stripped<'t>(text: &'t str, chars: Option<&str>, left: bool, right: bool) -> &'t str {
    let goes = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(goes) } else { text };
    if right { text.trim_end_matches(goes) } else { text }
}

fn split(text: &str, method: &str, args: &[Value]) -> Result<Vec<Value>, Error> {
    let [separator, most] = bind_arguments(method, args, ["sep", "maxsplit"])?;
    let from_end = method == "rsplit";
    // A negative maximum means no limit.
    let most = integer(most.as_ref())?.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let Some(separator) = separator.filter(|separator| !separator.is_none()) else {
        let mut words = words(text, most, from_end);
        if from_end {
            words.reverse();
        }
        return Ok(words.into_iter().map(Value::from).collect());
    };
    let separator = required_text(method, Some(&separator))?;
    if separator.is_empty() {
        return Err(invalid(format!("{method} needs a separator that is not empty")));
    }
    let n = most.saturating_add(1);
    if !from_end {
        return Ok(text.splitn(n, separator).map(Value::from).collect());
    }
    let mut parts: Vec<Value> = text.rsplitn(n, separator).map(Value::from).collect();
    parts.reverse();
    Ok(parts)
}

/// At most `most` words of a text, from the start or the end in the order they are found, and then the rest.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = stripped(text, None, !from_end, from_end);
    while !rest.is_empty() {
        let end = if from_end {
            rest.char_indices().rev().find(|&(_, c)| is_space(c)).map(|(at, c)| at + c.len_utf8())
        } else {
            rest.find(is_space)
        };
        let Some(end) = end.filter(|_| words.len() < most) else {
            words.push(rest);
            break;
        };
        let (before, after) = rest.split_at(end);
        let (word, others) = if from_end { (after, before) } else { (before, after) };
        words.push(word);
        rest = stripped(others, None, !from_end, from_end);
    }
    words
}

/// The lines of a text, as `str.splitlines` returns them.
pub(crate) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c' | '\x1d' | '\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let after = &rest[end..];
        let width = if after.starts_with("\r\n") { 2 } else { after.chars().next().map_or(0, char::len_utf8) };
        lines.push(if keep_ends { &rest[..end + width] } else { &rest[..end] });
        rest = &after[width..];
    }
    lines
}

fn of_list(list: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "count" => {
            let [wanted] = bind_arguments(method, args, [""])?;
            let wanted = wanted.unwrap_or_default();
            Ok(list.try_iter()?.filter(|item| *item == wanted).count().into())
        }
        "index" => {
            let [wanted, start, end] = bind_arguments(method, args, ["", "", ""])?;
            let wanted = wanted.unwrap_or_default();
            let n = list.len().unwrap_or_default();
            let place = |bound: i64| if bound < 0 { bound.saturating_add_unsigned(n as u64).max(0) } else { bound };
            let start = integer(start.as_ref())?.map_or(0, place);
            let end = integer(end.as_ref())?.map_or(i64::MAX, place);
            let mut places = (0i64..).zip(list.try_iter()?);
            let found = places.find(|(place, item)| (start..end).contains(place) && *item == wanted);
            found.map(|(place, _)| place.into()).ok_or_else(|| invalid("the value is not in the list"))
        }
        "copy" => bind_arguments(method, args, []).map(|[]| list.clone()),
        _ => Err(unknown()),
    }
}

fn of_dictionary(dictionary: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let pairs = || dictionary.as_object().and_then(minijinja::value::DynObject::try_iter_pairs).into_iter().flatten();
    match method {
        "get" => {
            let [key, default] = bind_arguments(method, args, ["", ""])?;
            let key = key.ok_or_else(|| Error::new(ErrorKind::MissingArgument, "get needs a key"))?;
            let found = dictionary.as_object().and_then(|object| object.get_value(&key));
            Ok(found.or(default).unwrap_or_else(|| ().into()))
        }
        "keys" => bind_arguments(method, args, []).map(|[]| pairs().map(|(key, _)| key).collect()),
        "values" => bind_arguments(method, args, []).map(|[]| pairs().map(|(_, value)| value).collect()),
        "items" => {
            let pair = |(key, value)| Value::from(Tuple::from([key, value]));
            bind_arguments(method, args, []).map(|[]| pairs().map(pair).collect())
        }
        "copy" => bind_arguments(method, args, []).map(|[]| dictionary.clone()),
        _ => Err(unknown()),
    }
}

fn of_number(number: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match method {
        "is_integer" => {
            bind_arguments(method, args, []).map(drop)?;
            Ok(f64::try_from(number.clone())?.fract().eq(&0.0).into())
        }
        "bit_length" if number.is_integer() => {
            bind_arguments(method, args, []).map(drop)?;
            Ok((u128::BITS - i128::try_from(number.clone())?.unsigned_abs().leading_zeros()).into())
        }
        _ => Err(unknown()),
    }
}
