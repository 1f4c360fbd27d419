"""Tool calls: parsing of answers, whole and streamed, and required calls."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from conftest import Logits
from test_chat import HELLO

from metal_attention import LLM, LogitsProcessor, OptionError, SamplingParams, StreamOutput, TemplateError, ToolCall

# A template with the tool-call format of Hermes and Qwen.
HERMES = """{%- if tools %}{{ tools[0].function.name }}: <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}, "day": {"type": "integer", "minimum": 1, "maximum": 7}},
            "required": ["city", "day"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "tell", "parameters": {"type": "object", "properties": {}}}}
ANSWER = 'Let me see.\n<tool_call>\n{"name": "look_up", "arguments": {"city": "Rome", "day": 3}}\n</tool_call>'


def says(llm: LLM, text: str, *, ends: bool = True) -> LogitsProcessor:
    """A logits processor that forces `text`, in the longest fitting tokens, and then EOS, or with `ends=False` nothing more."""
    vocab, special = llm.get_tokenizer().get_vocab(), llm.get_tokenizer().all_special_tokens
    pieces = {token.replace("▁", " "): id for token, id in vocab.items() if token not in special and "<0x" not in token}
    ids: list[int | None] = []
    while text:
        longest = max((piece for piece in pieces if piece and text.startswith(piece)), key=len, default=None)
        ids += [vocab[f"<0x{byte:02X}>"] for byte in text[0].encode()] if longest is None else [pieces[longest]]
        text = text[len(longest or text[0]) :]
    ids += [llm.eos_token_id] if ends else []
    n_prompt: list[int] = []

    def process(so_far: list[int], logits: Logits) -> None:
        if not n_prompt:
            n_prompt.append(len(so_far))
        n_generated = len(so_far) - n_prompt[0]
        if n_generated < len(ids):
            logits[np.arange(len(logits)) != ids[n_generated]] = -np.inf

    return process


def saying(llm: LLM, text: str) -> SamplingParams:
    """Parameters with which the model generates `text`."""
    return SamplingParams(temperature=0, max_tokens=None, logits_processors=[says(llm, text)])


def test_calls_are_parsed_from_the_answer(llm: LLM) -> None:
    output = llm.chat(HELLO, saying(llm, ANSWER), tools=[TOOL], chat_template=HERMES, use_tqdm=False)[0]
    text = output.outputs[0]
    assert (text.text, text.finish_reason, text.stop_reason) == (ANSWER, "stop", "end_of_text")
    [call] = text.tool_calls
    assert call == ToolCall(call.id, "look_up", '{"city": "Rome", "day": 3}')
    assert call.parsed_arguments() == {"city": "Rome", "day": 3} and len(call.id) == 9
    function = {"name": "look_up", "arguments": call.arguments}
    message = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"id": call.id, "type": "function", "function": function}],
    }
    assert text.message == message
    # The message can be passed back in the next conversation.
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    assert "tool: warm" in llm.chat_prompt([*HELLO, message, result], tools=[TOOL], chat_template=HERMES)[0]


def test_a_call_at_which_the_answer_is_cut_off_is_left_out(llm: LLM) -> None:
    # A call that the model itself leaves open is completed.
    left_open = ANSWER[: ANSWER.index(', "day"')]
    text = llm.chat(HELLO, saying(llm, left_open), tools=[TOOL], chat_template=HERMES, use_tqdm=False)[0].outputs[0]
    assert [call.arguments for call in text.tool_calls] == ['{"city": "Rome"}']
    params = dataclasses.replace(saying(llm, ANSWER), max_tokens=len(text.token_ids))
    text = llm.chat(HELLO, params, tools=[TOOL], chat_template=HERMES, use_tqdm=False)[0].outputs[0]
    assert (text.text, text.finish_reason) == (left_open, "length")
    assert (text.tool_calls, text.message) == ([], {"role": "assistant", "content": "Let me see."})
    params = dataclasses.replace(params, logits_processors=[says(llm, ANSWER)])
    pieces = list(llm.chat_stream(HELLO, params, tools=[TOOL], chat_template=HERMES))
    [[name, arguments]] = joined(pieces)["calls"]
    assert (name, pieces[-1].finish_reason) == ("look_up", "length")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


