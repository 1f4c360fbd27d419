"""A request that can never fit (more texts than places and queue together) is a 400 that names the limit, not a 429 to be tried again."""

from lib import *

with Server(None, "-c", "64") as s:
    st, r = s.post("/v1/completions", {"prompt": ["a"] * 256, "n": 2, "max_tokens": 1})
    check("256 prompts, two answers each, idle server", (st, str(r)[:160]), lambda g: g[0] in (200, 400))
done()
