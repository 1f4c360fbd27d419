"""Arguments of calls are streamed in small deltas in every tool-call format."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}), tool("now", {})]

value = "a line of some length, number 7\\n" * 0 + "".join(f"line {i}\n" for i in range(40))
for name, text in [
    ("qwen2.5", '<tool_call>\n{"name": "edit", "arguments": {"path": ' + json.dumps(value) + "}}\n</tool_call>"),
    ("qwen3-coder", f"<tool_call>\n<function=edit>\n<parameter=path>\n{value}\n</parameter>\n</function>\n</tool_call>"),
    ("glm-4.6", f"<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"),
    ("gemma-4", f'<|tool_call>call:edit{{path:<|"|>{value}<|"|>}}<tool_call|>'),
    ("lfm2", "<|tool_call_start|>[edit(path=" + json.dumps(value) + ")]<|tool_call_end|>"),
]:
    extra = ["<|tool_call>", "<tool_call|>", '<|"|>'] if name == "gemma-4" else controls(template(name))
    _, s = says(template(name), text, tools, control=extra)
    deltas = [
        d["function"].get("arguments")
        for e in s["events"]
        if e != "[DONE]" and e.get("choices")
        for d in e["choices"][0]["delta"].get("tool_calls") or []
    ]
    check(name + ": longest delta", max(map(len, deltas)), lambda n: n < 40)
done()
