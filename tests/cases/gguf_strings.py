"""Models load although strings of their metadata end with a zero byte or are no UTF-8."""

from lib import *

g = raw_gguf.read(BUILTIN)


def loads(label, change, path=TMP + "s.gguf"):
    h = raw_gguf.cp(g)
    change(h)
    raw_gguf.write(h, path)
    rc, out, err = cli("run", "-m", path, "-p", "Once upon a time", "--temp", "0", "-n", "4", "--device", "cpu")
    check(label + ": " + err.split("\n")[0][:120], rc, 0)


loads("as it is", lambda h: None)
for key in ["general.architecture", "tokenizer.ggml.model", "general.name"]:
    loads(f"{key} with a zero byte", lambda h: raw_gguf.setk(h, key, 8, raw_gguf.get(h, key) + b"\0"))
loads("description in Latin-1", lambda h: raw_gguf.setk(h, "general.description", 8, b"caf\xe9"))
loads("another key in Latin-1", lambda h: h.kv.append(["general.author", 8, b"Ren\xe9"]))


def token(h):
    t = raw_gguf.get(h, "tokenizer.ggml.tokens")[1][:]
    t[500] = b"\xff\xfe"
    raw_gguf.setk(h, "tokenizer.ggml.tokens", 9, (8, t))


loads("a token that is no UTF-8", token)
done()
