"""A tiny GPT-2 whose next token depends only on the position, so that it generates a given text after any prompt of a known length.

`write` writes such a model as a GGUF file, `Server` runs `metal-attention serve` on a free port, and `dictated` sends a request to a
server whose model generates a given text."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import gguf
import numpy as np

SCRATCH = os.environ.get("SCRATCH") or tempfile.mkdtemp(prefix="cases-")
MA = os.environ.get("METAL_ATTENTION", "metal-attention")


def byte_chars():
    """GPT-2's character for each byte."""
    bs = list(range(ord("!"), ord("~") + 1)) + list(range(0xA1, 0xAC + 1)) + list(range(0xAE, 0xFF + 1))
    cs = bs[:]
    n = 0
    for b in range(256):
        if b not in bs:
            bs.append(b)
            cs.append(256 + n)
            n += 1
    return {b: chr(c) for b, c in zip(bs, cs)}


BC = byte_chars()
DIM = 128


class Vocab:
    """A vocabulary of the 256 bytes, a double blank, `words`, control tokens and EOS."""

    def __init__(self, control=(), words=()):
        self.tokens = [BC[b] for b in range(256)]
        self.types = [1] * 256
        self.tokens.append("ĠĠ")
        self.types.append(1)
        self.words = {}
        for w in words:
            self.words[w] = len(self.tokens)
            self.tokens.append("".join(BC[b] for b in w.encode()))
            self.types.append(1)
        self.control = {}
        for c in list(control) + ["<|eos|>"]:
            if c in self.control:
                continue
            self.control[c] = len(self.tokens)
            self.tokens.append(c)
            self.types.append(3)
        self.eos = self.control["<|eos|>"]

    def ids(self, text):
        """The ids of `text`: control tokens where they are spelt out, otherwise one token for each byte."""
        out = []
        i = 0
        cs = sorted(self.control, key=len, reverse=True)
        while i < len(text):
            c = next((c for c in cs if text.startswith(c, i)), None)
            if c:
                out.append(self.control[c])
                i += len(c)
                continue
            out += list(text[i].encode())
            i += 1
        return out


def write(path, vocab, script, start, template=None, n_ctx=4096, meta=None, eog=None):
    """Writes a model that generates the ids `script`, then `eog` (default: EOS), after a prompt of `start` tokens. All weights are
    zero, except that the embedding of each position equals the output row of the token to generate there."""
    rng = np.random.default_rng(1)
    n = len(vocab.tokens)
    r = rng.standard_normal((n, DIM)).astype(np.float32)
    r -= r.mean(1, keepdims=True)
    r /= np.linalg.norm(r, axis=1, keepdims=True)
    ids = list(script) + [eog if eog is not None else vocab.eos]
    pos = np.zeros((n_ctx, DIM), np.float32)
    for p in range(n_ctx):
        k = p - (start - 1)
        pos[p] = r[ids[min(max(k, 0), len(ids) - 1)]]
    w = gguf.GGUFWriter(path, "gpt2")
    w.add_name("dictated")
    w.add_context_length(n_ctx)
    w.add_embedding_length(DIM)
    w.add_feed_forward_length(DIM)
    w.add_block_count(1)
    w.add_head_count(2)
    w.add_layer_norm_eps(1e-5)
    w.add_file_type(0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(vocab.tokens)
    w.add_token_types(vocab.types)
    w.add_token_merges(["Ġ Ġ"])
    w.add_bos_token_id(vocab.eos)
    w.add_eos_token_id(vocab.eos)
    w.add_add_bos_token(False)
    if template:
        w.add_chat_template(template)
    for k, v in (meta or {}).items():
        if isinstance(v, bool):
            w.add_bool(k, v)
        elif isinstance(v, int):
            w.add_uint32(k, v)
        else:
            w.add_string(k, v)
    z = lambda *s: np.zeros(s, np.float32)
    o = lambda *s: np.ones(s, np.float32)
    w.add_tensor("token_embd.weight", z(n, DIM))
    w.add_tensor("position_embd.weight", pos)
    w.add_tensor("blk.0.attn_norm.weight", o(DIM))
    w.add_tensor("blk.0.attn_norm.bias", z(DIM))
    w.add_tensor("blk.0.attn_qkv.weight", z(3 * DIM, DIM))
    w.add_tensor("blk.0.attn_qkv.bias", z(3 * DIM))
    w.add_tensor("blk.0.attn_output.weight", z(DIM, DIM))
    w.add_tensor("blk.0.attn_output.bias", z(DIM))
    w.add_tensor("blk.0.ffn_norm.weight", o(DIM))
    w.add_tensor("blk.0.ffn_norm.bias", z(DIM))
    w.add_tensor("blk.0.ffn_up.weight", z(DIM, DIM))
    w.add_tensor("blk.0.ffn_up.bias", z(DIM))
    w.add_tensor("blk.0.ffn_down.weight", z(DIM, DIM))
    w.add_tensor("blk.0.ffn_down.bias", z(DIM))
    w.add_tensor("output_norm.weight", o(DIM))
    w.add_tensor("output_norm.bias", z(DIM))
    w.add_tensor("output.weight", r * 5)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def port():
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    p = s.getsockname()[1]
    s.close()
    return p


class Server:
    """A server process on a free port, which is killed at the end of its context. `args`: further flags of `serve`."""

    def __init__(self, model=None, *args):
        self.port = port()
        cmd = (
            [MA, "serve", "--port", str(self.port), "-t", "1", "--device", "cpu"] + (["-m", model] if model else []) + list(args)
        )
        self.log = open(SCRATCH + "/.server.log", "a+")
        self.log.seek(0, 2)
        self.at = self.log.tell()
        self.p = subprocess.Popen(cmd, stdout=self.log, stderr=self.log)
        for _ in range(400):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=2) as r:
                    if r.status == 200:
                        break
            except Exception:
                if self.p.poll() is not None:
                    raise RuntimeError("server ended: " + self.tail())
                time.sleep(0.03)

    def tail(self):
        self.log.flush()
        return open(SCRATCH + "/.server.log").read()[self.at :]

    def req(self, path, body=None, raw=None, headers=None, method=None, t=120):
        data = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
        h = {"Content-Type": "application/json", **(headers or {})}
        q = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, headers=h, method=method)
        try:
            with urllib.request.urlopen(q, timeout=t) as r:
                return r.status, r.read().decode("utf-8")
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode("utf-8", "replace")

    def post(self, path, body, **k):
        s, t = self.req(path, body, **k)
        try:
            return s, json.loads(t)
        except Exception:
            return s, t

    def stream(self, path, body):
        s, t = self.req(path, {**body, "stream": True})
        ev = []
        for block in t.split("\n\n"):
            for l in block.split("\n"):
                if l.startswith("data: "):
                    ev.append(l[6:])
        return s, [json.loads(e) if e != "[DONE]" else e for e in ev]

    def close(self):
        self.p.send_signal(signal.SIGKILL)
        self.p.wait()

    def __enter__(self):
        return self

    def __exit__(self, *a):
        self.close()


