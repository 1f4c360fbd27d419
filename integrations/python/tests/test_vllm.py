"""vLLM's arguments: those that work, those whose neutral values are accepted, and those that are rejected with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from test_generate import GREEDY, STORY

from metal_attention import LLM, DeviceError, MetalAttentionError, OptionError, SamplingParams


def test_a_script_for_vllm_runs_unchanged() -> None:
    llm = LLM(
        max_model_len=64,
        max_num_seqs=2,
        tensor_parallel_size=1,
        dtype="auto",
        seed=0,
        gpu_memory_utilization=0.9,
        trust_remote_code=True,
        enforce_eager=True,
        swap_space=4,
        disable_log_stats=True,
        quantization=None,
        tokenizer_mode="auto",
        device="cpu",
    )
    assert (llm.n_ctx, repr(llm).endswith(", 2 texts of 64 tokens>")) == (64, True)
    params = SamplingParams(
        temperature=0,
        max_tokens=22,
        best_of=1,
        skip_special_tokens=True,
        spaces_between_special_tokens=False,
        detokenize=True,
        include_stop_str_in_output=False,
        bad_words=[],
        top_k=-1,
    )
    assert llm.generate("Once upon a time", params, use_tqdm=False, lora_request=None)[0].outputs[0].text == STORY


def test_the_seed_of_the_model_makes_texts_reproducible() -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12)

    def texts(seed: int | None) -> list[str]:
        with LLM(device="cpu", n_parallel=2, seed=seed) as llm:
            outputs = llm.generate(["Once upon a time"] * 2, params, use_tqdm=False)
            return [output.outputs[0].text for output in outputs] + [p.text for p in llm.stream("Once upon a time", params)]

    first = texts(7)
    assert first == texts(7) and first != texts(8) and first[0] != first[1]
    assert texts(None) != texts(None)


def test_unsupported_model_arguments_are_rejected() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dtype='bfloat16' is not supported: tensors have the types of the model's file", {"dtype": "bfloat16"}),
        ("tensor_parallel_size is 0", {"tensor_parallel_size": 0}),
        ("quantization='awq' is not supported", {"quantization": "awq"}),
        ("tokenizer='other'", {"tokenizer": "other"}),
        ("enable_lora=True", {"enable_lora": True}),
        ("pipeline_parallel_size=2 is not supported: cards share layers out", {"pipeline_parallel_size": 2}),
        ("kv_cache_dtype='fp8'", {"kv_cache_dtype": "fp8"}),
        ("max_model_len is -1", {"max_model_len": -1}),
    ]
    for why, options in cases:
        with pytest.raises(OptionError, match=why):
            LLM(device="cpu", **options)
    # Tensor parallelism needs several CUDA devices; the machine has fewer.
    with pytest.raises((DeviceError, MetalAttentionError), match="cuda|CUDA|NVIDIA"):
        LLM(tensor_parallel_size=8)
    with pytest.raises(MetalAttentionError, match="cpu"):
        LLM(tensor_parallel_size=2, device="cpu")
    with pytest.raises(TypeError, match="LLM has no argument 'colour'"):
        LLM(colour="red")


def test_unsupported_sampling_params_are_rejected() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("best_of=3", {"n": 2, "best_of": 3}),
        ("bad_words=.* use logit_bias", {"bad_words": ["no"]}),
        ("allowed_token_ids=.* use structured_outputs", {"allowed_token_ids": [1]}),
        ("truncate_prompt_tokens=5", {"truncate_prompt_tokens": 5}),
        ("include_stop_str_in_output=True", {"include_stop_str_in_output": True}),
        ("skip_special_tokens=False", {"skip_special_tokens": False}),
        ("min_tokens is 9, but it must be at least 0 and at most max_tokens, 8", {"min_tokens": 9, "max_tokens": 8}),
        ("min_tokens is -1", {"min_tokens": -1}),
    ]
    for why, options in cases:
        with pytest.raises(OptionError, match=why):
            SamplingParams(**options)


def test_float32_is_exact(exact: LLM) -> None:
    with LLM(device="cpu", n_parallel=1, cache_type="f32", dtype="float32") as llm:
        logits = llm.logits("Once upon a time")
    assert (logits == exact.logits("Once upon a time")).all()
    assert exact.generate("Once upon a time", GREEDY, use_tqdm=False)[0].outputs[0].text == STORY
