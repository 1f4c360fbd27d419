"""Fixtures and helpers of the Python package's tests."""

from __future__ import annotations

import json
import lzma
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from metal_attention import LLM

ROOT = pathlib.Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "tests/data/reference"

Logits = npt.NDArray[np.float32]


def reference(name: str) -> Any:
    """The JSON of the reference data `name`, computed in float64, which the engine's tests use, too."""
    path = REFERENCE / name
    return json.loads(path.read_text() if path.exists() else lzma.decompress(pathlib.Path(f"{path}.xz").read_bytes()))


def nmse(got: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """The normalised mean squared error: the squared error divided by the reference's variance."""
    g, e = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(((g - e) ** 2).sum() / ((e - e.mean()) ** 2).sum())


@pytest.fixture(scope="session")
def generated_models(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the small models that the engine's tests generate from seeds."""
    folder = tmp_path_factory.mktemp("models")
    example = ["cargo", "run", "-q", "-p", "metal-attention-testing", "--example", "write_models", "--"]
    subprocess.run([*example, str(folder), "architectures", "more-architectures"], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The built-in model on the CPU."""
    return LLM(device="cpu", n_parallel=4)


@pytest.fixture(scope="session")
def exact() -> LLM:
    """The built-in model with F32 arithmetic and cache."""
    return LLM(device="cpu", n_parallel=2, exact=True, cache_type="f32")


@pytest.fixture(scope="session")
def program() -> Callable[..., str]:
    """A function that runs the program `metal-attention` and returns its stdout."""
    path = os.environ.get("METAL_ATTENTION", str(ROOT / "target/debug/metal-attention"))

    def run(*args: str) -> str:
        done = subprocess.run([path, *args], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
