"""The results; the names are vLLM's."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token at one position."""

    logprob: float
    """Natural logarithm of its probability, before biases, processors and samplers."""
    rank: int
    """Its rank among all tokens: 1 is the most probable one."""
    decoded_token: str
    """Its text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function in an answer."""

    id: str
    """The id of the call, which the message with the function's result has as `tool_call_id`."""
    name: str
    """The function's name."""
    arguments: str
    """The arguments as the model wrote them: a JSON object as text."""

    def parsed_arguments(self) -> Any:
        """The arguments as Python objects. Raises `json.JSONDecodeError` if the model wrote no valid JSON."""
        return json.loads(self.arguments)


@dataclass(slots=True)
class CompletionOutput:
    """A generated text."""

    index: int
    """Its index among the `n` texts of the prompt."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """"stop", "length" or "abort"; None while the text is generated."""
    stop_reason: str | None
    """The exact reason: "end_of_text", "stop_string", "length", "context_full", "deadline", "cancelled"."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, the log probabilities of itself and of the most probable tokens; None: not requested."""
    message: dict[str, Any] | None = None
    """The answer to a conversation as OpenAI's message, with `content`, `reasoning_content` and `tool_calls`, which can be appended
    to the conversation. An incomplete call is left out. None: there was no conversation."""
    num_drafted_tokens: int = 0
    """Drafts that were evaluated: tokens that the drafter proposed."""
    num_accepted_tokens: int = 0
    """Drafts that were accepted. They are among the tokens of the text."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The complete calls in the answer to a conversation with `tools`."""
        calls = [] if self.message is None else self.message.get("tool_calls", [])
        return [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of the whole text; None: log probabilities were not requested."""
        if self.logprobs is None:
            return None
        return sum(top[id].logprob for id, top in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a text in seconds."""

    queued: float
    """Until it got a slot."""
    prefill: float
    """From there to its first token."""
    decode: float
    """From there to its end."""


@dataclass(slots=True)
class RequestOutput:
    """The result of a prompt."""

    request_id: str
    prompt: str | None
    """The prompt's text; None: it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    """Tokens of the prompt that were in the KV cache already."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, the log probabilities of itself and of the most probable tokens at its position; None for the
    first token. None as a whole: not requested."""
    metrics: list[RequestMetrics] = field(default_factory=list)
    """One for each text."""


@dataclass(frozen=True, slots=True)
class StreamOutput:
    """A part of a text."""

    text: str
    """The text that became final: whole characters, and nothing that may be the beginning of a stop string. May be
    empty."""
    token_ids: list[int]
    """The token; empty in the last part."""
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None
    """Set in the last part; see `CompletionOutput.finish_reason`."""
    stop_reason: str | None
    delta: dict[str, Any] | None = None
    """The addition of this part to the answer to a conversation, as the `delta` of OpenAI's chunks: parts of `content`,
    `reasoning_content` and `tool_calls`. The arguments of a call stay incomplete if the text is cut off. None: there was no
    conversation."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Set in the first part, which has no text, if requested; see `RequestOutput.prompt_logprobs`."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding of length 1."""

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
    """How well a document answers a query: the model's score, which is no probability for most models."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
