"""Jinja features that published templates need: reject("in", list), strftime_now, tojson(ensure_ascii=False), slices with a step, loop
controls."""

from lib import *

u = [{"role": "user", "content": "x"}]

for source, want in [
    ("{{ {'a': 1, 'type': 2, 'b': 3}.keys()|reject('in', ['type'])|list }}", "['a', 'b']"),
    ("{{ {'é': 1}|tojson(ensure_ascii=False) }}", '{"é": 1}'),
    ("{{ [1, 2, 3][::-1] }}", "[3, 2, 1]"),
    ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}", "b"),
    (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "013",
    ),
    ("{{ strftime_now('%Y')|int > 2000 }}", "True"),
]:
    check(source, render(source, u), want)
done()
