"""NaN logits are reported as an error of the model, and only for the request that has them."""

import struct
from lib import *

NAN = b"\0\0\xc0\x7f"


def damaged(name, change):
    g = raw_gguf.read(BUILTIN)
    change(g.data, {t[0]: t for t in g.t})
    raw_gguf.write(g, TMP + name)
    return TMP + name


def norm(d, t):
    d["output_norm.weight"] = NAN * 8 + d["output_norm.weight"][32:]


whole = damaged("nan-whole.gguf", norm)
for c in (
    ["run", "-p", "Once", "-n", "3", "--temp", "0"],
    ["run", "-p", "Once", "-n", "3"],
    ["logits", "-p", "Once", "--last"],
    ["embed", "-p", "Once", "--json"],
    ["perplexity", "-p", "Once upon a time there was a little girl and", "-c", "8", "--json"],
):
    rc, out, err = cli(*c, "-m", whole, "-t", "1", "--device", "cpu")
    check(f'{" ".join(c[:1] + c[3:])}: an error', (rc != 0, err.strip()[:160]), lambda g: g[0])
try:
    with Server(whole) as s:
        check(
            "serve of a wholly damaged file does not start",
            s.post("/v1/completions", dict(prompt="Once", max_tokens=3))[0],
            lambda st: st >= 400,
        )
except RuntimeError as e:
    check("serve of a wholly damaged file says so", "no number" in str(e) or "damaged" in str(e), True)


def row(d, t):
    n = len(d["token_embd.weight"]) // t["token_embd.weight"][1][1]
    e = bytearray(d["token_embd.weight"])
    e[400 * n : 401 * n] = NAN * (n // 4)
    d["token_embd.weight"] = bytes(e)


if {t[0]: t for t in raw_gguf.read(BUILTIN).t}["token_embd.weight"][2] == 0:
    with Server(damaged("nan-row.gguf", row)) as s:
        good = dict(prompt=[1, 50, 60, 70], max_tokens=20, temperature=0, ignore_eos=True)
        a = s.post("/v1/completions", good)[1]["choices"][0]["text"]
        check(
            "token 400 alone: an error",
            s.post("/v1/completions", dict(prompt=[1, 400], max_tokens=3, temperature=0))[0],
            lambda st: st >= 400,
        )
        check("others as before", s.post("/v1/completions", good)[1]["choices"][0]["text"], a)
        check("embedding with token 400: an error", s.post("/v1/embeddings", dict(input=[1, 400]))[0], lambda st: st >= 400)
done()
