"""The engine as a model of EleutherAI's evaluation harness (lm-eval), and an evaluation with it.

python examples/lm_eval_model.py [MODEL] [TASK ...]

Without tasks it runs two small ones that need no download. Benchmarks such as "hellaswag" come from the hub.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from metal_attention import LLM, SamplingParams

LogLikelihoods = list[tuple[float, bool]]


class MetalAttentionLM(TemplateLM):  # type: ignore[misc]
    """A model that scores and continues texts for the harness."""

    def __init__(self, llm: LLM, max_gen_toks: int = 256) -> None:
        super().__init__()
        self.llm = llm
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        id = self.llm.eos_token_id
        assert id is not None, "the model has no token that ends a text"
        return id

    @property
    def prefix_token_id(self) -> int:
        id = self.llm.bos_token_id
        return self.eot_token_id if id is None else id

    @property
    def tokenizer_name(self) -> str:
        return repr(self.llm)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.llm.tokenize(string, add_special=add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> LogLikelihoods:
        return [self._loglikelihood(context, continuation) for _, context, continuation in requests]

    def _loglikelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log probability of `continuation` after `context`, and whether it is the greedy one. If both do not fit into the
        context, their beginning is cut off."""
        ids = (context + continuation)[-(self.llm.n_ctx + 1) :]
        # The logits after each token that comes before one of the continuation.
        logits = self.llm.logits(ids[:-1], start=-len(continuation)).astype(np.float64)
        largest = logits.max(axis=1, keepdims=True)
        logprobs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
        wanted = np.asarray(ids[-len(logits) :])
        total = logprobs[np.arange(len(wanted)), wanted].sum()
        return float(total), bool((logits.argmax(axis=1) == wanted).all())

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.llm.n_ctx,
            context_len=1,
        )
        return sum(self._loglikelihood(*make_disjoint_window(window))[0] for window in windows)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            most = options.get("max_gen_toks", self.max_gen_toks)
            sampled = options.get("do_sample", False)
            params.append(
                SamplingParams(
                    max_tokens=most,
                    stop=[until] if isinstance(until, str) else until,
                    temperature=options.get("temperature", 1.0) if sampled else 0.0,
                    top_p=options.get("top_p", 1.0),
                    seed=0,
                )
            )
            room = max(1, self.llm.n_ctx - most)
            prompts.append(self.tok_encode(context)[-room:])
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        return [output.outputs[0].text for output in outputs]


def small_tasks(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Two tasks with a few lines each: the more probable of two endings, and the next words."""
    endings = [
        {"text": "Once upon a time, there was a little", "endings": ["girl", "quarter"], "label": 0},
        {"text": "She loved to play outside in the", "endings": ["although", "park"], "label": 1},
        {"text": "One day, she saw a big, red", "endings": ["ball", "because"], "label": 0},
    ]
    words = [{"text": "Once upon a time", "words": ", there was a little girl"}]
    data = {}
    for name, rows in (("endings", endings), ("words", words)):
        data[name] = str(folder / f"{name}.jsonl")
        pathlib.Path(data[name]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
    return [
        common
        | {
            "task": "endings",
            "dataset_kwargs": {"data_files": {"test": data["endings"]}},
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{endings}}",
            "doc_to_target": "{{label}}",
            "metric_list": [{"metric": "acc"}],
        },
        common
        | {
            "task": "words",
            "dataset_kwargs": {"data_files": {"test": data["words"]}},
            "output_type": "generate_until",
            "doc_to_text": "{{text}}",
            "doc_to_target": "{{words}}",
            "generation_kwargs": {"until": [" named"], "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]


def main() -> None:
    model, *tasks = sys.argv[1:] or [None]
    lm = MetalAttentionLM(LLM(model))
    with tempfile.TemporaryDirectory() as folder:
        results = lm_eval.simple_evaluate(lm, tasks=tasks or small_tasks(pathlib.Path(folder)), bootstrap_iters=0)
    for task, numbers in results["results"].items():
        print(task, {name: number for name, number in numbers.items() if "," in name})
    if model is None:
        assert results["results"]["endings"]["acc,none"] == 1.0
        assert results["results"]["words"]["exact_match,none"] == 1.0


if __name__ == "__main__":
    main()
