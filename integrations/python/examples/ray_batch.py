"""Continues the prompts of a data set with Ray Data: a pool of actors, each with its own model.

python examples/ray_batch.py [--model MODEL] [--rows N] [--actors N] [--kill]

If an actor dies, Ray starts another one and gives it the batch again, so that every row is in the result once: `--kill` ends one
by SIGKILL in the middle and checks this.
"""

from __future__ import annotations

import argparse
import collections
import os
import signal
import time
from typing import Any

import ray
from ray.data import ActorPoolStrategy

from metal_attention import LLM, SamplingParams


class Continue:
    """An actor: loads the model once, then continues batches. All rows of a batch run at once."""

    def __init__(self, model: str | None, batch_size: int, n_threads: int) -> None:
        self.llm = LLM(model, n_parallel=batch_size, n_threads=n_threads, use_tqdm=False)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        # The seed is the row's id, so that a row has the same text on every actor.
        params = [SamplingParams(temperature=0.8, max_tokens=100, seed=int(id)) for id in batch["id"]]
        outputs = self.llm.generate(list(batch["prompt"]), params, use_tqdm=False)
        text = [output.outputs[0].text for output in outputs]
        return {**batch, "text": text, "process": [os.getpid()] * len(text)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file or hf:OWNER/REPO [the built-in model]")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--kill", action="store_true", help="end an actor in the middle")
    args = parser.parse_args()

    ray.init(num_cpus=args.actors, include_dashboard=False, log_to_driver=False)
    animals = ["cat", "dog", "bear", "bird"]
    rows = [{"id": i, "prompt": f"Once upon a time there was a {animals[i % 4]}"} for i in range(args.rows)]
    texts = ray.data.from_items(rows, override_num_blocks=max(1, args.rows // args.batch_size)).map_batches(
        Continue,
        fn_constructor_kwargs={"model": args.model, "batch_size": args.batch_size, "n_threads": 1},
        batch_size=args.batch_size,
        compute=ActorPoolStrategy(size=args.actors),
        num_cpus=1,
    )
    start, killed, results = time.monotonic(), None, []
    for row in texts.iter_rows():
        results.append(row)
        if args.kill and killed is None:
            # The actor that made the first row.
            killed = int(row["process"])
            os.kill(killed, signal.SIGKILL)
    seconds = time.monotonic() - start
    ray.shutdown()

    counts = collections.Counter(row["id"] for row in results)
    assert counts == collections.Counter(range(args.rows)), "each row once"
    assert all(row["text"] for row in results)
    processes = collections.Counter(row["process"] for row in results)
    if args.kill:
        print(f"killed process {killed}")
    print(f"{len(results)} rows, each once, in {seconds:.1f} s; rows by process: {dict(processes)}")
    print(repr(results[0]["text"]))


if __name__ == "__main__":
    main()
