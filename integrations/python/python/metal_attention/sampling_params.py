"""How the next token is chosen, and when a text ends."""

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
"""Gets the ids of the text so far (the prompt's first) and the logits of the next token, `[n_vocab]`. It changes them in
place, or returns others. A logit of -inf forbids its token."""

_MOST_TEXTS = 16384

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
"""Options of vLLM's that are not supported, the values that ask for nothing, and what there is instead."""


@dataclass(kw_only=True)
class SamplingParams:
    """Options of a text. Names and defaults are vLLM's where it has them; the other samplers are llama.cpp's, and off."""

    n: int = 1
    """Texts for each prompt, at most 16384."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: until the model ends the text or the context is full."""
    temperature: float = 1.0
    """The logits are divided by it; 0 always takes the highest."""
    top_p: float = 1.0
    """Keep the most probable tokens until their probabilities sum to this; 1: off."""
    top_k: int = 0
    """Keep this many of the highest logits; 0 or -1: off."""
    min_p: float = 0.0
    """Keep the tokens at least this probable relative to the most probable one; 0: off."""
    seed: int | None = None
    """Seed of the random numbers; the i-th of `n` texts has `seed + i`. None or below 0: from the operating system."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; they are not part of it."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the text besides those of the vocabulary; they are not part of it."""
    min_tokens: int = 0
    """The least number of tokens before one that ends the text may be chosen."""
    ignore_eos: bool = False
    """Never choose a token that ends the text."""
    logprobs: int | None = None
    """Tell the log probability of each token and of so many of the most probable ones, -1: of all; those of the model itself,
    before biases, processors and samplers."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. The prompt is then evaluated from its start, whatever the KV cache holds of it."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must look like."""
    guided_decoding: GuidedDecodingParams | None = None
    """The same, under the name that vLLM had for it before."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit when it was seen at all among the last `penalty_last_n` tokens."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was seen there."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens seen there are divided by it, others multiplied; 1: off."""
    penalty_last_n: int = 64
    """How many of the last tokens, of prompt and text, the three penalties look at; -1: all."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens; -inf forbids a token."""
    logits_processors: Sequence[LogitsProcessor] | None = None
    """Functions that change the logits before everything else, one after the other. They run while others wait."""
    timeout: float | None = None
    """Seconds after which the text ends, finished or not."""

    min_keep: int = 0
    """The least number of tokens that top_p, min_p, typical_p and XTC leave."""
    typical_p: float = 1.0
    """Keep the most typical tokens until their probabilities sum to this; 1: off."""
    top_n_sigma: float = -1.0
    """Keep the logits within so many standard deviations of the highest; 0 or less: off."""
    xtc_probability: float = 0.0
    """How often the most probable tokens are left out; 0: never."""
    xtc_threshold: float = 0.1
    """The probability from which a token counts among these."""
    dynatemp_range: float = 0.0
    """Half the width of the interval around `temperature` in which the entropy picks the temperature; 0: off."""
    dynatemp_exponent: float = 1.0
    """The power of the normalised entropy that maps it into that interval."""
    dry_multiplier: float = 0.0
    """The DRY penalty of the shortest repetition that is penalised; 0: off."""
    dry_base: float = 1.75
    """The factor by which it grows with each token of the repetition."""
    dry_allowed_length: int = 2
    """The length in tokens from which a repetition is penalised."""
    dry_penalty_last_n: int = 64
    """How many of the last tokens DRY looks at; -1: all."""
    dry_sequence_breakers: Sequence[str] | None = None
    """Strings that end a repetition for DRY; None: line breaks, colons, quotation marks and asterisks."""
    samplers: Sequence[str] | None = None
    """The samplers to apply, first to last, by llama.cpp's names such as "top_k"; None: its order."""

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
    """No effect: `generate` gives whole texts, `stream` gives pieces."""
    flat_logprobs: bool = False
    """Only False."""
    extra_args: Mapping[str, Any] | None = None
    """Only None."""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= _MOST_TEXTS:
            raise OptionError(f"n is {self.n}, but it must be at least 1 and at most {_MOST_TEXTS}")
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
        """The fields of a request to the server that ask for the same form, in JSON."""
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
        """All processors as one that works on the bytes of the logits."""
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
