"""oneOf of subschemas that are not known to exclude each other is treated as anyOf."""

from lib import *

O = lambda p: {"type": "object", "properties": {"d": p}, "required": ["d"]}
S = lambda **k: {"type": "string", **k}
check("two texts", schema_run(O({"oneOf": [S(description="an address"), S(description="a path")]}), '{"d":"x"}'), True)
check("a date or a text", schema_run(O({"oneOf": [S(format="date"), S(maxLength=5)]}), '{"d":"x"}'), True)
check("integer or number", schema_run(O({"oneOf": [{"type": "integer"}, {"type": "number"}]}), '{"d":1.5}'), True)
check("patterns that exclude each other", schema_run(O({"oneOf": [S(pattern="^a"), S(pattern="^b")]}), '{"d":"bx"}'), True)
check("constants", schema_run(O({"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]}), '{"d":"b"}'), True)
check("null or a text", schema_run(O({"oneOf": [{"type": "null"}, S()]}), '{"d":null}'), True)
check(
    "objects by a discriminator",
    schema_run(
        O(
            {
                "oneOf": [
                    {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                    {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
                ],
                "discriminator": {"propertyName": "k"},
            }
        ),
        '{"d":{"k":"b"}}',
    ),
    True,
)
done()
