"""The normal form of patterns against their multiplicity, and keys of query ranges against all pairs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_dispatch.spec.orders import ORDERS, Reordered
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.reach import Band
from attn_dispatch.spec.shapes import pair_count
from tests.support.definition import SPECS, Spec


def branch_sum(pattern: Pattern, spec: Spec, head: int) -> Tensor:
    offsets = pattern.head_offsets(head, spec.heads)
    queries, keys = torch.arange(spec.q_len), torch.arange(spec.k_len)
    found = torch.zeros(spec.q_len, spec.k_len, dtype=torch.int32)
    for reach in pattern.reaches(queries, keys, spec.q_len, spec.k_len, offsets):
        found += reach.sees()
    return found


@given(SPECS, st.none() | st.sampled_from(ORDERS))
def test_branches_add_up_to_the_multiplicity(spec: Spec, order: str | None) -> None:
    pattern = spec.pattern
    if order is not None and spec.q_len == spec.k_len:
        pattern = Reordered(pattern, order)
    expected = pattern.multiplicity(*spec.lengths)
    assert all(torch.equal(branch_sum(pattern, spec, head), expected[head]) for head in range(spec.heads))


@given(SPECS)
def test_pairs_are_counted_without_the_multiplicity(spec: Spec) -> None:
    assert pair_count(spec.pattern, *spec.lengths) == spec.pattern.multiplicity(*spec.lengths).sum()


@given(st.data(), SPECS)
def test_bands_match_the_pairs(data: st.DataObject, spec: Spec) -> None:
    head = data.draw(st.integers(0, spec.heads - 1))
    start = data.draw(st.integers(0, spec.q_len - 1))
    stop = data.draw(st.integers(start + 1, spec.q_len))
    bands = spec.pattern.bands(spec.q_len, spec.k_len, spec.pattern.head_offsets(head, spec.heads))
    for band in bands or ():
        check(band, range(start, stop), spec.k_len)


def check(band: Band, run: range, k_len: int) -> None:
    queries = torch.arange(run.start, run.stop)
    seen = band.reach(queries, torch.arange(k_len), k_len).sees().any(0)
    assert torch.equal(band.seen(queries, k_len), seen)
    # The range of keys is exact where every position is selected.
    found = seen.nonzero().flatten().tolist()
    around = band.run(run, k_len)
    assert all(key in around for key in found)
    assert band.rate > 1 or len(around) == len(found)
