//! [`BoundMethod`]: a method that a template names without calling it, such as `{{ text.upper }}`.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr};
use minijinja::{Error, State, Value};

use crate::builtins::priced_method;
use crate::measured::Size;

/// A method with its receiver. Its size is that of a list with the receiver as its only item.
#[derive(Debug)]
pub(crate) struct BoundMethod {
    receiver: Value,
    name: String,
    size: Size,
}

/// The method `name` of a string, or of a measured list or dictionary.
pub(crate) fn bound_method(receiver: &Value, name: &str) -> Result<Value, Error> {
    let size = Size::around([receiver].into_iter())?;
    Ok(Value::from_object(BoundMethod { receiver: receiver.clone(), name: name.to_owned(), size }))
}

impl BoundMethod {
    pub fn size(&self) -> Size {
        self.size
    }
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        priced_method(&self.receiver, &self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<built-in method {}>", self.name)
    }
}
