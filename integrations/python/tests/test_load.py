"""`LLM(...)`: model files, devices, options and their errors; forked, interrupted and ending processes."""

from __future__ import annotations

import multiprocessing
import pathlib
import subprocess
import sys
import warnings

import pytest
from test_generate import GREEDY, STORY

import metal_attention
from metal_attention import LLM, DeviceError, EngineError, MetalAttentionError, ModelError, OptionError


def test_attributes_describe_the_model(llm: LLM) -> None:
    assert (llm.architecture, llm.n_ctx, llm.n_vocab, llm.n_embd) == ("llama", 512, 512, 64)
    assert llm.device.startswith("cpu ")
    assert repr(llm) == f"<LLM: llama on {llm.device}, 4 texts of 512 tokens>"
    assert metal_attention.__version__.count(".") == 2
    small = LLM(n_ctx=64, n_parallel=1, device="cpu", n_threads=1)
    output = small.generate("Once upon a time", metal_attention.SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert (small.n_ctx, output.outputs[0].stop_reason) == (64, "context_full")


def test_files_are_opened_by_path(tmp_path: pathlib.Path) -> None:
    from conftest import ROOT

    for model in (ROOT / "models/stories260K.gguf", str(ROOT / "models/stories260K.gguf")):
        for in_memory in (False, True):
            llm = LLM(model, device="cpu", n_parallel=1, in_memory=in_memory)
            assert llm.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text == STORY
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
    for model, why in (("none.gguf", "none.gguf"), ("bad.gguf", "bad.gguf")):
        with pytest.raises(ModelError, match=why):
            LLM(tmp_path / model)


def test_invalid_options_are_rejected() -> None:
    cases: list[tuple[type[Exception], str, dict[str, object]]] = [
        (DeviceError, "is no device", {"device": "tpu"}),
        (DeviceError, "GPU", {"device": "gpu:no such card"}),
        (DeviceError, "NVIDIA|CUDA device 99", {"device": "cuda:99"}),
        (OptionError, "context length must be at least 1", {"n_ctx": 0, "device": "cpu"}),
        (OptionError, "n_ctx is -1", {"n_ctx": -1}),
        (OptionError, "n_threads is 1000", {"n_threads": 10**30}),
        (OptionError, "n_parallel", {"n_parallel": 0, "device": "cpu"}),
        (OptionError, "threads", {"n_threads": 0, "device": "cpu"}),
        (OptionError, "unknown cache type", {"cache_type": "f8"}),
    ]
    for kind, why, options in cases:
        with pytest.raises(kind, match=why) as error:
            LLM(**options)  # type: ignore[arg-type]
        assert isinstance(error.value, MetalAttentionError)


def _forked(llm: LLM, answers: multiprocessing.SimpleQueue[str]) -> None:
    try:
        llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    except EngineError as error:
        answers.put(str(error))
    loaded_here = LLM(device="cpu", n_parallel=1)
    answers.put(loaded_here.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_must_load_the_model_itself(llm: LLM) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_forked, args=(llm, answers))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(60)
    assert process.exitcode == 0
    assert "forked off" in answers.get()
    assert answers.get() == STORY


INTERRUPTED = """
import os, signal, sys, threading, time
from metal_attention import LLM, SamplingParams

# Python ignores SIGINT in processes that are started in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(device="cpu", n_parallel=2)
for run in (
    # Each of these takes minutes and must end at once.
    lambda params: llm.generate(["Once upon a time"] * 20000, params, use_tqdm=False),
    lambda params: llm.embed([[5] * 500] * 20000, use_tqdm=False),
    lambda params: [list(llm.stream("Once upon a time", params)) for _ in range(20000)],
):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        run(SamplingParams(max_tokens=None, ignore_eos=True))
    except KeyboardInterrupt:
        assert time.monotonic() - start < 10
        print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].text)
"""


def test_ctrl_c_ends_the_call_and_the_model_stays_usable() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == (", there was a\n" * 3, 0), done.stderr


def test_a_process_can_exit_while_sequences_run() -> None:
    script = """
import asyncio
from metal_attention import LLM, SamplingParams
llm = LLM(device="cpu", n_parallel=2)
long = SamplingParams(max_tokens=None, ignore_eos=True, logits_processors=[lambda ids, logits: None])
streams = [llm.stream("Once upon a time", long) for _ in range(8)]
async def first():
    await asyncio.gather(*(stream.__anext__() for stream in streams))
asyncio.run(first())
print("over")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("over\n", 0), done.stderr
