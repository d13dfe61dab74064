"""DTensors, and torch's context_parallel: attend() on them computes what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from attn_dispatch import Blocks, Dense, Dilated, Ranges, Window, attend, explain
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend
from attn_dispatch.spec.pattern import Pattern
from tests.support.pairwise import crossed
from tests.support.ring_ranks import Ranks

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 4, 24, 8, 4, 8
MESH = (2, 2)
WHERE: dict[str, tuple[Any, ...]] = {
    "batch": (Shard(0), Replicate()),
    "heads": (Replicate(), Shard(2)),
    "batch and heads": (Shard(0), Shard(2)),
    "batch twice": (Shard(0), Shard(0)),
    "outer heads": (Shard(2), Replicate()),
    "replicated": (Replicate(), Replicate()),
    "tokens": (Replicate(), Shard(1)),
    "heads and tokens": (Shard(2), Shard(1)),
}
PATTERNS: tuple[Pattern, ...] = (Dense(is_causal=True), Window(5, 0), Dilated((6, 12), (1, 2), is_causal=True))

pytestmark = pytest.mark.usefixtures("short_trials", "no_trials")


@cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """One for all jobs of a rank: each makes process groups, whose threads stay."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


def whole(q_len: int = LENGTH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((q_len, HEADS), (LENGTH, KV_HEADS), (LENGTH, KV_HEADS), (q_len, HEADS))
    q, k, v, grad = (torch.randn(BATCH, *size, HEAD_DIM, generator=generator).double() for size in sizes)
    return q, k, v, grad


def swapped(placements: tuple[Any, ...]) -> tuple[Any, ...]:
    """Placements for layout "bhnd"."""
    axes = {0: 0, 1: 2, 2: 1}
    return tuple(Shard(axes[each.dim]) if isinstance(each, Shard) else each for each in placements)


def full(x: Any) -> Tensor:
    """A DTensor's entries on all ranks."""
    found: Tensor = x.full_tensor()
    return found


def agree(found: list[Tensor], exact: list[Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in zip(found, exact, strict=True))


def placed(pattern: Pattern, where: str, layout: str, masked: bool) -> tuple[bool, list[Any]]:
    """A job: whether out, lse and gradients are those of one process; the placements of out and lse."""
    mesh = mesh_of(*MESH)
    q, k, v, grad = whole()
    others: dict[str, Any] = {}
    if masked:
        others = {"key_mask": torch.arange(LENGTH) % torch.tensor([[3], [4], [5], [6]]) > 0}
        others["seq_lens"] = torch.tensor([LENGTH, 20, 1, 0])
    plain = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attend(plain[0], plain[1], plain[2], pattern, backend="manual", return_lse=True, **others)
    exact = [out, lse, *torch.autograd.grad(out, plain, grad)]

    placements = WHERE[where] if layout == "bnhd" else swapped(WHERE[where])

    def axes(x: Any) -> Any:
        return x if layout == "bnhd" else x.transpose(1, 2)

    given = [distribute_tensor(axes(x.detach()), mesh, placements).requires_grad_() for x in plain]
    out, lse = attend(given[0], given[1], given[2], pattern, layout=layout, return_lse=True, **others)
    grads = torch.autograd.grad(out, given, distribute_tensor(axes(grad), mesh, placements))
    found = [axes(full(out)), full(lse), *(axes(full(x)) for x in grads)]
    return agree(found, exact), [list(out.placements), list(lse.placements)]


@crossed(
    lambda pattern, where, layout, masked: {"where": where},
    pattern=PATTERNS,
    where=WHERE,
    layout=("bnhd", "bhnd"),
    masked=(False, True),
)
def test_every_placement(ranks: Ranks, pattern: Pattern, where: str, layout: str, masked: bool) -> None:
    placements = WHERE[where] if layout == "bnhd" else swapped(WHERE[where])
    of_lse = swapped(WHERE[where])  # lse is [batch, heads, q_len]
    if where == "heads and tokens" and isinstance(pattern, Dilated):
        with pytest.raises(AssertionError, match="take patterns alike for all heads, not Dilated"):
            ranks.everywhere(placed, pattern, where, layout, masked)
        return
    assert ranks.everywhere(placed, pattern, where, layout, masked) == [(True, [list(placements), list(of_lse)])] * 4


TABLE = (torch.arange(36).view(1, 1, 6, 6) * 7 % 3 > 0).expand(1, KV_HEADS, 6, 6)


@pytest.mark.parametrize(
    ("pattern", "where"),
    [
        *((Ranges(torch.arange(LENGTH)[None] - 9, torch.arange(LENGTH)[None] * 2 % 17), where) for where in WHERE),
        *((Blocks(TABLE[:, :1], 4), where) for where in ("heads", "heads and tokens")),
        *((Blocks(TABLE, 4), where) for where in ("batch", "tokens")),
    ],
    ids=str,
)
def test_patterns_that_hold_tensors(ranks: Ranks, pattern: Pattern, where: str) -> None:
    placements, of_lse = list(WHERE[where]), list(swapped(WHERE[where]))
    assert ranks.everywhere(placed, pattern, where, "bnhd", True) == [(True, [placements, of_lse])] * 4


@pytest.mark.parametrize("where", ["heads", "outer heads", "heads and tokens"])
def test_tables_by_head_are_not_split(ranks: Ranks, where: str) -> None:
    """Of half of the heads, as many tables as there are key heads would be taken for those of query heads."""
    with pytest.raises(AssertionError, match="take patterns alike for all heads, not Blocks"):
        ranks.everywhere(placed, Blocks(TABLE, 4), where, "bnhd", False)


def placed_with_terms(where: str) -> bool:
    """A job: a bias and a sink as DTensors, whose gradients are summed over ranks; slopes, documents; fewer queries."""
    mesh = mesh_of(*MESH)
    q, k, v, grad = whole()
    bias, sink = torch.randn(1, HEADS, LENGTH, LENGTH).double(), torch.randn(HEADS).double()
    torch.distributed.broadcast(bias, 0)
    torch.distributed.broadcast(sink, 0)
    slopes, ids = torch.linspace(0.1, 0.9, HEADS), torch.arange(LENGTH).expand(BATCH, -1) // 10
    plain = [x.requires_grad_() for x in (q, k, v, bias, sink)]
    more: dict[str, Any] = {"alibi_slopes": slopes, "documents": ids}
    out = attend(q, k, v, is_causal=True, bias=bias, sink=sink, backend="manual", **more)
    exact = [out, *torch.autograd.grad(out, plain, grad)]
    few = attend(q[:, -3:], k, v, is_causal=True, alibi_slopes=slopes, backend="manual")

    given = [distribute_tensor(x.detach(), mesh, WHERE[where]).requires_grad_() for x in (q, k, v)]
    terms = [distribute_tensor(x.detach(), mesh, [Replicate()] * 2).requires_grad_() for x in (bias, sink)]
    out = attend(given[0], given[1], given[2], is_causal=True, bias=terms[0], sink=terms[1], **more)
    grads = torch.autograd.grad(out, [*given, *terms], distribute_tensor(grad, mesh, WHERE[where]))
    late = distribute_tensor(q.detach()[:, -3:].contiguous(), mesh, WHERE[where])
    found = [full(out), *map(full, grads)]
    last = attend(late, given[1], given[2], is_causal=True, alibi_slopes=slopes)
    return agree([*found, full(last)], [*exact, few])


@pytest.mark.parametrize("where", ["batch and heads", "batch twice", "replicated"])
def test_biases_sinks_and_documents(ranks: Ranks, where: str) -> None:
    assert ranks.everywhere(placed_with_terms, where) == [True] * 4


def refused(case: str) -> str:
    """A job: the error of a call that DTensors do not take."""
    mesh = mesh_of(*MESH)
    q, k, v, _ = whole()

    def at(x: Tensor, *placements: Any) -> DTensor:
        return distribute_tensor(x, mesh, placements)

    same, few = (Shard(0), Replicate()), (k[:, :, :2], v[:, :, :2])
    calls: dict[str, Callable[[], Any]] = {
        "mixed": lambda: attend(at(q, *same), k, v),
        "placements": lambda: attend(at(q, *same), at(k, Replicate(), Replicate()), at(v, *same)),
        "width": lambda: attend(*(at(x, Replicate(), Shard(3)) for x in (q, k, v))),  # type: ignore[arg-type]
        "mesh": lambda: attend(*(at(x, *same) for x in (q, k, v)), mesh=mesh["inner"]),  # type: ignore[arg-type]
        "uneven": lambda: attend(*(at(x, Shard(2), Shard(2)) for x in (q, *few))),  # type: ignore[arg-type]
        "uneven together": lambda: attend(*(at(x[:, :, :2], Shard(2), Shard(2)) for x in (q, k, v))),  # type: ignore[arg-type]
        "batch": lambda: attend(*(at(x[:1], Shard(0), Shard(1)) for x in (q, k, v))),  # type: ignore[arg-type]
        "first_head": lambda: attend(at(q, *same), at(k, *same), at(v, *same), first_head=0, all_heads=HEADS),
        "gradient": lambda: attend(
            at(q, *same), at(k, *same), at(v, *same), sink=torch.zeros(HEADS, requires_grad=True)
        ),
        "softcap": lambda: attend(*(at(x, Replicate(), Shard(1)) for x in (q, k, v)), softcap=2.0),  # type: ignore[arg-type]
    }
    try:
        calls[case]()
    except (InvalidInput, NoBackend) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("mixed", "q, k and v must all be DTensors with 4 axes where one is, got DTensor [4, 24, 8, 8], Tensor"),
        ("placements", "of one mesh with equal placements"),
        ("width", "sharded along batch, heads or tokens, or replicated, got S(3)"),
        ("mesh", "mesh cannot be given with DTensors, whose placements say it"),
        ("uneven", "heads of DTensors must be split evenly, got 8 and 2"),
        ("uneven together", "heads of DTensors must be split evenly, got 2 and 2"),
        ("batch", "the batch of DTensors sharded along tokens must be split evenly, got 1 over 2 ranks"),
        ("first_head", "first_head cannot be given with DTensors"),
        ("gradient", "sink must be a DTensor where q is and it gets a gradient"),
        ("softcap", "softcap cannot be given with mesh"),
    ],
)
def test_refused(ranks: Ranks, case: str, text: str) -> None:
    found = ranks.everywhere(refused, case)
    assert all(text in each for each in found), found[0]


