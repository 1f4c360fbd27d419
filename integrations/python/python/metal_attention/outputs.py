"""What comes back; the names are vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token among those that might have come."""

    logprob: float
    """Natural logarithm of its probability, by the model itself."""
    rank: int
    """Its place among all tokens: 1 is the most probable one."""
    decoded_token: str
    """Its text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function in an answer."""

    id: str
    """Its own name, which the message with the function's result gives back as `tool_call_id`."""
    name: str
    """The function."""
    arguments: str
    """The arguments as the model wrote them: a JSON object as text."""

    def parsed_arguments(self) -> Any:
        """The arguments as Python objects. Raises `json.JSONDecodeError` where the model wrote no JSON."""
        return json.loads(self.arguments)


@dataclass(slots=True)
class CompletionOutput:
    """A text."""

    index: int
    """Its number among the `n` texts of the prompt."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """"stop", "length" or "abort"; None while the text goes on."""
    stop_reason: str | None
    """The same more exactly: "end_of_text", "stop_string", "length", "context_full", "deadline", "cancelled"."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token itself and the most probable ones, where they were asked for."""
    message: dict[str, Any] | None = None
    """The answer to a conversation as OpenAI's message, with `content`, `reasoning_content` and `tool_calls` apart: what to append
    to the conversation. A call that the text was cut off in is left out. None where there was none."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The complete calls in the answer to a conversation with `tools`."""
        calls = [] if self.message is None else self.message.get("tool_calls", [])
        return [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of the whole text, where log probabilities were asked for."""
        if self.logprobs is None:
            return None
        return sum(top[id].logprob for id, top in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds that a text took."""

    queued: float
    """Until it got a place."""
    prefill: float
    """From there to its first token."""
    decode: float
    """From there to its end."""


@dataclass(slots=True)
class RequestOutput:
    """The answer to a prompt."""

    request_id: str
    prompt: str | None
    """The prompt; None where it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache already."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt itself and the most probable ones in its place, where they were asked for; None for the first,
    which nothing comes before."""
    metrics: list[RequestMetrics] = field(default_factory=list)
    """One for each text."""


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """The next piece of a text."""

    text: str
    """What can be shown now: whole characters, and nothing that may turn out to be the start of a stop string. May be
    empty."""
    token_ids: list[int]
    """The token that was chosen; none in the last piece."""
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None
    """Set in the last piece; see `CompletionOutput.finish_reason`."""
    stop_reason: str | None
    delta: dict[str, Any] | None = None
    """What the piece adds to the answer to a conversation, as the `delta` of OpenAI's chunks: pieces of `content`,
    `reasoning_content` and `tool_calls`. The arguments of a call that the text was cut off in stay incomplete. None where there was no
    conversation."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Set in the first piece, which has no text, where they were asked for; see `RequestOutput.prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector of length 1."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of a text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well a document answers a query: what the model gives, of most models no probability."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
