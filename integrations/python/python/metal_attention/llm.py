"""A loaded model: generates texts, answers chats, and computes embeddings, scores and logits, many at a time.

`LLM` is the public class. It turns prompts into token ids and results into the classes of `outputs.py`; `_engine` (Rust) runs the model.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import warnings
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypeAlias

import numpy as np

from . import pictures, vllm_arguments
from ._engine import Completion, Conversation, Engine, Grammar, Spans
from .errors import OptionError, PromptError
from .outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .progress import DownloadProgress, Progress
from .sampling_params import Logits, SamplingParams
from .stream import Stream, _finish_reason
from .tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}`, also with `"multi_modal_data": {"image": pictures}`, and
`{"prompt_token_ids": ids}`."""

Message: TypeAlias = Mapping[str, Any]
"""A message in the form of OpenAI's interface: `{"role": "user", "content": "Hello!"}`. The content may be a list of parts, which may
be pictures."""

ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]
"""Whether an answer calls a function: "auto", the model decides; "none"; "required"; or OpenAI's object, which names one."""

_MAX_GPUS = 8


@dataclass(slots=True)
class _Prompt:
    """A prompt as token ids."""

    text: str | None
    """Its text; None: it was given as token ids."""
    token_ids: list[int]
    spans: Spans | None = None
    """The rows of its pictures; None: it has none."""
    conversation: Conversation | None = None
    """The conversation that it renders; None: it is plain text."""
    calls: Literal["one", "several"] | None = None
    """Whether the answer must call one or several functions."""


