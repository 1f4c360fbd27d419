"""`LLM.stream`: streamed texts with and without `async`, cancellation, errors."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time

import pytest
from test_generate import GREEDY, STORY

from metal_attention import LLM, PromptError, SamplingParams, StreamOutput


def check(pieces: list[StreamOutput], ids: list[int]) -> None:
    """Checks the pieces of the greedy story with the token ids `ids`."""
    assert "".join(piece.text for piece in pieces) == STORY
    assert [id for piece in pieces for id in piece.token_ids] == ids
    assert [piece.finish_reason for piece in pieces] == [None] * len(ids) + ["length"]
    assert pieces[-1].stop_reason == "length"


def long() -> SamplingParams:
    """Parameters of a text that fills the context."""
    return SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def is_idle(llm: LLM) -> bool:
    """Whether all slots are free, so that four texts finish soon."""
    start = time.monotonic()
    llm.generate(["Once upon a time"] * 4, GREEDY, use_tqdm=False)
    return time.monotonic() - start < 10


def test_pieces_add_up_to_the_text(llm: LLM) -> None:
    ids = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream("Once upon a time", GREEDY)
    check(list(stream), ids)
    assert list(stream) == []
    probable = list(llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=2, logprobs=1)))
    assert [list(piece.logprobs or {}) for piece in probable] == [[ids[0]], [ids[1]], []]


def test_async_streams_run_concurrently(llm: LLM) -> None:
    ids = llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    async def read() -> list[StreamOutput]:
        return [piece async for piece in llm.stream("Once upon a time", GREEDY)]

    async def all_of_them() -> list[list[StreamOutput]]:
        return await asyncio.gather(*(read() for _ in range(24)))

    for pieces in asyncio.run(all_of_them()):
        check(pieces, ids)


def test_streams_do_not_block_the_event_loop(llm: LLM) -> None:
    async def count() -> tuple[int, int]:
        ticks, pieces = 0, 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        async for _ in llm.stream("Once upon a time", long()):
            pieces += 1
        ticking.cancel()
        return ticks, pieces

    ticks, pieces = asyncio.run(count())
    assert pieces == 512 - 5 + 2 and ticks > 3


def test_leaving_the_loop_cancels_the_text(llm: LLM) -> None:
    with llm.stream("Once upon a time", long()) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
    assert list(stream) == []
    for _ in llm.stream("Once upon a time", long()):
        break

    async def leave() -> None:
        stream = llm.stream("Once upon a time", long())
        async for _ in stream:
            break
        await stream.aclose()
        assert [piece async for piece in stream] == []
        async for _ in llm.stream("Once upon a time", long()):
            break

    asyncio.run(leave())
    gc.collect()
    assert is_idle(llm)


def test_a_cancelled_task_cancels_its_text(llm: LLM) -> None:
    steps = 0

    def slow(ids: list[int], logits: object) -> None:
        nonlocal steps
        steps += 1
        time.sleep(0.01)

    async def cancel() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in llm.stream("Once upon a time", dataclasses.replace(long(), logits_processors=[slow])):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert is_idle(llm)
    assert steps < 400


def test_a_closed_event_loop_does_no_harm(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", long())

    async def first() -> StreamOutput:
        return await stream.__anext__()

    asyncio.run(first())
    time.sleep(0.1)
    assert is_idle(llm)


def test_errors_are_raised_by_the_call_or_at_their_token(llm: LLM) -> None:
    with pytest.raises(PromptError, match="600 tokens"):
        llm.stream([5] * 600)

    def broken(ids: list[int], logits: object) -> None:
        if len(ids) == 7:
            raise LookupError("no rule for this")

    async def read() -> list[StreamOutput]:
        pieces: list[StreamOutput] = []
        params = SamplingParams(temperature=0, logits_processors=[broken])
        with pytest.raises(LookupError, match="no rule"):
            async for piece in llm.stream("Once upon a time", params):
                pieces.append(piece)
        return pieces

    assert len(asyncio.run(read())) == 2
