"""Problems from shapes, without tensors; and how many query-key pairs a pattern has at a shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import torch

from attn_dispatch.errors import InvalidInput
from attn_dispatch.private import without_modes
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem

FEW_QUERIES = 16  #: up to which the number of keys may grow from call to call, as in decoding with a cache


@lru_cache(maxsize=4096)
def measured_for(problem: Problem) -> Problem:
    """The problem that is measured and decided for this one: with few queries, that of the next power of two of keys.

    Of documents of packed rows, that of powers of two of their number and length. A grid has its number of keys, and is
    measured as it is.
    """
    k_len = 1 << (problem.k_len - 1).bit_length()
    pattern = problem.pattern.lengthened(problem.k_len, k_len)
    if problem.is_document:
        plain = replace(problem, is_document=False)
        if pattern is None:
            return plain
        batch = 1 << (problem.batch.bit_length() - 1)
        bias = tuple(min(size, most) for size, most in zip(problem.bias, (batch, problem.heads)))
        return replace(plain, batch=batch, q_len=k_len, k_len=k_len, bias=bias, pattern=pattern)
    if pattern is None or problem.q_len > FEW_QUERIES or problem.q_len >= problem.k_len or k_len == problem.k_len:
        return problem
    return replace(problem, k_len=k_len, pattern=pattern)


@lru_cache(1024)
def pair_count(pattern: Pattern, q_len: int, k_len: int, heads: int) -> int:
    """Query-key pairs of all heads that a pattern has, each as often as the query sees the key."""
    natural = pattern.natural
    with torch.inference_mode(False), torch.device("cpu"), without_modes():
        counts = Counter(natural.head_offsets(head, heads) for head in range(heads))
        return sum(count * natural.pairs(q_len, k_len, offsets) for offsets, count in counts.items())


def quick_problems(device: torch.device) -> list[Problem]:
    """A few problems of each kind, sized to run in well under a second each on this device."""
    dtype, lengths, rows = torch.float32, (512, 2048, 4096), 32
    if device.type == "cuda":
        dtype, lengths, rows = torch.bfloat16, (2048, 8192, 32768), 64
    longnet = Dilated((512, 1024, 2048), (1, 2, 4), is_causal=True)
    patterns = (Dense(), Dense(is_causal=True), Window(left=255, right=0), longnet)
    plain = [problem_of((1, n, 8, 64), p, dtype, device) for p in patterns for n in lengths]
    grid = problem_of((1, rows * 32, 8, 64), Neighborhood((rows, 32), (13, 13)), dtype, device)
    return [*plain, grid, problem_of((1, lengths[1], 8, 64), longnet, dtype, device, backward=True)]


def standard_problems(device: torch.device) -> list[Problem]:
    """The problems of a profile for others: every kind at a length of each octave, in each usual dtype, both ways.

    The shortest come first, for a common budget. On a CPU dense patterns end an octave earlier: one float16 call with
    gradients takes ten seconds on two cores at 8192 tokens.
    """
    gpu = device.type == "cuda"
    lengths = [1 << octave for octave in (range(10, 16) if gpu else range(9, 14))]
    found = []
    for length in lengths:
        patterns: list[Pattern] = [
            *([Dense(), Dense(is_causal=True)] if gpu or length < lengths[-1] else []),
            Window(left=255, right=0),
            Dilated((length // 4, length // 2, length), (1, 2, 4), is_causal=True),
            Neighborhood((length // 32, 32), (13, 13)),
        ]
        for pattern in patterns:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                each = problem_of((1, length, 8, 64), pattern, dtype, device)
                found += [each, replace(each, needs_grad=True)]
    return found


def problem_of(
    shape: tuple[int, int, int, int],
    pattern: Pattern,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kv_heads: int | None = None,
    backward: bool = False,
) -> Problem:
    """The problem for contiguous q, k and v of shape [batch, len, heads, head_dim].

    Args:
        kv_heads: heads of k and v; by default those of q.
        backward: whether gradients are needed.

    Raises:
        InvalidInput: the shape is not positive or too large for a tensor, or the pattern does not fit it.
    """
    batch, length, heads, head_dim = shape
    kv_heads = heads if kv_heads is None else kv_heads
    if min(*shape, kv_heads) < 1:
        raise InvalidInput(f"shape and kv_heads must be integers >= 1, got {shape} and {kv_heads}")
    try:
        q, kv = (
            torch.empty(batch, length, count, head_dim, dtype=dtype, device="meta", requires_grad=backward)
            for count in (heads, kv_heads)
        )
    except RuntimeError as error:
        raise InvalidInput(f"shape {shape}: {error}") from error
    with torch.enable_grad():
        return Problem.of(q, kv, kv, pattern, device=device)