_len = {}


def dictated(
    vocab,
    script,
    path="/v1/chat/completions",
    body=None,
    template=None,
    args=(),
    stream=False,
    model=SCRATCH + "/.dict.gguf",
    both=False,
    n_ctx=4096,
    meta=None,
    eog=None,
):
    """The response to `body` (status and JSON, or events with `stream`, or both with `both`) of a model that generates `script`, a text
    or ids. A first request finds the length of the prompt, on which the model depends."""
    ids = vocab.ids(script) if isinstance(script, str) else list(script)
    body = {"temperature": 0, "max_tokens": 1000, **body}
    key = hashlib.sha1(json.dumps([vocab.tokens, path, body, template, list(args), meta], sort_keys=True).encode()).hexdigest()
    if key not in _len:
        write(model, vocab, [97], 1, template, n_ctx, meta, eog)
        with Server(model, *args) as s:
            st, r = s.post(path, {**body, "max_tokens": 1, "stream": False})
            if st != 200:
                return st, r
            _len[key] = r["usage"]["prompt_tokens"]
    write(model, vocab, ids, _len[key], template, n_ctx, meta, eog)
    with Server(model, *args) as s:
        if both:
            return s.post(path, body), s.stream(path, body)
        return s.stream(path, body) if stream else s.post(path, body)


def joined(events):
    """The message that the events of a streamed chat add up to, and its finish_reason."""
    m = {"content": None, "reasoning_content": None, "tool_calls": []}
    fin = None
    for e in events:
        if e == "[DONE]" or not e.get("choices"):
            continue
        c = e["choices"][0]
        d = c["delta"]
        fin = c["finish_reason"] or fin
        for k in ("content", "reasoning_content"):
            if d.get(k):
                m[k] = (m[k] or "") + d[k]
        for t in d.get("tool_calls") or []:
            while len(m["tool_calls"]) <= t["index"]:
                m["tool_calls"].append({"id": None, "name": None, "arguments": ""})
            x = m["tool_calls"][t["index"]]
            if t.get("id"):
                x["id"] = t["id"]
            if t["function"].get("name"):
                x["name"] = t["function"]["name"]
            x["arguments"] += t["function"].get("arguments") or ""
    return m, fin
