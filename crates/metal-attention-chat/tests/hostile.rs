//! Hostile chat templates, which try to exhaust the stack, memory or time: each must end soon, with an error or a text, and
//! within a limit of memory. An allocator counts the memory, so these tests are a program of their own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use metal_attention_chat::{ChatTemplate, Message, RenderRequest, TemplateError, TemplateLimit, Tool, ToolCall};
use serde_json::{Value, json};

/// The limit of allocated bytes. Templates are limited to 128 MiB of values, and texts are copied when they become values.
const MAX_MEMORY: usize = 512 << 20;
/// The time limit of one template, with a margin for a slow machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// The system's allocator with a counter of allocated bytes and their peak.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn count(bytes: usize) {
    let now = ALLOCATED.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every call is passed to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller meets the contract of `GlobalAlloc`, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size);
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The outcome of compiling and rendering a template.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// A rendered text.
    Text,
    /// The error of this limit ([`TemplateLimit`]); the same for the following ones.
    Line,
    Tag,
    Name,
    Nesting,
    Attributes,
    Steps,
    Output,
    Work,
    Depth,
    Source,
    /// Another error.
    Error,
}

/// The kind of a result.
fn end_of(result: &Result<String, TemplateError>) -> End {
    let limit = match result {
        Ok(_) => return End::Text,
        Err(TemplateError::Limit { limit, .. }) => limit,
        Err(_) => return End::Error,
    };
    match limit {
        TemplateLimit::Source { .. } => End::Source,
        TemplateLimit::Line { .. } => End::Line,
        TemplateLimit::Tag { .. } => End::Tag,
        TemplateLimit::Name { .. } => End::Name,
        TemplateLimit::Nesting { .. } => End::Nesting,
        TemplateLimit::Attributes { .. } => End::Attributes,
        TemplateLimit::Steps { .. } => End::Steps,
        TemplateLimit::Output { .. } => End::Output,
        TemplateLimit::Work { .. } => End::Work,
        TemplateLimit::Depth { .. } => End::Depth,
        other => panic!("{other}"),
    }
}

fn render(source: &str, request: &RenderRequest<'_>) -> Result<String, TemplateError> {
    ChatTemplate::new(source)?.render(request).map(|prompt| prompt.text)
}

/// A template that repeats `step`, which doubles `n.x`, `times` times, then has `then`.
fn doubled(start: &str, step: &str, times: usize, then: &str) -> String {
    format!(
        "{{% set n = namespace(x={start}) %}}{{% for i in range({times}) %}}{{% set n.x = {step} %}}{{% endfor %}}{then}"
    )
}

/// A template that sets `x` to a text of 16 MiB, then has `rest`.
fn with_text(rest: &str) -> String {
    format!("{{% set x = 'a' * 16777216 %}}{rest}")
}

/// Statements that set `n` attributes.
fn attributes(n: usize) -> String {
    (0..n).fold(String::new(), |all, i| all + &format!("{{% set n.a{i} = 1 %}}"))
}

