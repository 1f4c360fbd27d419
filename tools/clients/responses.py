"""Clients of OpenAI's Responses interface. Each gets the server's address; those in JavaScript a folder with their packages too."""

import asyncio
import json
import os
import pathlib
import subprocess
import tempfile
from typing import Literal

from clients import speaker
from clients.child import Child
from serving import run, serving

MODEL = "stories260K"
ASK = "What is the weather in Rome?"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def openai_responses(url):
    import openai

    client = openai.OpenAI(base_url=url, api_key="none")
    ask = {"model": MODEL, "temperature": 0}
    whole = client.responses.create(input=ASK, instructions="Help.", max_output_tokens=8, **ask)
    assert whole.output_text and whole.status == "incomplete" and whole.usage.output_tokens == 8, whole
    # A stream, parsed by the package.
    with client.responses.stream(input=ASK, instructions="Help.", max_output_tokens=8, **ask) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text, (text, whole.output_text)
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")][0] == 0
    assert client.responses.parse(input="A child", text_format=Child, **ask).output_parsed.name in ("Lily", "Tom")
    # A call, and the turn after it.
    called = client.responses.create(input=ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **ask)
    call = called.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Paris"), call
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    after = client.responses.create(
        input=[output], previous_response_id=called.id, tools=[WEATHER], tool_choice="none", max_output_tokens=8, **ask
    )
    by_hand = [{"role": "user", "content": ASK}, *called.output, output]
    count = client.responses.input_tokens.count(model=MODEL, input=by_hand, tools=[WEATHER], tool_choice="none")
    assert after.usage.input_tokens == count.input_tokens, (after.usage, count)
    items = client.responses.input_items.list(after.id, order="asc")
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"], items
    assert client.responses.retrieve(after.id).output_text == after.output_text
    client.responses.delete(after.id)
    try:
        client.responses.retrieve(after.id)
        raise AssertionError("a deleted response is still there")
    except openai.NotFoundError:
        pass
    pick = {"type": "custom", "name": "pick", "format": {"type": "grammar", "syntax": "regex", "definition": "yes|no"}}
    picked = client.responses.create(input=ASK, tools=[pick], tool_choice={"type": "custom", "name": "pick"}, **ask)
    assert picked.output[-1].type == "custom_tool_call" and picked.output[-1].input in ("yes", "no"), picked.output


def openai_agents_responses(url):
    """The agents' default model class."""
    import agents
    import openai

    cities = []

    @agents.function_tool
    def weather(city: Literal["Rome", "Paris"]) -> str:
        """The weather in a city."""
        cities.append(city)
        return "It is sunny."

    agents.set_default_openai_client(openai.AsyncOpenAI(base_url=url, api_key="none"))
    agent = agents.Agent(
        name="Weather", instructions="Help.", tools=[weather], model=MODEL, output_type=Child,
        # The first turn must call the tool; the answer after its result must be a Child.
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=60, parallel_tool_calls=False),
    )  # fmt: skip
    result = asyncio.run(agents.Runner.run(agent, ASK))
    assert len(cities) == 1 and cities[0] in ("Rome", "Paris"), cities
    assert isinstance(result.final_output, Child), result.final_output

    async def streamed():
        run = agents.Runner.run_streamed(agent, ASK)
        kinds = [event.type async for event in run.stream_events()]
        assert "run_item_stream_event" in kinds, kinds

    asyncio.run(streamed())
    assert len(cities) == 2


def vercel_ai_responses(url, packages):
    run(["node", packages / "vercel_ai_responses.mjs", url, MODEL])


def codex(_, packages):
    """A turn of the Codex CLI with a command. The small model cannot call one, so a scripted model (`speaker.py`) answers."""
    call = {"name": "exec_command", "arguments": {"cmd": "echo six times seven is $((6 * 7)) | tee answer.txt"}}
    answers = {"user": f"<tool_call>\n{json.dumps(call)}\n</tool_call>", "tool": "The answer is in answer.txt."}
    # Codex does not work in /tmp, so the folder is elsewhere.
    with tempfile.TemporaryDirectory(dir=packages) as folder:
        folder = pathlib.Path(folder)
        work = folder / "work"
        work.mkdir()
        speaker.write(folder / "speaker.gguf", answers)
        with serving("-m", folder / "speaker.gguf", "--device", "cpu", "--alias", "speaker") as server:
            (folder / "config.toml").write_text(
                'model = "speaker"\nmodel_provider = "local"\nmodel_reasoning_summary = "auto"\n'
                f'[model_providers.local]\nname = "local"\nbase_url = "{server.url}/v1"\nwire_api = "responses"\n'
                "[analytics]\nenabled = false\n"
            )
            command = [packages / "node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--cd", work]
            command += ["--dangerously-bypass-approvals-and-sandbox", "--json", "-o", folder / "last.txt", "Compute."]
            said = run(command, env={**os.environ, "CODEX_HOME": str(folder)}, stdin=subprocess.DEVNULL, timeout=120)
        assert (work / "answer.txt").read_text() == "six times seven is 42\n"
        assert (folder / "last.txt").read_text().strip() == answers["tool"]
        items = [event["item"] for line in said.splitlines() if (event := json.loads(line))["type"] == "item.completed"]
        [ran] = [item for item in items if item["type"] == "command_execution"]
        assert ran["exit_code"] == 0 and "42" in ran["aggregated_output"], ran
