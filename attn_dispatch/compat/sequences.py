"""Sequences that stand one after the other, each with keys of its own."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from attn_dispatch.errors import InvalidInput

Borders = list[tuple[int, int]]  #: of each sequence, its first token and the one after its last


def borders(name: str, starts: list[int], length: int) -> Borders:
    """Those of sequences that fill `length` tokens. Raises InvalidInput where these do not."""
    if not starts or (starts[0], starts[-1]) != (0, length) or starts != sorted(starts):
        raise InvalidInput(f"{name} must rise from 0 to {length}, got {starts[:8]}")
    return list(pairwise(starts))


def sequences(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str], of_q: Borders, of_k: Borders
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v [1, tokens, heads, head_dim] of each sequence.

    Args:
        names: of the arguments that say where queries and keys start.

    Raises:
        InvalidInput: there are not as many of queries as of keys, or of keys as of values.
    """
    if len(of_q) != len(of_k):
        counts = f"{len(of_q)} and {len(of_k)} sequences"
        raise InvalidInput(f"{names[0]} and {names[1]} must have equal lengths, got {counts}")
    if k.shape[1] != v.shape[1]:
        raise InvalidInput(f"k and v must have equal lengths, got {k.shape[1]} and {v.shape[1]}")
    return [(q[:, a:b], k[:, c:d], v[:, c:d]) for (a, b), (c, d) in zip(of_q, of_k)]
