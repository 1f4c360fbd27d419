//! The filters that `checked.rs` puts in place of operators. They have Python's semantics and charge their work before
//! they do it.

use std::cmp::Ordering;

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use crate::TemplateLimit;
use crate::builtins::attribute;
use crate::measured::{NODE, Size, is_measured, is_mutable, is_tuple, len, list, measure, printed, tuple};
use crate::meter::{charge, charge_output};
use crate::prices::{self, CallArgs};
use crate::printf::printf;
use crate::python_str::{ExactNumber, text};

/// The names of the operators as filters. No template can write these names.
pub(crate) const ADD: &str = "+";
pub(crate) const MUL: &str = "*";
pub(crate) const CONCAT: &str = "~";
pub(crate) const REM: &str = "%";
pub(crate) const SLICE: &str = "[:]";
pub(crate) const EQ: &str = "==";
pub(crate) const NE: &str = "!=";
pub(crate) const LT: &str = "<";
pub(crate) const LE: &str = "<=";
pub(crate) const GT: &str = ">";
pub(crate) const GE: &str = ">=";
/// Looks up an attribute whose name is also that of a method.
pub(crate) const ATTRIBUTE: &str = ".";
/// Measures a new list, tuple or dictionary.
pub(crate) const MEASURED: &str = "[]";
/// Charges for a value that is compared or searched.
pub(crate) const CHARGED: &str = "?";
/// Charges for a value that is iterated over or indexed.
pub(crate) const ITERATED: &str = "[?]";
/// Charges for a value whose items become arguments (`*args`).
pub(crate) const SPREAD: &str = "*[?]";

/// The maximum number of attributes of a namespace. They are iterated over whenever the namespace is a condition.
/// Published templates have at most 10.
pub(crate) const MAX_ATTRIBUTES: usize = 64;

/// Adds the operators and the formatter to `env`.
pub(crate) fn add_operators(env: &mut Environment<'_>) {
    env.add_filter(ADD, add);
    env.add_filter(MUL, mul);
    env.add_filter(CONCAT, concat);
    env.add_filter(REM, rem);
    env.add_filter(SLICE, slice);
    env.add_filter(EQ, equal);
    env.add_filter(NE, |a: &Value, b: &Value| !equal(a, b));
    env.add_filter(LT, |a: &Value, b: &Value| Ok::<_, Error>(order("<", a, b)? == Some(Ordering::Less)));
    env.add_filter(LE, |a: &Value, b: &Value| Ok::<_, Error>(order("<=", a, b)?.is_some_and(Ordering::is_le)));
    env.add_filter(GT, |a: &Value, b: &Value| Ok::<_, Error>(order(">", a, b)? == Some(Ordering::Greater)));
    env.add_filter(GE, |a: &Value, b: &Value| Ok::<_, Error>(order(">=", a, b)?.is_some_and(Ordering::is_ge)));
    env.add_filter(ATTRIBUTE, attribute);
    env.add_filter(MEASURED, measure);
    env.add_filter(CHARGED, charged);
    env.add_filter(ITERATED, iterated);
    env.add_filter(SPREAD, spread);
    env.set_formatter(write);
}

/// Writes a value to the output: minijinja's formatter.
fn write(out: &mut minijinja::Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    let plain = matches!(state.auto_escape(), minijinja::AutoEscape::None);
    if let Some(plain) = value.as_str().filter(|_| plain) {
        charge_output(plain.len())?;
        return out.write_str(plain).map_err(Error::from);
    }
    charge(printed(value)?)?;
    if plain {
        let shown = text(value);
        charge_output(shown.len())?;
        return out.write_str(&shown).map_err(Error::from);
    }
    let text = value.to_string();
    // No character is longer than `&quot;` when escaped.
    charge_output(text.len().saturating_mul("&quot;".len()))?;
    minijinja::escape_formatter(out, state, value)
}

fn charged(value: Value) -> Result<Value, Error> {
    charge(Size::of(&value)?.weight)?;
    Ok(value)
}

fn iterated(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        charge(text.len() as u64)?;
    } else if is_mutable(&value) {
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
    Ok((text(a) + &text(b)).into())
}

