"""Many threads with one model: with the global interpreter lock (GIL), and without it in a free-threaded Python."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from conftest import Logits
from test_generate import GREEDY, STORY

from metal_attention import LLM, MetalAttentionError, SamplingParams

N_THREADS = 8
PROMPTS = ["Once upon a time", "Lily and Ben", "The cat sat on the mat and", "One day, a boy"]
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=24)

Result = TypeVar("Result")


def at_once(work: Callable[[int], Result]) -> list[Result]:
    """Runs `work(i)` in thread i of `N_THREADS`, which start at the same moment. Returns the results, or raises an exception of one."""
    results: dict[int, Result] = {}
    raised: list[BaseException] = []
    start = threading.Barrier(N_THREADS)

    def run(i: int) -> None:
        try:
            start.wait()
            results[i] = work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return [results[i] for i in range(N_THREADS)]


def is_free_threaded() -> bool:
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.mark.skipif(not is_free_threaded(), reason="this Python has the lock in any case")
def test_the_module_does_not_enable_the_lock() -> None:
    assert not sys._is_gil_enabled()  # type: ignore[attr-defined, unused-ignore]


def test_concurrent_calls_give_the_results_of_single_ones(llm: LLM) -> None:
    texts = [output.outputs[0].text for output in llm.generate(PROMPTS, SEEDED, use_tqdm=False)]
    logits = [llm.logits(prompt) for prompt in PROMPTS]
    vectors = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]

    def ask(i: int) -> list[str]:
        ids = []
        for j in range(4):
            at = (i + j) % len(PROMPTS)
            outputs = llm.generate(PROMPTS, SEEDED, use_tqdm=False)
            assert [output.outputs[0].text for output in outputs] == texts
            ids += [output.request_id for output in outputs]
            assert "".join(piece.text for piece in llm.stream(PROMPTS[at], SEEDED)) == texts[at]
            assert np.array_equal(llm.logits(PROMPTS[at]), logits[at])
            assert llm.embed(PROMPTS[at], use_tqdm=False)[0].outputs.embedding == vectors[at]
            assert llm.detokenize(llm.tokenize(PROMPTS[at], add_special=False)).strip() == PROMPTS[at]
        return ids

    ids = [id for thread_ids in at_once(ask) for id in thread_ids]
    assert len(set(ids)) == len(ids) == N_THREADS * 4 * len(PROMPTS)


def test_logits_processors_of_many_threads_survive_garbage_collection(llm: LLM) -> None:
    over = threading.Event()

    def collect() -> None:
        while not over.is_set():
            gc.collect()

    collector = threading.Thread(target=collect)
    collector.start()

    def ask(i: int) -> tuple[list[int], int]:
        calls = 0

        def only(token_ids: list[int], logits: Logits) -> Logits:
            nonlocal calls
            calls += 1
            changed = np.full_like(logits, -np.inf)
            changed[300 + i] = 0
            return changed

        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, logits_processors=[only]), use_tqdm=False)
        return [id for output in outputs for id in output.outputs[0].token_ids], calls

    try:
        answers = at_once(ask)
    finally:
        over.set()
        collector.join()
    assert answers == [([300 + i] * 24, 24) for i in range(N_THREADS)]


def test_a_stream_shared_by_threads_returns_each_piece_once(llm: LLM) -> None:
    for _ in range(10):
        stream = llm.stream("Once upon a time", GREEDY)
        pieces = [piece for read in at_once(lambda _: list(stream)) for piece in read]
        assert len(pieces) <= 23 and len("".join(piece.text for piece in pieces)) <= len(STORY)
        assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text == STORY


def test_streams_and_models_can_be_closed_from_other_threads() -> None:
    for _ in range(3):
        model = LLM(device="cpu", n_parallel=2, n_threads=1)
        long = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        stream = model.stream("Once upon a time", long)

        def work(i: int) -> str:
            try:
                if i == 0:
                    model.close()
                elif i == 1:
                    stream.close()
                elif i < 5:
                    return "".join(piece.text for piece in stream)
                else:
                    return model.generate("Once upon a time", long, use_tqdm=False)[0].outputs[0].text
            except MetalAttentionError as error:
                assert "closed" in str(error) or "shut" in str(error), error
            return ""

        for text in at_once(work):
            assert len(text) < 4000
