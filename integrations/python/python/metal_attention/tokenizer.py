"""The model's tokenizer, with the names of the transformers package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from .errors import OptionError, PromptError

if TYPE_CHECKING:
    from .llm import LLM, Message


_OF_TENSORS = {"return_tensors", "return_dict", "padding", "truncation", "max_length"}
"""Arguments of `apply_chat_template` in transformers that choose the type of the result."""


class Tokenizer:
    """The model's tokenizer, returned by `LLM.get_tokenizer`.

    Other than in `LLM.tokenize`, the name of a control token in a text becomes that token, as in transformers.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm._engine

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self._engine.n_vocab

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None: the model has none."""
        return self._engine.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None: the model has none."""
        return self._engine.eos_token_id

    @property
    def unk_token_id(self) -> int | None:
        """The token for text that the vocabulary does not have; None: the model has none."""
        return self._engine.unk_token_id

    @property
    def bos_token(self) -> str | None:
        """The name of the token that begins a text."""
        return self._spelling(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The name of the token that ends a text."""
        return self._spelling(self.eos_token_id)

    @property
    def unk_token(self) -> str | None:
        """The name of the token for text that the vocabulary does not have."""
        return self._spelling(self.unk_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the control tokens, which have no text."""
        return [id for id in range(self.vocab_size) if self._engine.is_control(id)]

    @property
    def all_special_tokens(self) -> list[str]:
        """The names of the control tokens."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; None: it has none, or it cannot be used."""
        return self._engine.chat_template

    def get_vocab(self) -> dict[str, int]:
        """The ids of the tokens by their names; if two tokens have one name, the first one."""
        vocab: dict[str, int] = {}
        for id, token in enumerate(self.convert_ids_to_tokens(range(self.vocab_size))):
            vocab.setdefault(token, id)
        return vocab

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. `add_special_tokens` adds the tokens that the model expects around a text."""
        return self._engine.tokenize(text, add_special_tokens, True)

    def decode(self, token_ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens, with or without the names of control tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._llm.detokenize(ids, special=not skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """The texts of several lists of tokens."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """`{"input_ids": ..., "attention_mask": ...}` of a text, or of several texts with lists of these."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        each = [self.encode(one, add_special_tokens=add_special_tokens) for one in text]
        return {"input_ids": each, "attention_mask": [[1] * len(ids) for ids in each]}

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """The names of a text's tokens."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=add_special_tokens))

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """The names of tokens in the vocabulary, such as "▁the"."""
        return self._token(ids) if isinstance(ids, int) else [self._token(id) for id in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | None | list[int | None]:
        """The ids of tokens with these names; `unk_token_id` for unknown names."""
        if isinstance(tokens, str):
            id = self._engine.token_to_id(tokens)
            return self.unk_token_id if id is None else id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The token ids of the prompt that a conversation becomes, or its text; further arguments are variables of the template."""
        for name in _OF_TENSORS & variables.keys():
            if variables.pop(name):
                raise OptionError(f"{name} is not supported: what comes back is a list of token ids, or a text")
        rendered = self._llm._conversation(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=variables,
        )
        return rendered.token_ids if tokenize else rendered.text

    def _token(self, id: int) -> str:
        token = self._engine.id_to_token(id) if 0 <= id < self.vocab_size else None
        if token is None:
            raise PromptError(f"token id {id} is outside the vocabulary of {self.vocab_size} tokens")
        return token

    def _spelling(self, id: int | None) -> str | None:
        return None if id is None else self._token(id)
