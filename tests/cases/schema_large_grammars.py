"""Schemas whose grammar would become very large: a response within 3 s, and the server still works. Runs in 3 GB of address space."""

from lib import *
import resource, time

resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
M = lambda *k: {"allOf": [{"type": "integer", "multipleOf": x} for x in k]}
for name, schema in (
    ("four primes", M(9973, 9967, 9949, 9941)),
    ("days, hundreds, seconds", {"type": "object", "properties": {"a": M(86400, 100, 365)}, "required": ["a"]}),
    ("one large", M(9999991)),
    ("4,000 optional properties", {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(4000)}}),
):
    with Server(None, "--timeout", "5") as s:
        t = time.time()
        try:
            st = s.post(
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "a"}],
                    "max_tokens": 16,
                    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
                },
                t=10,
            )[0]
        except Exception as e:
            st = repr(e)
        check(name, (st, round(time.time() - t, 1)), lambda g: g[0] in (200, 400, 504) and g[1] < 3)
        try:
            lives = s.p.poll() is None and s.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, t=10)[0]
        except Exception as e:
            lives = repr(e)
        check(name + ": the server lives and answers", lives, 200)
done()
