"""propertyNames, uniqueItems, dependentRequired and overlapping patternProperties are enforced or ignored, not rejected."""

from lib import *

O = lambda p: {"type": "object", "properties": {"d": p}, "required": ["d"]}
check(
    "propertyNames of type string",
    schema_run(
        O({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}), '{"d":{"a":1}}'
    ),
    True,
)
check(
    "propertyNames {}",
    schema_run(O({"type": "object", "propertyNames": {}, "additionalProperties": {"type": "number"}}), '{"d":{"a":1}}'),
    True,
)
check(
    "uniqueItems false", schema_run(O({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}), '{"d":[1,1]}'), True
)
check(
    "uniqueItems true (pydantic: set[int])",
    schema_run(O({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}), '{"d":[1,2]}'),
    True,
)
check(
    "propertyNames with a pattern",
    schema_run(
        O({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "number"}}),
        '{"d":{"a":1}}',
    ),
    True,
)
check(
    "dependentRequired",
    schema_run(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "dependentRequired": {"a": ["b"]}},
        '{"a":1,"b":2}',
    ),
    True,
)
check(
    "two patternProperties that may meet",
    schema_run(
        {
            "type": "object",
            "patternProperties": {"^x-": {"type": "integer"}, "_s$": {"type": "string"}},
            "additionalProperties": False,
        },
        '{"x-a":1,"b_s":"c"}',
    ),
    True,
)
done()
