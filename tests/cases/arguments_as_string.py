"""Templates that append a call's arguments to a string (Functionary 3.2, Firefunction 2) get them as a string, others as an object."""

from lib import *

T = "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '>>>' + c.function.name + '\n' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
for arguments, want in [('{"a": 1}', '{"a": 1}'), ('{"a":1,"b":"\u00e9"}', None), ("{}", "{}")]:
    call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": arguments}}
    got = render(
        T,
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "content": "r"},
        ],
        [tool("f", {})],
    )
    check("arguments " + arguments, got, lambda text: ">>>f\n{" in text)
done()
