//! Registers the built-in filters, tests, functions and methods of the template language. Each is charged its price
//! (`prices.rs`) to the meter before it runs, and its result is measured (`measured.rs`).

use minijinja::value::{DynObject, ObjectRepr, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions, tests};

use crate::bound_method::bound_method;
use crate::counters;
use crate::filters as jinja_filters;
use crate::measured::{NODE, len, measure};
use crate::meter::charge;
use crate::operators::check_attributes;
use crate::prices::{self, CallArgs, Price};
use crate::python_methods;
use crate::python_str::ExactNumber;

/// Adds the built-in filters, tests and functions to `env`.
pub(crate) fn add_builtins(env: &mut Environment<'_>) {
    for (names, price, filter) in all_filters() {
        for &name in names {
            env.add_filter(name, priced(price, filter.clone()));
        }
    }
    for (names, price, test) in all_tests() {
        for &name in names {
            env.add_test(name, priced(price, test.clone()));
        }
    }
    env.add_function("dict", priced(prices::items, stateless(jinja_filters::dictionary)));
    env.add_function("range", range);
    env.add_function("namespace", namespace);
    env.add_function("joiner", priced(prices::text, Value::from_function(counters::joiner)));
    env.add_function("cycler", priced(prices::text, Value::from_function(counters::cycler)));
}

/// A built-in: its names, its price and its function.
type Builtin = (&'static [&'static str], Price, Value);

/// The built-in filters, except `tojson` (see `environment.rs`) and those that expose the engine's internals.
fn all_filters() -> Vec<Builtin> {
    let f = |names: &'static [&'static str], price: Price, filter: Value| (names, price, filter);
    vec![
        f(&["abs"], prices::free, stateless(jinja_filters::abs)),
        f(&["attr"], prices::text, Value::from_function(filters::attr)),
        f(&["batch"], prices::grouped, Value::from_function(filters::batch)),
        f(&["bool"], prices::free, Value::from_function(filters::bool)),
        f(&["capitalize"], prices::changed_text, Value::from_function(filters::capitalize)),
        f(&["chain"], prices::ordered, Value::from_function(filters::chain)),
        f(&["default", "d"], prices::free, stateless(jinja_filters::default)),
        f(&["dictsort"], prices::ordered, stateless(jinja_filters::dictsort)),
        f(&["escape", "e"], prices::changed_text, stateless(jinja_filters::escape)),
        f(&["first"], prices::free, stateless(|args| jinja_filters::at_end(args, false))),
        f(&["float"], prices::text, stateless(jinja_filters::to_float)),
        f(&["format"], prices::formatted, stateless(jinja_filters::format)),
        f(&["groupby"], prices::ordered, stateful(jinja_filters::group_by)),
        f(&["indent"], prices::indented, stateless(jinja_filters::indent)),
        f(&["int"], prices::text, stateless(jinja_filters::int)),
        f(&["items"], prices::items, stateless(jinja_filters::items)),
        f(&["join"], prices::joined, stateless(jinja_filters::join)),
        f(&["last"], prices::last, stateless(|args| jinja_filters::at_end(args, true))),
        f(&["length", "count"], prices::last, Value::from_function(length)),
        f(&["lines"], prices::lines, Value::from_function(filters::lines)),
        f(&["list"], prices::items, Value::from_function(filters::list)),
        f(&["lower"], prices::changed_text, Value::from_function(filters::lower)),
        f(&["map"], prices::items, Value::from_function(filters::map)),
        f(&["max"], prices::ordered, Value::from_function(filters::max)),
        f(&["min"], prices::ordered, Value::from_function(filters::min)),
        f(&["pprint"], prices::pretty, stateless(jinja_filters::pretty)),
        f(&["reject"], prices::items, Value::from_function(filters::reject)),
        f(&["rejectattr"], prices::items, Value::from_function(filters::rejectattr)),
        f(&["replace"], prices::replaced, stateless(jinja_filters::replace)),
        f(&["reverse"], prices::items, stateless(jinja_filters::reverse)),
        f(&["round"], prices::free, stateless(jinja_filters::round)),
        f(&["safe"], prices::text, Value::from_function(filters::safe)),
        f(&["select"], prices::items, Value::from_function(filters::select)),
        f(&["selectattr"], prices::items, Value::from_function(filters::selectattr)),
        f(&["slice"], prices::grouped, Value::from_function(filters::slice)),
        f(&["sort"], prices::ordered, stateful(jinja_filters::sort)),
        f(&["split"], prices::parts, Value::from_function(filters::split)),
        f(&["string"], prices::text, stateless(jinja_filters::string)),
        f(&["sum"], prices::sum, Value::from_function(filters::sum)),
        f(&["title"], prices::changed_text, Value::from_function(filters::title)),
        f(&["trim"], prices::stripped, Value::from_function(filters::trim)),
        f(&["unique"], prices::ordered, stateful(jinja_filters::unique)),
        f(&["upper"], prices::changed_text, Value::from_function(filters::upper)),
        f(&["center"], prices::padded, stateless(jinja_filters::center)),
        f(&["forceescape"], prices::changed_text, stateless(jinja_filters::force_escape)),
        f(&["striptags"], prices::changed_text, stateless(jinja_filters::strip_tags)),
        f(&["truncate"], prices::changed_text, stateless(jinja_filters::truncate)),
        f(&["urlencode"], prices::changed_text, stateless(jinja_filters::url_encode)),
        f(&["wordcount"], prices::changed_text, stateless(jinja_filters::word_count)),
        f(&["wordwrap"], prices::wrapped, stateless(jinja_filters::word_wrap)),
        f(&["xmlattr"], prices::changed_text, stateless(jinja_filters::xml_attributes)),
        f(&["zip"], prices::items, Value::from_function(filters::zip)),
    ]
}

