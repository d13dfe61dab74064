"""Routes of calls whose pattern holds tensors: found by what is static, and checked each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_dispatch import Blocks, Ranges, attend
from attn_dispatch.calls import routes
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.data import DataPattern
from tests.support.calls import close

LENGTH = 32
Q, K, V = (torch.randn(2, LENGTH, heads, 16) for heads in (4, 2, 2))


def spans(left: int = 3) -> Ranges:
    return Ranges.spans(torch.arange(LENGTH)[None] // 8, left=left)


def blocks(tables: int = 1, rows: int = 1, *, seed: int = 0) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    return Blocks(torch.rand(rows, tables, 4, 4, generator=generator) < 0.5, 8)


PATTERNS: dict[str, Callable[[], DataPattern]] = {
    "spans": spans,
    "blocks": blocks,
    "blocks of key heads": lambda: blocks(2),
    "blocks of heads by row": lambda: blocks(4, 2),
}


@pytest.fixture(autouse=True)
def decided_once(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls for which a route is made."""
    found: list[Any] = []
    new = routes.new_route

    def noted(call: Any, key: Any) -> Any:
        found.append(call)
        return new(call, key)

    monkeypatch.setattr("attn_dispatch.dispatch.new_route", noted)
    routes.routes.clear()
    return found


@pytest.mark.parametrize("backend", ["native", "manual"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_route_serves_all_tensors_of_a_form(name: str, backend: str, decided_once: list[Any]) -> None:
    for layout in ("bnhd", "bhnd"):
        q, k, v = ((x if layout == "bnhd" else x.transpose(1, 2)) for x in (Q, K, V))
        for _ in range(2):
            pattern = PATTERNS[name]()  # others with the same facts
            found = attend(q, k, v, pattern, layout=layout, backend=backend)
            exact = attend(Q.double(), K.double(), V.double(), pattern, backend="manual")
            assert close(found if layout == "bnhd" else found.transpose(1, 2), exact)
    assert len(decided_once) == 3  # one for each layout, and one in float64
    assert not any(isinstance(x, DataPattern) for key in routes.routes for x in key)


def test_other_tensors_have_other_results(decided_once: list[Any]) -> None:
    first, second = (Blocks(torch.eye(4, dtype=torch.bool).roll(shift, 1)[None, None], 8) for shift in (0, 1))
    outs = [attend(Q, K, V, each, backend="native") for each in (first, second, first)]
    assert len(decided_once) == 1
    assert torch.equal(outs[0], outs[2])
    assert not torch.allclose(outs[0], outs[1])


def test_a_hit_checks_what_may_have_changed() -> None:
    table = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    pattern = Blocks(table, 8)
    attend(Q, K, V, pattern, backend="native")
    table[0, 0, 0, 1] = False
    with pytest.raises(InvalidInput, match="changed in place"):
        attend(Q, K, V, pattern, backend="native")


@pytest.mark.parametrize("lists", [[[0, 1]] * 4, [[0, 4]] * 4])
def test_entries_are_checked_in_each_new_table(lists: list[list[int]]) -> None:
    attend(Q, K, V, Blocks(torch.tensor([[[[0, 1]] * 4]]), 8), backend="native")
    given = Blocks(torch.tensor([[lists]]), 8)
    if lists[0][1] < 4:
        attend(Q, K, V, given, backend="native")
        return
    with pytest.raises(InvalidInput, match=r"entries in -1\.\.3"):
        attend(Q, K, V, given, backend="native")


@pytest.mark.parametrize(
    ("changes", "why"), [({"layout": "nope"}, "layout"), ({"scale": [1]}, "scale"), ({"key_mask": Q}, "key_mask")]
)
def test_wrong_arguments_are_named(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        attend(Q, K, V, blocks(), **changes)
    with pytest.raises(InvalidInput, match="q must"):
        attend(Q[0], K, V, blocks())
