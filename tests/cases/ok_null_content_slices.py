"""A message of the assistant with calls and null content is rendered, also by templates that slice the content (Qwen 3)."""

from lib import *

u = [{"role": "user", "content": "x"}]

call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
h = u + [
    {"role": "assistant", "content": None, "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call00001", "content": "r"},
]
for name in ["qwen3", "qwen2.5", "qwen3-coder", "glm-4.6", "gpt-oss", "mistral-nemo", "granite-4.0"]:
    got = render(template(name), h, [tool("f", {"a": {"type": "integer"}})])
    check(name, ("None" in got, got.startswith("(")), (False, False))
done()
