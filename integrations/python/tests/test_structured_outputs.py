"""Texts of a given form: what they look like, and that they are those of the program."""

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


def text_of(llm: LLM, params: SamplingParams, prompt: str = "Lily has") -> str:
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
def test_texts_are_those_of_the_program(
    llm: LLM, program: Callable[..., str], form: dict[str, Any], flags: list[str]
) -> None:
    lines = program("run", "-p", "Lily has", "-n", "60", "--temp", "0", "--json", "--device", "cpu", *flags).splitlines()
    output = llm.generate("Lily has", greedy(**form), use_tqdm=False)[0].outputs[0]
    assert output.text == json.loads(lines[-1])["text"]
    assert (output.finish_reason, output.stop_reason) == ("stop", "end_of_text")


def test_texts_have_their_form(llm: LLM) -> None:
    assert text_of(llm, greedy(grammar=GBNF)) == " a cat."
    assert text_of(llm, greedy(choice=[" blue", " red"])) == " red"
    assert text_of(llm, greedy(json=SCHEMA)) == '{ "name" : "Lily" ,"age" : 3 }'
    assert text_of(llm, greedy(json_object=True)).startswith('{ "Hello," : "')
    old = GuidedDecodingParams(choice=[" blue", " red"], backend="xgrammar")
    assert text_of(llm, SamplingParams(temperature=0, guided_decoding=old)) == " red"
    # A schema that says nothing is any JSON.
    free = SamplingParams(temperature=0, max_tokens=60)
    assert text_of(llm, greedy(json={})) == text_of(llm, greedy(json="{}")) != text_of(llm, free)


def test_a_form_is_made_once_and_followed_by_each_text(llm: LLM) -> None:
    params = SamplingParams(
        n=3, seed=1, temperature=1.5, structured_outputs=StructuredOutputsParams(regex=" [0-9]{4}|-[a-z]{6}")
    )
    outputs = llm.generate(["Once", "Lily", "Tom"], [params, params, SamplingParams(max_tokens=4)], use_tqdm=False)
    texts = [text.text for output in outputs[:2] for text in output.outputs]
    assert len(texts) == 6 and all(len(text) in (5, 7) for text in texts), texts
    pieces = list(llm.stream("Once", greedy(choice=[" blue", " red"])))
    assert "".join(piece.text for piece in pieces) in (" blue", " red")


def test_answers_have_their_form_after_thoughts(llm: LLM) -> None:
    form = greedy(grammar='root ::= "yes" | "no"')

    def answer(template: str, thoughts: str) -> tuple[str, object]:
        params = dataclasses.replace(form, logits_processors=[says(llm, thoughts, ends=False)])
        text = llm.chat(HELLO, params, chat_template=template, use_tqdm=False)[0].outputs[0]
        return text.text, text.message

    # The prompt has begun them.
    begun = TEMPLATE.replace("assistant:{% endif %}", "assistant:<think>\n{% endif %}{# </think> #}")
    message = {"role": "assistant", "content": "yes", "reasoning_content": "It is hot."}
    assert answer(begun, "It is hot.\n</think>\n\n") == ("It is hot.\n</think>\n\n \nyes", message)
    # The model begins them, or not.
    thinks = TEMPLATE + "{# <think> </think> #}"
    assert answer(thinks, "<think>It is hot.</think>") == ("<think>It is hot.</think>yes", message)
    assert answer(thinks, "") == ("yes", {"role": "assistant", "content": "yes"})
    assert answer(TEMPLATE, "") == ("yes", {"role": "assistant", "content": "yes"})


def test_forms_that_cannot_be_are_refused(llm: LLM) -> None:
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
            text_of(llm, greedy(**form))
    both = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="a"), guided_decoding=GuidedDecodingParams(regex="a")
    )
    with pytest.raises(OptionError, match="leave one of them out"):
        text_of(llm, both)
    said = [*HELLO, {"role": "assistant", "content": "I"}]
    with pytest.raises(OptionError, match="structured_outputs cannot be followed by an answer that goes on with the last message"):
        llm.chat(said, greedy(regex="a"), chat_template=TEMPLATE, continue_final_message=True, use_tqdm=False)


def test_what_is_not_enforced_of_a_schema_is_told(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 1}
    with pytest.warns(UserWarning, match="not enforced of the schema: .*uniqueItems"):
        text_of(llm, greedy(json=schema))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text_of(llm, greedy(json=SCHEMA))
