"""Triton's kernels in its interpreter, where there is no CUDA device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from attn_dispatch.kernels.triton import support

INTERPRETED = not support.missing() and not torch.cuda.is_available()


def load() -> None:
    """Triton looks for its switch once, as each kernel is defined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in ("forward", "backward", "few_queries"):
            importlib.import_module(f"attn_dispatch.kernels.triton.{name}")
        interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        # Before 3.7 it asked for int(array of one entry), which numpy 2.4 refuses.
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patched
