"""With parallel_tool_calls false only the first call is returned, also with tool_choice auto."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}}), tool("now", {})]
for name, text in [
    (
        "qwen2.5",
        '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    ("mistral-nemo", '[TOOL_CALLS][{"name": "edit", "arguments": {"path": "a"}}, {"name": "now", "arguments": {}}]'),
    ("llama-3.1", '{"name": "edit", "parameters": {"path": "a"}}; {"name": "now", "parameters": {}}'),
]:
    for how, got in zip(["whole", "stream"], says(template(name), text, tools, parallel_tool_calls=False)):
        check(f"{name} ({how})", [n for n, _ in got["calls"]], ["edit"])
whole, _ = says(
    template("qwen2.5"),
    '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    tools,
    parallel_tool_calls=False,
    tool_choice="required",
)
check("required", [n for n, _ in whole["calls"]], ["edit"])
whole, _ = says(
    template("qwen2.5"),
    '<tool_call>\n{"name": "edit", "arguments": {"path": "a"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    tools,
)
check("not said: both", [n for n, _ in whole["calls"]], ["edit", "now"])
done()
