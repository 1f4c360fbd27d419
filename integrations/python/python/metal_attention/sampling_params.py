"""How the next token is chosen, and when a text ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import OptionError

Logits: TypeAlias = npt.NDArray[np.float32]
LogitsProcessor: TypeAlias = Callable[[list[int], Logits], Logits | None]
"""Gets the ids of the text so far (the prompt's first) and the logits of the next token, `[n_vocab]`. It changes them in
place, or returns others. A logit of -inf forbids its token."""

_MOST_TEXTS = 16384


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
    ignore_eos: bool = False
    """Never choose a token that ends the text."""
    logprobs: int | None = None
    """Tell the log probability of each token and of so many of the most probable ones: those of the model itself, before
    biases, processors and samplers."""
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
    samplers: Sequence[str] | None = None
    """The samplers to apply, first to last, by llama.cpp's names such as "top_k"; None: its order."""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= _MOST_TEXTS:
            raise OptionError(f"n is {self.n}, but it must be at least 1 and at most {_MOST_TEXTS}")

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
