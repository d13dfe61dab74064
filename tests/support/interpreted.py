"""Triton's kernels in its interpreter, where there is no CUDA device."""

from __future__ import annotations

import importlib
import operator
from functools import cache
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
    _patch_once(interpreter)
    kind_of, kinds = interpreter._get_np_dtype, dict[str, Any]()

    def kind_once(kind: Any) -> Any:
        if (name := kind.scalar.name) not in kinds:
            kinds[name] = kind_of(kind)
        return kinds[name]

    interpreter._get_np_dtype = kind_once
    if hasattr(interpreter, "interpreter_semantic"):
        interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = _refuse_overflow


def _patch_once(interpreter: Any) -> None:
    """For each function that a kernel calls the language would be patched again: a quarter of the time."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    @cache
    def languages_of(function: Any) -> set[int]:
        seen = set(map(id, function.__globals__.values()))
        return seen & {id(interpreter.tl), id(interpreter.tl.core)}

    def patch_once(function: Any) -> Any:
        if languages_of(function) <= patched:
            return None  # of those that ask for it, kernels alone restore the language
        patched.update(languages_of(function))
        return patch(function)

    def launched(*given: Any, **more: Any) -> Any:
        patched.clear()
        return launch(*given, **more)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launched


def _refuse_overflow(left: Any, right: Any, operation: Any) -> None:
    """The interpreter works out with ten operations of its own whether integers overflow, and does not look."""
    kind = left.type.scalar
    if kind.int_bitwidth < 64:
        found = getattr(operator, operation.__name__)(*(x.handle.data.astype("int64") for x in (left, right)))
        fits = kind.get_int_min_value() <= found.min() and found.max() <= kind.get_int_max_value()
        assert fits, f"{kind} overflows in {operation.__name__}"