/// `a % b`: the remainder with the sign of the divisor, or `%`-formatting of a string.
fn rem(a: &Value, b: &Value) -> Result<Value, Error> {
    let Some(form) = a.as_str() else {
        if matches!(b.kind(), ValueKind::Number | ValueKind::Bool) && !b.is_true() {
            return Err(Error::new(ErrorKind::InvalidOperation, "cannot divide by zero"));
        }
        let of_integers = |a: i128, b: i128| {
            let rest = a.checked_rem(b)?;
            Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
        };
        let of_floats = |a: f64, b: f64| {
            let rest = a % b;
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest.abs().copysign(b) }
        };
        return arithmetic("%", a, b, of_integers, of_floats);
    };
    let mut values = vec![a.clone()];
    if is_tuple(b) {
        values.extend(b.try_iter()?);
    } else {
        values.push(b.clone());
    }
    charge(prices::formatted(&CallArgs(&values))?)?;
    printf(form, b).map(Value::from)
}

/// `a == b`. A tuple and a list are never equal, as in Python.
fn equal(a: &Value, b: &Value) -> bool {
    if let (Some(ExactNumber(a)), Some(ExactNumber(b))) = (a.downcast_object_ref(), b.downcast_object_ref()) {
        return a == b;
    }
    match (a.kind(), b.kind()) {
        (ValueKind::Seq, ValueKind::Seq) => {
            let (Ok(mut a_items), Ok(mut b_items)) = (a.try_iter(), b.try_iter()) else { return false };
            if is_tuple(a) != is_tuple(b) || a.len() != b.len() {
                return false;
            }
            a_items.all(|item| b_items.next().is_some_and(|other| equal(&item, &other)))
        }
        (ValueKind::Map, ValueKind::Map) if is_measured(a) && is_measured(b) => {
            let pairs = |map: &Value| map.as_object().and_then(minijinja::value::DynObject::try_iter_pairs);
            let (Some(mut pairs), Some(other)) = (pairs(a), b.as_object()) else { return false };
            a.len() == b.len()
                && pairs.all(|(key, value)| other.get_value(&key).is_some_and(|other| equal(&value, &other)))
        }
        _ => a == b,
    }
}

/// The order of two numbers, strings, lists or tuples; `None` if one is NaN. An error for other combinations.
fn order(sign: &str, a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let alike = (is_number(a) && is_number(b))
        || (a.as_str().is_some() && b.as_str().is_some())
        || (is_sequence(a) && is_sequence(b) && is_tuple(a) == is_tuple(b));
    if !alike {
        let what = format!("{sign} does not compare values of type {} and {}", a.kind(), b.kind());
        return Err(Error::new(ErrorKind::InvalidOperation, what));
    }
    let is_nan = |value: &Value| is_number(value) && f64::try_from(value.clone()).is_ok_and(f64::is_nan);
    Ok(if is_nan(a) || is_nan(b) { None } else { Some(a.cmp(b)) })
}

fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge(a.len() as u64 + b.len() as u64)?;
        return Ok([a, b].concat().into());
    }
    if is_sequence(a) && is_sequence(b) && is_tuple(a) == is_tuple(b) {
        let (a, b) = (measure(a.clone())?, measure(b.clone())?);
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
    // As in Python, a negative count gives an empty result.
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
        let (once, times) = (measure(repeated.clone())?, times()?);
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

/// An arithmetic operator on numbers; `true` and `false` are numbers.
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

/// `value[start:stop:step]` with Python's semantics.
fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |bound: &Value| if bound.is_none() { Ok(None) } else { i64::try_from(bound.clone()).map(Some) };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "cannot slice by step size of 0"));
    }
    if let Some(text) = value.as_str() {
        // The vector of characters takes four bytes per character.
        charge(4 * text.len() as u64)?;
        let chars: Vec<char> = text.chars().collect();
        return Ok(indices(chars.len(), start, stop, step).map(|i| chars[i]).collect::<String>().into());
    }
    if value.is_undefined() || value.is_none() {
        return list(Vec::new());
    }
    if !is_sequence(value) {
        return Ok(Value::UNDEFINED);
    }
    let value = measure(value.clone())?;
    let n = value.len().unwrap_or_default();
    let mut items = Vec::new();
    for i in indices(n, start, stop, step) {
        charge(NODE)?;
        items.push(value.get_item_by_index(i)?);
    }
    if is_tuple(&value) { tuple(items) } else { list(items) }
}

/// The indices that a slice selects from `len` items.
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

/// An error if a namespace would have `n` attributes, more than the maximum.
pub(crate) fn check_attributes(n: usize) -> Result<(), Error> {
    if n > MAX_ATTRIBUTES { Err(TemplateLimit::Attributes { limit: MAX_ATTRIBUTES }.into()) } else { Ok(()) }
}
