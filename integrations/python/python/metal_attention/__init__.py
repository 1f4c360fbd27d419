"""Runs GGUF language models on CPUs and GPUs.

>>> from metal_attention import LLM, SamplingParams
>>> llm = LLM("model.gguf")  # or LLM.from_hub("bartowski/SmolLM2-135M-Instruct-GGUF")
>>> print(llm.generate("Once upon a time", SamplingParams(max_tokens=60))[0].outputs[0].text)
"""

from ._engine import __version__
from .errors import (
    DeviceError,
    EngineError,
    HubError,
    MetalAttentionError,
    ModelError,
    OptionError,
    PromptError,
    TemplateError,
)
from .llm import LLM
from .outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    StreamOutput,
    ToolCall,
)
from .sampling_params import LogitsProcessor, SamplingParams
from .stream import Stream
from .structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from .tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "DeviceError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineError",
    "GuidedDecodingParams",
    "HubError",
    "Logprob",
    "LogitsProcessor",
    "MetalAttentionError",
    "ModelError",
    "OptionError",
    "PromptError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "Stream",
    "StreamOutput",
    "StructuredOutputsParams",
    "TemplateError",
    "Tokenizer",
    "ToolCall",
    "__version__",
]