_open: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Closes all engines before the interpreter ends, because no thread of an engine may call Python then."""
    for engine in list(_open):
        engine.close()


class LLM:
    """A loaded model, with the interface of vLLM's class of this name.

    >>> from metal_attention import LLM, SamplingParams
    >>> llm = LLM("model.gguf")
    >>> for output in llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(temperature=0)):
    ...     print(output.outputs[0].text)

    Many texts are generated at once, prompts with a common beginning share its KV cache, and other Python threads continue
    meanwhile. One object may be used by any number of threads. It does not survive `fork`: make one in each process.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        mmproj: str | os.PathLike[str] | None = None,
        image_min_tokens: int | None = None,
        image_max_tokens: int | None = None,
        device: str = "auto",
        n_ctx: int | None = None,
        n_parallel: int = 8,
        n_threads: int | None = None,
        cache_type: str = "f16",
        exact: bool = False,
        in_memory: bool = False,
        drafter: Literal["auto", "ngram", "mtp", "draft", "eagle3", "dflash", "gemma4-assistant", "off"] = "auto",
        draft_model: str | os.PathLike[str] | None = None,
        use_tqdm: bool = True,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        tensor_parallel_size: int = 1,
        dtype: Any = "auto",
        seed: int | None = None,
        **vllm: Any,
    ) -> None:
        """Loads a model.

        model: a GGUF file (any part of a split one), or a name on the Hugging Face hub, `hf:OWNER/REPO[:TYPE or :FILE]`;
            None: the small built-in model.
        mmproj: the model's file with mmproj in its name, which encodes pictures; None: the model reads text only.
        image_min_tokens, image_max_tokens: limits of a picture in tokens, in models that keep its size.
        device: "auto" (a GPU in which the model fits, else the CPU), "cpu", "wgpu", "wgpu:1" (by index), "wgpu:NAME", "cuda" or
            "cuda:1".
        n_ctx: the length of the context of each text in tokens, including the prompt; None: that of the training, at most 4096.
        n_parallel: texts that are generated at once; the KV cache is large enough for `n_parallel * n_ctx` tokens.
        n_threads: threads on the CPU; None: one for each physical core.
        cache_type: number format of the KV cache, "f16" or "f32".
        exact: compute in F32 instead of faster, less exact formats.
        in_memory: read the file instead of mapping it.
        drafter: how tokens are proposed so that a decode step may give a text several: "ngram" (tokens that followed the same ones
            earlier), "mtp" (the prediction heads in the model's file), "draft", "eagle3", "dflash" or "gemma4-assistant" (what the file of `draft_model` has), "off",
            or "auto", that of `draft_model`, or else the best that the model has. Texts do not depend on it.
        draft_model: the GGUF file of a smaller model that proposes tokens, or of a drafter made for the model (EAGLE-3).
        use_tqdm: show a download's progress.
        max_model_len, max_num_seqs: vLLM's names for `n_ctx` and `n_parallel`; they take precedence.
        tensor_parallel_size: NVIDIA GPUs that share the model: `device` ("cuda" if that is "auto") and those that follow it.
        dtype: "auto", the types of the model's file; "float32": the same as `exact`.
        seed: the source of seeds for texts without their own, one for each prompt in order.
        vllm: further arguments of vLLM's. Those without effect on texts are accepted; others raise `OptionError`.
        """
        vllm_arguments.check("LLM", vllm)
        exact = vllm_arguments.exact_of_dtype(dtype) or exact
        if not 1 <= tensor_parallel_size <= _MAX_GPUS:
            raise OptionError(f"tensor_parallel_size is {tensor_parallel_size}, but it must be from 1 to {_MAX_GPUS}")
        if tensor_parallel_size > 1 and device == "auto":
            device = "cuda"
        counts = {
            "n_ctx": n_ctx,
            "n_parallel": n_parallel,
            "n_threads": n_threads,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "image_min_tokens": image_min_tokens,
            "image_max_tokens": image_max_tokens,
        }
        for name, value in counts.items():
            if value is not None and not 0 <= value < 1 << 63:
                raise OptionError(f"{name} is {value}, but it must be at least 1 and what memory has room for")
        path = None if model is None else os.fspath(model)
        download = DownloadProgress(use_tqdm)
        try:
            self._engine = Engine(
                path,
                mmproj=None if mmproj is None else os.fspath(mmproj),
                image_min_tokens=image_min_tokens,
                image_max_tokens=image_max_tokens,
                device=device,
                n_ranks=tensor_parallel_size,
                n_ctx=n_ctx if max_model_len is None else max_model_len,
                n_parallel=n_parallel if max_num_seqs is None else max_num_seqs,
                n_threads=n_threads,
                cache_type=cache_type,
                exact=exact,
                in_memory=in_memory,
                drafter=drafter,
                draft_model=None if draft_model is None else os.fspath(draft_model),
                download=download,
            )
        finally:
            download.close()
        _open.add(self._engine)
        self._pictures = pictures.Pictures(self._engine)
        self._request_ids = itertools.count()
        self._seeds = None if seed is None else random.Random(seed)
        self._warned_of_template = False

    @classmethod
    def from_hub(cls, name: str, **options: Any) -> LLM:
        """Loads `OWNER/REPO`, `OWNER/REPO:TYPE` or `OWNER/REPO:FILE` from the cache that the hub's programs share; a model that
        is not there is downloaded first. The options are those of `LLM`."""
        return cls(name if name.startswith("hf:") else f"hf:{name}", **options)

    @property
    def device(self) -> str:
        """The device that runs the model."""
        return self._engine.device

    @property
    def architecture(self) -> str:
        """The model's architecture, in the words of its file."""
        return self._engine.architecture

    @property
    def n_ctx(self) -> int:
        """The length of the context of each text in tokens, including the prompt."""
        return self._engine.n_ctx

    @property
    def n_vocab(self) -> int:
        """The number of tokens in the vocabulary."""
        return self._engine.n_vocab

    @property
    def n_embd(self) -> int:
        """The width of a hidden state."""
        return self._engine.n_embd

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text; None: the model has none."""
        return self._engine.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None: the model has none."""
        return self._engine.eos_token_id

    def get_default_sampling_params(self) -> SamplingParams:
        """The options of texts without `sampling_params`: those that the model's file recommends, otherwise the defaults."""
        return SamplingParams(**json.loads(self._engine.recommended_sampling()))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, with the names of the transformers package."""
        return Tokenizer(self)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of `text`. `add_special` adds the tokens that the model expects around a text; with `parse_special` the
        name of a control token in the text becomes that token."""
        return self._engine.tokenize(text, add_special, parse_special)

    def detokenize(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; control tokens are included if `special` is set."""
        return self._engine.detokenize(_token_ids(token_ids), special)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        images: Any = None,
        use_tqdm: bool = True,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Continues prompts, `n_parallel` texts at a time.

        `images` are the pictures of the prompt, or a list with those of each prompt: a path, bytes, an image of Pillow's, or a list
        of these. A picture stands where the text has `<image>`, otherwise before the text.

        The outputs are in the order of the prompts. `sampling_params` is for all of them, or a list with one for each; without it
        the values are those that the model's file recommends. Ctrl-C cancels the texts that are not finished.
        """
        vllm_arguments.check("generate", vllm)
        each = _prompts(prompts)
        of_each = [images] if _is_single(prompts) else [None] * len(each) if images is None else list(images)
        if len(of_each) != len(each):
            raise OptionError(f"there are {len(each)} prompts, but images for {len(of_each)}")
        texts = [self._prompt(prompt, own) for prompt, own in zip(each, of_each, strict=True)]
        return self._generate(texts, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        **vllm: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them, through the model's chat template.

        Text in messages never becomes a control token. Pictures are parts of a content: {"type": "image_url", "image_url": {"url":
        "data:image/png;base64,..."}}, or {"type": "image", "image": ...} with bytes, a pathlib.Path or an image of Pillow's.
        `tools` are described to the model, whose calls are in the outputs' `tool_calls`; their `message` can be appended to the
        conversation. With `tool_choice` "required" answers are only calls, with {"type": "function", "function": {"name": ...}} one
        call of this function; with "none" the tools are not described to the model. `chat_template` replaces the model's template
        (Jinja), and `chat_template_kwargs` are variables of the template, such as `enable_thinking`. `continue_final_message`:
        answers continue the last message, which is the assistant's.
        """
        vllm_arguments.check("chat", vllm)
        conversations: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        tools, calls = _chosen(tools, tool_choice)
        rendered = (
            self._conversation(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        )
        prompts = [_Prompt(chat.text, chat.token_ids, chat.spans, chat, calls) for chat in rendered]
        return self._generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The text and the token ids of the prompt that `chat` renders for a conversation."""
        conversation = self._conversation(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return conversation.text, conversation.token_ids

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, images: Any = None) -> Stream:
        """Continues a prompt and returns the text as a stream, for `for` or `async for`. `images` are its pictures."""
        return self._stream(self._prompt(prompt, images), sampling_params)

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Answers a conversation and returns the answer as a stream: `text` as the model writes it, `delta` split into parts."""
        tools, calls = _chosen(tools, tool_choice)
        conversation = self._conversation(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        prompt = _Prompt(conversation.text, conversation.token_ids, conversation.spans, conversation, calls)
        return self._stream(prompt, sampling_params)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """Computes an embedding of length 1 of each text, pooled in the way that the model's file gives."""
        texts = [self._text_ids(prompt) for prompt in _prompts(prompts)]
        with Progress(use_tqdm, len(texts), "embedding", "text") as done:
            vectors = self._engine.embed(texts, done)
        return [
            EmbeddingRequestOutput(self._request_id(), EmbeddingOutput(vector), ids)
            for vector, ids in zip(vectors, texts, strict=True)
        ]

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """Scores how well documents answer queries: one query and all documents, or pairs of as many queries and documents. The
        model must be a reranker."""
        queries = [queries] if isinstance(queries, str) else list(queries)
        documents = [documents] if isinstance(documents, str) else list(documents)
        if len(queries) == 1:
            queries *= len(documents)
        pairs = zip(queries, documents, strict=True)
        texts = [self._engine.rerank_prompt(query, document) for query, document in pairs]
        with Progress(use_tqdm, len(texts), "scoring", "pair") as done:
            scores = self._engine.rerank(texts, done)
        return [
            ScoringRequestOutput(self._request_id(), ScoringOutput(score), ids)
            for score, ids in zip(scores, texts, strict=True)
        ]

    def logits(self, prompt: Prompt, *, start: int = 0) -> Logits:
        """The logits after each token of a text from index `start` on (a negative one counts from the end), `[n_tokens,
        n_vocab]`."""
        ids = self._text_ids(prompt)
        first = max(len(ids) + start, 0) if start < 0 else start
        data = self._engine.logits(ids, first)
        return np.frombuffer(data, dtype=np.float32).reshape(-1, self.n_vocab)

    def close(self) -> None:
        """Cancels all requests and frees the model's memory. Afterwards only the tokenizer works."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM: {self.architecture} on {self.device}, {self._engine.n_parallel} texts of {self.n_ctx} tokens>"

    def _prompt(self, prompt: Prompt, images: Any = None) -> _Prompt:
        given: Any = prompt
        found = pictures.listed(images)
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if given is None:
                raise PromptError(f"a prompt has no \"prompt\" and no \"prompt_token_ids\", but {list(prompt)}")
            data = prompt.get("multi_modal_data") or {}
            if other := [kind for kind in data if kind != "image"]:
                raise PromptError(f"multi_modal_data has {other}: models see pictures only (\"image\")")
            found = [*pictures.listed(data.get("image")), *found]
        if isinstance(given, str):
            if not found:
                return _Prompt(given, self.tokenize(given))
            encoded = [self._pictures.encode(pictures.read(picture)) for picture in found]
            return _Prompt(given, *self._engine.picture_prompt(given, encoded))
        if found:
            raise PromptError("pictures stand in a text: give the prompt as a text, not as token ids")
        return _Prompt(None, _token_ids(given))

    def _text_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt without pictures."""
        found = self._prompt(prompt)
        if found.spans is not None:
            raise PromptError("pictures are read by texts and chats only")
        return found.token_ids

    def _conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> Conversation:
        if self._engine.chat_template is None and chat_template is None and not self._warned_of_template:
            self._warned_of_template = True
            warnings.warn('the model has no chat template that works: messages become lines of "User:"', stacklevel=3)
        given, files = pictures.of_messages(messages)
        return self._engine.conversation(
            json.dumps(given),
            json.dumps([dict(tool) for tool in tools or []]),
            json.dumps(dict(chat_template_kwargs or {})),
            add_generation_prompt,
            continue_final_message,
            chat_template,
            [self._pictures.encode(file) for file in files],
        )

    def _generate(
        self,
        prompts: Sequence[_Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * len(prompts)
        if len(params) != len(prompts):
            raise OptionError(f"there are {len(prompts)} prompts, but {len(params)} sampling_params")
        grammars = _Grammars(self._engine)
        forms = [grammars.of(own, prompt) for own, prompt in zip(params, prompts, strict=True)]
        each = [self._own(own, prompt) for own, prompt in zip(params, prompts, strict=True)]
        requests = [
            (prompt.token_ids, prompt.spans, own, index, form, prompt.conversation)
            for prompt, own, form in zip(prompts, each, forms, strict=True)
            for index in range(own.n)
        ]
        with Progress(use_tqdm, len(requests), "generating", "text") as done:
            completions = iter(self._engine.generate(requests, done))
        outputs = []
        for prompt, own in zip(prompts, each, strict=True):
            texts = list(itertools.islice(completions, own.n))
            of_prompt = None
            if own.prompt_logprobs is not None:
                of_prompt = self._prompt_logprobs(prompt.token_ids, texts[0].prompt_logprobs)
            outputs.append(
                RequestOutput(
                    request_id=self._request_id(),
                    prompt=prompt.text,
                    prompt_token_ids=prompt.token_ids,
                    outputs=[self._completion(index, completion) for index, completion in enumerate(texts)],
                    num_cached_tokens=texts[0].cached_tokens,
                    prompt_logprobs=of_prompt,
                    metrics=[RequestMetrics(*completion.seconds) for completion in texts],
                )
            )
        return outputs

    def _stream(self, prompt: _Prompt, params: SamplingParams | None) -> Stream:
        params = params or self.get_default_sampling_params()
        form = _Grammars(self._engine).of(params, prompt)
        text = (prompt.token_ids, prompt.spans, self._own(params, prompt), 0, form, prompt.conversation)
        return Stream(self, prompt.token_ids, self._engine.stream(text))

    def _own(self, params: SamplingParams, prompt: _Prompt) -> SamplingParams:
        """The parameters of one prompt: with the strings that end its answer, and with a seed."""
        stop = [] if prompt.conversation is None else prompt.conversation.stop
        seed = params.seed
        if seed is None and self._seeds is not None:
            # The prompt's other texts get the seeds that follow.
            seed = self._seeds.getrandbits(63)
        if not stop and seed == params.seed:
            return params
        return replace(params, stop=[*params._stop(), *stop], seed=seed)

    def _completion(self, index: int, completion: Completion) -> CompletionOutput:
        ids, told = completion.token_ids, completion.logprobs
        logprobs = [self._logprobs(id, of) for id, of in zip(ids, told, strict=True)] if told else None
        reason = completion.reason
        message = None if completion.message is None else json.loads(completion.message)
        counts = completion.drafted_tokens, completion.accepted_tokens
        return CompletionOutput(index, completion.text, ids, _finish_reason(reason), reason, logprobs, message, *counts)

    def _logprobs(self, id: int, told: tuple[float, int, list[tuple[int, float]]]) -> dict[int, Logprob]:
        own, rank, top = told
        text = self._engine.token_text
        logprobs = {other: Logprob(logprob, place, text(other)) for place, (other, logprob) in enumerate(top, 1)}
        logprobs.setdefault(id, Logprob(own, rank, text(id)))
        return logprobs

    def _prompt_logprobs(
        self, ids: Sequence[int], told: Iterable[tuple[float, int, list[tuple[int, float]]]]
    ) -> list[dict[int, Logprob] | None]:
        """The log probabilities of a prompt's tokens; the first token has none."""
        return [None, *(self._logprobs(id, of) for id, of in zip(ids[1:], told, strict=True))]

    def _request_id(self) -> str:
        return str(next(self._request_ids))


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a single prompt and no list of them."""
    return isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """A single prompt as a list; a list unchanged."""
    return [prompts] if _is_single(prompts) else list(prompts)


def _token_ids(given: Any) -> list[int]:
    """Token ids as a list. The vocabulary is checked later."""
    if isinstance(given, (bytes, bytearray)):
        raise TypeError("a prompt is a text or token ids, not bytes")
    try:
        return array("I", list(given)).tolist()
    except OverflowError:
        raise PromptError("a token id is below 0, or larger than any that a model knows") from None


def _chosen(
    tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice
) -> tuple[list[Mapping[str, Any]], Literal["one", "several"] | None]:
    """The tools that are described to the model, and how many it must call."""
    given = list(tools or [])
    if choice == "auto":
        return given, None
    if choice == "none":
        return [], None
    if choice == "required":
        if not given:
            raise OptionError("tool_choice wants a call, but there are no tools")
        return given, "several"
    name = choice.get("function", choice).get("name") if isinstance(choice, Mapping) else None
    if name is None:
        raise OptionError(f'tool_choice={choice!r} is not supported: "auto", "none", "required", or an object that names a function')
    named = [tool for tool in given if tool.get("function", tool).get("name") == name]
    if not named:
        raise OptionError(f"tool_choice names {name!r}, which is none of the tools")
    return named, "one"


class _Grammars:
    """The grammars of one call; equal ones are compiled once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made: dict[tuple[str | None, bool, bool], Grammar | None] = {}

    def of(self, params: SamplingParams, prompt: _Prompt) -> Grammar | None:
        """The grammar of a text; None: the text is not constrained."""
        fields, chat = params._form(), prompt.conversation
        if fields is None and prompt.calls is None:
            return None
        key = (fields, chat is not None, chat is not None and chat.begins_in_reasoning)
        if key not in self._made:
            grammar = self._made[key] = self._make(fields, prompt)
            if grammar is not None and grammar.left_out:
                warnings.warn(f"not enforced of the schema: {', '.join(grammar.left_out)}", stacklevel=5)
        return self._made[key]

    def _make(self, fields: str | None, prompt: _Prompt) -> Grammar | None:
        form = None if fields is None else self._engine.grammar(fields, prompt.conversation)
        if prompt.conversation is None or prompt.calls is None:
            return form
        if form is not None:
            raise OptionError("tool_choice demands a call, which structured_outputs rules out")
        return self._engine.call_grammar(prompt.conversation, prompt.calls == "several")
