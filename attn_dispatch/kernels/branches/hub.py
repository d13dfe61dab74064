"""Builds of flash-attn from the Hugging Face Hub that are on disk, as the package `kernels` keeps them.

Source: huggingface/kernels-community at 31ec5e6 (2026), flash-attn2/torch-ext and flash-attn3/torch-ext.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.branches.backend import Package
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.settings import FLASH_KERNEL, flash_kernel

KERNELS = ("flash_attn2", "flash_attn3")


class Build(Package):
    """A build of `KERNELS`: its `hint` is the folder. It takes the place of the distribution of that generation."""

    def load(self) -> Any:
        """Its operators: what its module `_ops` has, without the functions of Python around them."""
        if self.module not in sys.modules:
            package: Any = types.ModuleType(self.module)
            package.__path__ = [self.hint]
            sys.modules[self.module] = package
        return importlib.import_module(f"{self.module}._ops").ops

    def version(self) -> str:
        """The revision of its repository, which the Hub's cache names a folder after; else the names of its files."""
        folder = Path(self.hint)
        above = [path for path in folder.parents if path.parent.name == "snapshots"]
        found = above[0].name[:12] if above else " ".join(sorted(path.stem for path in folder.glob("*.so")))
        return f"of the Hub @ {found}"

    def refusals(self) -> list[Refusal]:
        return []


def build(kernel: str) -> Package | None:
    """The build that $ATTN_DISPATCH_FLASH_KERNEL names, if it is of this kernel. Raises InvalidInput if of none."""
    named = flash_kernel()
    if named is None:
        return None
    text = str(named).replace("-", "_")
    known = max(KERNELS, key=text.rfind)  # the last: folders above may be named after another
    if known not in text or not (named / "_ops.py").is_file():
        what = "a folder with _ops.py, a build of flash-attn2 or flash-attn3 by the Hub's kernels-community"
        raise InvalidInput(f"${FLASH_KERNEL} must be {what}, got {str(named)!r}")
    return Build(kernel, str(named), f"_attn_dispatch_{kernel}", ()) if known == kernel else None
