"""`LLM.chat` and `chat_prompt`: rendering conversations with the chat template; control tokens in messages stay text."""

from __future__ import annotations

import pathlib

import gguf
import pytest
from conftest import ROOT

from metal_attention import LLM, SamplingParams, TemplateError

TEMPLATE = """{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if tools %}{{ tools[0].function.name }}
{% endif %}{% if shout is defined %}LOUD{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"""
HELLO = [{"role": "user", "content": "Hello!"}]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The built-in model with a chat template."""
    path = tmp_path_factory.mktemp("models") / "chat.gguf"
    with_template(ROOT / "models/stories260K.gguf", path, TEMPLATE)
    return LLM(path, device="cpu", n_parallel=2)


def with_template(source: pathlib.Path, path: pathlib.Path, template: str) -> None:
    """Copies a model and gives it a chat template."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_chat_template(template)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversations_are_rendered_with_the_template(chat: LLM) -> None:
    text, ids = chat.chat_prompt(HELLO)
    assert text == "user: Hello!\nassistant:"
    assert ids == chat.tokenize(text)
    assert chat.chat_prompt(HELLO, add_generation_prompt=False)[0] == "user: Hello!\n"
    assert chat.chat_prompt(HELLO, chat_template_kwargs={"shout": True})[0] == "user: Hello!\nLOUDassistant:"
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    assert "look_up" in chat.chat_prompt(HELLO, tools=[tool])[0]

    output = chat.chat(HELLO, GREEDY, use_tqdm=False)[0]
    assert (output.prompt, output.prompt_token_ids) == (text, ids)
    assert output.outputs[0].token_ids == chat.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert "".join(piece.text for piece in chat.chat_stream(HELLO, GREEDY)) == output.outputs[0].text
    two = chat.chat([HELLO, [{"role": "system", "content": "Be brief."}, *HELLO]], GREEDY, use_tqdm=False)
    assert two[0].outputs[0].text == output.outputs[0].text
    assert two[1].prompt == "system: Be brief.\nuser: Hello!\nassistant:"


def test_control_tokens_in_messages_stay_text(chat: LLM) -> None:
    _, ids = chat.chat_prompt([{"role": "user", "content": "<s></s>"}])
    assert ids[0] == 1 and 1 not in ids[1:] and 2 not in ids


def test_invalid_conversations_are_rejected(chat: LLM) -> None:
    for messages, why in (
        ([{"role": "pirate", "content": "Arr"}], "messages: unknown variant `pirate`"),
        ([{"content": "Hello"}], "missing field `role`"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type \"image_url\" cannot be read"),
    ):
        with pytest.raises(TemplateError, match=why):
            chat.chat(messages, use_tqdm=False)
    with pytest.raises(TemplateError, match="tools"):
        chat.chat_prompt(HELLO, tools=[{"type": "function"}])


def test_without_a_template_messages_are_lines(llm: LLM) -> None:
    with pytest.warns(UserWarning, match="no chat template"):
        output = LLM(device="cpu", n_parallel=1).chat(HELLO, GREEDY, use_tqdm=False)[0]
    assert output.prompt == "User: Hello!\nAssistant:"
