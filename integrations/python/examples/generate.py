"""Generates texts, streams, logits and embeddings.

python examples/generate.py [MODEL]
"""

import asyncio
import sys

from metal_attention import LLM, SamplingParams

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
print(llm)

prompts = ["Once upon a time", "Lily and Ben went to the park."]
for output in llm.generate(prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=40)):
    print(f"{output.prompt!r}: {output.outputs[0].text!r}")

for piece in llm.stream("The cat", SamplingParams(max_tokens=20, seed=2)):
    print(piece.text, end="", flush=True)
print()


async def side_by_side() -> None:
    async def read(prompt: str) -> str:
        return "".join([piece.text async for piece in llm.stream(prompt, SamplingParams(max_tokens=20, seed=3))])

    print(await asyncio.gather(*(read(prompt) for prompt in prompts)))


asyncio.run(side_by_side())
print("logits", llm.logits("Once upon a time").shape, "embedding", len(llm.embed("Once upon a time")[0].outputs.embedding))
