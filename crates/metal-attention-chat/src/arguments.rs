//! Binds the arguments of Jinja filters, functions and methods to parameters, by position or by name, as Python does.

use minijinja::{Error, ErrorKind, Value};

/// An error for a wrong use of a filter, function or method.
pub(crate) fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

/// The value of each parameter of `function`, in the order of `names`; `None` if it was not passed. A parameter with
/// an empty name is positional only. Returns an error for surplus, unknown and repeated arguments.
pub(crate) fn bind_arguments<const N: usize>(
    function: &str,
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (named, positional) = match args.split_last() {
        Some((last, others)) if last.is_kwargs() => (Some(last), others),
        _ => (None, args),
    };
    if positional.len() > N {
        return Err(Error::new(ErrorKind::TooManyArguments, format!("{function} takes at most {N} arguments")));
    }
    let mut given = [const { None }; N];
    for (slot, value) in given.iter_mut().zip(positional) {
        *slot = Some(value.clone());
    }
    for name in named.into_iter().filter_map(|named| named.try_iter().ok()).flatten() {
        let place = names.iter().position(|known| !known.is_empty() && name.as_str() == Some(known));
        match place.map(|place| &mut given[place]) {
            Some(slot @ None) => *slot = named.map(|named| named.get_item(&name)).transpose()?,
            Some(Some(_)) => return Err(invalid(format!("{function} gets {name} twice"))),
            None => {
                return Err(Error::new(ErrorKind::TooManyArguments, format!("{function} has no parameter {name}")));
            }
        }
    }
    Ok(given)
}

/// A required string argument.
pub(crate) fn required_text<'v>(function: &str, value: Option<&'v Value>) -> Result<&'v str, Error> {
    let value = value.ok_or_else(|| Error::new(ErrorKind::MissingArgument, format!("{function} needs a text")))?;
    value.as_str().ok_or_else(|| invalid(format!("{function} needs a text, not a value of type {}", value.kind())))
}

/// An optional integer argument; `None` if it was not passed or is Python's `None`. Values beyond 64 bits are clamped.
pub(crate) fn integer(value: Option<&Value>) -> Result<Option<i64>, Error> {
    match value {
        Some(value) if !value.is_none() => {
            let wide = i128::try_from(value.clone())?;
            Ok(Some(i64::try_from(wide).unwrap_or(if wide < 0 { i64::MIN } else { i64::MAX })))
        }
        _ => Ok(None),
    }
}
