"""Helpers of the cases: a check, requests to a model that generates a given text, rendering of prompts, the command line."""

import json
import lzma
import os
import re
import subprocess
import sys

from dictate import MA, SCRATCH, Server, Vocab, dictated, joined, write
import raw_gguf

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TEMPLATES = REPO + "/crates/metal-attention-chat/tests/data/templates/"
BUILTIN = REPO + "/models/stories260K.gguf"
TMP = SCRATCH + "/.tmp/"
os.makedirs(TMP, exist_ok=True)
bad = 0


def check(what, got, want):
    """Prints `ok` or `FAULT` for the check `what`. `want`: the expected value, or a predicate."""
    global bad
    ok = want(got) if callable(want) else got == want
    bad += not ok
    print(
        ("ok    " if ok else "FAULT ")
        + what
        + ("" if ok else f"\n        got  {got!r:.400}" + ("" if callable(want) else f"\n        want {want!r:.400}")),
        flush=True,
    )


def done():
    """Ends the case with exit code 1 if a check has failed."""
    sys.exit(1 if bad else 0)


def template(name):
    return open(TEMPLATES + name + ".jinja").read()


def with_template(source, path=None):
    """Writes the built-in model with the chat template `source` and a context of 4096 tokens. Returns the path."""
    path = path or TMP + "templated.gguf"
    g = raw_gguf.read(BUILTIN)
    raw_gguf.setk(g, "tokenizer.chat_template", 8, source.encode())
    raw_gguf.setk(g, "llama.context_length", 4, 4096)
    raw_gguf.write(g, path)
    return path


def render(source, messages, tools=None, **body):
    """The prompt that the server renders. The template raises an exception with its own text, which the error response contains."""
    shown = "{% set shown %}" + source + '{% endset %}{{ raise_exception("<<<" + shown + ">>>") }}'
    with Server(with_template(shown), "-c", "4096") as s:
        st, r = s.post("/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 1, **body})
    m = r["error"]["message"] if st != 200 else str(r)
    at = m.find("<<<")
    return m[at + 3 : m.rfind(">>>")] if at >= 0 else f"({st}) " + m


def controls(source):
    """The markers in a template's source that look like control tokens."""
    return sorted(set(re.findall(r"<\|[^|<>\s]{1,40}\|>|<[|｜][^<>]{1,40}[|｜]>|\[/?(?:TOOL_CALLS|ARGS|THINK)\]", source)))


def says(source, text, tools=None, control=None, **body):
    """The parsed answer, whole and streamed, of a model with the template `source` that generates `text`."""
    v = Vocab(control if control is not None else controls(source))
    r = dictated(
        v,
        text,
        body={"messages": [{"role": "user", "content": "x"}], **({"tools": tools} if tools else {}), **body},
        template=source,
        both=True,
        n_ctx=8192,
    )
    if not isinstance(r[0], tuple):
        return r, r
    (st, a), (_, ev) = r
    if st != 200:
        return (st, a), ev
    c = a["choices"][0]
    m = c["message"]
    j, f = joined(ev)
    one = lambda m, calls: {"content": m.get("content") or None, "reasoning": m.get("reasoning_content") or None, "calls": calls}
    return (
        {
            **one(m, [(k["function"]["name"], k["function"]["arguments"]) for k in m.get("tool_calls", [])]),
            "finish": c["finish_reason"],
        },
        {**one(j, [(k["name"], k["arguments"]) for k in j["tool_calls"]]), "finish": f, "events": ev},
    )


def tool(name, properties=None, **more):
    p = {"type": "object", "properties": properties} if properties is not None else None
    return {
        "type": "function",
        "function": {"name": name, "description": "A function.", **({"parameters": p} if p else {}), **more},
    }


def schema_run(schema, text, strict=None, limit=80):
    """True if a model that generates `text` does so under the schema; otherwise the text that it was forced to, or the error."""
    T = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    js = {"name": "s", "schema": schema, **({"strict": strict} if strict is not None else {})}
    st, r = dictated(
        Vocab(["<|im_start|>", "<|im_end|>"]),
        text,
        body={
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": js},
            "max_tokens": len(text.encode()) + limit,
        },
        template=T,
    )
    if st != 200:
        return f"({st}) {r['error']['message']}"
    c = r["choices"][0]
    return True if c["message"]["content"] == text and c["finish_reason"] == "stop" else c["message"]["content"]


def cli(*a, stdin=None, env=None):
    """Runs the program. Returns its exit code, stdout and stderr."""
    p = subprocess.run([MA, *a], input=stdin, capture_output=True, env={**os.environ, **(env or {})}, timeout=120)
    return p.returncode, p.stdout.decode("utf-8", "replace"), p.stderr.decode("utf-8", "replace")


def random_model(name):
    """Writes a model with the template `name` whose text is random, so that a grammar determines it. Returns the path."""
    import numpy as np

    src = template(name)
    v = Vocab(controls(src))
    rng = np.random.default_rng(0)
    write(TMP + name + ".gguf", v, [int(x) for x in rng.integers(32, 120, 2000)], 1, src, 4096)
    return TMP + name + ".gguf"


def vocabulary(name):
    """Decompresses a vocabulary of tests/data/tokenizers. Returns the path."""
    path = TMP + name
    with lzma.open(f"{REPO}/tests/data/tokenizers/{name}.xz") as packed, open(path, "wb") as file:
        file.write(packed.read())
    return path
