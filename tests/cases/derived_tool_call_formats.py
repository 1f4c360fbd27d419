"""Calls of Kimi K2, MiniMax M2 and Functionary 3.1 are parsed, with minimal templates that have the models' markers."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}), tool("now", {})]

K = "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% for c in m.tool_calls or [] %}<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments|tojson }}<|tool_call_end|><|tool_calls_section_end|>{% endfor %}{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}<|im_assistant|>"
M = '{% for m in messages %}]~b]{{ m.content }}[e~[{% for c in m.tool_calls or [] %}<minimax:tool_call><invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments|items %}<parameter name="{{ k }}">{{ v }}</parameter>{% endfor %}</invoke></minimax:tool_call>{% endfor %}{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}]~b]ai\n'
F = "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}{{ m.content }}{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>{{ c.function.arguments|tojson }}</function>{% endfor %}<|eot_id|>{% endfor %}{% if tools %}{{ tools|tojson }}{% endif %}<|start_header_id|>assistant<|end_header_id|>"
for label, t, text, want in [
    (
        "Kimi K2",
        K,
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{"path": "x"}<|tool_call_end|><|tool_calls_section_end|>',
        [("edit", {"path": "x"})],
    ),
    (
        "Kimi K2, two",
        K,
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.edit:0<|tool_call_argument_begin|>{"path": "x"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>',
        [("edit", {"path": "x"}), ("now", {})],
    ),
    (
        "MiniMax M2",
        M,
        '<minimax:tool_call>\n<invoke name="edit">\n<parameter name="path">x</parameter>\n<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
        [("edit", {"path": "x", "n": 3})],
    ),
    ("Functionary 3.1", F, '<function=edit>{"path": "x"}</function>', [("edit", {"path": "x"})]),
]:
    whole, _ = says(t, text, tools)
    check(label, whole, lambda got: [(n, json.loads(a)) for n, a in got["calls"]] == want)
done()
