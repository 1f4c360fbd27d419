"""If `</parameter>` is missing before `</function>` or the next `<parameter=`, the value ends there, and later calls are parsed."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}), tool("now", {})]

for name in ["qwen3-coder", "qwen3.5", "nemotron-3-nano"]:
    before = "" if name == "qwen3-coder" else "</think>\n\n"
    for label, text, want in [
        (
            "before </function>",
            "<tool_call>\n<function=edit>\n<parameter=path>\na b\n</function>\n</tool_call>",
            [("edit", {"path": "a b"})],
        ),
        (
            "an object",
            '<tool_call>\n<function=edit>\n<parameter=o>\n{"k": [true]}\n</function>\n</tool_call>',
            [("edit", {"o": {"k": [True]}})],
        ),
        (
            "before the next parameter",
            "<tool_call>\n<function=edit>\n<parameter=path>\na\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
            [("edit", {"path": "a", "n": 3})],
        ),
        (
            "with a call after it",
            "<tool_call>\n<function=edit>\n<parameter=path>\na\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [("edit", {"path": "a"}), ("now", {})],
        ),
        (
            "nothing missing",
            "<tool_call>\n<function=edit>\n<parameter=path>a</parameter>\n<parameter=n>3</parameter>\n</function>\n</tool_call>",
            [("edit", {"path": "a", "n": 3})],
        ),
    ]:
        for how, got in zip(["whole", "stream"], says(template(name), before + text, tools)):

            def right(got, want=want):
                try:
                    return [(n, json.loads(a)) for n, a in got["calls"]] == want and not got["content"]
                except ValueError:
                    return False

            check(f"{name}: {label} ({how})", {k: v for k, v in got.items() if k != "events"}, right)
done()
