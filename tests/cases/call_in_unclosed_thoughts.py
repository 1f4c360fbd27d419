"""A call inside thoughts that are never closed, as Qwen 3.5 sometimes writes, is parsed as a call."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}}), tool("now", {})]
for label, text, want in [
    ("call at the end", "I will look.\n<tool_call>\n<function=now>\n</function>\n</tool_call>", ["now"]),
    (
        "with an argument",
        "I will look.\n\n<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        ["edit"],
    ),
    ("thoughts that close later", "Not <tool_call>\n<function=now>\n</function>\n</tool_call> yet.\n</think>\n\nDone.", []),
]:
    for how, got in zip(["whole", "stream"], says(template("qwen3.5"), text, tools)):
        check(f"{label} ({how})", [n for n, _ in got["calls"]], want)
done()