/// The cases: name, expected outcome, template.
fn hostile() -> Vec<(&'static str, End, String)> {
    // Nested constructs on several lines, so that the limit of a line's length does not apply.
    let many = |piece: &str, n: usize| -> String {
        let line = |start: usize| piece.repeat(1000.min(n - start));
        (0..n).step_by(1000).map(line).collect::<Vec<_>>().join("\n")
    };
    let tag = |body: String| format!("{{{{ {body} }}}}");
    let mut cases: Vec<(&str, End, String)> = Vec::new();
    let mut case = |name, end, source: String| cases.push((name, end, source));

    // Attacks on the parser and the compiler.
    case("attributes in a row", End::Tag, tag("a".to_owned() + &many(".b", 300_000)));
    case("items in a row", End::Tag, tag("a".to_owned() + &many("[0]", 200_000)));
    case("calls in a row", End::Tag, tag("a".to_owned() + &many("()", 200_000)));
    case("minus signs", End::Tag, tag(many("-", 400_000) + "1"));
    case("not not", End::Tag, tag(many("not ", 200_000) + "1"));
    case("concatenations", End::Tag, tag(many("1 ~ ", 200_000) + "1"));
    case("sums", End::Tag, tag(many("1+", 300_000) + "1"));
    case("powers", End::Tag, tag(many("1**", 200_000) + "1"));
    case("ands", End::Tag, tag(many("1 and ", 150_000) + "1"));
    case("comparisons", End::Tag, tag(many("1<", 300_000) + "1"));
    case("filters", End::Tag, tag("1".to_owned() + &many("|string", 100_000)));
    case("tests", End::Tag, tag("1".to_owned() + &many(" is odd", 100_000)));
    case("filters of a block", End::Tag, format!("{{% filter a{} %}}{{% endfilter %}}", many("|string", 100_000)));
    case("conditions", End::Tag, tag(many("1 if 1 else ", 80_000) + "1"));
    case("conditions without an end", End::Tag, tag("1".to_owned() + &many(" if 1", 80_000)));
    case("parentheses", End::Tag, tag(many("(", 400_000)));
    case("lists", End::Tag, tag(many("[", 400_000)));
    case("dictionaries", End::Tag, tag(many("{1:", 300_000)));
    case("targets", End::Tag, format!("{{% for {}x in y %}}{{% endfor %}}", many("(", 400_000)));
    case("targets of set", End::Tag, format!("{{% set {}x = y %}}", many("(", 400_000)));
    case("a chain below the length of a tag", End::Nesting, tag(many("1~", 900) + "1"));
    case("signs below the length of a tag", End::Nesting, tag(many("-", 1900) + "1"));
    case("nots below the length of a tag", End::Nesting, tag(many("not ", 1900) + "1"));
    case("attributes below the length of a tag", End::Nesting, tag("a".to_owned() + &many(".b", 900)));
    case("conditions below the length of a tag", End::Nesting, tag(many("1 if 1 else ", 450) + "1"));
    case("parentheses below the length of a tag", End::Error, tag(many("(", 900) + "1" + &many(")", 900)));
    case("ifs", End::Nesting, many("{% if 1 %}", 50_000));
    case("elifs", End::Nesting, "{% if 1 %}".to_owned() + &many("{% elif 1 %}", 50_000) + "{% endif %}");
    case("fors", End::Nesting, many("{% for a in b %}", 50_000));
    case("macros", End::Nesting, many("{% macro m() %}", 50_000));
    case("calls", End::Nesting, many("{% call m() %}", 50_000));
    case("sets", End::Nesting, many("{% set x | f(a=1) %}", 40_000));
    case("withs", End::Nesting, many("{% with %}", 50_000));
    case("a long name", End::Name, tag("a".repeat(50_000)));
    case("a long template", End::Source, many("x", (1 << 20) + 1));
    case("many tags", End::Text, many("{{1}}", 200_000));
    case("many lines", End::Text, many("\n", 1_000_000));
    case("many attributes", End::Attributes, attributes(200));
    case("an open comment", End::Error, many("{#", 500_000));
    case("open tags", End::Tag, many("{%", 500_000));
    case("a long line", End::Line, "x".repeat(70_000));
    case("a constant of constants", End::Work, tag("'x' * 100000000 * 1000".into()));

    // Texts.
    case("a doubled text", End::Work, doubled("'ab'", "n.x ~ n.x", 60, "{{ n.x|length }}"));
    case("a doubled text, with +", End::Work, doubled("'ab'", "n.x + n.x", 60, "{{ n.x|length }}"));
    case("a doubled text, with *", End::Work, doubled("'ab'", "n.x * 2", 60, ""));
    case("a doubled text, by join", End::Work, doubled("'ab'", "[n.x, n.x]|join", 60, ""));
    case("a doubled text, by a method", End::Work, doubled("'ab'", "n.x.join([n.x, n.x])", 60, ""));
    case("a doubled text, by format", End::Work, doubled("'ab'", "'%s%s'|format(n.x, n.x)", 60, ""));
    case("a doubled text, by str.format", End::Work, doubled("'ab'", "'{0}{0}'.format(n.x)", 60, ""));
    case("a doubled text, by replace", End::Work, doubled("'ab'", "n.x|replace('a', 'aa')|replace('b', 'bb')", 60, ""));
    case("a doubled text, by a method of replacing", End::Work, doubled("'ab'", "n.x.replace('', 'xy')", 60, ""));
    case("a doubled text, by JSON", End::Work, doubled("'\"'", "n.x|tojson", 60, ""));
    case(
        "a doubled text, by a macro",
        End::Output,
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}".to_owned() + &doubled("'ab'", "m(n.x)", 60, ""),
    );
    case(
        "a doubled text, captured",
        End::Output,
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}\
        {% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
            .into(),
    );
    case(
        "a doubled text, filtered",
        End::Work,
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}\
        {% set n.x | replace('a', 'aa') | upper | lower %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}"
            .into(),
    );
    case("a doubled text, escaped", End::Work, doubled("'&'", "n.x|replace('&', '&&')|e|string", 60, ""));
    case("a repeated text", End::Work, tag("'x' * 100000000000".into()));
    case("a repeated list", End::Work, tag("[1] * 100000000000".into()));
    case("a repeated tuple", End::Work, tag("(1, 2) * 90000000".into()));
    case("no text, repeated", End::Text, tag("'' * 9223372036854775807".into()));
    case("replace", End::Work, with_text("{{ x|replace('a', x) }}"));
    case("a method of replacing", End::Work, with_text("{{ x.replace('a', x) }}"));
    case("indent", End::Work, tag("'x'|indent(4000000000, true)".into()));
    case("indent by name", End::Work, tag("'x'|indent(width=18446744073709551615)".into()));
    case("many lines, indented", End::Work, tag("('\\n' * 1000000)|indent(1000, true, true)".into()));
    case("a width", End::Work, tag("'%4000000000d'|format(1)".into()));
    case("a width among the values", End::Work, tag("'%*d'|format(4000000000, 1)".into()));
    case("a precision", End::Work, tag("'%.4000000000f'|format(1.5)".into()));
    case("a width of str.format", End::Work, tag("'{:>4000000000}'.format(1)".into()));
    case("a width of zeros", End::Work, tag("'{:04000000000,}'.format(1)".into()));
    case("many widths", End::Work, tag("('%99999d' * 100000)|format(1)".into()));
    case("join by a long text", End::Work, with_text("{{ range(100000)|join(x) }}"));
    case("a method of joining", End::Work, with_text("{{ x.join(range(100000)) }}"));
    case(
        "JSON with an indent",
        End::Work,
        with_text("{{ [[[[1]]]]|tojson(indent=x) }}{{ range(1000)|tojson(indent=x) }}"),
    );
    case("JSON with separators", End::Work, with_text("{{ range(1000)|tojson(separators=(x, x)) }}"));
    case("split into letters", End::Work, with_text("{{ x.split('a')|length }}"));
    case("lines", End::Work, tag("('\\n' * 16777216).splitlines()|length".into()));
    case("letters as a list", End::Work, with_text("{{ x|list|length }}"));
    case(
        "letters as arguments",
        End::Work,
        with_text("{% macro m() %}{% endmacro %}{% for i in range(99) %}{{ m(*x) }}{% endfor %}"),
    );
    case("output", End::Output, with_text("{{ x }}{{ x }}{{ x }}"));
    case(
        "captured output",
        End::Output,
        format!("{{% set x %}}{{% for i in range(100000) %}}{}{{% endfor %}}{{% endset %}}", many("x", 100_000)),
    );
    case("a long error", End::Error, with_text("{{ raise_exception(x) }}"));
    case("a long time", End::Error, tag("strftime_now('%Y' * 1000000)".into()));

    // Lists.
    case("a doubled list", End::Work, doubled("[1]", "n.x + n.x", 60, "{{ n.x|length }}"));
    case("a doubled list, with *", End::Work, doubled("[1]", "n.x * 2", 60, ""));
    case("a doubled list, chained", End::Work, doubled("[1]", "n.x|chain(n.x)|list", 60, ""));
    case("a doubled list, summed", End::Work, doubled("[1]", "[n.x, n.x]|sum(start=[])", 60, ""));
    case("range", End::Work, tag("range(4000000000)|length".into()));
    case("range of extremes", End::Work, tag("range(-9223372036854775807, 9223372036854775807, 3)".into()));
    case(
        "range backwards",
        End::Text,
        tag("range(-9223372036854775807, 9223372036854775807, -9223372036854775807)".into()),
    );
    case("batch", End::Work, tag("[1]|batch(4000000000, 0)|length".into()));
    case("slice", End::Work, tag("[1]|slice(4000000000)|length".into()));
    case(
        "slices of extremes",
        End::Text,
        tag("'abc'[-9223372036854775807:9223372036854775807:-9223372036854775807] ~ ''[::-1] ~ [][::-1]".into()),
    );
    case("a deep list, printed", End::Depth, doubled("[]", "[n.x]", 90_000, "{{ n.x }}"));
    case("a deep list, compared", End::Depth, doubled("[]", "[n.x]", 90_000, "{{ n.x == [n.x] }}"));
    case("a deep list as JSON", End::Depth, doubled("[]", "[n.x]", 90_000, "{{ n.x|tojson }}"));
    case("a deep list, dropped", End::Depth, doubled("[]", "[n.x]", 90_000, ""));
    case("a deep dictionary", End::Depth, doubled("{}", "{'a': n.x}", 90_000, ""));
    case("a deep tuple", End::Depth, doubled("()", "(n.x,)", 90_000, ""));
    case("a deep list of slices", End::Text, doubled("[1, 2]", "n.x[:]", 90_000, "{{ n.x }}"));
    case("a deep list of filters", End::Text, doubled("[1, 2]", "n.x|reverse", 90_000, "{{ n.x }}"));
    case("a deep list of batches", End::Depth, doubled("[1, 2]", "n.x|batch(3)", 90_000, ""));
    case("a deep list of groups", End::Depth, doubled("[1, 2]", "n.x|zip", 90_000, ""));
    case("a wide and deep list, printed", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ n.x }}"));
    case(
        "a wide and deep list, compared",
        End::Work,
        doubled("[1]", "[n.x, n.x]", 60, "{{ n.x == [n.x[0]] + [n.x[1]] }}"),
    );
    case("a wide and deep list, as a key", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ {}[n.x] }}"));
    case("a wide and deep list, in a dictionary", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ {n.x: 1}|length }}"));
    case("a wide and deep list, searched", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ 2 in n.x }}"));
    case(
        "a wide and deep list, chained in comparisons",
        End::Work,
        doubled("[1]", "[n.x, n.x]", 60, "{{ 1 < n.x < n.x }}"),
    );
    case(
        "a wide and deep list, tested",
        End::Work,
        doubled("[1]", "[n.x, n.x]", 60, "{{ n.x is eq([n.x[0]] + [n.x[1]]) }}"),
    );
    case("a wide and deep list as a text", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ n.x|upper }}"));
    case("a wide and deep list as JSON", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ n.x|tojson }}"));
    case("a wide and deep list, for people", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ n.x|pprint }}"));
    case("a wide and deep list, sorted", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ [n.x, n.x]|sort }}"));
    case("a wide and deep list, counted", End::Work, doubled("[1]", "[n.x, n.x]", 60, "{{ [n.x].count([n.x]) }}"));

    // Values that contain themselves.
    case(
        "a namespace in itself",
        End::Depth,
        "{% set n = namespace() %}{% for i in range(999) %}{% set n.x = n %}{% endfor %}{{ n }}".into(),
    );
    case(
        "a namespace twice in itself",
        End::Work,
        "{% set n = namespace() %}{% for i in range(99) %}{% set n.x = n %}{% set n.y = n %}{% endfor %}{{ n }}".into(),
    );
    case(
        "a namespace in a list in itself",
        End::Text,
        "{% set n = namespace() %}{% set n.x = [n] %}{{ n }}{{ n == n.x }}{{ n|tojson }}".into(),
    );
    case(
        "namespaces in a row",
        End::Depth,
        "{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = namespace(x=n.x) %}{% endfor %}".into(),
    );
    case("a namespace of many", End::Attributes, "{% set d = dict(range(1000)|zip(range(1000))) %}{{ namespace(d) }}{% set n = namespace(**{'a': 1}) %}{% for i in range(1) %}{% endfor %}\
        {% set n = namespace(x=1) %}".to_owned() + &attributes(200));
    case(
        "loops that keep each other",
        End::Depth,
        "{% set n = namespace(l=1) %}{% for i in range(90000) %}{% for j in [1] %}\
        {% if loop.changed(n.l) %}{% endif %}{% set n.l = [loop, n.l] %}{% endfor %}{% endfor %}"
            .into(),
    );
    case(
        "a loop that keeps itself",
        End::Text,
        "{% for i in [1, 2] %}{{ loop.changed(loop) }}{{ loop.changed([loop]) }}{% endfor %}".into(),
    );

    case(
        "methods of lists of methods",
        End::Depth,
        "{% set n = namespace(x=[1]) %}{% for i in range(99999) %}{% set n.x = [n.x.count] %}{% endfor %}".into(),
    );
    case(
        "cyclers of cyclers",
        End::Error,
        "{% set n = namespace(x=1) %}{% for i in range(99999) %}{% set n.x = cycler(n.x) %}{% endfor %}".into(),
    );
    case("a width of a method", End::Work, tag("'x'.ljust(4000000000)".into()));
    case("zeros of a method", End::Work, tag("'x'.zfill(9223372036854775807)".into()));
    case("a centre", End::Work, tag("'x'|center(4000000000)".into()));
    case("tabs", End::Work, tag("('\\t' * 100000).expandtabs(100000)".into()));
    case("a width of %", End::Work, tag("'%4000000000d' % 1".into()));
    case("a width of % among the values", End::Work, tag("'%*d' % (4000000000, 1)".into()));
    case("many values of %", End::Work, with_text("{{ ('%s' * 100) % ((x,) * 100) }}"));
    case("lines with a long text after each", End::Work, with_text("{{ ('a ' * 100000)|wordwrap(1, wrapstring=x) }}"));
    case("an indent of a text", End::Work, with_text("{{ ('a\\n' * 1000)|indent(x) }}"));
    case(
        "a method called often",
        End::Work,
        with_text("{% set f = x.upper %}{% for i in range(99999) %}{{ f() }}{% endfor %}"),
    );
    case(
        "large lists compared often",
        End::Work,
        "{% set x = range(10000)|list %}{% for i in range(100000) %}{% if x < x + [1] %}{% endif %}{% endfor %}".into(),
    );

    // Recursion.
    case("a macro of itself", End::Error, "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into());
    case(
        "two macros of each other",
        End::Error,
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}".into(),
    );
    case(
        "a macro of itself, twice",
        End::Error,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}".into(),
    );
    case(
        "a macro of itself, twice, not deep",
        End::Steps,
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(30) }}".into(),
    );
    case(
        "callers",
        End::Error,
        "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{% call m() %}x{% endcall %}".into(),
    );
    case("a loop of itself", End::Error, "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".into());
    case(
        "a loop of itself by another name",
        End::Error,
        "{% for i in [1] recursive %}{% set l = loop %}{{ l([1]) }}{% endfor %}".into(),
    );
    case("a block of itself", End::Error, "{% block b %}{{ self.b() }}{% endblock %}".into());
    case("super of nothing", End::Error, "{% block b %}{{ super() }}{% endblock %}".into());
    case("an include of itself", End::Error, "{% include 'chat template' %}".into());
    case("an import of itself", End::Error, "{% import 'chat template' as x %}".into());
    case("a template that extends itself", End::Error, "{% extends 'chat template' %}".into());

    // Time.
    case(
        "loops in loops",
        End::Steps,
        "{% for i in range(9999) %}{% for j in range(9999) %}{% set x = i %}{% endfor %}{% endfor %}".into(),
    );
    case(
        "a text searched often",
        End::Work,
        with_text("{% for i in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}"),
    );
    case("a text counted often", End::Work, with_text("{% for i in range(100000) %}{{ x.count('b') }}{% endfor %}"));
    case("a text measured often", End::Work, with_text("{% for i in range(100000) %}{{ x|length }}{% endfor %}"));
    case(
        "a text upper and lower",
        End::Work,
        with_text("{% for i in range(100000) %}{% set y = x|upper|lower %}{% endfor %}"),
    );
    case("a text's last letter, often", End::Work, with_text("{% for i in range(100000) %}{{ x[-1] }}{% endfor %}"));
    case(
        "a text's last letter by a path",
        End::Work,
        with_text("{% for i in range(100000) %}{{ [[x]]|map(attribute='0.9999999')|list }}{% endfor %}"),
    );
    case(
        "a text's letters, begun often",
        End::Work,
        with_text("{% for i in range(100000) %}{% for c in x %}{% break %}{% endfor %}{% endfor %}"),
    );
    case(
        "a text's letters, by a loop of itself",
        End::Work,
        with_text(
            "{% for i in range(99999) recursive %}{% if i is number %}{{ loop(x) }}{% else %}{% break %}{% endif %}{% endfor %}",
        ),
    );
    case("a text stripped of many letters", End::Work, with_text("{{ x.strip(x) }}"));
    case("a text trimmed of many letters", End::Work, with_text("{{ x|trim(x) }}"));
    case(
        "a long text as a key",
        End::Work,
        with_text("{% set d = {x: 1} %}{% for i in range(100000) %}{{ d[x] }}{% endfor %}"),
    );
    case(
        "a long text as a key of get",
        End::Work,
        with_text("{% set d = {x: 1} %}{% for i in range(100000) %}{{ d.get(x) }}{% endfor %}"),
    );
    case(
        "a list sorted often",
        End::Work,
        "{% set x = range(10000)|list %}{% for i in range(100000) %}{% set y = x|sort %}{% endfor %}".into(),
    );
    case("a list of long texts, unique", End::Work, with_text("{{ ([x] * 100000)|unique|list }}"));
    case("a sum of texts", End::Work, tag("(['a' * 1000] * 100000)|sum(start='')".into()));
    case(
        "a condition on a large namespace",
        End::Work,
        "{% set n = namespace() %}".to_owned()
            + &attributes(60)
            + "{% for i in range(99999) %}{% for j in range(99999) %}{% if n %}{% endif %}{% endfor %}{% endfor %}",
    );
    case(
        "equal lists, compared often",
        End::Work,
        "{% set x = range(10000)|list %}{% set y = x + [] %}\
        {% for i in range(100000) %}{% if x == y %}{% endif %}{% endfor %}"
            .into(),
    );

    case(
        "a look through many loops",
        End::Steps,
        "{% set n = namespace() %}{% for i in [1] recursive %}\
        {% for m in range(9999) %}{% set n.y = 1 %}{% endfor %}{{ loop([1]) }}{% endfor %}"
            .into(),
    );

    case(
        "numbers of many digits",
        End::Work,
        "{% for i in range(999) %}{% for j in range(999) %}{{ 1e-320 }}{% endfor %}{% endfor %}".into(),
    );

    // Constructs that the engine does not support.
    case(
        "a division by zero",
        End::Text,
        "{{ 1 is divisibleby 0 }}{{ 1.5 is divisibleby 0.0 }}{{ true is divisibleby false }}".into(),
    );
    case("a cycle of nothing", End::Error, "{% for i in [1] %}{{ loop.cycle() }}{% endfor %}".into());
    case("a cycle of an empty list", End::Error, "{% for i in [1] %}{{ loop.cycle(*[]) }}{% endfor %}".into());
    case(
        "a break out of a block",
        End::Error,
        "{% for i in [1] %}{% with a = 1 %}{% break %}{% endwith %}{% endfor %}".into(),
    );
    case(
        "a break out of a captured text",
        End::Error,
        "{% for i in [1] %}{% set a %}{% break %}{% endset %}{% endfor %}".into(),
    );
    case("the engine's insides", End::Error, "{{ debug() }}".into());
    cases
}

