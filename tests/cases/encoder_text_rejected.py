"""Requests for text from an encoder (EmbeddingGemma, llama-embed) are rejected with 400 and unsupported_by_model."""

from lib import *

m = TMP + "encoder.gguf"
sizes = ["--n-embd", "32", "--n-head", "4", "--n-ff", "48", "--n-layer", "2", "-o", m]
cli("synth", "custom", "--arch", "gemma-embedding", *sizes)
with Server(m) as s:
    for path, body in (
        ("/v1/completions", {"prompt": "Once", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ):
        st, r = s.post(path, body)
        check(path, (st, r["error"].get("code") if isinstance(r, dict) and "error" in r else r), (400, "unsupported_by_model"))
    check("embeddings as before", s.post("/v1/embeddings", {"input": "a"})[0], 200)
cli("synth", "custom", "--arch", "llama-embed", *sizes)
rc, out, err = cli("logits", "-m", m, "--tokens", ",".join(["5"] * 600), "--last", "--device", "cpu", "-t", "1")
check("logits of 600 tokens", (rc, err.strip()[:120]), lambda g: g[0] == 0)
done()