/// The built-in tests.
fn all_tests() -> Vec<Builtin> {
    let t = |names: &'static [&'static str], price: Price, test: Value| (names, price, test);
    vec![
        t(&["boolean"], prices::free, Value::from_function(tests::is_boolean)),
        t(&["defined"], prices::free, Value::from_function(tests::is_defined)),
        t(&["divisibleby"], prices::free, Value::from_function(is_divisible_by)),
        t(&["endingwith"], prices::text, Value::from_function(tests::is_endingwith)),
        t(&["eq", "equalto", "=="], prices::compared, Value::from_function(tests::is_eq)),
        t(&["even"], prices::free, Value::from_function(tests::is_even)),
        t(&["false"], prices::free, Value::from_function(tests::is_false)),
        t(&["filter"], prices::text, Value::from_function(tests::is_filter)),
        t(&["float"], prices::free, Value::from_function(tests::is_float)),
        t(&["ge", ">="], prices::compared, Value::from_function(tests::is_ge)),
        t(&["gt", "greaterthan", ">"], prices::compared, Value::from_function(tests::is_gt)),
        t(&["in"], prices::contained, Value::from_function(tests::is_in)),
        t(&["callable"], prices::free, Value::from_function(is_callable)),
        t(&["integer"], prices::free, Value::from_function(is_integer)),
        t(&["le", "<="], prices::compared, Value::from_function(tests::is_le)),
        t(&["lower"], prices::text, Value::from_function(tests::is_lower)),
        t(&["lt", "lessthan", "<"], prices::compared, Value::from_function(tests::is_lt)),
        t(&["mapping"], prices::free, Value::from_function(tests::is_mapping)),
        t(&["ne", "!="], prices::compared, Value::from_function(tests::is_ne)),
        t(&["none"], prices::free, Value::from_function(tests::is_none)),
        t(&["number"], prices::free, Value::from_function(is_number)),
        t(&["odd"], prices::free, Value::from_function(tests::is_odd)),
        t(&["safe", "escaped"], prices::free, Value::from_function(tests::is_safe)),
        t(&["sameas"], prices::compared, Value::from_function(tests::is_sameas)),
        t(&["startingwith"], prices::text, Value::from_function(tests::is_startingwith)),
        t(&["string"], prices::free, Value::from_function(tests::is_string)),
        t(&["test"], prices::text, Value::from_function(tests::is_test)),
        t(&["true"], prices::free, Value::from_function(tests::is_true)),
        t(&["undefined"], prices::free, Value::from_function(tests::is_undefined)),
        t(&["upper"], prices::text, Value::from_function(tests::is_upper)),
        // As in Jinja2, everything with a length and items is a sequence, strings included.
        t(&["sequence"], prices::free, Value::from_function(is_sequence)),
        t(&["iterable"], prices::free, Value::from_function(is_iterable)),
    ]
}

/// The length of a value. As in Jinja2, an undefined value has length 0.
fn length(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(0.into()) } else { filters::length(value).map(Value::from) }
}

fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined)
}

/// Whether a value is a function, macro or method. Undefined values are callable, too, as in Jinja2; the call fails.
fn is_callable(value: &Value) -> bool {
    let is_function = |object: &DynObject| object.repr() == ObjectRepr::Plain && !object.is::<ExactNumber>();
    value.is_undefined() || value.as_object().is_some_and(is_function)
}

/// Whether a value is a number. In Python `true` and `false` are numbers.
fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || value.downcast_object_ref::<ExactNumber>().is_some()
}

