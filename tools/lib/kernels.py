"""What takes the place of a Triton kernel in a backend's module: it sees each launch."""

from __future__ import annotations

from functools import partial
from typing import Any


class InPlace:
    """Stands for a `TritonKernel`, whose launches become calls of `start`.

    `wanted`: whether these are to do what it is there for; `made`: Triton's compiled kernel.
    """

    made: Any = None

    def __init__(self, kernel: Any, wanted: bool) -> None:
        self.kernel, self.wanted = kernel, wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def load(self) -> InPlace:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self.start, grid)

    def start(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        raise NotImplementedError
