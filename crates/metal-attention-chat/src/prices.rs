//! The prices of filters, tests and methods: upper bounds of the bytes that they create, compare and search, computed
//! before they run.

use minijinja::value::ValueKind;
use minijinja::{Error, Value};

use crate::measured::{NODE, Size, len, printed};

/// The arguments of a call. The first is the value that it is applied to.
pub(crate) struct CallArgs<'a>(pub &'a [Value]);

/// The maximum cost in bytes of a call.
pub(crate) type Price = fn(&CallArgs<'_>) -> Result<u64, Error>;

impl CallArgs<'_> {
    /// The argument at a position, or with a name; `None` if it is missing or none.
    fn get(&self, place: usize, name: &str) -> Option<Value> {
        let positional = self.0.get(place).filter(|value| !value.is_kwargs());
        let named = || self.0.last().filter(|value| value.is_kwargs())?.get_attr(name).ok();
        positional.cloned().or_else(named).filter(|value| !value.is_undefined() && !value.is_none())
    }

    /// The numeric argument at a position, or with a name. Negative numbers are 0.
    fn number(&self, place: usize, name: &str) -> Option<u64> {
        let value = self.get(place, name)?;
        // A value that is not a number is 0 here; the function refuses it.
        Some(i128::try_from(value).map_or(0, |n| u64::try_from(n.max(0)).unwrap_or(u64::MAX)))
    }

    fn weight(&self, place: usize) -> Result<u64, Error> {
        self.0.get(place).map_or(Ok(0), |value| Ok(Size::of(value)?.weight))
    }

    fn printed(&self, place: usize) -> Result<u64, Error> {
        self.0.get(place).map_or(Ok(0), printed)
    }

    fn len(&self, place: usize) -> Result<u64, Error> {
        self.0.get(place).map_or(Ok(0), len)
    }

    fn text(&self, place: usize) -> Option<&str> {
        self.0.get(place)?.as_str()
    }

    /// The printed length of all arguments.
    fn all_printed(&self) -> Result<u64, Error> {
        self.0.iter().try_fold(0u64, |sum, value| Ok(sum.saturating_add(printed(value)?)))
    }

    /// The printed length of the items of an argument.
    fn items_printed(&self, place: usize) -> Result<u64, Error> {
        let Some(items) = self.0.get(place).filter(|value| value.as_str().is_none()) else {
            return self.printed(place);
        };
        let Ok(mut items) = items.try_iter() else { return Ok(0) };
        items.try_fold(self.len(place)?, |sum, item| Ok(sum.saturating_add(printed(&item)?)))
    }

    /// The printed length of the arguments after the first.
    fn others_printed(&self) -> Result<u64, Error> {
        CallArgs(self.0.get(1..).unwrap_or_default()).all_printed()
    }
}

/// No cost beyond the instruction itself.
#[allow(clippy::unnecessary_wraps)] // as a `Price`
pub(crate) fn free(_: &CallArgs<'_>) -> Result<u64, Error> {
    Ok(0)
}

/// A string that is traversed or copied.
pub(crate) fn text(args: &CallArgs<'_>) -> Result<u64, Error> {
    args.all_printed()
}

/// A string whose characters are replaced, by upper case, lower case or escapes, which may be longer.
pub(crate) fn changed_text(args: &CallArgs<'_>) -> Result<u64, Error> {
    Ok(args.all_printed()?.saturating_mul(6))
}

/// A string whose ends are compared.
pub(crate) fn ends(args: &CallArgs<'_>) -> Result<u64, Error> {
    Ok(args.printed(0)?.min(args.others_printed()?))
}

/// The last item of a list, or the last character of a string.
pub(crate) fn last(args: &CallArgs<'_>) -> Result<u64, Error> {
    match args.0.first().map(Value::kind) {
        Some(ValueKind::Map) => items(args),
        _ => Ok(args.text(0).map_or(0, |text| text.len() as u64)),
    }
}

/// The lookup of a key.
pub(crate) fn key(args: &CallArgs<'_>) -> Result<u64, Error> {
    args.weight(1)
}

