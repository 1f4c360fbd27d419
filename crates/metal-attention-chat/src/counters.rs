//! Jinja2's `joiner` and `cycler`, whose results depend on how often they were called.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Object, ObjectRepr, Rest};
use minijinja::{Error, ErrorKind, State, Value};

/// The result of `joiner(separator)`: the first call returns an empty string, later calls the separator.
#[derive(Debug)]
struct Joiner {
    separator: Value,
    calls: AtomicUsize,
}

pub(crate) fn joiner(separator: Option<Value>) -> Result<Value, Error> {
    let separator = separator.unwrap_or_else(|| ", ".into());
    without_parts(&separator)?;
    Ok(Value::from_object(Joiner { separator, calls: AtomicUsize::new(0) }))
}

/// Rejects values with parts. The depth of a value within a joiner or cycler would not be limited.
fn without_parts(value: &Value) -> Result<(), Error> {
    match value.as_object() {
        None => Ok(()),
        Some(_) => Err(Error::new(ErrorKind::InvalidOperation, "joiner and cycler take texts and numbers")),
    }
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        let is_first = self.calls.fetch_add(1, Ordering::Relaxed) == 0;
        Ok(if is_first { "".into() } else { self.separator.clone() })
    }
}

/// The result of `cycler(a, b, ...)`: `next()` returns its values in turn.
#[derive(Debug)]
struct Cycler {
    values: Vec<Value>,
    place: AtomicUsize,
}

pub(crate) fn cycler(Rest(values): Rest<Value>) -> Result<Value, Error> {
    if values.is_empty() {
        return Err(Error::new(ErrorKind::MissingArgument, "cycler needs values"));
    }
    values.iter().try_for_each(without_parts)?;
    Ok(Value::from_object(Cycler { values, place: AtomicUsize::new(0) }))
}

impl Cycler {
    fn current(&self, place: usize) -> Value {
        self.values[place % self.values.len()].clone()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        (key == "current").then(|| self.current(self.place.load(Ordering::Relaxed)))
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn call_method(self: &Arc<Self>, _: &mut State<'_, '_>, method: &str, _: &[Value]) -> Result<Value, Error> {
        match method {
            "next" => Ok(self.current(self.place.fetch_add(1, Ordering::Relaxed))),
            "reset" => {
                self.place.store(0, Ordering::Relaxed);
                Ok(().into())
            }
            _ => Err(ErrorKind::UnknownMethod.into()),
        }
    }
}
