"""A text while it is generated, for loops with and without `async`."""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import TYPE_CHECKING

from .outputs import StreamOutput

if TYPE_CHECKING:
    from ._engine import Event, EventStream
    from .llm import LLM


class Stream:
    """The parts of a text while it is generated: `for part in stream` or `async for part in stream`.

    Leaving the loop early, `close`, or dropping the stream cancels the request, which frees its slot.
    """

    def __init__(self, llm: LLM, prompt_ids: list[int], events: EventStream) -> None:
        self._llm = llm
        self._prompt_ids = prompt_ids
        self._events = events
        self._queue: asyncio.Queue[Event | BaseException] | None = None
        self._ended = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamOutput:
        event = None if self._ended else self._events.next()
        if event is None:
            raise StopIteration
        return self._output(event)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamOutput:
        if self._ended:
            raise StopAsyncIteration
        if self._queue is None:
            queue = self._queue = asyncio.Queue()
            loop = asyncio.get_running_loop()
            self._events.listen(lambda event: loop.call_soon_threadsafe(queue.put_nowait, event))
        try:
            event = await self._queue.get()
        except asyncio.CancelledError:
            self.close()
            raise
        if isinstance(event, BaseException):
            self._ended = True
            raise event
        return self._output(event)

    def close(self) -> None:
        """Cancels the request; no further parts come."""
        self._ended = True
        self._events.close()

    async def aclose(self) -> None:
        """The same as `close`, under the name that `async` code expects."""
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _output(self, event: Event) -> StreamOutput:
        self._ended = event.reason is not None
        told, id = event.logprobs, event.token_id
        of_prompt = event.prompt_logprobs
        return StreamOutput(
            text=event.text,
            token_ids=[] if id is None else [id],
            logprobs=None if told is None or id is None else self._llm._logprobs(id, told),
            finish_reason=_finish_reason(event.reason),
            stop_reason=event.reason,
            delta=None if event.delta is None else json.loads(event.delta),
            prompt_logprobs=None if of_prompt is None else self._llm._prompt_logprobs(self._prompt_ids, of_prompt),
        )


def _finish_reason(reason: str | None) -> str | None:
    """The reason in vLLM's words."""
    if reason is None:
        return None
    if reason in ("end_of_text", "stop_string"):
        return "stop"
    return "length" if reason in ("length", "context_full") else "abort"
