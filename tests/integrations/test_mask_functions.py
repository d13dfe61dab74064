"""Mask functions as they are read, against what they return for each query and key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Ranges
from attn_dispatch.integrations import mask_functions
from attn_dispatch.integrations.mask_functions import Facts, Unreadable, evaluated, read

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


@pytest.mark.parametrize(
    "function", [causal, window, distance, less_distance, signed_distance, sided, either, everything, packed, chunks]
)
def test_reads_what_is_returned(function: Any) -> None:
    query, key = torch.arange(SIZE)[:, None], torch.arange(SIZE)[None]
    expected = function(torch.tensor(0), 0, query, key).expand(SIZE, SIZE)
    assert not bool(expected.all()) or function is everything
    assert torch.equal(dense(read(function)), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: key % 2 == query % 2,
        lambda batch, head, query, key: (key <= query - 3) | (key >= query),  # a gap
        lambda batch, head, query, key: causal(batch, head, query, key) | (IDS[batch, query] == IDS[batch, key]),
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


# --- by what they return ----------------------------------------------------------------------------------------------

SPANS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, 0, 0, -1], [0] * 5 + [-1] * 6 + [2]])


def spans(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Those of row 0 lie in two places."""
    same = (SPANS[batch, query] == SPANS[batch, key]) & (SPANS[batch, query] >= 0)
    return causal(batch, head, query, key) | same


def spans_in_a_window(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return spans(batch, head, query, key) & (key > query - 4)


def nothing(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """For half of the queries."""
    return (query % 2 == 0) & (key <= query)


def far(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query - 3


def runs(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Three for the last queries."""
    return (key % 4 < 2) & (key <= query)


def of_queries(function: Any, start: int, count: int, q_len: int) -> Tensor:
    """What a function returns [2, count, SIZE] for queries at the end of the keys."""
    query = torch.arange(start, start + count)[None, :, None] + SIZE - q_len
    seen = function(torch.arange(2)[:, None, None], 0, query, torch.arange(SIZE)[None, None])
    return seen.expand(2, count, SIZE)  # type: ignore[no-any-return]


@pytest.mark.parametrize("q_len", [SIZE, 5])
@pytest.mark.parametrize("queries", [SIZE, 3, 1])
@pytest.mark.parametrize("function", [spans, spans_in_a_window, nothing, far, runs, lambda *at: at[3] < 0])
def test_intervals(function: Any, queries: int, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pieces of some queries each."""
    monkeypatch.setattr(mask_functions, "PIECE", 2 * SIZE * queries)
    found = evaluated(lambda start, count: of_queries(function, start, count, q_len), 2, q_len, SIZE)
    assert isinstance(found, Ranges)
    assert len(found.data[0]) == (2 if "spans" in function.__name__ else 1)
    counts = found.multiplicity(q_len, SIZE, 1)
    expected = of_queries(function, 0, q_len, q_len)
    assert torch.equal(counts.expand(2, 1, -1, -1)[:, 0], expected.int())


@pytest.mark.parametrize("q_len", [SIZE, 5])
@pytest.mark.parametrize("function", [causal, window, distance, signed_distance, lambda *at: at[3] >= 0])
def test_windows_are_no_intervals(function: Any, q_len: int) -> None:
    found = evaluated(lambda start, count: of_queries(function, start, count, q_len), 2, q_len, SIZE)
    assert isinstance(found, Facts)
    assert torch.equal(dense(found)[-q_len:], of_queries(function, 0, q_len, q_len)[0])
    assert (found.low, found.high) == {"causal": (None, 0), "<lambda>": (None, None)}.get(
        function.__name__, (found.low, found.high)
    )


def test_too_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_functions, "PIECE", 2 * SIZE)

    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key % 2 == 0) & (key <= query) | (key == query)

    with pytest.raises(Unreadable, match="query 6 sees 4 runs of keys, where 3 can be told"):
        evaluated(lambda start, count: of_queries(function, start, count, SIZE), 2, SIZE, SIZE)
