"""The runs of keys by mask functions, against what these return for each query and key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch import Ranges
from attn_dispatch.integrations import mask_runs
from attn_dispatch.integrations.mask_functions import Facts, Unreadable
from attn_dispatch.integrations.mask_runs import END, edges_of, evaluated
from tests.integrations.test_mask_functions import (
    SIZE,
    causal,
    dense,
    distance,
    either,
    everything,
    less_distance,
    sided,
    signed_distance,
    window,
)

SPANS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, 0, 0, -1], [0] * 5 + [-1] * 6 + [2]])
TYPES = (SPANS >= 0).long()
PADDING = torch.tensor([3, 0])


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


def of_images(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """As libraries write it, for keys past the ids."""
    length = SPANS.shape[1] - 1
    safe = torch.where(key < length, key, 0)
    types = torch.where(key < length, TYPES[batch, safe], 0)
    ids = torch.where(key < length, SPANS[batch, safe], -1)
    images = (TYPES[batch, query.clamp(max=length)] == 1) & (types == 1)
    return images & (SPANS[batch, query] == ids)


def padded(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return causal(batch, head, query, key).to(key.device) & (key >= PADDING[batch]) & (TYPES[batch, key] != 2)


def by_row(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (batch == 0) | ~causal(batch, head, query, key)


def chunks(batch: Any, head: Any, query: Any, key: Any) -> Any:
    left = PADDING[batch]
    return ((key - left) // 4 == (query - left) // 4) & (key <= query)


FUNCTIONS = [
    *(spans, spans_in_a_window, nothing, far, runs, of_images, padded, by_row),
    *(causal, window, distance, less_distance, signed_distance, sided, either, everything, chunks),
]


def of_queries(function: Any, start: int, count: int, q_len: int) -> Tensor:
    """What a function returns [2, count, SIZE] for queries at the end of the keys."""
    query = torch.arange(start, start + count)[None, None, :, None] + SIZE - q_len
    seen = function(torch.arange(2)[:, None, None, None], 0, query, torch.arange(SIZE)[None, None, None])
    return seen.expand(2, 1, count, SIZE)[:, 0]  # type: ignore[no-any-return]


def found_by(function: Any, q_len: int, asks: bool) -> Facts | Ranges:
    """Of SIZE keys, with or without being asked about all pairs."""

    def seen(start: int, count: int) -> Tensor:
        assert asks
        return of_queries(function, start, count, q_len)

    keys = torch.arange(SIZE)
    return evaluated(None if asks else function, keys[SIZE - q_len :], keys, 2, seen)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("q_len", [SIZE, 5])
@pytest.mark.parametrize("queries", [SIZE, 3, 1])
@pytest.mark.parametrize("function", [spans, spans_in_a_window, nothing, far, runs, lambda *at: at[3] < 0])
def test_intervals(function: Any, queries: int, q_len: int, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pieces of some queries each."""
    monkeypatch.setattr(mask_runs, "PIECE", 2 * SIZE * queries)
    found = found_by(function, q_len, asks)
    assert isinstance(found, Ranges)
    assert len(found.data[0]) == (2 if "spans" in function.__name__ else 1)
    counts = found.multiplicity(q_len, SIZE, 1)
    expected = of_queries(function, 0, q_len, q_len)
    assert torch.equal(counts.expand(2, 1, -1, -1)[:, 0], expected.int())


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("q_len", [SIZE, 5])
@pytest.mark.parametrize("function", [causal, window, distance, signed_distance, lambda *at: at[3] >= 0])
def test_windows_are_no_intervals(function: Any, q_len: int, asks: bool) -> None:
    found = found_by(function, q_len, asks)
    assert isinstance(found, Facts)
    assert torch.equal(dense(found)[-q_len:], of_queries(function, 0, q_len, q_len)[0])
    assert (found.low, found.high) == {"causal": (None, 0), "<lambda>": (None, None)}.get(
        function.__name__, (found.low, found.high)
    )


@pytest.mark.parametrize("asks", [False, True])
def test_too_many_runs(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_runs, "PIECE", 2 * SIZE)

    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key % 2 == 0) & (key <= query) | (key == query)

    with pytest.raises(Unreadable, match="query 6 sees over 3 runs of keys"):
        found_by(function, SIZE, asks)


# --- without all pairs ------------------------------------------------------------------------------------------------


def seen_by(function: Any, q_len: int = SIZE) -> Tensor:
    """Bool [2, q_len, SIZE], by the edges."""
    keys = torch.arange(SIZE)
    edges = edges_of(function, keys[SIZE - q_len :], keys, 2)
    assert bool((edges.diff(dim=-1)[edges[..., 1:] < END] > 0).all())  # each once, in order
    assert edges.shape[2] <= max(2, int((edges < END).sum(-1).max()))
    return (edges[..., None] <= keys).sum(2) % 2 == 1


