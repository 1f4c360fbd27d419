"""Gemma 4: the arguments of a required call match union types and enumerations of several types."""

import collections
from lib import *


def text_or_null(v):
    return v is None or isinstance(v, str)


with Server(random_model("gemma-4"), "-c", "2048") as s:
    for name, schema, ok in (
        ('["string","null"]', {"type": ["string", "null"]}, text_or_null),
        ('enum ["a",1,null]', {"enum": ["a", 1, None]}, lambda v: v in ("a", 1, None)),
        ("anyOf string/null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, text_or_null),
        ("string", {"type": "string"}, lambda v: isinstance(v, str)),
        ("integer", {"type": "integer"}, lambda v: type(v) is int),
    ):
        seen = collections.Counter()
        for seed in range(20):
            st, d = s.post(
                "/v1/chat/completions",
                dict(
                    messages=[dict(role="user", content="a")],
                    tools=[
                        {
                            "type": "function",
                            "function": {
                                "name": "f",
                                "strict": True,
                                "parameters": {
                                    "type": "object",
                                    "properties": {"u": schema},
                                    "required": ["u"],
                                    "additionalProperties": False,
                                },
                            },
                        }
                    ],
                    tool_choice="required",
                    parallel_tool_calls=False,
                    temperature=1.0,
                    seed=seed,
                    max_tokens=120,
                ),
            )
            if st != 200 or d["choices"][0]["finish_reason"] == "length":
                seen["cut" if st == 200 else st] += 1
                continue
            try:
                good = ok(json.loads(d["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["u"])
            except Exception:
                good = False
            seen["follows" if good else "does not follow"] += 1
        check(name, dict(seen), lambda c: set(c) <= {"follows", "cut"})
done()
