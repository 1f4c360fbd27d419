"""Progress bars, if tqdm is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Progress:
    """A bar of `total` steps; no bar if it is not wanted or tqdm is not installed."""

    def __init__(self, wanted: bool, total: int, what: str, unit: str = "it") -> None:
        self._bar: Any = None
        if wanted:
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=what, unit=unit, dynamic_ncols=True)

    def __enter__(self) -> Callable[[int], object] | None:
        return None if self._bar is None else self._step

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def _step(self, _: int) -> None:
        self._bar.update(1)


class DownloadProgress:
    """A bar for each file of a download."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._name: str | None = None
        self._bar: Any = None

    def __call__(self, name: str, done: int, total: int) -> None:
        if not self._wanted:
            return
        if name != self._name:
            self.close()
            try:
                from tqdm.auto import tqdm
            except ImportError:
                self._wanted = False
                return
            self._name = name
            self._bar = tqdm(total=total, initial=done, desc=name, unit="B", unit_scale=True, dynamic_ncols=True)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
