"""A request with more sequences than slots and queue together is rejected with 400 and the limit, not with 429, which invites a retry."""

from lib import *

with Server(None, "-c", "64") as s:
    st, r = s.post("/v1/completions", {"prompt": ["a"] * 256, "n": 2, "max_tokens": 1})
    check("256 prompts, two answers each, idle server", (st, str(r)[:160]), lambda g: g[0] in (200, 400))
done()