fn is_integer(value: &Value) -> bool {
    let exact = value.downcast_object_ref::<ExactNumber>();
    exact.map_or_else(|| value.is_integer() && value.kind() == ValueKind::Number, ExactNumber::is_integer)
}

/// Replaces minijinja's test, which panics on zero. Nothing is divisible by zero.
fn is_divisible_by(value: &Value, other: &Value) -> bool {
    if let (Ok(value), Ok(other)) = (i128::try_from(value.clone()), i128::try_from(other.clone())) {
        return other != 0 && value.wrapping_rem(other) == 0;
    }
    matches!((f64::try_from(value.clone()), f64::try_from(other.clone())), (Ok(a), Ok(b)) if a % b == 0.0)
}

/// Whether a value can be iterated over. As in Python, `None` cannot.
fn is_iterable(value: &Value) -> bool {
    value.kind() == ValueKind::String || (!value.is_none() && value.try_iter().is_ok())
}

/// Wraps a function so that it is charged before it runs, and its arguments and result are measured.
fn priced(
    price: Price,
    function: Value,
) -> impl Fn(&mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = measure_all(args.into_values())?;
        run(price, &args, |args| function.call(state, args))
    }
}

/// The arguments with their values measured.
fn measure_all(args: Vec<Value>) -> Result<Vec<Value>, Error> {
    args.into_iter().map(|arg| if arg.is_kwargs() { Ok(arg) } else { measure(arg) }).collect()
}

/// Charges the price, runs `function` and measures its result.
fn run(price: Price, args: &[Value], function: impl FnOnce(&[Value]) -> Result<Value, Error>) -> Result<Value, Error> {
    charge(price(&CallArgs(args))?)?;
    measure(function(args)?)
}

/// Calls a method of a string, list or dictionary, after charging for it. `method` has Python's name.
pub(crate) fn priced_method(value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let price: Price = match (value.kind(), method) {
        (ValueKind::String, "startswith" | "endswith") if args.len() == 1 => prices::ends,
        (ValueKind::String, "removeprefix" | "removesuffix") => prices::text,
        (ValueKind::String, "strip" | "lstrip" | "rstrip") => prices::stripped,
        (ValueKind::String, "split" | "rsplit" | "partition" | "rpartition") => prices::parts,
        (ValueKind::String, "splitlines") => prices::lines,
        (ValueKind::String, "replace") => prices::replaced,
        (ValueKind::String, "join") => prices::joined_by,
        (ValueKind::String, "format") => prices::formatted,
        (ValueKind::String, "center" | "ljust" | "rjust" | "zfill") => prices::padded,
        (ValueKind::String, "expandtabs") => prices::expanded_tabs,
        (ValueKind::String, _) => prices::changed_text,
        (ValueKind::Map, "get") => prices::key,
        (ValueKind::Map, _) => prices::items,
        // Lists have the methods `count` and `index`.
        (_, _) => prices::contained_in,
    };
    let mut all = vec![value.clone()];
    all.extend_from_slice(args);
    let all = measure_all(all)?;
    run(price, &all, |all| python_methods::call(&all[0], method, &all[1..]))
}

/// The attribute `name` of a value. As in Python, a method takes precedence over an item of the same name.
pub(crate) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if python_methods::has_method(value, name) {
        return bound_method(value, name);
    }
    value.get_attr(name)
}

/// A filter that depends on its arguments only.
fn stateless(filter: fn(&[Value]) -> Result<Value, Error>) -> Value {
    Value::from_function(move |args: Rest<ValueOrKwargs>| filter(&args.into_values()))
}

/// A filter that needs the state of the rendering.
fn stateful(filter: fn(&State<'_, '_>, &[Value]) -> Result<Value, Error>) -> Value {
    Value::from_function(move |state: &State<'_, '_>, args: Rest<ValueOrKwargs>| filter(state, &args.into_values()))
}

/// Python's `range`, as a list.
fn range(lower: i64, upper: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (start, stop) = upper.map_or((0, lower), |upper| (lower, upper));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::new(ErrorKind::InvalidOperation, "cannot create range with step of 0"));
    }
    let distance = (i128::from(stop) - i128::from(start)) * i128::from(step.signum());
    let n = distance.max(0).unsigned_abs().div_ceil(step.unsigned_abs().into());
    charge(u64::try_from(n).unwrap_or(u64::MAX).saturating_mul(NODE))?;
    crate::measured::list((0..n as i64).map(|i| Value::from(start + i * step)).collect())
}

/// Jinja's `namespace()`, with measured attributes.
fn namespace(state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = measure_all(args.into_values())?;
    let attributes = measure(jinja_filters::dictionary(&args)?)?;
    check_attributes(len(&attributes)? as usize)?;
    Value::from_function(functions::namespace).call(state, &[attributes])
}
