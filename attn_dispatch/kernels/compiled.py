"""The kernels that this process has compiled, or loaded from a cache on disk, by what they are compiled for."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

from attn_dispatch import process_state
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Problem

_compiled: set[Hashable] = set()


@lru_cache(maxsize=4096)
def note(name: str, problem: Problem, more: Hashable = None) -> None:
    """Note that a call of the problem has been made; `more`: what its kernels are compiled for besides.

    Every call of a backend notes itself: the cache makes all but a problem's first cheap.
    """
    _compiled.add((name, kernel_class(problem), more))


def is_noted(name: str, problem: Problem, more: Hashable = None) -> bool:
    """Whether the kernels of a problem are compiled: a call with such kernels has been noted."""
    return (name, kernel_class(problem), more) in _compiled


@lru_cache(maxsize=4096)
def kernel_class(problem: Problem) -> Hashable:
    """What kernels are compiled for: neither lengths nor the number of heads."""
    pattern = problem.pattern.natural
    masks = problem.has_seq_lens, problem.has_key_mask
    results = problem.needs_grad, problem.return_lse, problem.deterministic
    numbers = problem.dtype, problem.matmul_precision, problem.head_dim, problem.heads // problem.kv_heads
    sides: Hashable = getattr(pattern, "is_causal", False)
    if isinstance(pattern, Window):
        sides = pattern.left is None, pattern.right is None, pattern.sinks > 0
    axes = len(pattern.branches) if isinstance(pattern, Dilated) else 0
    axes = len(pattern.grid) if isinstance(pattern, Neighborhood) else axes
    return problem.device, type(pattern), sides, axes, masks, results, numbers


process_state.register(process_state.FACTS, _compiled.clear, note.cache_clear)
