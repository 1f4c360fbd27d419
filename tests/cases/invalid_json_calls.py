"""Calls in invalid JSON (raw line breaks, lone backslashes, trailing commas, True) are repaired; arguments are always valid JSON."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}), tool("now", {})]

for label, inner in [
    ("line break in a text", '{"path": "a\nb"}'),
    ("lone backslash", '{"path": "C:\\dir"}'),
    ("comma at the end", '{"path": "a",}'),
    ("Python's True", '{"path": "a", "o": True}'),
    ("01", '{"path": "a", "n": 01}'),
    ("a list for arguments", '["x"]'),
    ("a text for arguments", '"x y"'),
    ("JSON", '{"path": "a\\nb", "n": 1}'),
]:
    text = '<tool_call>\n{"name": "edit", "arguments": ' + inner + "}\n</tool_call>"
    for how, got in zip(["whole", "stream"], says(template("qwen2.5"), text, tools)):

        def right(got):
            if not got["calls"]:
                return got["content"] == text
            try:
                return isinstance(json.loads(got["calls"][0][1]), dict) and not got["content"]
            except ValueError:
                return False

        check(f"{label} ({how})", {k: v for k, v in got.items() if k != "events"}, right)
done()
