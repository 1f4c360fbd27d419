//! The operators that `checked.rs` puts in place of minijinja's: what they make is charged for before it is made.

use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use crate::TemplateLimit;
use crate::measured::{NODE, Size, is_live, is_tuple, len, list, made, printed, tuple};
use crate::meter::{charge, charge_output};

/// The names of the operators as filters, which no template can write.
pub(crate) const ADD: &str = "+";
pub(crate) const MUL: &str = "*";
pub(crate) const CONCAT: &str = "~";
pub(crate) const SLICE: &str = "[:]";
/// Makes what a list, tuple or dictionary of a template is.
pub(crate) const MADE: &str = "[]";
/// Charges for a value that is compared or searched.
pub(crate) const CHARGED: &str = "?";
/// Charges for a value whose items are looked for.
pub(crate) const ITERATED: &str = "[?]";
/// Charges for a value whose items become arguments.
pub(crate) const SPREAD: &str = "*[?]";

/// Attributes of a namespace, which are gone through whenever it is a condition. In published templates: 10.
pub(crate) const MAX_ATTRIBUTES: usize = 64;

/// Adds the operators, and what writes values to the output.
pub(crate) fn add_operators(env: &mut Environment<'_>) {
    env.add_filter(ADD, add);
    env.add_filter(MUL, mul);
    env.add_filter(CONCAT, concat);
    env.add_filter(SLICE, slice);
    env.add_filter(MADE, made);
    env.add_filter(CHARGED, charged);
    env.add_filter(ITERATED, iterated);
    env.add_filter(SPREAD, spread);
    env.set_formatter(write);
}

/// Writes a value to the output.
fn write(out: &mut minijinja::Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let plain = matches!(state.auto_escape(), minijinja::AutoEscape::None);
    if let Some(text) = value.as_str().filter(|_| plain) {
        charge_output(text.len())?;
        return out.write_str(text).map_err(Error::from);
    }
    charge(printed(value)?)?;
    let text = value.to_string();
    // No character becomes longer than `&quot;`.
    charge_output(if plain { text.len() } else { text.len().saturating_mul("&quot;".len()) })?;
    minijinja::escape_formatter(out, state, value)
}

fn charged(value: Value) -> Result<Value, Error> {
    charge(Size::of(&value)?.weight)?;
    Ok(value)
}

fn iterated(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        charge(text.len() as u64)?;
    } else if is_live(&value) {
        charge(MAX_ATTRIBUTES as u64 * NODE)?;
    }
    Ok(value)
}

fn spread(value: Value) -> Result<Value, Error> {
    charge(Size::of(&value)?.weight.saturating_add(len(&value)?.saturating_mul(NODE)))?;
    Ok(value)
}

fn concat(a: &Value, b: &Value) -> Result<Value, Error> {
    charge(printed(a)?.saturating_add(printed(b)?))?;
    let mut text = String::new();
    // Writing to a text cannot fail.
    let _ = write!(text, "{a}{b}");
    Ok(text.into())
}

fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge(a.len() as u64 + b.len() as u64)?;
        return Ok([a, b].concat().into());
    }
    if is_sequence(a) && is_sequence(b) && is_tuple(a) == is_tuple(b) {
        let (a, b) = (made(a.clone())?, made(b.clone())?);
        let mut items = Vec::new();
        for item in a.try_iter()?.chain(b.try_iter()?) {
            charge(NODE)?;
            items.push(item);
        }
        return if is_tuple(&a) { tuple(items) } else { list(items) };
    }
    arithmetic("+", a, b, i128::checked_add, |a, b| a + b)
}