def in_context_parallel(pattern: Pattern, balanced: bool) -> tuple[bool, str]:
    """A job: whether a call in torch's context_parallel is over its ranks; the error of a compiled one."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = mesh_of(4)
    module: Any = __import__("sys").modules["torch.distributed.tensor.experimental._attention"]
    options = (
        getattr(module, "_cp_options", None)
        or __import__(
            "torch.distributed.tensor.experimental._context_parallel._attention", fromlist=["_cp_options"]
        )._cp_options
    )
    options.enable_load_balance = balanced
    q, k, v, _ = (torch.cat([x, x], 1) for x in whole())  # an early and a late chunk of 6 tokens for each rank
    exact = attend(q, k, v, pattern, backend="manual")
    error = ""
    with context_parallel(mesh, buffers=[q, k, v, exact], buffer_seq_dims=[1] * 4):
        right = agree([attend(q, k, v, pattern)], [exact]) and q.shape[1] == 12
        if mesh.get_rank() == 0:  # to compile takes a second
            with pytest.raises((NoBackend, BackendFailed)) as raised:
                torch.compile(attend, backend="eager", fullgraph=True)(q, k, v, pattern)
            error = str(raised.value)
    after = attend(q, k, v, pattern)
    return right and agree([after], [exact]), error


@pytest.mark.parametrize(
    ("pattern", "balanced"), [pytest.param(PATTERNS[0], True, marks=pytest.mark.full), (PATTERNS[1], False)], ids=str
)
def test_context_parallel(ranks: Ranks, pattern: Pattern, balanced: bool) -> None:
    right, errors = zip(*ranks.everywhere(in_context_parallel, pattern, balanced))
    assert all(right)
    assert "inside torch's context_parallel attend() cannot be part of a graph" in errors[0]


def explained(where: str) -> str:
    """A job: the problem that explain() names."""
    q, k, v, _ = whole()
    given = [distribute_tensor(x.float(), mesh_of(*MESH), WHERE[where]) for x in (q, k, v)]
    return explain(given[0], given[1], given[2], is_causal=True).problem


@pytest.mark.parametrize(
    ("where", "sizes"),
    [("batch and heads", [BATCH // 2, LENGTH, HEADS // 2, HEAD_DIM]), ("tokens", [BATCH, LENGTH, HEADS, HEAD_DIM])],
)
def test_explain_says_what_a_rank_computes(ranks: Ranks, where: str, sizes: list[int]) -> None:
    """Not what one process would, with the whole batch and all heads."""
    for problem in ranks.everywhere(explained, where):
        assert problem.startswith(str(sizes))
        assert ("ranks 2" in problem) == (where == "tokens")
