"""LFM2, whose calls have Python's syntax: required calls of functions whose property names are no identifiers."""

import collections
from lib import *

with Server(random_model("lfm2"), "-c", "2048") as s:
    for prop in ("x_y", "x y", "a=b", "a\nb", '"q"', "x-y", "class"):
        seen = collections.Counter()
        for seed in range(6):
            st, d = s.post(
                "/v1/chat/completions",
                dict(
                    messages=[dict(role="user", content="a")],
                    tools=[
                        {
                            "type": "function",
                            "function": {
                                "name": "f",
                                "parameters": {
                                    "type": "object",
                                    "properties": {prop: {"enum": ["A", "B"]}},
                                    "required": [prop],
                                    "additionalProperties": False,
                                },
                            },
                        }
                    ],
                    tool_choice="required",
                    parallel_tool_calls=False,
                    temperature=1.0,
                    seed=seed,
                    max_tokens=100,
                ),
            )
            if st == 400:
                seen["refused by name" if repr(prop).strip("'") in str(d) or "name" in str(d) else "refused"] += 1
                continue
            m = d["choices"][0] if st == 200 else {}
            if m.get("finish_reason") == "length":
                continue
            try:
                good = json.loads(m["message"]["tool_calls"][0]["function"]["arguments"])[prop] in ("A", "B")
            except Exception:
                good = False
            seen["call" if good else f"no call ({st})"] += 1
        check(f"property {prop!r}", dict(seen), lambda c: set(c) <= {"call", "refused by name"})
done()