/// The search of a value in a list.
pub(crate) fn contained_in(args: &CallArgs<'_>) -> Result<u64, Error> {
    args.weight(0)
}

/// The comparison of two values.
pub(crate) fn compared(args: &CallArgs<'_>) -> Result<u64, Error> {
    Ok(args.weight(0)?.min(args.weight(1)?).saturating_mul(2))
}

/// The search of a value in a list, string or dictionary.
pub(crate) fn contained(args: &CallArgs<'_>) -> Result<u64, Error> {
    Ok(args.printed(0)?.saturating_add(args.weight(1)?))
}

/// A new list of the items, possibly of an attribute of each, possibly with a call for each.
pub(crate) fn items(args: &CallArgs<'_>) -> Result<u64, Error> {
    let positional = args.0.iter().filter(|value| !value.is_kwargs());
    let n = positional.clone().try_fold(0u64, |n, value| Ok::<_, Error>(n.saturating_add(len(value)?)))?;
    let each = (NODE * (1 + args.0.len() as u64)).saturating_add(args.others_printed()?);
    // A number in an attribute path indexes strings, which traverses them.
    let attribute = args.0.last().filter(|value| value.is_kwargs()).and_then(|named| named.get_attr("attribute").ok());
    let mut paths = positional.skip(1).chain(&attribute).filter_map(Value::as_str);
    let by_number = paths.any(|path| path.contains(|c: char| c.is_ascii_digit()));
    let counted = if by_number { args.weight(0)?.saturating_mul(args.others_printed()?) } else { 0 };
    Ok(n.saturating_mul(each).saturating_add(counted))
}

/// A sorted list of the items.
pub(crate) fn ordered(args: &CallArgs<'_>) -> Result<u64, Error> {
    let rounds = u64::from(u64::BITS - args.len(0)?.leading_zeros()) + 1;
    let compared = args.weight(0)?.saturating_add(items(args)?);
    // Strings are compared case-insensitively, by copies.
    Ok(compared.saturating_mul(2 * rounds))
}

/// A sum, each step of which may create a longer string or list.
pub(crate) fn sum(args: &CallArgs<'_>) -> Result<u64, Error> {
    let start = args.get(2, "start").map_or(Ok(0), |start| Ok::<_, Error>(Size::of(&start)?.weight))?;
    let copies = if start > 0 { args.len(0)?.saturating_mul(args.weight(0)?.saturating_add(start)) } else { 0 };
    Ok(items(args)?.saturating_add(copies))
}

/// The items joined by a separator.
pub(crate) fn joined(args: &CallArgs<'_>) -> Result<u64, Error> {
    Ok(args.items_printed(0)?.saturating_add(items(args)?))
}

/// Like [`joined`] for the method `join`, which is called on the separator.
pub(crate) fn joined_by(args: &CallArgs<'_>) -> Result<u64, Error> {
    Ok(args.len(1)?.saturating_mul(args.printed(0)?).saturating_add(args.items_printed(1)?))
}

/// The parts of a split string.
pub(crate) fn parts(args: &CallArgs<'_>) -> Result<u64, Error> {
    let Some(whole) = args.text(0) else { return args.printed(0) };
    let n = match args.text(1) {
        Some(separator) if !separator.is_empty() => whole.matches(separator).count(),
        Some(_) => whole.len(),
        None => whole.matches(char::is_whitespace).count(),
    };
    Ok((n as u64 + 1).saturating_mul(NODE).saturating_add(args.all_printed()?))
}

