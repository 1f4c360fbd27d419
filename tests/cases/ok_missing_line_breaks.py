"""Calls are parsed without the line breaks before `</parameter>` and between arguments."""

from lib import *

tools = [tool("edit", {"path": {"type": "string"}, "n": {"type": "integer"}})]

for name, text in [
    (
        "qwen3-coder",
        "<tool_call>\n<function=edit>\n<parameter=path>value</parameter>\n<parameter=n>3</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=edit>\n<parameter=path>\nz\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "glm-4.6",
        "<tool_call>edit<arg_key>path</arg_key>\n<arg_value>value</arg_value><arg_key>n</arg_key>\n<arg_value>3</arg_value></tool_call>\n<tool_call>edit<arg_key>path</arg_key><arg_value>z</arg_value></tool_call>",
    ),
]:
    for got in says(template(name), text, tools):
        check(name, [(n, json.loads(a)) for n, a in got["calls"]], [("edit", {"path": "value", "n": 3}), ("edit", {"path": "z"})])
done()
