//! Lists and dictionaries of templates that record their size and depth.
//!
//! Values share their parts: sixty nested lists, each with the previous one twice, take little memory but are endless
//! when printed. So each list, tuple and dictionary of a rendering is a [`MeasuredValue`]. Its size is known without
//! traversing it, and operations on it can be charged beforehand. Other values with parts (lazy sequences, namespaces,
//! loops) are converted to measured ones when they are put into another value. So no value contains itself, and none
//! is deeper than [`MAX_DEPTH`].

use std::fmt;
use std::sync::Arc;

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Serde, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use crate::TemplateLimit;
use crate::bound_method::BoundMethod;
use crate::exact_json;
use crate::meter::charge;
use crate::python_str::{ExactNumber, repr};

/// The maximum nesting of lists and dictionaries. The JSON of a request has at most 128 levels; messages add a few.
const MAX_DEPTH: u32 = 256;
/// The weight of a value in bytes, in addition to its text.
pub(crate) const NODE: u64 = 32;
/// The weight of a float with hundreds of digits, which is slow to print.
const LONG_NUMBER: u64 = 512;
/// The weight of a dictionary entry in bytes, in addition to its key and value.
const PAIR: u64 = 64;
/// The maximum factor by which a byte of weight grows when it is printed in a list or as JSON.
const PRINTED: u64 = 8;

/// The size of a value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Size {
    /// The weight in bytes. A shared part counts each time it occurs.
    pub weight: u64,
    /// The nesting depth.
    pub depth: u32,
}

impl Size {
    /// The size of a container of `parts`; an error if it would be too deep.
    pub fn around<'v>(parts: impl Iterator<Item = &'v Value>) -> Result<Self, Error> {
        let mut size = Self { weight: NODE, depth: 0 };
        for part in parts {
            let part = Self::of(part)?;
            size = Self { weight: size.weight.saturating_add(part.weight), depth: size.depth.max(part.depth) };
        }
        if size.depth >= MAX_DEPTH {
            return Err(TemplateLimit::Depth { limit: MAX_DEPTH }.into());
        }
        Ok(Self { depth: size.depth + 1, ..size })
    }

    /// The size of a value.
    pub fn of(value: &Value) -> Result<Self, Error> {
        if let Some(text) = value.as_str() {
            return Ok(Self { weight: NODE + text.len() as u64, depth: 0 });
        }
        if let Some(measured) = value.downcast_object_ref::<MeasuredValue>() {
            return Ok(measured.size);
        }
        if value.kind() == ValueKind::Number && !value.is_integer() {
            let usual = f64::try_from(value.clone()).is_ok_and(|v| v == 0.0 || (1e-9..1e17).contains(&v.abs()));
            return Ok(Self { weight: if usual { NODE } else { LONG_NUMBER }, depth: 0 });
        }
        if let Some(ExactNumber(digits)) = value.downcast_object_ref() {
            return Ok(Self { weight: NODE + digits.len() as u64, depth: 0 });
        }
        if let Some(method) = value.downcast_object_ref::<BoundMethod>() {
            return Ok(method.size());
        }
        match value.as_object().map(DynObject::repr) {
            None | Some(ObjectRepr::Plain) => Ok(Self { weight: NODE, depth: 0 }),
            // `measure` returns a `MeasuredValue`, so this recursion ends.
            Some(_) => Self::of(&measure(value.clone())?),
        }
    }
}

/// A list, tuple or dictionary with its length and size.
struct MeasuredValue {
    inner: DynObject,
    len: usize,
    size: Size,
}

impl MeasuredValue {
    fn value(inner: &Value, len: usize, size: Size) -> Value {
        match inner.as_object() {
            Some(inner) => Value::from_object(Self { inner: inner.clone(), len, size }),
            None => inner.clone(),
        }
    }
}

impl fmt::Debug for MeasuredValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.render(f)
    }
}

impl Object for MeasuredValue {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        self.inner.repr()
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.inner.get_value(key)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.inner.get_value_by_str(key)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.inner.enumerate()
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.len)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&repr(&Value::from_dyn_object(DynObject::new(Arc::clone(self)))))
    }
}

/// Converts a value so that it can be put into other values: containers become measured lists, tuples and
/// dictionaries, with a copy of their current items.
pub(crate) fn measure(value: Value) -> Result<Value, Error> {
    measure_nested(value, 0)
}

