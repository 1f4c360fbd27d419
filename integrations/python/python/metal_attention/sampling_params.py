"""Sampling options, and the end of a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import structured_outputs as forms
from .errors import OptionError
from .structured_outputs import GuidedDecodingParams, StructuredOutputsParams

Logits: TypeAlias = npt.NDArray[np.float32]
LogitsProcessor: TypeAlias = Callable[[list[int], Logits], Logits | None]
"""A function that gets the token ids so far (the prompt's first) and the logits of the next token, `[n_vocab]`. It changes them in
place, or returns other ones. A logit of -inf forbids its token."""

_MAX_TEXTS = 16384

_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None,), "n texts are made, and all of them come back"),
    "truncate_prompt_tokens": ((None,), "shorten the prompt"),
    "include_stop_str_in_output": ((False,), "stop_reason says that a stop string ended the text"),
    "detokenize": ((True,), "texts are always made"),
    "skip_special_tokens": ((True,), "get_tokenizer().decode(token_ids) has the control tokens"),
    "bad_words": ((None, [], ()), "use logit_bias, or logits_processors"),
    "allowed_token_ids": ((None,), "use structured_outputs, or logits_processors"),
    "flat_logprobs": ((False,), "logprobs are a dictionary for each token"),
    "extra_args": ((None, {}), "it has no meaning here"),
}
"""Options of vLLM's that are not supported, their values without effect, and what there is instead."""


@dataclass(kw_only=True)
class SamplingParams:
    """Options of a text. Names and defaults are vLLM's if it has them; the other samplers are llama.cpp's, and off."""

    n: int = 1
    """Texts for each prompt, at most 16384."""
    max_tokens: int | None = 16
    """The largest number of tokens to generate; None: until the model ends the text or the context is full."""
    temperature: float = 1.0
    """Divides the logits; 0 always chooses the most probable token."""
    top_p: float = 1.0
    """Keeps the most probable tokens until their probabilities sum to this; 1: off."""
    top_k: int = 0
    """Keeps this many of the most probable tokens; 0 or -1: off."""
    min_p: float = 0.0
    """Keeps tokens whose probability is at least this share of the largest one; 0: off."""
    seed: int | None = None
    """The seed of the random numbers; text i of the `n` texts has `seed + i`. None or below 0: from the operating system."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; they are not part of it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text, in addition to those of the vocabulary; they are not part of it."""
    min_tokens: int = 0
    """The number of tokens before which no token that ends the text is chosen."""
    ignore_eos: bool = False
    """Never choose a token that ends the text."""
    logprobs: int | None = None
    """The number of most probable tokens whose log probabilities are reported in addition to that of each token, -1: all.
    They are those of the model, before biases, processors and samplers. None: none are reported."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The prompt is then evaluated from its start, even if the KV cache holds a part of it."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form of the text."""
    guided_decoding: GuidedDecodingParams | None = None
    """The same, under the name that vLLM had for it earlier."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it occurred among the last `penalty_last_n` tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it occurred there."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens that occurred there, and multiplies negative ones; 1: off."""
    penalty_last_n: int = 64
    """The number of last tokens, of prompt and text, that the three penalties consider; -1: all."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; -inf forbids a token."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    """Functions that change the logits before everything else, in order. All sequences wait while they run."""
    timeout: float | None = None
    """Seconds after which the text ends, finished or not."""
    max_drafts: int | None = None
    """The largest number of drafts in a step; 0: none. None: as many as pay. The text does not depend on it."""
    prediction: str | None = None
    """A text that the answer is likely to repeat, such as the one that it edits: drafts are taken from it, too. The text does not
    depend on it."""

    min_keep: int = 0
    """The smallest number of tokens that top_p, min_p, typical_p and XTC keep."""
    typical_p: float = 1.0
    """Keeps the most typical tokens until their probabilities sum to this; 1: off."""
    top_n_sigma: float = -1.0
    """Keeps the logits within this many standard deviations of the highest; 0 or less: off."""
    xtc_probability: float = 0.0
    """The probability that XTC removes the most probable tokens; 0: off."""
    xtc_threshold: float = 0.1
    """The probability that a token must have for XTC to remove it."""
    dynatemp_range: float = 0.0
    """Half the width of the interval around `temperature` from which the entropy chooses the temperature; 0: off."""
    dynatemp_exponent: float = 1.0
    """The power of the normalised entropy in this choice."""
    dry_multiplier: float = 0.0
    """The DRY penalty of the shortest repetition that is penalised; 0: off."""
    dry_base: float = 1.75
    """The factor by which it grows with each token of the repetition."""
    dry_allowed_length: int = 2
    """The length in tokens from which on a repetition is penalised."""
    dry_penalty_last_n: int = 64
    """The number of last tokens that DRY considers; -1: all."""
    dry_sequence_breakers: Sequence[str] | None = None
    """Strings that end a repetition for DRY; None: line breaks, colons, quotation marks and asterisks."""
    samplers: Sequence[str] | None = None
    """The samplers in their order, by llama.cpp's names such as "top_k"; None: its order."""

    best_of: int | None = None
    """Only None, or `n`."""
    detokenize: bool = True
    """Only True."""
    skip_special_tokens: bool = True
    """Only True."""
    spaces_between_special_tokens: bool = True
    """No effect: texts have no control tokens."""
    include_stop_str_in_output: bool = False
    """Only False."""
    truncate_prompt_tokens: int | None = None
    """Only None."""
    bad_words: Sequence[str] | None = None
    """Only None."""
    allowed_token_ids: Sequence[int] | None = None
    """Only None."""
    output_kind: Any = None
    """No effect: `generate` returns complete texts, `stream` parts."""
    flat_logprobs: bool = False
    """Only False."""
    extra_args: Mapping[str, Any] | None = None
    """Only None."""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= _MAX_TEXTS:
            raise OptionError(f"n is {self.n}, but it must be at least 1 and at most {_MAX_TEXTS}")
        most = float("inf") if self.max_tokens is None else max(self.max_tokens, 0)
        if not 0 <= self.min_tokens <= most:
            raise OptionError(f"min_tokens is {self.min_tokens}, but it must be at least 0 and at most max_tokens, {most}")
        if self.best_of == self.n:
            self.best_of = None
        for name, (neutral, instead) in _REFUSED.items():
            value = getattr(self, name)
            if value not in neutral:
                raise OptionError(f"{name}={value!r} is not supported: {instead}")

    def _form(self) -> str | None:
        """The fields of a request to the server that describe the same form, as JSON."""
        given = [params for params in (self.structured_outputs, self.guided_decoding) if params is not None]
        if len(given) > 1:
            raise OptionError("structured_outputs and guided_decoding are the same: leave one of them out")
        return json.dumps(forms.fields(given[0])) if given else None

    def _stop_token_ids(self) -> list[int]:
        return list(self.stop_token_ids or [])

    def _dry_sequence_breakers(self) -> list[str] | None:
        return None if self.dry_sequence_breakers is None else list(self.dry_sequence_breakers)

    def _stop(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def _samplers(self) -> list[str] | None:
        return None if self.samplers is None else list(self.samplers)

    def _logit_bias(self) -> list[tuple[int, float]]:
        return list((self.logit_bias or {}).items())

    def _processor(self) -> Callable[[list[int], bytearray], None] | None:
        """All processors as one function that changes the bytes of the logits."""
        if not self.logits_processors:
            return None
        processors = tuple(self.logits_processors)

        def process(ids: list[int], data: bytearray) -> None:
            logits: Logits = np.frombuffer(data, dtype=np.float32)
            changed = logits
            for processor in processors:
                result = processor(ids, changed)
                if result is not None:
                    changed = result
            if changed is not logits:
                logits[:] = changed

        return process
