"""The engine: token ids in, tokens out. `LLM` is what programs use."""

from collections.abc import Callable, Sequence
from typing import final

from .sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "Event", "EventStream", "__version__"]

__version__: str

@final
class Completion:
    """A text from its first token to its end."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """For each token its own log probability, then the most probable ones."""
    @property
    def reason(self) -> str: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def seconds(self) -> tuple[float, float, float]:
        """Queued, prefill, decode."""

@final
class Event:
    """A piece of a text."""

    @property
    def text(self) -> str: ...
    @property
    def token_id(self) -> int | None: ...
    @property
    def logprobs(self) -> tuple[float, list[tuple[int, float]]] | None: ...
    @property
    def reason(self) -> str | None: ...

@final
class EventStream:
    """The pieces of a text as they come. Dropping it cancels the text."""

    def next(self) -> Event | None:
        """Waits for the next piece; None after the last."""
    def listen(self, callback: Callable[[Event | BaseException], object]) -> None:
        """Gives all further pieces to `callback`, from another thread. Where that raises the text is cancelled."""
    def close(self) -> None:
        """Cancels the text."""

@final
class Engine:
    """A model that runs, and its queue."""

    def __new__(
        cls,
        model: str | None,
        *,
        device: str,
        n_ctx: int | None,
        n_parallel: int,
        n_threads: int | None,
        cache_type: str,
        exact: bool,
        in_memory: bool,
        download: Callable[[str, int, int], object] | None,
    ) -> Engine: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def n_vocab(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_parallel(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def has_chat_template(self) -> bool: ...
    def recommended_sampling(self) -> str: ...
    @property
    def chat_stop(self) -> list[str]: ...
    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...
    def detokenize(self, ids: Sequence[int], special: bool) -> str: ...
    def token_text(self, id: int) -> str: ...
    def chat_prompt(
        self, messages: str, tools: str, variables: str, add_generation_prompt: bool
    ) -> tuple[str, list[int]]: ...
    def rerank_prompt(self, query: str, document: str) -> list[int]: ...
    def generate(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams, int]], done: Callable[[int], object] | None
    ) -> list[Completion]:
        """Continues prompts with these parameters, each with its number among the texts of its prompt."""
    def stream(self, ids: Sequence[int], params: SamplingParams) -> EventStream: ...
    def embed(self, texts: Sequence[Sequence[int]], done: Callable[[int], object] | None) -> list[list[float]]: ...
    def rerank(self, texts: Sequence[Sequence[int]], done: Callable[[int], object] | None) -> list[float]: ...
    def logits(self, ids: Sequence[int], start: int) -> bytearray: ...
    def close(self) -> None: ...