@pytest.mark.parametrize("q_len", [SIZE, 5])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_edges(function: Any, q_len: int) -> None:
    assert torch.equal(seen_by(function, q_len), of_queries(function, 0, q_len, q_len))


ATOMS: dict[str, Callable[..., Any]] = {
    **{each.__name__: each for each in FUNCTIONS},
    "same": lambda b, h, q, k: SPANS[b, q] == SPANS[b, k],
    "other": lambda b, h, q, k: TYPES[b, k] != TYPES[b, q],
    "query": lambda b, h, q, k: SPANS[b, q] > 0,
    "key": lambda b, h, q, k: SPANS[b, k] >= 0,
    "row": lambda b, h, q, k: PADDING[b] > 2,
    "all": lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
    "none": lambda b, h, q, k: torch.tensor(False),
    "constant": lambda b, h, q, k: k.new_zeros(()) < q - 4,
    "halves": lambda b, h, q, k: q // 2 >= k // 3,
    "difference": lambda b, h, q, k: -(k - q) > 2,
    "apart": lambda b, h, q, k: torch.abs(k - q) >= 3,
}
MASKS = st.recursive(
    st.sampled_from(sorted(ATOMS)),
    lambda inner: st.tuples(st.sampled_from("&|"), inner, inner) | st.tuples(st.just("~"), inner),
    max_leaves=6,
)


def composed(mask: Any) -> Callable[..., Any]:
    if isinstance(mask, str):
        return ATOMS[mask]
    operator, one, *others = (mask[0], *map(composed, mask[1:]))
    if operator == "~":
        return lambda *at: ~one(*at)
    return lambda *at: one(*at) & others[0](*at) if operator == "&" else one(*at) | others[0](*at)


@given(mask=MASKS)
def test_any_edges(mask: Any) -> None:
    function = composed(mask)
    assert torch.equal(seen_by(function), of_queries(function, 0, SIZE, SIZE))


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: q % 3 == (q - k) % 3,
        lambda b, h, q, k: (q - k) == 2,
        lambda b, h, q, k: (q * k) > 4,
        lambda b, h, q, k: torch.maximum(q, k) > 4,
        lambda b, h, q, k: SPANS[b, k] <= q,  # keys in no order
        lambda b, h, q, k: k / 2 <= q,
        lambda b, h, q, k: torch.where(k <= q, SPANS[b, k], 0) > 0,
        lambda b, h, q, k: q if k <= q else k,
        lambda b, h, q, k: (k <= q) and (k >= 0),
        lambda b, h, q, k: (k <= q) == (k >= 0),
        lambda b, h, q, k: not (k <= q),
        lambda b, h, q, k: torch.sub(q, k, alpha=2) >= 0,
        lambda b, h, q, k: -abs(q - k) >= -2,
        lambda b, h, q, k: (k <= q) & torch.ones(SIZE, SIZE, dtype=torch.bool),
        lambda b, h, q, k: q + torch.zeros(SIZE).long() >= 0,
        lambda b, h, q, k: k.flip(-1) <= q,
        # What would be another function of each position on its own.
        lambda b, h, q, k: k <= q.max(),
        lambda b, h, q, k: (k >= 3).any() & (k <= q),
        lambda b, h, q, k: PADDING[b].sum() > k,
        lambda b, h, q, k: q >= q.numel() - k,
        lambda b, h, q, k: (k <= q) & (k.ndim > 0),
        lambda b, h, q, k: (torch.arange(SIZE) == k) & (k <= q),
        lambda b, h, q, k: SPANS[:, q] == SPANS[:, k],
        lambda b, h, q, k: SPANS[b][q] == 0,
        lambda b, h, q, k: q[..., 0] >= k,
        lambda b, h, q, k: k <= q + int(h),
        lambda b, h, q, k: (k <= q) & bool(h == 0),
        lambda b, h, q, k: q,
        lambda b, h, q, k: None,
    ],
)
def test_what_is_not_modelled_is_told(function: Any) -> None:
    with pytest.raises(Unreadable):
        seen_by(function)


def test_many_tokens_take_no_pairs() -> None:
    """Of 100,000 tokens, with thousands of images; all pairs would take 10 GB."""
    length, images = 100_000, 3000
    at = torch.arange(length)
    ids = torch.where(at // 16 % 2 == 0, at // 32, -1).expand(2, -1).clone()
    ids[1] = pad(ids[1, :-7], (7, 0), value=-1)

    def function(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) & (k > q - 1024) | ((ids[b, q] >= 0) & (ids[b, q] == ids[b, k]))

    assert int(ids.max()) > images

    def seen(start: int, count: int) -> Tensor:
        raise AssertionError("asked about pairs")

    found = evaluated(function, at, at, 2, seen)
    assert isinstance(found, Ranges)
    expected = [Ranges.spans(each[None], left=1023).data[:, 0, 0] for each in ids]
    assert torch.equal(found.data[:, :, 0], torch.stack(expected, 1).clamp(0, length - 1))
