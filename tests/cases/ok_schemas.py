"""JSON schemas: references into arrays, nested patterns and length limits, oneOf beside properties, properties that also match
patternProperties."""

from lib import *

tree = {
    "type": "object",
    "properties": {
        "t": {
            "type": "object",
            "properties": {
                "l": {"anyOf": [{"type": "string"}, {"$ref": "#/properties/t"}]},
                "r": {"anyOf": [{"$ref": "#/properties/t/properties/l/anyOf/0"}, {"$ref": "#/properties/t"}]},
            },
            "required": ["l", "r"],
        }
    },
    "required": ["t"],
}
for label, schema, good, bad in [
    ("references into arrays", tree, '{"t":{"l":"a","r":{"l":"b","r":"c"}}}', '{"t":{"l":"a","r":1}}'),
    (
        "nested maxLength",
        {
            "type": "object",
            "properties": {
                "o": {"type": "object", "properties": {"s": {"type": "string", "maxLength": 2500}}, "required": ["s"]}
            },
            "required": ["o"],
        },
        '{"o":{"s":"abc"}}',
        '{"o":{"s":1}}',
    ),
    (
        "nested pattern",
        {
            "type": "object",
            "properties": {
                "i": {"type": "array", "items": {"type": "string", "pattern": "^(\\d+|imap:[a-z-]+)$"}, "minItems": 1}
            },
            "required": ["i"],
        },
        '{"i":["12","imap:a-b"]}',
        '{"i":["x"]}',
    ),
    (
        "pattern without anchors",
        {"type": "object", "properties": {"k": {"type": "string", "pattern": "\\S"}}, "required": ["k"]},
        '{"k":" a "}',
        '{"k":"  "}',
    ),
    (
        "maxItems 0",
        {"type": "object", "properties": {"c": {"type": "array", "items": {"type": "string"}, "maxItems": 0}}, "required": ["c"]},
        '{"c":[]}',
        '{"c":["a"]}',
    ),
    (
        "oneOf beside properties",
        {
            "type": "object",
            "properties": {"a": {"enum": ["go", "take"]}},
            "required": ["a"],
            "oneOf": [
                {"properties": {"a": {"const": "go"}, "to": {"type": "string"}}, "required": ["to"]},
                {"properties": {"a": {"const": "take"}, "it": {"type": "string"}}, "required": ["it"]},
            ],
        },
        '{"a":"go","to":"x"}',
        '{"a":"go","it":"y"}',
    ),
    (
        "names and patterns that meet",
        {
            "type": "object",
            "properties": {"score": {"type": "integer", "multipleOf": 5}},
            "required": ["score"],
            "additionalProperties": False,
            "patternProperties": {"^score$": {"type": "integer"}},
        },
        '{"score":5}',
        '{"score":4}',
    ),
    (
        "definitions",
        {
            "definitions": {
                "A": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
                "B": {"type": "array", "items": {"$ref": "#/definitions/A"}},
            },
            "type": "object",
            "properties": {"b": {"$ref": "#/definitions/B"}},
            "required": ["b"],
        },
        '{"b":[{"n":2}]}',
        '{"b":[{"n":"x"}]}',
    ),
]:
    check(label, schema_run(schema, good), True)
    check(label + ", wrong", schema_run(schema, bad), lambda got: got is not True and not str(got).startswith("(400)"))
done()
