"""Arguments of vLLM's: those without effect on texts are accepted, others refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import OptionError

WITHOUT_EFFECT = frozenset({
    "trust_remote_code",
    "enforce_eager",
    "gpu_memory_utilization",
    "swap_space",
    "disable_log_stats",
    "disable_custom_all_reduce",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "max_num_batched_tokens",
    "max_seq_len_to_capture",
    "block_size",
    "distributed_executor_backend",
    "compilation_config",
    "limit_mm_per_prompt",
})
"""Arguments of `LLM` that do not change texts."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tokenizer": ((None,), "the tokenizer is the one in the model's file"),
    "tokenizer_mode": (("auto", "slow"), "the tokenizer is the one in the model's file"),
    "skip_tokenizer_init": ((False,), "texts need the tokenizer"),
    "quantization": ((None, "gguf"), "the tensors have the types of the model's file: take a file of another type"),
    "load_format": (("auto", "gguf"), "models are GGUF files"),
    "config_format": (("auto",), "the model's file has its configuration"),
    "hf_overrides": ((None, {}), "the model's file has its configuration"),
    "revision": ((None,), "the hub's main branch is taken: download the file, and give its path"),
    "tokenizer_revision": ((None,), "the tokenizer is the one in the model's file"),
    "download_dir": ((None,), "the environment variable HF_HUB_CACHE names the folder"),
    "generation_config": (("auto",), "give sampling_params, which replace what the model's file recommends"),
    "override_generation_config": ((None, {}), "give sampling_params"),
    "pipeline_parallel_size": ((1,), "cards share layers out by tensor_parallel_size"),
    "data_parallel_size": ((1,), "make an LLM for each device"),
    "cpu_offload_gb": ((0,), "a model runs on one device: take a smaller type of it, or device=\"cpu\""),
    "kv_cache_dtype": (("auto",), "cache_type names it, \"f16\" or \"f32\""),
    "runner": (("auto", "generate"), "generate, embed and score are there for what the model can"),
    "task": ((None, "auto", "generate"), "generate, embed and score are there for what the model can"),
    "enable_lora": ((False,), "adapters are not read: merge them into the model"),
    "speculative_config": ((None,), "drafter names the drafter, and draft_model its file"),
    "mm_processor_kwargs": ((None, {}), "image_min_tokens and image_max_tokens limit a picture's tokens"),
    "logits_processors": ((None,), "SamplingParams has logits_processors"),
    "structured_outputs_config": ((None, {}), "there is one implementation"),
    "guided_decoding_backend": ((None, "auto", "guidance"), "there is one implementation, llguidance"),
    "lora_request": ((None,), "adapters are not read: merge them into the model"),
    "priority": ((None,), "prompts are taken in their order"),
    "chat_template_content_format": (("auto", "string", "openai"), "contents are texts or lists of parts"),
}
"""Arguments of `LLM` and its methods, their values without effect, and what there is instead of others."""


def check(function: str, arguments: Mapping[str, Any]) -> None:
    """Refuses arguments that would change texts, and arguments that vLLM does not have."""
    for name, value in arguments.items():
        if name in WITHOUT_EFFECT:
            continue
        if name not in REFUSED:
            raise TypeError(f"{function} has no argument {name!r}")
        neutral, instead = REFUSED[name]
        if value not in neutral:
            raise OptionError(f"{name}={value!r} is not supported: {instead}")


def exact_of_dtype(dtype: Any) -> bool:
    """Whether vLLM's `dtype` stands for computing in F32."""
    # Torch's types are written as "torch.float32".
    name = str(dtype).removeprefix("torch.")
    if name in ("float32", "float"):
        return True
    if name != "auto":
        raise OptionError(
            f"dtype={name!r} is not supported: tensors have the types of the model's file, of which there may be others, such as "
            'hf:OWNER/REPO:BF16; "auto" takes them as they are, "float32" also computes in F32'
        )
    return False
