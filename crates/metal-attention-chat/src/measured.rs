//! Lists and dictionaries that know how large and how deep they are.
//!
//! Values share their parts: sixty lists that each hold the one before twice are small in memory and endless to print. So
//! each list, tuple and dictionary of a rendering is a [`MeasuredValue`]: whoever prints, compares or walks one knows what that
//! costs before. What else has parts (lazy sequences, namespaces, loops) becomes one when it is put into another value, so
//! no value holds itself, and none is deeper than [`MAX_DEPTH`].

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

/// Lists in lists. JSON of a request has at most 128, and the messages around it some.
const MAX_DEPTH: u32 = 256;
/// What a value counts for besides its text.
pub(crate) const NODE: u64 = 32;
/// What a number with hundreds of digits counts for, which take long to find.
const LONG_NUMBER: u64 = 512;
/// What a pair of a dictionary counts for besides its key and its value.
const PAIR: u64 = 64;
/// The most that a byte of a text or of a [`NODE`] becomes when it is printed within a list, or as JSON.
const PRINTED: u64 = 8;

/// How much there is of a value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Size {
    /// In bytes, as often as a part is there.
    pub weight: u64,
    /// Lists in lists.
    pub depth: u32,
}

impl Size {
    /// The size of what holds `parts`.
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
            // What this makes is a `MeasuredValue`.
            Some(_) => Self::of(&measure(value.clone())?),
        }
    }
}

/// A list, tuple or dictionary with its size.
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

/// `value` as other values may hold it: what has parts is a list, tuple or dictionary of them, as they are now.
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
        // minijinja has no others.
        _ => Err(Error::new(ErrorKind::InvalidOperation, "a value of an unknown kind")),
    }
}

/// A list of what [`measure`] gave.
pub(crate) fn list(items: Vec<Value>) -> Result<Value, Error> {
    let (len, size) = (items.len(), Size::around(items.iter())?);
    Ok(MeasuredValue::value(&Value::from(items), len, size))
}

/// A tuple of what [`measure`] gave.
pub(crate) fn tuple(items: Vec<Value>) -> Result<Value, Error> {
    let (len, size) = (items.len(), Size::around(items.iter())?);
    Ok(MeasuredValue::value(&Tuple::from(items).into(), len, size))
}

fn dictionary(pairs: Vec<(Value, Value)>) -> Result<Value, Error> {
    let size = Size::around(pairs.iter().flat_map(|(key, value)| [key, value]))?;
    let size = Size { weight: size.weight.saturating_add(PAIR * pairs.len() as u64), ..size };
    let inner = Value::from_pairs(pairs);
    // A key that came twice is there once.
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

/// Whether a value is a namespace, or another that can still change.
pub(crate) fn is_mutable(value: &Value) -> bool {
    let is_mutable = |object: &DynObject| object.repr() != ObjectRepr::Plain && !object.is::<MeasuredValue>();
    value.as_object().is_some_and(is_mutable)
}

/// The items of a list, or the characters of a text: how many there are at most.
pub(crate) fn len(value: &Value) -> Result<u64, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.len() as u64);
    }
    match value.downcast_object_ref::<MeasuredValue>() {
        Some(measured) => Ok(measured.len as u64),
        // At least as many as there are.
        None => Ok(Size::of(value)?.weight / NODE),
    }
}

/// The bytes of a value as text, at most.
pub(crate) fn printed(value: &Value) -> Result<u64, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len() as u64),
        None => Ok(Size::of(value)?.weight.saturating_mul(PRINTED)),
    }
}

/// Variables for a rendering, and their weight.
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

/// A value of JSON that was read by [`exact_json`].
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
