"""White space before a marker that does not begin a call stays in the text."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}), tool("now", {})]

for name, mark in [
    ("qwen2.5", "<tool_call>"),
    ("qwen3-coder", "<tool_call>"),
    ("granite-4.0", "<tool_call>"),
    ("mistral-nemo", "[TOOL_CALLS]"),
]:
    for text in [f"The tag {mark} is used.", f"a\n\n{mark}\n\nb", f"x  {mark}"]:
        whole, stream = says(template(name), text, tools, control=["<|im_start|>", "<|im_end|>"])
        check(f"{name}: {text!r}", whole["content"], text)
        check(f"{name}: {text!r} (stream)", stream["content"], text)
done()
