"""A model that runs: texts, chats, embeddings, scores and logits, many at a time."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import warnings
import weakref
from array import array
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from ._engine import Completion, Engine
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

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` and `{"prompt_token_ids": ids}`."""

Message: TypeAlias = Mapping[str, Any]
"""A message as OpenAI's interface has it: `{"role": "user", "content": "Hello!"}`."""


_open: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before the interpreter goes: no thread of an engine may be in Python then."""
    for engine in list(_open):
        engine.close()


class LLM:
    """A model that runs, in the same way as vLLM's class of this name.

    >>> from metal_attention import LLM, SamplingParams
    >>> llm = LLM("model.gguf")
    >>> for output in llm.generate(["Once upon a time", "The capital of France is"], SamplingParams(temperature=0)):
    ...     print(output.outputs[0].text)

    Many texts run side by side, prompts that begin alike share what was computed for them, and other Python threads go on
    meanwhile. One object serves any number of threads. It does not survive `fork`: make one in each process.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        n_ctx: int | None = None,
        n_parallel: int = 8,
        n_threads: int | None = None,
        cache_type: str = "f16",
        exact: bool = False,
        in_memory: bool = False,
        use_tqdm: bool = True,
    ) -> None:
        """Loads a model.

        model: a GGUF file (any part, where it is split), or a name on the Hugging Face hub, `hf:OWNER/REPO[:TYPE or :FILE]`;
            None: the small model that is built in.
        device: "auto" (a GPU with room for the model, else the CPU), "cpu", "gpu", "gpu:1" (by index), "gpu:NAME", "cuda" or
            "cuda:1".
        n_ctx: tokens of each text, the prompt's included; None: those of the training, at most 4096.
        n_parallel: texts side by side; the KV cache has room for so many times `n_ctx` tokens.
        n_threads: threads on the CPU; None: one for each physical core.
        cache_type: number format of the KV cache, "f16" or "f32".
        exact: compute in F32 where it could be faster with less.
        in_memory: read the file instead of mapping it.
        use_tqdm: show a download's progress.
        """
        for name, value in (("n_ctx", n_ctx), ("n_parallel", n_parallel), ("n_threads", n_threads)):
            if value is not None and not 0 <= value < 1 << 63:
                raise OptionError(f"{name} is {value}, but it must be at least 1 and what memory has room for")
        path = None if model is None else os.fspath(model)
        download = DownloadProgress(use_tqdm)
        try:
            self._engine = Engine(
                path,
                device=device,
                n_ctx=n_ctx,
                n_parallel=n_parallel,
                n_threads=n_threads,
                cache_type=cache_type,
                exact=exact,
                in_memory=in_memory,
                download=download,
            )
        finally:
            download.close()
        _open.add(self._engine)
        self._request_ids = itertools.count()
        self._warned_of_template = False

    @classmethod
    def from_hub(cls, name: str, **options: Any) -> LLM:
        """Loads `OWNER/REPO`, `OWNER/REPO:TYPE` or `OWNER/REPO:FILE` from the cache that the hub's programs share; what is
        not there is downloaded first. The options are those of `LLM`."""
        return cls(name if name.startswith("hf:") else f"hf:{name}", **options)

    @property
    def device(self) -> str:
        """What runs the model."""
        return self._engine.device

    @property
    def architecture(self) -> str:
        """The model's architecture, as its file names it."""
        return self._engine.architecture

    @property
    def n_ctx(self) -> int:
        """Tokens a text may have, its prompt's included."""
        return self._engine.n_ctx

    @property
    def n_vocab(self) -> int:
        """Tokens the model knows."""
        return self._engine.n_vocab

    @property
    def n_embd(self) -> int:
        """Numbers in a hidden state."""
        return self._engine.n_embd

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, where the model has one."""
        return self._engine.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, where the model has one."""
        return self._engine.eos_token_id

    def get_default_sampling_params(self) -> SamplingParams:
        """The options of texts without `sampling_params`: those that the model's file recommends, and else the defaults."""
        return SamplingParams(**json.loads(self._engine.recommended_sampling()))

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of `text`: `add_special`: with those that begin and end a text, as the model wants them;
        `parse_special`: the spelling of a control token in the text is that token."""
        return self._engine.tokenize(text, add_special, parse_special)

    def detokenize(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens; control tokens have one where `special` is set."""
        return self._engine.detokenize(_token_ids(token_ids), special)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts, `n_parallel` texts at a time.

        The outputs are in the order of the prompts. `sampling_params` is for all of them, or a list with one for each; without it
        what the model's file recommends holds. Ctrl-C cancels what is not finished.
        """
        return self._generate([self._prompt(prompt) for prompt in _prompts(prompts)], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of a list of them, through the model's chat template.

        Text in messages is never a control token. `tools` are described to the model, whose calls are in the text as it
        writes them. `chat_template_kwargs` are variables of the template, such as `enable_thinking`.
        """
        conversations: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts = [
            self.chat_prompt(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._generate(prompts, sampling_params, use_tqdm, self._engine.chat_stop)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """The text and the token ids of a conversation, as `chat` gives them to the model."""
        if not self._engine.has_chat_template and not self._warned_of_template:
            self._warned_of_template = True
            warnings.warn('the model has no chat template that works: messages become lines of "User:"', stacklevel=2)
        variables = json.dumps(dict(chat_template_kwargs or {}))
        listed = [dict(message) for message in messages]
        return self._engine.chat_prompt(
            json.dumps(listed), json.dumps(list(tools or [])), variables, add_generation_prompt
        )

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Continues a prompt, and gives the text as it comes to a loop, `for` or `async for`."""
        _, ids = self._prompt(prompt)
        return self._stream(ids, sampling_params, [])

    def chat_stream(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Answers a conversation, and gives the text as it comes."""
        _, ids = self.chat_prompt(messages, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return self._stream(ids, sampling_params, self._engine.chat_stop)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """Makes a vector of length 1 of each text, pooled as the model's file says."""
        texts = [self._prompt(prompt)[1] for prompt in _prompts(prompts)]
        with Progress(use_tqdm, len(texts), "embedding", "text") as done:
            vectors = self._engine.embed(texts, done)
        return [
            EmbeddingRequestOutput(self._request_id(), EmbeddingOutput(vector), ids)
            for vector, ids in zip(vectors, texts, strict=True)
        ]

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """Says how well documents answer queries: a query to all documents, or as many of both, pair by pair. The model must
        be a reranker."""
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
        """The logits after each token of a text from the `start`-th on (a negative one counts from the end), `[n_tokens,
        n_vocab]`."""
        _, ids = self._prompt(prompt)
        first = max(len(ids) + start, 0) if start < 0 else start
        data = self._engine.logits(ids, first)
        return np.frombuffer(data, dtype=np.float32).reshape(-1, self.n_vocab)

    def close(self) -> None:
        """Cancels what runs and gives the model's memory back. Afterwards only the tokenizer works."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM: {self.architecture} on {self.device}, {self._engine.n_parallel} texts of {self.n_ctx} tokens>"

    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if given is None:
                raise PromptError(f"a prompt has no \"prompt\" and no \"prompt_token_ids\", but {list(prompt)}")
        if isinstance(given, str):
            return given, self.tokenize(given)
        return None, _token_ids(given)

    def _generate(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        stop: Sequence[str] = (),
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.get_default_sampling_params()] * len(prompts)
        if len(params) != len(prompts):
            raise OptionError(f"there are {len(prompts)} prompts, but {len(params)} sampling_params")
        each = [_with_stop(own, stop) for own in params]
        requests = [
            (ids, own, index) for (_, ids), own in zip(prompts, each, strict=True) for index in range(own.n)
        ]
        with Progress(use_tqdm, len(requests), "generating", "text") as done:
            completions = iter(self._engine.generate(requests, done))
        outputs = []
        for (text, ids), own in zip(prompts, each, strict=True):
            texts = list(itertools.islice(completions, own.n))
            outputs.append(
                RequestOutput(
                    request_id=self._request_id(),
                    prompt=text,
                    prompt_token_ids=ids,
                    outputs=[self._completion(index, completion) for index, completion in enumerate(texts)],
                    num_cached_tokens=texts[0].cached_tokens,
                    metrics=[RequestMetrics(*completion.seconds) for completion in texts],
                )
            )
        return outputs

    def _stream(self, ids: list[int], params: SamplingParams | None, stop: Sequence[str]) -> Stream:
        return Stream(self, self._engine.stream(ids, _with_stop(params or self.get_default_sampling_params(), stop)))

    def _completion(self, index: int, completion: Completion) -> CompletionOutput:
        ids, told = completion.token_ids, completion.logprobs
        logprobs = [self._logprobs(id, of) for id, of in zip(ids, told, strict=True)] if told else None
        reason = completion.reason
        return CompletionOutput(index, completion.text, ids, _finish_reason(reason), reason, logprobs)

    def _logprobs(self, id: int, told: tuple[float, list[tuple[int, float]]]) -> dict[int, Logprob]:
        own, top = told
        text = self._engine.token_text
        logprobs = {other: Logprob(logprob, rank, text(other)) for rank, (other, logprob) in enumerate(top, 1)}
        logprobs.setdefault(id, Logprob(own, None, text(id)))
        return logprobs

    def _request_id(self) -> str:
        return str(next(self._request_ids))


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt as a list, and a list of them as it is."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _token_ids(given: Any) -> list[int]:
    """Token ids as a list; whether the model knows them is looked at later."""
    if isinstance(given, (bytes, bytearray)):
        raise TypeError("a prompt is a text or token ids, not bytes")
    try:
        return array("I", list(given)).tolist()
    except OverflowError:
        raise PromptError("a token id is below 0, or larger than any that a model knows") from None


def _with_stop(params: SamplingParams, stop: Sequence[str]) -> SamplingParams:
    """The parameters with more stop strings."""
    if not stop:
        return params
    from dataclasses import replace

    return replace(params, stop=[*params._stop(), *stop])