#[test]
fn hostile_templates_end() {
    let cases = hostile();
    assert!(cases.len() >= 60, "{}", cases.len());
    let (sender, results) = mpsc::channel();
    let sources: Vec<String> = cases.iter().map(|(_, _, source)| source.clone()).collect();
    thread::spawn(move || {
        let messages = [Message::user("x")];
        for source in sources {
            let before = ALLOCATED.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            let result = render(&source, &RenderRequest { messages: &messages, ..Default::default() });
            let peak = PEAK.load(Ordering::Relaxed) - before;
            drop(source);
            if sender.send((result, peak)).is_err() {
                return;
            }
        }
    });
    let mut wrong = Vec::new();
    for (name, expected, _) in &cases {
        let start = std::time::Instant::now();
        let (result, peak) = results.recv_timeout(TIME_LIMIT).unwrap_or_else(|_| panic!("{name} does not end"));
        let end = end_of(&result);
        println!("{name}: {end:?}, {} KiB, {:?}", peak >> 10, start.elapsed());
        let message = result.err().map(|error| error.to_string()).unwrap_or_default();
        if end != *expected || peak > MAX_MEMORY || message.len() > 3000 || message.contains("has a fault") {
            wrong.push(format!("{name}: {end:?}, not {expected:?}; {} MiB; {message:.200}", peak >> 20));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Arguments and tools of a request may be nested as deep as the JSON parser allows; deeper arguments stay text.
#[test]
fn deep_arguments_and_tools_are_rendered() {
    let deep = |n: usize| format!("{{\"a\": {}{}}}", "[".repeat(n), "]".repeat(n));
    let source = "{{ tools|tojson }}{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}\
                  {{ c.function.arguments == tools }}{{ c }}{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(source).unwrap();
    for n in [10, 120, 100_000] {
        let arguments = deep(n);
        let call = Message { tool_calls: vec![ToolCall::new("1", "f", &arguments)], ..Message::assistant("") };
        let parameters: Value = serde_json::from_str(&deep(n.min(110))).unwrap();
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        let tools = [Tool::try_from(tool).unwrap()];
        let prompt =
            template.render(&RenderRequest { messages: &[call], tools: &tools, ..Default::default() }).unwrap();
        assert!(prompt.text.len() > 3 * n, "{n}");
    }
}

#[test]
fn errors_name_the_limit() {
    let message = |source: &str| render(source, &RenderRequest::default()).unwrap_err().to_string();
    assert_eq!(
        message("\n{{ 'x' * 1000000000 }}"),
        "the chat template goes beyond a limit: it makes or searches more than 134230560 bytes of values"
    );
    assert_eq!(
        message(&format!("\n\n{{{{ {}1 }}}}", "-".repeat(3000))),
        "the chat template goes beyond a limit: the tag in line 3 has more than 2000 words and signs"
    );
    assert_eq!(
        message(&"{% if 1 %}".repeat(200)),
        "the chat template goes beyond a limit: blocks or operators are nested more than 150 deep in line 1"
    );
}
