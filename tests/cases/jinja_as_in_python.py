"""Filters, methods, number formats and comparisons equal those of Python's jinja2, set up as in transformers."""

from lib import *

u = [{"role": "user", "content": "x"}]
for source, want in [
    ("{{ '%s=%d' % ('a', 3) }}", "a=3"),
    ("{{ '%05.2f' % 3.14159 }}", "03.14"),
    ("{{ 'x'|center(5) }}|", "  x  |"),
    ("{{ 'hello world foo'|truncate(8) }}", "hello..."),
    ("{{ 'a b c'|wordcount }}", "3"),
    ("{{ 'a b'|urlencode }}", "a%20b"),
    ("{{ '<p>x</p>'|striptags }}", "x"),
    ("{{ 'x'|int }}", "0"),
    ("{{ 'abc'.index('b') }}", "1"),
    ("{{ [1, 2, 3].index(2) }}", "1"),
    ("{{ 'x'.ljust(3) }}|", "x  |"),
    ("{{ 'x'.zfill(3) }}", "00x"),
    ("{{ 'Ab'.casefold() }}", "ab"),
    ("{{ 1e20 }} {{ 1e-7 }} {{ 1e16 }}", "1e+20 1e-07 1e+16"),
    ("{{ (1, 2) == [1, 2] }}", "False"),
    ("{{ {'b': 1, 'a': 2}|dictsort(false, 'key', true) }}", "[('b', 1), ('a', 2)]"),
]:
    check(source, render(source, u), want)
for source, want in [
    ("[{{ nothing|first }}]", "[]"),
    ("[{{ nothing|last }}]", "[]"),
    ("{{ nothing is sequence }}", "True"),
    ("{{ ''.strip is callable }}", "True"),
    ("{{ {'a': 1}.keys is defined }}", "True"),
    ("{% set n = -3 %}{{ +n }}", "-3"),
    ("{{ dict([('a', 1), ('b', 2)])|tojson }}", '{"a": 1, "b": 2}'),
    ("{{ dict({'a': 1}.items(), b=2)|tojson }}", '{"a": 1, "b": 2}'),
]:
    check(source, render(source, u), want)
call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"n": 12345678901234567890123}'}}
h = u + [
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call00001", "content": "ok"},
]
check(
    "digits of a large integer", render(template("qwen2.5"), h, [tool("f", {})]), lambda text: "12345678901234567890123" in text
)
done()
