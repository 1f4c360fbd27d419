//! Python's `%`-formatting of strings.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use crate::arguments::{integer, invalid};
use crate::measured::is_tuple;
use crate::python_str::{repr, text};

/// `form % values`. A tuple supplies one value per placeholder, a dictionary one per name; any other value is the only
/// one.
pub(crate) fn printf(form: &str, values: &Value) -> Result<String, Error> {
    let by_place: Vec<Value> = if is_tuple(values) { values.try_iter()?.collect() } else { vec![values.clone()] };
    let mut by_place = by_place.into_iter();
    let mut next = || by_place.next().ok_or_else(|| invalid("not enough values for the places of a text"));
    let mut by_name = false;
    let mut out = String::with_capacity(form.len());
    let mut rest = form;
    while let Some((before, after)) = rest.split_once('%') {
        out += before;
        let unfinished = || invalid("a place in a text is not finished");
        let (name, after) = match after.strip_prefix('(') {
            Some(named) => named.split_once(')').map(|(name, after)| (Some(name), after)).ok_or_else(unfinished)?,
            None => (None, after),
        };
        let end = after.find(|c: char| !matches!(c, '-' | '+' | ' ' | '#' | '.' | '*' | '0'..='9'));
        let end = end.ok_or_else(unfinished)?;
        let mut options = String::new();
        for c in after[..end].chars() {
            match c {
                '*' => options += &integer(Some(&next()?))?.unwrap_or_default().to_string(),
                c => options.push(c),
            }
        }
        // Python ignores C's length modifiers.
        let after = after[end..].trim_start_matches(['h', 'l', 'L']);
        let kind = after.chars().next().ok_or_else(unfinished)?;
        rest = &after[kind.len_utf8()..];
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match name {
            Some(name) if values.kind() == ValueKind::Map => {
                by_name = true;
                let found = values.as_object().and_then(|object| object.get_value_by_str(name));
                found.ok_or_else(|| invalid(format!("there is no value for the place {name}")))?
            }
            Some(_) => return Err(invalid("places with names need a dictionary")),
            None => next()?,
        };
        let (kind, value) = match kind {
            's' => {
                out += &padded(&text(&value), &options)?;
                continue;
            }
            'r' | 'a' => {
                out += &padded(&repr(&value), &options)?;
                continue;
            }
            'd' | 'i' | 'u' => ('d', whole(&value)?),
            kind => (kind, value),
        };
        out += &format(FormatStyle::Printf, &format!("%{options}{kind}"), &[value])?;
    }
    // As in Python, a list or dictionary may remain unused.
    let has_items = !is_tuple(values) && matches!(values.kind(), ValueKind::Map | ValueKind::Seq);
    if !by_name && !has_items && by_place.next().is_some() {
        return Err(invalid("a text has fewer places than there are values"));
    }
    Ok(out + rest)
}

/// A string cut to the precision and padded to the width of `options`, both in characters.
fn padded(text: &str, options: &str) -> Result<String, Error> {
    let sizes = options.trim_start_matches(['-', '+', ' ', '#', '0']);
    let left = options[..options.len() - sizes.len()].contains('-');
    let (width, precision) = sizes.split_once('.').map_or((sizes, None), |(width, precision)| (width, Some(precision)));
    let size = |digits: &str| match digits {
        "" => Ok(0),
        digits => digits.parse::<usize>().map_err(|_| invalid("a width of a text is no number")),
    };
    let cut: String = text.chars().take(precision.map(size).transpose()?.unwrap_or(usize::MAX)).collect();
    let blanks = " ".repeat(size(width)?.saturating_sub(cut.chars().count()));
    Ok(if left { cut + &blanks } else { blanks + &cut })
}

/// The integer part of a number.
fn whole(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Number if value.is_integer() => Ok(value.clone()),
        ValueKind::Number => {
            let number = f64::try_from(value.clone())?;
            if number.is_finite() { Ok(Value::from(number as i128)) } else { Err(invalid("it is no integer")) }
        }
        ValueKind::Bool => Ok(i64::from(value.is_true()).into()),
        kind => Err(invalid(format!("a number is needed, not a value of type {kind}"))),
    }
}
