"""SentencePiece: the blank after a special token is encoded as in transformers."""

from lib import *

VOCABULARY = vocabulary("llama-spm-cut.gguf")


def tok(vocab, text, *a):
    open(TMP + "t.txt", "w", newline="").write(text)
    rc, out, err = cli("tokenize", "-m", vocab, "-f", TMP + "t.txt", "--json", "--no-bos", *a)
    return json.loads(out) if rc == 0 else err


check("</s> world", tok(VOCABULARY, "Hello</s> world", "--parse-special"), [379, 3156, 2, 6000, 3186])
check("</s>world", tok(VOCABULARY, "Hello</s>world", "--parse-special"), [379, 3156, 2, 3186])
check("without --parse-special no </s>", 2 not in tok(VOCABULARY, "Hello</s> world"), True)
done()