/// Whether `str.splitlines` ends a line at this character.
fn is_line_end(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// The lines of a string.
pub(crate) fn lines(args: &CallArgs<'_>) -> Result<u64, Error> {
    let n = args.text(0).map_or(0, |text| text.matches(is_line_end).count()) as u64;
    Ok((n + 1).saturating_mul(NODE).saturating_add(args.printed(0)?))
}

/// A string with characters removed at its ends.
pub(crate) fn stripped(args: &CallArgs<'_>) -> Result<u64, Error> {
    let tried = args.others_printed()?.max(1);
    Ok(args.printed(0)?.saturating_mul(tried).saturating_add(tried))
}

/// A string with occurrences of one string replaced by another.
pub(crate) fn replaced(args: &CallArgs<'_>) -> Result<u64, Error> {
    let n = match (args.text(0), args.text(1)) {
        (Some(text), Some(old)) if !old.is_empty() => text.matches(old).count() as u64,
        _ => args.printed(0)?.saturating_add(1),
    };
    Ok(args.all_printed()?.saturating_add(n.saturating_mul(args.printed(2)?)))
}

/// A string with its lines indented.
pub(crate) fn indented(args: &CallArgs<'_>) -> Result<u64, Error> {
    let lines = args.text(0).map_or(args.printed(0)?, |text| text.matches(is_line_end).count() as u64 + 1);
    let width = match args.get(1, "width") {
        Some(width) if width.as_str().is_some() => printed(&width)?,
        _ => args.number(1, "width").unwrap_or(4),
    };
    Ok(args.printed(0)?.saturating_add(width.saturating_mul(lines + 1)))
}

/// A string padded to a width.
pub(crate) fn padded(args: &CallArgs<'_>) -> Result<u64, Error> {
    let width = args.number(1, "width").unwrap_or(80);
    Ok(args.all_printed()?.saturating_add(width.saturating_mul(4)))
}

/// A string with tabs expanded to blanks.
pub(crate) fn expanded_tabs(args: &CallArgs<'_>) -> Result<u64, Error> {
    let tabs = args.text(0).map_or(0, |text| text.matches('\t').count() as u64);
    Ok(args.printed(0)?.saturating_add(tabs.saturating_mul(args.number(1, "tabsize").unwrap_or(8))))
}

/// A string wrapped into lines, at most one per character, with a separator after each.
pub(crate) fn wrapped(args: &CallArgs<'_>) -> Result<u64, Error> {
    let wrap = args.get(3, "wrapstring").map_or(Ok(1), |wrap| printed(&wrap))?;
    Ok(args.printed(0)?.saturating_mul(NODE.saturating_add(wrap)))
}

/// The items in groups; the second argument is the size or the number of groups.
pub(crate) fn grouped(args: &CallArgs<'_>) -> Result<u64, Error> {
    let n = args.number(1, "").unwrap_or_default();
    Ok(items(args)?.saturating_add(n.saturating_mul(2 * NODE)))
}

/// A pretty-printed value, with each level indented.
pub(crate) fn pretty(args: &CallArgs<'_>) -> Result<u64, Error> {
    let levels = args.0.first().map_or(Ok(0), |value| Ok::<_, Error>(Size::of(value)?.depth))?;
    Ok(args.printed(0)?.saturating_mul(1 + u64::from(levels)))
}

/// A format string with values. Widths and precisions are numbers in the string, or among the values (`*`).
pub(crate) fn formatted(args: &CallArgs<'_>) -> Result<u64, Error> {
    let Some(format) = args.text(0) else { return args.printed(0) };
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let widths = numbers.map(|n| n.parse().unwrap_or(u64::MAX)).fold(0u64, u64::saturating_add);
    let fields = format.matches(['%', '{']).count() as u64;
    let given = args.0.iter().filter_map(|value| i128::try_from(value.clone()).ok());
    let largest = given.map(|n| u64::try_from(n.unsigned_abs()).unwrap_or(u64::MAX)).max().unwrap_or_default();
    let stars = (format.matches('*').count() as u64).saturating_mul(largest);
    // A fill character takes up to four bytes; a float has up to 309 digits.
    let padding = widths.saturating_add(stars).saturating_mul(4);
    let values = fields.saturating_mul(args.others_printed()?.saturating_add(400));
    Ok((format.len() as u64).saturating_add(padding).saturating_add(values))
}

/// JSON with `indent` bytes per level and `separators` bytes per item.
pub(crate) fn json(value: &Value, indent: u64, separators: u64) -> Result<u64, Error> {
    let size = Size::of(value)?;
    let lines = size.weight / NODE;
    let around = indent.saturating_mul(size.depth.into()).saturating_add(separators);
    Ok(size.weight.saturating_mul(2).saturating_add(lines.saturating_mul(2).saturating_mul(around)))
}