fn measure_nested(value: Value, level: u32) -> Result<Value, Error> {
    let Some(object) = value.as_object() else { return Ok(value) };
    if object.downcast_ref::<MeasuredValue>().is_some() {
        return Ok(value);
    }
    if level > MAX_DEPTH {
        return Err(TemplateLimit::Depth { limit: MAX_DEPTH }.into());
    }
    match object.repr() {
        // Functions and macros.
        ObjectRepr::Plain => Ok(value),
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            let mut items = Vec::new();
            for item in value.try_iter()?.checked() {
                charge(NODE)?;
                items.push(measure_nested(item?, level + 1)?);
            }
            if value.is_tuple() { tuple(items) } else { list(items) }
        }
        ObjectRepr::Map => {
            let mut pairs = Vec::new();
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                charge(NODE + PAIR)?;
                pairs.push((measure_nested(key, level + 1)?, measure_nested(value, level + 1)?));
            }
            dictionary(pairs)
        }
        // minijinja has no other kinds; the type is non-exhaustive.
        _ => Err(Error::new(ErrorKind::InvalidOperation, "a value of an unknown kind")),
    }
}

/// A measured list. The items must come from [`measure`].
pub(crate) fn list(items: Vec<Value>) -> Result<Value, Error> {
    let (len, size) = (items.len(), Size::around(items.iter())?);
    Ok(MeasuredValue::value(&Value::from(items), len, size))
}

/// A measured tuple. The items must come from [`measure`].
pub(crate) fn tuple(items: Vec<Value>) -> Result<Value, Error> {
    let (len, size) = (items.len(), Size::around(items.iter())?);
    Ok(MeasuredValue::value(&Tuple::from(items).into(), len, size))
}

/// A measured dictionary. Keys and values must come from [`measure`].
fn dictionary(pairs: Vec<(Value, Value)>) -> Result<Value, Error> {
    let size = Size::around(pairs.iter().flat_map(|(key, value)| [key, value]))?;
    let size = Size { weight: size.weight.saturating_add(PAIR * pairs.len() as u64), ..size };
    let inner = Value::from_pairs(pairs);
    // Duplicate keys are stored once.
    let len = inner.len().unwrap_or_default();
    Ok(MeasuredValue::value(&inner, len, size))
}

/// Whether a value is a [`MeasuredValue`].
pub(crate) fn is_measured(value: &Value) -> bool {
    value.downcast_object_ref::<MeasuredValue>().is_some()
}

/// Whether a value is a tuple.
pub(crate) fn is_tuple(value: &Value) -> bool {
    let inner = value.downcast_object_ref::<MeasuredValue>().map(|measured| &measured.inner);
    value.is_tuple() || inner.is_some_and(|inner| inner.downcast_ref::<Tuple>().is_some())
}

/// Whether a value can still change: a namespace, loop or lazy sequence.
pub(crate) fn is_mutable(value: &Value) -> bool {
    let is_mutable = |object: &DynObject| object.repr() != ObjectRepr::Plain && !object.is::<MeasuredValue>();
    value.as_object().is_some_and(is_mutable)
}

/// An upper bound of the number of items of a container or characters of a string.
pub(crate) fn len(value: &Value) -> Result<u64, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.len() as u64);
    }
    match value.downcast_object_ref::<MeasuredValue>() {
        Some(measured) => Ok(measured.len as u64),
        // The weight is at least NODE per item.
        None => Ok(Size::of(value)?.weight / NODE),
    }
}

/// An upper bound of the length in bytes of a printed value.
pub(crate) fn printed(value: &Value) -> Result<u64, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len() as u64),
        None => Ok(Size::of(value)?.weight.saturating_mul(PRINTED)),
    }
}

/// The variables of a rendering as one value, and their total weight.
pub(crate) fn variables(map: &Map<String, Json>) -> Result<(Value, u64), Error> {
    let mut weight = 0u64;
    let mut pairs = Vec::with_capacity(map.len());
    for (name, value) in map {
        let value = from_json(value)?;
        weight = weight.saturating_add(Size::of(&value)?.weight);
        pairs.push((name.as_str(), value));
    }
    Ok((Value::from_pairs(pairs), weight))
}

/// The template value of JSON that [`exact_json`] parsed.
pub(crate) fn from_json(value: &Json) -> Result<Value, Error> {
    match value {
        Json::Array(items) => list(items.iter().map(from_json).collect::<Result<_, _>>()?),
        Json::Object(map) => {
            if let Some(number) = exact_json::number(map) {
                return Ok(number);
            }
            let pair = |(key, value): (&String, &Json)| Ok((Value::from(key.as_str()), from_json(value)?));
            dictionary(map.iter().map(pair).collect::<Result<_, Error>>()?)
        }
        Json::String(text) => Ok(Value::from(text.as_str())),
        Json::Null | Json::Bool(_) | Json::Number(_) => Ok(Value::from(Serde(value))),
    }
}
