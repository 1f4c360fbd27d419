"""Clients of Ollama's interface in Python, each used as in its documentation. test-clients runs them."""

import asyncio
import math

from clients.child import Child

PROMPT = "Once upon a time"
STORY = ", there was a little girl"
ASK = "What is the weather in Rome?"
GREEDY = {"temperature": 0, "num_predict": 8}


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: the city

    Returns:
        str: what it is like
    """
    return f"It is sunny in {city}."


def ollama_python(url, model):
    import ollama

    client = ollama.Client(host=url)
    text = client.generate(model=model, prompt=PROMPT, raw=True, options=GREEDY)
    assert text.response == STORY and text.done_reason == "length" and text.eval_count == 8, text
    parts = list(client.generate(model=model, prompt=PROMPT, raw=True, stream=True, options=GREEDY))
    assert "".join(part.response for part in parts) == STORY and parts[-1].done and not parts[0].done
    first = client.generate(model=model, prompt=PROMPT, system="Tell a story.", options=GREEDY)
    assert client.generate(model=model, prompt="And then?", context=first.context, options=GREEDY).context

    messages = [{"role": "user", "content": ASK}]
    whole = client.chat(model=model, messages=messages, options=GREEDY, think=False, keep_alive="5m")
    assert whole.message.content and whole.model == model and whole.total_duration > whole.eval_duration > 0
    parts = list(client.chat(model=f"{model}:latest", messages=messages, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count

    # A Python function as tool, and the turn after its call.
    assert client.chat(model=model, messages=messages, tools=[weather], options=GREEDY).message.role == "assistant"
    call = ollama.Message.ToolCall(function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": "Rome"}))
    messages += [ollama.Message(role="assistant", tool_calls=[call])]
    messages += [{"role": "tool", "tool_name": "weather", "content": weather("Rome")}]
    assert client.chat(model=model, messages=messages, tools=[weather], options=GREEDY).message.content

    answer = client.chat(model=model, messages=[{"role": "user", "content": "A child"}], format=Child.model_json_schema())
    Child.model_validate_json(answer.message.content)
    vectors = client.embed(model=model, input=[PROMPT, "Hello"]).embeddings
    assert [len(vector) for vector in vectors] == [64, 64] and math.isclose(math.hypot(*vectors[0]), 1, abs_tol=1e-5)
    assert len(client.embeddings(model=model, prompt=PROMPT).embedding) == 64

    assert [known.model for known in client.list().models] == [f"{model}:latest"]
    assert client.show(model).modelinfo["general.architecture"] == "llama"
    [running] = client.ps().models
    assert running.model == f"{model}:latest" and running.size > 0 and running.context_length == 4096
    try:
        client.chat(model="absent", messages=messages)
        raise AssertionError("a model that is not there answered")
    except ollama.ResponseError as error:
        assert error.status_code == 404 and "not found" in error.error, error

    async def streamed():
        parts = await ollama.AsyncClient(host=url).generate(
            model=model, prompt=PROMPT, raw=True, stream=True, options=GREEDY
        )
        return "".join([part.response async for part in parts])

    assert asyncio.run(streamed()) == STORY


def ollama_python_management(url, model):
    import ollama

    client = ollama.Client(host=url)
    steps = list(client.create(model="mario", from_=model, system="You are Mario.", parameters={"num_predict": 3}, stream=True))
    assert steps[-1].status == "success"
    assert client.show("mario").model_dump()["parameters"].split() == ["num_predict", "3"]
    assert client.generate(model="mario", prompt=PROMPT, raw=True, options={"temperature": 0}).response == ", there was"
    assert client.copy("mario", "luigi").status == "success"
    assert {known.model for known in client.list().models} == {f"{name}:latest" for name in (model, "mario", "luigi")}
    for name in ("mario", "luigi"):
        assert client.delete(name).status == "success"
    assert client.generate(model=model, keep_alive=0).done_reason == "unload"
    assert client.generate(model=model).done_reason == "load"


def langchain_ollama(url, model):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

    assert OllamaLLM(base_url=url, model=model, temperature=0, num_predict=8).invoke(PROMPT)
    chat = ChatOllama(base_url=url, model=model, num_predict=300, validate_model_on_init=True)
    answer = chat.invoke(ASK)
    assert answer.usage_metadata["output_tokens"] > 0 and answer.response_metadata["model"] == model
    assert "".join(part.content for part in chat.stream(ASK))
    messages = [HumanMessage(ASK)]
    called = {"name": "weather", "args": {"city": "Rome"}, "id": "call-1", "type": "tool_call"}
    messages += [answer.model_copy(update={"tool_calls": [called]}), ToolMessage(weather("Rome"), tool_call_id="call-1")]
    assert chat.bind_tools([tool(weather)]).invoke(messages).usage_metadata["input_tokens"] > 0
    child = chat.with_structured_output(Child, method="json_schema").invoke("A child")
    assert isinstance(child, Child), child
    form = ChatOllama(base_url=url, model=model, format=Child.model_json_schema())
    Child.model_validate_json(form.invoke("A child").content)
    vectors = OllamaEmbeddings(base_url=url, model=model).embed_documents([PROMPT, "Hello"])
    assert [len(vector) for vector in vectors] == [64, 64]
