"""`format` is an annotation (JSON Schema 2020-12, 7.2.3), so an unknown one is ignored."""

from lib import *

O = lambda p: {"type": "object", "properties": {"d": p}, "required": ["d"]}
for f in ["password", "byte", "binary", "uri-reference", "json-pointer", "regex", "iri", "cuid2", "base64url", "phone", "x-mine"]:
    check(f, schema_run(O({"type": "string", "format": f}), '{"d":"a b"}'), True)
check("of a nullable text", schema_run(O({"type": ["string", "null"], "format": "password"}), '{"d":null}'), True)
check("beside an enum", schema_run(O({"type": "string", "format": "x-mine", "enum": ["a", "b"]}), '{"d":"b"}'), True)
check("without a type", schema_run(O({"format": "x-mine"}), '{"d":1}'), True)
check("int32", schema_run(O({"type": "integer", "format": "int32"}), '{"d":1}'), True)
check(
    "date stays a date",
    schema_run(O({"type": "string", "format": "date"}), '{"d":"x"}'),
    lambda got: got is not True and not str(got).startswith("(400)"),
)
with Server() as s:
    st, r = s.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 4,
            "tool_choice": "required",
            "tools": [tool("f", {"d": {"type": "string", "format": "byte"}})],
        },
    )
    check("tool_choice required: " + str(r.get("error", {}).get("message", "")), st, 200)
done()
