"""tool_choice with a name forces a call of that function; an unknown name is rejected; arguments of a function without parameters are
{}."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}}), tool("now", {})]

whole, stream = says(
    template("qwen2.5"),
    '<tool_call>\n{"name": "edit", "arguments": {"path": "x"}}\n</tool_call>',
    tools,
    tool_choice={"type": "function", "function": {"name": "now"}},
    max_tokens=60,
)
for got in (whole, stream):
    check("now, not edit", [n for n, _ in got["calls"]], ["now"])
    check("arguments", [json.loads(a) for _, a in got["calls"]], [{}])
    check("finish_reason", got["finish"], "tool_calls")
with Server() as s:
    check(
        "a name that is none",
        s.post(
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "tools": tools,
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
        )[0],
        400,
    )
done()
