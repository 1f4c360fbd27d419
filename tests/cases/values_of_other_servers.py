"""Values that llama.cpp's server, vLLM or LM Studio accept: max_tokens -1, top_k -1, tool_choice any and allowed_tools, parts of type
refusal, continue_final_message."""

from lib import *

u = [{"role": "user", "content": "x"}]
with Server() as s:
    ok = lambda label, path, body: (
        lambda r: check(label + ": " + str(r[1].get("error", {}).get("message", ""))[:110], r[0], 200)
    )(s.post(path, body))
    ok("max_tokens -1", "/v1/completions", {"prompt": "a", "max_tokens": -1})
    ok("top_k -1", "/v1/completions", {"prompt": "a", "top_k": -1, "max_tokens": 1})
    C = {"messages": u, "max_tokens": 1, "tools": [tool("f", {})]}
    ok("tool_choice any", "/v1/chat/completions", {**C, "tool_choice": "any"})
    ok(
        "tool_choice allowed_tools",
        "/v1/chat/completions",
        {
            **C,
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        },
    )
    ok(
        "a part of type refusal",
        "/v1/chat/completions",
        {"messages": u + [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}] + u, "max_tokens": 1},
    )
    ok(
        "continue_final_message",
        "/v1/chat/completions",
        {
            "messages": u + [{"role": "assistant", "content": "On"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": 1,
        },
    )
done()
