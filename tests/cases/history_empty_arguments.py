"""A call in a conversation with the arguments "" or null, which clients send for functions without parameters, renders as "{}"."""

from lib import *


def history(arguments):
    call = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": arguments}}
    return [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "now", "content": "12:00"},
    ]


for name in [
    "qwen3-coder",
    "qwen3.5",
    "seed-oss",
    "nemotron-3-nano",
    "qwen2.5",
    "qwen3",
    "llama-3.1",
    "mistral-nemo",
    "gpt-oss",
    "granite-4.0",
    "glm-4.6",
    "gemma-4",
]:
    want = render(template(name), history("{}"), [tool("now", {})])
    for arguments in ["", None]:
        check(f"{name} {arguments!r}", render(template(name), history(arguments), [tool("now", {})]), want)
done()
