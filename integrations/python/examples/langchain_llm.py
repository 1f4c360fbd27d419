"""The engine as a LangChain language model. The prompts of a batch run at once.

python examples/langchain_llm.py [MODEL]
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompts import PromptTemplate
from pydantic import Field

from metal_attention import LLM, SamplingParams


class MetalAttention(BaseLLM):
    """Texts of a GGUF model; `sampling` has the sampling options. Calls may set its fields, as in `invoke(text, seed=1)`."""

    llm: Any
    sampling: SamplingParams = Field(default_factory=lambda: SamplingParams(max_tokens=256))

    @property
    def _llm_type(self) -> str:
        return "metal-attention"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": repr(self.llm)}

    def _params(self, stop: list[str] | None, options: dict[str, Any]) -> SamplingParams:
        return dataclasses.replace(self.sampling, **({"stop": stop} if stop else {}), **options)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **options: Any,
    ) -> LLMResult:
        outputs = self.llm.generate(prompts, self._params(stop, options), use_tqdm=False)
        texts = [
            [Generation(text=text.text, generation_info={"finish_reason": text.finish_reason}) for text in output.outputs]
            for output in outputs
        ]
        n_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        n_text = sum(len(text.token_ids) for output in outputs for text in output.outputs)
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_text, "total_tokens": n_prompt + n_text}
        return LLMResult(generations=texts, llm_output={"token_usage": usage})

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **options: Any,
    ) -> Iterator[GenerationChunk]:
        for piece in self.llm.stream(prompt, self._params(stop, options)):
            chunk = GenerationChunk(text=piece.text)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **options: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async for piece in self.llm.stream(prompt, self._params(stop, options)):
            chunk = GenerationChunk(text=piece.text)
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def main() -> None:
    engine = LLM(sys.argv[1] if len(sys.argv) > 1 else None, use_tqdm=False)
    llm = MetalAttention(llm=engine, sampling=SamplingParams(temperature=0, max_tokens=30))
    story = PromptTemplate.from_template("Once upon a time there was a {animal}") | llm

    texts = story.batch([{"animal": animal} for animal in ("cat", "dog", "bear")])
    for text in texts:
        print(repr(text))
    # Each text is the one that its prompt gets alone, in a batch or as a stream.
    assert story.invoke({"animal": "dog"}) == texts[1]
    assert "".join(story.stream({"animal": "bear"})) == texts[2]

    async def read() -> str:
        return "".join([piece async for piece in story.astream({"animal": "cat"})])

    assert asyncio.run(read()) == texts[0]
    assert "." not in llm.invoke("Once upon a time", stop=["."])


if __name__ == "__main__":
    main()
