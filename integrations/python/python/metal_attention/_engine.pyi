"""The module of the engine, written in Rust: token ids in, tokens out. Programs use `LLM` instead."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from .sampling_params import SamplingParams

__all__ = ["Completion", "Conversation", "Engine", "Event", "EventStream", "Grammar", "Picture", "Spans", "__version__"]

__version__: str

_Logprobs: TypeAlias = tuple[float, int, list[tuple[int, float]]]
"""The log probability of a token, its rank, and the most probable tokens with their log probabilities."""

@final
class Completion:
    """A complete generated text."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> list[_Logprobs]: ...
    @property
    def prompt_logprobs(self) -> list[_Logprobs]:
        """The log probabilities of the prompt's tokens after the first."""
    @property
    def message(self) -> str | None:
        """The answer to a conversation, as a message in JSON."""
    @property
    def reason(self) -> str: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def drafted_tokens(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def seconds(self) -> tuple[float, float, float]:
        """The seconds of waiting in the queue, of prefill, and of decode."""

@final
class Event:
    """A part of a generated text."""

    @property
    def text(self) -> str: ...
    @property
    def token_id(self) -> int | None: ...
    @property
    def logprobs(self) -> _Logprobs | None: ...
    @property
    def prompt_logprobs(self) -> list[_Logprobs] | None:
        """The log probabilities of the prompt's tokens after the first; this event has nothing else."""
    @property
    def delta(self) -> str | None:
        """The addition of this part to the answer to a conversation, in JSON."""
    @property
    def reason(self) -> str | None: ...

@final
class EventStream:
    """The parts of a text while it is generated. Dropping the stream cancels the request."""

    def next(self) -> Event | None:
        """Waits for the next part; None after the last one."""
    def listen(self, callback: Callable[[Event | BaseException], object]) -> None:
        """Passes all further parts to `callback`, from another thread. If that raises, the request is cancelled."""
    def close(self) -> None:
        """Cancels the request."""

@final
class Conversation:
    """A conversation, rendered by a chat template."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def spans(self) -> Spans | None:
        """The rows of the pictures; None: there are none."""
    @property
    def stop(self) -> list[str]:
        """Strings that end an answer, for models that have no token for it."""
    @property
    def begins_in_reasoning(self) -> bool:
        """Whether the prompt ends within reasoning, which the answer continues."""

@final
class Grammar:
    """A grammar that constrains generated text. Each generation begins at its start."""

    @property
    def left_out(self) -> list[str]:
        """Parts of a JSON schema that are not enforced."""

@final
class Picture:
    """An encoded picture."""

    @property
    def n_rows(self) -> int:
        """The number of its rows, each of which takes the place of a token."""
    @property
    def n_bytes(self) -> int:
        """The bytes that it takes in memory."""

@final
class Spans:
    """The rows of the pictures in a prompt."""

_SequenceArgs: TypeAlias = tuple[Sequence[int], Spans | None, SamplingParams, int, Grammar | None, Conversation | None]
"""The token ids of the prompt, the rows of its pictures, its parameters, its index among the texts of the prompt, its grammar, and its
conversation."""

@final
class Engine:
    """A model on its device, and its scheduler."""

    def __new__(
        cls,
        model: str | None,
        *,
        mmproj: str | None,
        image_min_tokens: int | None,
        image_max_tokens: int | None,
        device: str,
        n_ranks: int,
        n_ctx: int | None,
        n_parallel: int,
        n_threads: int | None,
        cache_type: str,
        exact: bool,
        in_memory: bool,
        drafter: str,
        draft_model: str | None,
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
    def encode_picture(self, file: bytes) -> Picture: ...
    def picture_prompt(self, text: str, pictures: Sequence[Picture]) -> tuple[list[int], Spans]:
        """The token ids of a text with pictures, and their rows."""
    def conversation(
        self,
        messages: str,
        tools: str,
        variables: str,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
        pictures: Sequence[Picture],
    ) -> Conversation: ...
    def grammar(self, fields: str, conversation: Conversation | None) -> Grammar | None:
        """Compiles the grammar that the fields of a request to the server describe, for a text or an answer."""
    def call_grammar(self, conversation: Conversation, parallel: bool) -> Grammar:
        """Compiles the grammar of an answer that calls a function, or several."""
    def rerank_prompt(self, query: str, document: str) -> list[int]: ...
    def generate(self, texts: Sequence[_SequenceArgs], done: Callable[[int], object] | None) -> list[Completion]: ...
    def stream(self, text: _SequenceArgs) -> EventStream: ...
    def embed(self, texts: Sequence[Sequence[int]], done: Callable[[int], object] | None) -> list[list[float]]: ...
    def rerank(self, texts: Sequence[Sequence[int]], done: Callable[[int], object] | None) -> list[float]: ...
    def logits(self, ids: Sequence[int], start: int) -> bytearray: ...
    def close(self) -> None: ...
