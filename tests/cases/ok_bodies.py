"""Bodies that are no JSON or no UTF-8 are rejected with 400, and the server still works."""

from lib import *

with Server() as s:
    for raw in [
        b"",
        b'{"prompt": "a",}',
        b'{"prompt": "\xc4\xe3"}',
        b'{"prompt": "\\ud83d"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        b"[]",
        b"null",
    ]:
        check(repr(raw), s.req("/v1/completions", raw=raw)[0], 400)
    check("after that", s.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0], 200)
done()
