"""Mask functions as they are read, against what they return for each query and key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.integrations.mask_functions import Facts, Unreadable, read

SIZE = 12
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]])
IDS = torch.tensor([[0] * 4 + [1] * 3 + [2] * 5])
LEFT = torch.tensor([3])


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key > query - 3) & (query >= key)


def distance(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return abs(query - key) <= 2


def less_distance(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return abs(key - query) < 2


def signed_distance(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key <= 4) & (query - key > -3)


def sided(batch: Any, head: Any, query: Any, key: Any) -> Any:
    distance = query - key
    return ((distance >= 0) & (distance < 4)) | ((distance < 0) & (-distance < 2))


def either(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query.new_zeros((), dtype=torch.bool) | window(batch, head, query, key) | distance(batch, head, query, key)


def everything(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return causal(batch, head, query, key) | torch.tensor(True)


def packed(batch: Any, head: Any, query: Any, key: Any) -> Any:
    query_at, key_at = POSITIONS[batch, query], POSITIONS[batch, key]
    return (IDS[batch, query] == IDS[batch, key]) & window(batch, head, query_at, key_at)


def chunks(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return ((key - LEFT[batch]) // 4 == (query - LEFT[batch]) // 4) & (key <= query)


def dense(facts: Facts) -> Tensor:
    """True where all of them hold."""
    query, key = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    seen = torch.ones(SIZE, SIZE, dtype=torch.bool)
    if facts.low is not None:
        seen &= key - query >= facts.low
    if facts.high is not None:
        seen &= key - query <= facts.high
    if facts.documents is not None:
        seen &= facts.documents[0][:, None] == facts.documents[0]
    if facts.chunk is not None:
        size, left = facts.chunk
        seen &= (query - left) // size == (key - left) // size
    return seen


@pytest.mark.parametrize("function", [causal, window, distance, less_distance, signed_distance, packed, chunks])
def test_reads_what_is_returned(function: Any) -> None:
    query, key = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None]
    expected = function(torch.tensor(0), 0, query, key).expand(SIZE, SIZE)
    assert not bool(expected.all())
    assert torch.equal(dense(read(function)), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: key % 2 == query % 2,
        *(sided, either, everything),
        lambda batch, head, query, key: IDS[batch, query] >= 0,
        lambda batch, head, query, key: (key <= query) & IDS[0, 0].bool(),
        lambda batch, head, query, key: abs(query - key) >= 2,
        lambda batch, head, query, key: -abs(query - key) >= -2,
        lambda batch, head, query, key: query <= 5,
        lambda batch, head, query, key: key == query,
        lambda batch, head, query, key: POSITIONS[batch, key] <= POSITIONS[batch, query],  # of documents that mix
        lambda batch, head, query, key: key // 4 <= query // 4,
        lambda batch, head, query, key: True,
    ],
)
def test_refuses_what_it_does_not_model(function: Any) -> None:
    with pytest.raises(Unreadable):
        read(function)
