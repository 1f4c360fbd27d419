"""Structured outputs (grammars, regular expressions, choices, JSON schemas), and equality with the command line."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from test_chat import HELLO, TEMPLATE
from test_tools import says

from metal_attention import LLM, GuidedDecodingParams, OptionError, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["name", "age"],
}
GBNF = 'root ::= " a " pet "."\npet ::= "cat" | "dog"'


def greedy(**form: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(**form))


def generated(llm: LLM, params: SamplingParams, prompt: str = "Lily has") -> str:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ({"regex": r" [a-z]{3,8}, [a-z]{3,8}\."}, ["--regex", r" [a-z]{3,8}, [a-z]{3,8}\."]),
        ({"grammar": GBNF}, ["--grammar", GBNF]),
        ({"json": SCHEMA}, ["--json-schema", json.dumps(SCHEMA)]),
        ({"json": json.dumps(SCHEMA)}, ["--json-schema", json.dumps(SCHEMA)]),
    ],
)
def test_texts_equal_those_of_the_command_line(
    llm: LLM, program: Callable[..., str], form: dict[str, Any], flags: list[str]
) -> None:
    lines = program("run", "-p", "Lily has", "-n", "60", "--temp", "0", "--json", "--device", "cpu", *flags).splitlines()
    output = llm.generate("Lily has", greedy(**form), use_tqdm=False)[0].outputs[0]
    assert output.text == json.loads(lines[-1])["text"]
    assert (output.finish_reason, output.stop_reason) == ("stop", "end_of_text")


def test_texts_match_the_grammar(llm: LLM) -> None:
    assert generated(llm, greedy(grammar=GBNF)) == " a cat."
    assert generated(llm, greedy(choice=[" blue", " red"])) == " red"
    assert generated(llm, greedy(json=SCHEMA)) == '{ "name" : "Lily" ,"age" : 3 }'
    assert generated(llm, greedy(json_object=True)).startswith('{ "Hello," : "')
    old = GuidedDecodingParams(choice=[" blue", " red"], backend="xgrammar")
    assert generated(llm, SamplingParams(temperature=0, guided_decoding=old)) == " red"
    # An empty schema allows any JSON.
    free = SamplingParams(temperature=0, max_tokens=60)
    assert generated(llm, greedy(json={})) == generated(llm, greedy(json="{}")) != generated(llm, free)


def test_a_grammar_is_compiled_once_and_applies_to_each_text(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=1, temperature=1.5, structured_outputs=StructuredOutputsParams(regex=" [0-9]{4}|-[a-z]{6}")
    )
    outputs = llm.generate(["Once", "Lily", "Tom"], [params, params, SamplingParams(max_tokens=4)], use_tqdm=False)
    texts = [text.text for output in outputs[:2] for text in output.outputs]
    assert len(texts) == 6 and all(len(text) in (5, 7) for text in texts), texts
    pieces = list(llm.stream("Once", greedy(choice=[" blue", " red"])))
    assert "".join(piece.text for piece in pieces) in (" blue", " red")


def test_answers_match_the_grammar_after_thoughts(llm: LLM) -> None:
    form = greedy(grammar='root ::= "yes" | "no"')

    def answer(template: str, thoughts: str) -> tuple[str, object]:
        params = dataclasses.replace(form, logits_processors=[says(llm, thoughts, ends=False)])
        text = llm.chat(HELLO, params, chat_template=template, use_tqdm=False)[0].outputs[0]
        return text.text, text.message

    # The prompt begins the thoughts.
    begun = TEMPLATE.replace("assistant:{% endif %}", "assistant:<think>\n{% endif %}{# </think> #}")
    message = {"role": "assistant", "content": "yes", "reasoning_content": "It is hot."}
    assert answer(begun, "It is hot.\n</think>\n\n") == ("It is hot.\n</think>\n\n \nyes", message)
    # The model begins the thoughts, or writes none.
    thinks = TEMPLATE + "{# <think> </think> #}"
    assert answer(thinks, "<think>It is hot.</think>") == ("<think>It is hot.</think>yes", message)
    assert answer(thinks, "") == ("yes", {"role": "assistant", "content": "yes"})
    assert answer(TEMPLATE, "") == ("yes", {"role": "assistant", "content": "yes"})


def test_invalid_grammars_are_rejected(llm: LLM) -> None:
    for form, why in (
        ({"regex": "(a"}, "regex cannot be followed|structured_outputs cannot be followed"),
        ({"grammar": "root ::= ("}, "cannot be followed"),
        ({"json": "no JSON"}, "must be a JSON schema"),
        ({"choice": [" a"], "regex": " a"}, "ask for different things"),
        ({"structural_tag": "{}"}, "cannot be followed: use json or grammar"),
        ({}, "restricts no text, as nothing is given"),
        ({"json_object": False}, "restricts no text, as nothing is given"),
        ({"json": ""}, "restricts no text, as json is empty"),
        ({"regex": ""}, "restricts no text, as regex is empty"),
        ({"choice": []}, "restricts no text, as choice is empty"),
    ):
        with pytest.raises(OptionError, match=why):
            generated(llm, greedy(**form))
    both = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="a"), guided_decoding=GuidedDecodingParams(regex="a")
    )
    with pytest.raises(OptionError, match="leave one of them out"):
        generated(llm, both)
    messages = [*HELLO, {"role": "assistant", "content": "I"}]
    with pytest.raises(OptionError, match="structured_outputs cannot be followed by an answer that goes on with the last message"):
        llm.chat(messages, greedy(regex="a"), chat_template=TEMPLATE, continue_final_message=True, use_tqdm=False)


def test_unsupported_parts_of_a_schema_are_warned_of(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 1}
    with pytest.warns(UserWarning, match="not enforced of the schema: .*uniqueItems"):
        generated(llm, greedy(json=schema))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generated(llm, greedy(json=SCHEMA))
