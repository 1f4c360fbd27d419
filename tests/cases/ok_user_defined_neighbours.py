"""SentencePiece: a word after a user-defined token keeps its leading blank: "<|im_start|>user" is that token and " user"."""

from lib import *

VOCABULARY = vocabulary("llama-spm-cut.gguf")


def tok(vocab, text, *a):
    open(TMP + "t.txt", "w", newline="").write(text)
    rc, out, err = cli("tokenize", "-m", vocab, "-f", TMP + "t.txt", "--json", "--no-bos", *a)
    return json.loads(out) if rc == 0 else err


g = raw_gguf.read(VOCABULARY)
n = len(raw_gguf.get(g, "tokenizer.ggml.tokens")[1])
for key, t, more in [
    ("tokens", 8, [b"<|im_start|>", b"  ", b"Z\xc3\xbcrich"]),
    ("token_type", 5, [4, 4, 4]),
    ("scores", 6, [0.0] * 3),
]:
    raw_gguf.setk(g, "tokenizer.ggml." + key, 9, (t, raw_gguf.get(g, "tokenizer.ggml." + key)[1] + more))
raw_gguf.write(g, TMP + "v.gguf")
check("after", tok(TMP + "v.gguf", "<|im_start|>user"), [n, 1404])
check("before", tok(TMP + "v.gguf", "user<|im_start|>"), [1404, n])
check("blanks", tok(TMP + "v.gguf", "a  b"), [263, n + 1, 289])
check("outside ASCII", tok(TMP + "v.gguf", "in Zürich"), [297, 6000, n + 2])
done()
