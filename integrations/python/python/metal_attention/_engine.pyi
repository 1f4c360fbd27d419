"""The engine: token ids in, tokens out. `LLM` is what programs use."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from .sampling_params import SamplingParams

__all__ = ["Completion", "Conversation", "Engine", "Event", "EventStream", "Grammar", "__version__"]

__version__: str

_Logprobs: TypeAlias = tuple[float, int, list[tuple[int, float]]]
"""A token's own log probability, its rank, then the most probable tokens with theirs."""

@final
class Completion:
    """A text from its first token to its end."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[_Logprobs]: ...
    @property
    def prompt_logprobs(self) -> list[_Logprobs]:
        """Of the prompt's tokens after the first."""
    @property
    def message(self) -> str | None:
        """The answer to a conversation as a message, in JSON."""
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
    def logprobs(self) -> _Logprobs | None: ...
    @property
    def prompt_logprobs(self) -> list[_Logprobs] | None:
        """Of the prompt's tokens after the first, in a piece of their own."""
    @property
    def delta(self) -> str | None:
        """What the piece adds to the answer to a conversation, in JSON."""
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
class Conversation:
    """A conversation as a chat template has rendered it."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def stop(self) -> list[str]:
        """Strings that end an answer where the model has no token for it."""
    @property
    def begins_thoughts(self) -> bool:
        """Whether the prompt ends in thoughts, which the answer goes on with."""

@final
class Grammar:
    """A grammar that texts follow, each from its beginning."""

    @property
    def left_out(self) -> list[str]:
        """Places of a JSON schema that are not enforced."""

_Text: TypeAlias = tuple[Sequence[int], SamplingParams, int, Grammar | None, Conversation | None]
"""The ids of a prompt, its parameters, the text's number among those of the prompt, its form, and what it answers."""

@final
class Engine:
    """A model that runs, and its queue."""

    def __new__(
        cls,
        model: str | None,
        *,
        device: str,
        n_ranks: int,
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
    def unk_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> str | None: ...
    def recommended_sampling(self) -> str: ...
    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...
    def detokenize(self, ids: Sequence[int], special: bool) -> str: ...
    def token_text(self, id: int) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def is_control(self, id: int) -> bool: ...
    def conversation(
        self,
        messages: str,
        tools: str,
        variables: str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
    ) -> Conversation: ...
    def grammar(self, fields: str, conversation: Conversation | None) -> Grammar | None:
        """The grammar of texts, or of answers, that the fields of a request to the server ask for."""
    def call_grammar(self, conversation: Conversation, parallel: bool) -> Grammar:
        """The grammar of an answer that calls a function, or several."""
    def rerank_prompt(self, query: str, document: str) -> list[int]: ...
    def generate(self, texts: Sequence[_Text], done: Callable[[int], object] | None) -> list[Completion]: ...
    def stream(self, text: _Text) -> EventStream: ...
    def embed(self, texts: Sequence[Sequence[int]], done: Callable[[int], object] | None) -> list[list[float]]: ...
    def rerank(self, texts: Sequence[Sequence[int]], done: Callable[[int], object] | None) -> list[float]: ...
    def logits(self, ids: Sequence[int], start: int) -> bytearray: ...
    def close(self) -> None: ...
