"""Sequences one after the other, each of as many queries and keys as their starts say."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from attn_dispatch.errors import InvalidInput

Three = tuple[Tensor, Tensor, Tensor]


def sequences(q: Tensor, k: Tensor, v: Tensor, starts: dict[str, list[int]]) -> list[Three]:
    """q, k and v [1, tokens, heads, head_dim] of each sequence.

    Args:
        starts: by the arguments' names, where each sequence's queries start and the last ones end; the same of keys.

    Raises:
        InvalidInput: they are not those of these tensors.
    """
    for (name, given), x in zip(starts.items(), (q, k)):
        if len(given) < 2 or (given[0], given[-1]) != (0, x.shape[1]) or given != sorted(given):
            raise InvalidInput(f"{name} must rise from 0 to {x.shape[1]}, got {given[:8]}")
    (first, of_q), (second, of_k) = starts.items()
    if len(of_q) != len(of_k):
        raise InvalidInput(f"{first} and {second} must have equal lengths, got {len(of_q)} and {len(of_k)}")
    if k.shape[1] != v.shape[1]:
        raise InvalidInput(f"keys and values must have equal lengths, got {k.shape[1]} and {v.shape[1]}")
    borders = zip(pairwise(of_q), pairwise(of_k))
    return [(q[:, a:b], k[:, c:d], v[:, c:d]) for (a, b), (c, d) in borders]