fn mul(a: &Value, b: &Value) -> Result<Value, Error> {
    let (repeated, times) = if b.as_str().is_some() || is_sequence(b) { (b, a) } else { (a, b) };
    // As in Python, less than none is none.
    let times = || match i64::try_from(times.clone()) {
        Ok(n) => Ok(u64::try_from(n).unwrap_or_default()),
        Err(_) => Err(Error::new(ErrorKind::InvalidOperation, "texts and lists can only be multiplied with integers")),
    };
    if let Some(text) = repeated.as_str() {
        let times = times()?;
        charge((text.len() as u64).saturating_mul(times))?;
        return Ok(text.repeat(times as usize).into());
    }
    if is_sequence(repeated) {
        let (once, times) = (made(repeated.clone())?, times()?);
        let once_items: Vec<Value> = once.try_iter()?.collect();
        charge((once_items.len() as u64).saturating_mul(times).saturating_mul(NODE))?;
        let times = if once_items.is_empty() { 0 } else { times as usize };
        let items = (0..times).flat_map(|_| once_items.iter().cloned()).collect();
        return if is_tuple(&once) { tuple(items) } else { list(items) };
    }
    arithmetic("*", a, b, i128::checked_mul, |a, b| a * b)
}

fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// An operator of numbers, among which are `true` and `false`.
fn arithmetic(
    sign: &str,
    a: &Value,
    b: &Value,
    of_integers: impl Fn(i128, i128) -> Option<i128>,
    of_floats: impl Fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let is_float = |v: &Value| v.kind() == ValueKind::Number && !v.is_integer();
    let number = |v: &Value| v.kind() == ValueKind::Number || v.kind() == ValueKind::Bool;
    let failed = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    if !number(a) || !number(b) {
        let kinds = format!("{} and {}", a.kind(), b.kind());
        return Err(failed(format!("tried to use {sign} operator on unsupported types {kinds}")));
    }
    if is_float(a) || is_float(b) {
        let float = |v: &Value| f64::try_from(v.clone()).or_else(|_| i128::try_from(v.clone()).map(|v| v as f64));
        return Ok(of_floats(float(a)?, float(b)?).into());
    }
    let result = of_integers(i128::try_from(a.clone())?, i128::try_from(b.clone())?)
        .ok_or_else(|| failed(format!("unable to calculate {a} {sign} {b}")))?;
    Ok(i64::try_from(result).map_or_else(|_| result.into(), Value::from))
}

/// `value[start:stop:step]`, as Python cuts.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |bound: &Value| if bound.is_none() { Ok(None) } else { i64::try_from(bound.clone()).map(Some) };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "cannot slice by step size of 0"));
    }
    if let Some(text) = value.as_str() {
        // A character of four bytes for each.
        charge(4 * text.len() as u64)?;
        let chars: Vec<char> = text.chars().collect();
        return Ok(indices(chars.len(), start, stop, step).map(|i| chars[i]).collect::<String>().into());
    }
    if value.is_undefined() || value.is_none() {
        return list(Vec::new());
    }
    if !is_sequence(value) {
        let what = format!("value of type {} cannot be sliced", value.kind());
        return Err(Error::new(ErrorKind::InvalidOperation, what));
    }
    let value = made(value.clone())?;
    let n = value.len().unwrap_or_default();
    let mut items = Vec::new();
    for i in indices(n, start, stop, step) {
        charge(NODE)?;
        items.push(value.get_item_by_index(i)?);
    }
    if is_tuple(&value) { tuple(items) } else { list(items) }
}

/// The places that a slice takes of `len`.
fn indices(len: usize, start: Option<i64>, stop: Option<i64>, step: i64) -> impl Iterator<Item = usize> {
    let (len, step) = (len as i128, i128::from(step));
    let (first, last) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i64| {
        let bound = i128::from(bound);
        (if bound < 0 { bound + len } else { bound }).clamp(first, last)
    };
    let start = start.map_or(if step > 0 { first } else { last }, clamp);
    let stop = stop.map_or(if step > 0 { last } else { first }, clamp);
    let inside = move |&i: &i128| if step > 0 { i < stop } else { i > stop };
    std::iter::successors(Some(start), move |&i| Some(i + step)).take_while(inside).map(|i| i as usize)
}

/// A namespace, with as many attributes as one may have.
pub(crate) fn check_attributes(n: usize) -> Result<(), Error> {
    if n > MAX_ATTRIBUTES { Err(TemplateLimit::Attributes { limit: MAX_ATTRIBUTES }.into()) } else { Ok(()) }
}
