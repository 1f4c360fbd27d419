"""Tokenizing 131,072 equal characters, of each class and with each kind of vocabulary, neither crashes nor takes quadratic time."""

import time

from lib import *


def tok(vocab, text, *a):
    open(TMP + "t.txt", "w", newline="").write(text)
    rc, out, err = cli("tokenize", "-m", vocab, "-f", TMP + "t.txt", "--json", "--no-bos", *a)
    return json.loads(out) if rc == 0 else err


for v in ("llama-bpe", "gemma-4", "gpt-2", "llama-spm", "nomic-bert-moe", "bert-bge"):
    path = vocabulary(v + "-cut.gguf")
    for label, text in [
        ("Z", "Z" * 131072),
        ("CJK", "語" * 60000),
        (".", "." * 131072),
        ("blanks", " " * 131072),
        ("line breaks", "\n" * 131072),
        ("marks", "a\u0301" * 60000),
    ]:
        at = time.time()
        got = tok(path, text)
        check(
            f"{v} {label}",
            (isinstance(got, list) and len(got) > 0 or v in ("bert-bge", "nomic-bert-moe"), time.time() - at < 20),
            (True, True),
        )
done()
