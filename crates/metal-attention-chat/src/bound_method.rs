//! Methods that are named without being called.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr};
use minijinja::{Error, State, Value};

use crate::builtins::priced_method;
use crate::measured::Size;

/// A method of a value. It counts for as much as a list that holds the value.
#[derive(Debug)]
pub(crate) struct Method {
    of: Value,
    name: String,
    size: Size,
}

/// The method `name` of a text, or of a measured list or dictionary.
pub(crate) fn bound_method(of: &Value, name: &str) -> Result<Value, Error> {
    let size = Size::around([of].into_iter())?;
    Ok(Value::from_object(Method { of: of.clone(), name: name.to_owned(), size }))
}

impl Method {
    pub fn size(&self) -> Size {
        self.size
    }
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        priced_method(&self.of, &self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {}>", self.name)
    }
}
