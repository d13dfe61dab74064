"""Ranks with different arguments or different stored decisions: no rank waits, and all make the same decision."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Sharded, attend, explain, unshard
from attn_dispatch.errors import AttnDispatchError, GroupMismatch, InvalidInput, NoBackend, NotDecided
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Dilated, Window
from tests.support import ring_ranks
from tests.support.pairwise import crossed, thinned
from tests.support.ring_calls import nothing, part
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("short_trials")

SIZE = 3


def call(given: dict[str, Any]) -> tuple[int, ...]:
    """A job: the shape of the result; `given` may also name a shape, a dtype, settings and so on."""
    os.environ.update(given.pop("settings", {}))
    kind, grads = given.pop("kind", "contiguous"), given.pop("grads", False)
    shape, dtype = given.pop("shape", (2, 12, 4, 8)), given.pop("dtype", torch.float32)
    q, k, v = (torch.ones(shape, dtype=dtype, requires_grad=grads) for _ in range(3))
    out: Tensor = attend(q, given.pop("k", k), v, mesh=Sharded(ring_ranks.group(), kind), **given)
    return tuple(out.shape)


def called(ranks: Ranks, *arguments: dict[str, Any]) -> list[Any]:
    """The result or error of each rank, called with its own arguments."""
    return ranks.outcomes(call, [(each,) for each in arguments])


def works(ranks: Ranks) -> bool:
    """Whether the next call does, without a trial."""
    off = {"settings": {"ATTN_DISPATCH_MODE": "off"}}
    return called(ranks, *[off] * SIZE) == [(2, 12, 4, 8)] * SIZE


# --- different arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"shape": (3, 12, 4, 8)}, "batch: 2 on ranks 0, 2, 3 on rank 1"),
        ({"shape": (2, 12, 6, 8)}, "heads: 4 on ranks 0, 2, 6 on rank 1"),
        ({"shape": (2, 12, 4, 16)}, "head_dim: 8 on ranks 0, 2, 16 on rank 1"),
        ({"dtype": torch.float64}, "dtype: float32 on ranks 0, 2, float64 on rank 1"),
        ({"grads": True}, "needs_grad: False on ranks 0, 2, True on rank 1"),
        ({"kind": "zigzag"}, "shards: contiguous on ranks 0, 2, zigzag on rank 1"),
        ({"order": "ring"}, "order: None on ranks 0, 2, ring on rank 1"),
        ({"scale": 0.5}, "on ranks 0, 2, 0.5 on rank 1"),
        ({"return_lse": True}, "return_lse: False on ranks 0, 2, True on rank 1"),
        ({"is_causal": True}, "'is_causal': True} on rank 1"),
        ({"pattern": Window(4, 0)}, "pattern: {'kind': 'Dense', 'is_causal': False} on ranks 0, 2"),
        ({"seq_lens": torch.tensor([7, 7])}, "seq_lens: None on ranks 0, 2, [7, 7] on rank 1"),
        ({"key_mask": torch.ones(2, 12, dtype=torch.bool)}, "has_key_mask: False on ranks 0, 2, True on rank 1"),
        ({"settings": {"ATTN_DISPATCH_MODE": "locked"}}, "mode: off on ranks 0, 2, locked on rank 1"),
    ],
    ids=str,
)
def test_ranks_with_different_arguments(ranks: Ranks, other: dict[str, Any], message: str, set_mode: Any) -> None:
    set_mode("off")
    for error in called(ranks, {}, other, {}):
        assert isinstance(error, GroupMismatch)
        assert message in str(error)
    assert works(ranks)


def test_the_error_names_every_argument_that_differs(ranks: Ranks) -> None:
    found = called(ranks, {"is_causal": True}, {"shape": (2, 12, 2, 8)}, {"dtype": torch.bfloat16, "grads": True})
    assert len({str(error) for error in found}) == 1
    assert {line.split(":")[0].strip() for line in str(found[0]).splitlines()[1:]} >= {
        *("pattern", "heads", "kv_heads", "dtype", "needs_grad")
    }


def test_different_budgets_are_refused(ranks: Ranks) -> None:
    for error in called(ranks, {}, {}, {"settings": {"ATTN_DISPATCH_BUDGET_MS": "70"}}):
        assert isinstance(error, GroupMismatch)
        assert "budget_ms: 0.0 on ranks 0, 1, 70.0 on rank 2" in str(error)
    assert works(ranks)


@thinned(
    ("wrong", "message"),
    [
        ({"shape": (2, 12, 4)}, "q must have 4 axes"),
        ({"k": torch.ones(2, 12, 4, 6)}, "q and k must have one head_dim, got 8 and 6"),
        ({"order": "hilbert"}, "order must be None or one of"),
        ({"backend": "sdpa"}, "backend must be None or 'ring' over a mesh, got 'sdpa'"),
        ({"seq_lens": [3, 4]}, "seq_lens must be an int32 or int64 tensor, got list"),
        ({"seq_lens": torch.tensor([3])}, "seq_lens must have shape [batch] = [2]"),
        ({"key_mask": torch.ones(2, 36, dtype=torch.bool)}, "key_mask must"),
        ({"dropout_p": 2.0}, "dropout_p must"),
        ({"settings": {"ATTN_DISPATCH_MODE": "fast"}}, "$ATTN_DISPATCH_MODE must be one of"),
        ({"settings": {"ATTN_DISPATCH_BUDGET_MS": "soon"}}, "$ATTN_DISPATCH_BUDGET_MS must be"),
    ],
    3,
    str,
)
def test_a_wrong_argument_on_one_rank(ranks: Ranks, wrong: dict[str, Any], message: str) -> None:
    first, second, third = called(ranks, {}, {}, wrong)
    assert isinstance(third, InvalidInput)
    assert message in str(third)
    for error in (first, second):
        assert isinstance(error, GroupMismatch)
        assert f"rank 2: InvalidInput: {third}"[:60] in str(error)
    assert works(ranks)


def put_together(shape: tuple[int, ...], dtype: torch.dtype, kind: str, dim: int) -> tuple[int, ...]:
    return tuple(unshard(torch.zeros(shape, dtype=dtype), Sharded(ring_ranks.group(), kind), dim).shape)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (((3, 5), torch.float32, "contiguous", 1), "shape: [2, None] on ranks 0, 2, [3, None] on rank 1"),
        (((2, 5), torch.float64, "contiguous", 1), "dtype: torch.float32 on ranks 0, 2, torch.float64 on rank 1"),
        (((2, 5), torch.float32, "zigzag", 1), "shards: contiguous on ranks 0, 2, zigzag on rank 1"),
        (((2, 5), torch.float32, "contiguous", 2), "rank 1: InvalidInput: dim must be an axis of x"),
    ],
    ids=str,
)
def test_shards_of_different_kinds(ranks: Ranks, other: tuple[Any, ...], message: str) -> None:
    right = ((2, 4), torch.float32, "contiguous", 1)
    first, second, third = ranks.outcomes(put_together, [right, other, right])
    for error in (first, third):
        assert isinstance(error, GroupMismatch)
        assert message in str(error)
    assert isinstance(second, InvalidInput if "InvalidInput" in message else GroupMismatch)
    assert ranks.everywhere(put_together, *right, ranks=SIZE) == [(2, 12)] * SIZE


@thinned(
    ("arguments", "kind", "message"),
    [
        ({"order": "local"}, NoBackend, "local: rank 0 sees 96 key rows of other ranks"),
        ({"pattern": Dilated((12,), (1,)), "order": "ring"}, NoBackend, "ring: no rank sees another's rows"),
        ({"dropout_p": 0.5}, NoBackend, "ring: has no dropout, asked for 0.5"),
        ({"seq_lens": torch.tensor([40, 3])}, InvalidInput, "seq_lens must"),
        ({"settings": {"ATTN_DISPATCH_MODE": "locked"}}, NotDecided, "no decision is stored on ring-3r-1h-contiguous-"),
    ],
    2,
    str,
)
def test_no_rank_can_run(ranks: Ranks, arguments: dict[str, Any], kind: type[AttnDispatchError], message: str) -> None:
    found = called(ranks, *[arguments] * SIZE)
    assert {type(error) for error in found} == {kind}
    assert all(message in str(error) for error in found)
    assert works(ranks)


# --- different decisions ----------------------------------------------------------------------------------------------


def decided(settings: dict[str, str], change: Callable[[], object]) -> dict[str, Any]:
    """A job: the explanation of a call, from the decisions on disk. `change` may change these before."""
    os.environ.update(settings)
    change()
    mesh = ring_ranks.group()
    attend(*part(mesh), mesh=mesh)
    ring_ranks.forget()
    found = explain(*part(mesh), mesh=mesh).to_dict()
    for row in found["candidates"]:
        del row["measured"]  # of what is not timed, when it was last written
    return found


def lose_all() -> None:
    """As on a new host."""
    ring_ranks.forget()
    shutil.rmtree(cache_folder())


def lose_memory() -> None:
    """As in a new process."""
    ring_ranks.forget()


def put_aside() -> None:
    ring_ranks.forget()
    cache_folder().rename(f"{cache_folder()}-aside")


def bring_back() -> None:
    lose_all()
    Path(f"{cache_folder()}-aside").rename(cache_folder())


LOCKED = {"ATTN_DISPATCH_MODE": "locked"}


@crossed(lambda cold, change: {"change": change}, cold=((0,), (1, 2), (0, 2)), change=(lose_all, lose_memory))
def test_a_rank_with_a_decision_sends_it_to_the_others(
    ranks: Ranks, cold: tuple[int, ...], change: Callable[[], object]
) -> None:
    """Without a new trial: locked mode would raise."""
    first = ranks.everywhere(decided, {}, nothing, ranks=SIZE)
    assert first[0]["source"] == "measured"
    assert first == [first[0]] * SIZE
    then = [(LOCKED, change if rank in cold else nothing) for rank in range(SIZE)]
    assert ranks.each(decided, then) == first


def test_the_latest_of_different_decisions_is_taken_and_stored_by_all(ranks: Ranks) -> None:
    first = ranks.everywhere(decided, {}, nothing, ranks=SIZE)
    second = ranks.everywhere(decided, {}, put_aside, ranks=SIZE)
    assert second != first
    assert ranks.each(decided, [(LOCKED, bring_back), (LOCKED, lose_memory), (LOCKED, lose_all)]) == second
