"""gpt-oss with a schema: the text is complete from its first brace on, with or without thoughts before it."""

from lib import *

schema = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"prop": {"type": "string"}}, "required": ["prop"]}},
}
for text in [
    '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{"prop":"test"}<|return|>',
    '<|channel|>final<|message|>{"prop":"test"}<|return|>',
]:
    for got in says(template("gpt-oss"), text, response_format=schema, max_tokens=150):
        check(text[:24], got["content"], '{"prop":"test"}')
done()
