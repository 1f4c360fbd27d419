"""Clients of Anthropic's interface: the anthropic package, langchain-anthropic, and Claude Code's command line."""

import json
import os
import subprocess
import tempfile
from typing import Literal

from pydantic import BaseModel

MODEL = "stories260K"
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
        "required": ["city"],
    },
    "cache_control": {"type": "ephemeral"},
}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Paris"]


def base(url):
    """The address without /v1, which clients of this interface add."""
    return url.removesuffix("/v1")


def anthropic_python(url):
    import anthropic

    client = anthropic.Anthropic(base_url=base(url), api_key="none", max_retries=0)
    # Newer versions of the package have no parameter for it.
    greedy = {"extra_body": {"temperature": 0}}
    whole = client.messages.create(model=MODEL, max_tokens=8, messages=ASK, system="Be brief.", **greedy)
    assert whole.content[0].text and whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 8, whole
    assert whole._request_id.startswith("req-"), whole._request_id
    usage = whole.usage
    count = client.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.").input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens, (count, usage)
    with client.messages.stream(model=MODEL, max_tokens=8, messages=ASK, system="Be brief.", **greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text, (text, whole, final)
    assert final.usage.cache_read_input_tokens == count - final.usage.input_tokens > 0, final.usage
    choice = {"type": "tool", "name": "weather"}
    called = client.messages.create(
        model=MODEL, max_tokens=200, messages=ASK, tools=[WEATHER, SEARCH], tool_choice=choice
    )
    [call] = called.content
    assert called.stop_reason == "tool_use" and call.input["city"] in ("Rome", "Paris"), called
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=ASK, tools=[WEATHER, SEARCH], tool_choice=choice
    ) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_message().content
    assert {"input_json", "content_block_stop", "message_stop"} <= kinds, kinds
    assert streamed.input["city"] in ("Rome", "Paris"), streamed
    # The turn after the call, and thoughts of another model.
    thoughts = {"type": "thinking", "thinking": "Hm.", "signature": "EqoB"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
    messages = [
        *ASK,
        {"role": "assistant", "content": [thoughts, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And in Paris?"}]},
    ]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    again = client.messages.create(model=MODEL, max_tokens=8, messages=messages, tools=[WEATHER], thinking=thinking)
    assert again.usage.output_tokens == 8, again
    schema = {"type": "json_schema", "schema": City.model_json_schema()}
    formed = client.messages.create(model=MODEL, max_tokens=200, messages=ASK, output_config={"format": schema})
    City.model_validate_json(formed.content[0].text)
    begun = [*ASK, {"role": "assistant", "content": "The weather"}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=begun).content[0].text
    try:
        client.messages.create(model=MODEL, max_tokens=8, messages=[])
        raise AssertionError("a conversation without messages is answered")
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error", error.body


def langchain(url):
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool

    @tool
    def weather(city: Literal["Rome", "Paris"]) -> str:
        """The weather in a city."""
        return f"It is sunny in {city}."

    chat = ChatAnthropic(base_url=base(url), api_key="none", model=MODEL, max_tokens=200, max_retries=0)
    messages = [SystemMessage("Be brief."), HumanMessage(ASK[0]["content"])]
    assert "".join(part.text for part in chat.stream(messages))
    called = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(messages)
    assert called.tool_calls[0]["args"]["city"] in ("Rome", "Paris"), called
    messages += [called, ToolMessage(weather.invoke(called.tool_calls[0]["args"]), tool_call_id=called.tool_calls[0]["id"])]
    assert chat.bind_tools([weather]).invoke(messages).usage_metadata["output_tokens"] > 0
    for method in ("json_schema", "function_calling"):
        assert chat.with_structured_output(City, method=method).invoke("A city").name in ("Rome", "Paris"), method


def claude_code(url, packages):
    """One prompt after another in one session. The tools and the long prompt are left out, as the context is short."""
    with tempfile.TemporaryDirectory() as home:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": home,
            "ANTHROPIC_BASE_URL": base(url),
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            # The built-in model generates until its context is full.
            "CLAUDE_CODE_EXTRA_BODY": json.dumps({"temperature": 0, "stop_sequences": ["."]}),
        }

        def claude(prompt, *arguments):
            command = [packages / "node_modules/.bin/claude", "-p", prompt, "--output-format", "json", *arguments]
            command += ["--tools", "", "--system-prompt", "You tell stories."]
            done = subprocess.run(
                command, env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
            )
            result = json.loads(done.stdout)
            assert not result["is_error"] and result["result"], result
            return result

        first = claude("Once upon a time")
        second = claude("And then?", "--resume", first["session_id"])
        # The billing line differs in the second turn, but the first turn's tokens are not evaluated again.
        read = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
        assert second["usage"]["cache_read_input_tokens"] >= read, (first["usage"], second["usage"])