def test_without_tools_calls_are_plain_text(llm: LLM) -> None:
    for choice, tools in (("auto", None), ("none", [TOOL])):
        params = saying(llm, ANSWER)
        output = llm.chat(HELLO, params, tools=tools, tool_choice=choice, chat_template=HERMES, use_tqdm=False)[0]  # type: ignore[arg-type]
        assert output.outputs[0].tool_calls == []
        assert output.outputs[0].message == {"role": "assistant", "content": ANSWER}
        assert "look_up" not in (output.prompt or "")
    raw = llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0]
    assert raw.message is None and raw.tool_calls == []


def test_thoughts_are_parsed_from_the_answer(llm: LLM) -> None:
    thinking = HERMES.replace("assistant:{%", "assistant:<think>\n{%") + "{# </think> #}"
    params = saying(llm, "It is hot.\n</think>\n\nYes.")
    text = llm.chat(HELLO, params, chat_template=thinking, use_tqdm=False)[0].outputs[0]
    assert text.message == {"role": "assistant", "content": "Yes.", "reasoning_content": "It is hot."}


def joined(pieces: list[StreamOutput]) -> dict[str, Any]:
    """The message that the deltas add up to."""
    message: dict[str, Any] = {"content": "", "calls": []}
    for piece in pieces:
        assert piece.delta is not None
        message["content"] += piece.delta.get("content", "")
        for part in piece.delta.get("tool_calls", []):
            if part["index"] == len(message["calls"]):
                assert (part["type"], part["function"]["arguments"]) == ("function", "")
                message["calls"].append([part["function"]["name"], ""])
            else:
                message["calls"][part["index"]][1] += part["function"]["arguments"]
    return message


def test_streamed_answers_are_parsed(llm: LLM) -> None:
    expected = {"content": "Let me see.", "calls": [["look_up", '{"city": "Rome", "day": 3}']]}
    pieces = list(llm.chat_stream(HELLO, saying(llm, ANSWER), tools=[TOOL], chat_template=HERMES))
    assert joined(pieces) == expected and "".join(piece.text for piece in pieces) == ANSWER

    async def read() -> list[StreamOutput]:
        stream = llm.chat_stream(HELLO, saying(llm, ANSWER), tools=[TOOL], chat_template=HERMES)
        return [piece async for piece in stream]

    assert joined(asyncio.run(read())) == expected
    assert [piece.delta for piece in llm.stream("Once", SamplingParams(max_tokens=2))] == [None] * 3


def test_a_call_can_be_required(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=200)
    call = '{ "city" : "Paris" , "day" : 1 }'
    named = {"type": "function", "function": {"name": "look_up"}}
    output = llm.chat(HELLO, greedy, tools=[OTHER, TOOL], tool_choice=named, chat_template=HERMES, use_tqdm=False)[0]
    text = output.outputs[0]
    assert text.text == f'<tool_call>\n{{"name": "look_up", "arguments": {call}}}\n</tool_call>'
    assert [(call.name, call.arguments) for call in text.tool_calls] == [("look_up", call)]
    assert (text.finish_reason, text.message and text.message["content"]) == ("stop", None)
    pieces = list(llm.chat_stream(HELLO, greedy, tools=[OTHER, TOOL], tool_choice=named, chat_template=HERMES))
    assert joined(pieces) == {"content": "", "calls": [["look_up", call]]}
    several = llm.chat(HELLO, greedy, tools=[TOOL], tool_choice="required", chat_template=HERMES, use_tqdm=False)[0]
    calls = several.outputs[0].tool_calls
    assert [each.name for each in calls] == ["look_up"] * 2
    assert [each.arguments for each in calls] == [call, '{ "city" : "Rome" , "day" : 1 }']


def test_invalid_tools_are_rejected(llm: LLM) -> None:
    with pytest.raises(OptionError, match="there are no tools"):
        llm.chat(HELLO, tool_choice="required", chat_template=HERMES)
    with pytest.raises(OptionError, match="names 'fly', which is none of the tools"):
        llm.chat(HELLO, tools=[TOOL], tool_choice={"function": {"name": "fly"}}, chat_template=HERMES)
    with pytest.raises(OptionError, match="tool_choice='perhaps'"):
        llm.chat(HELLO, tools=[TOOL], tool_choice="perhaps", chat_template=HERMES)  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match="the function's name"):
        bad = {"type": "function", "function": {"name": "a\nb"}}
        llm.chat(HELLO, tools=[bad], chat_template=HERMES)
