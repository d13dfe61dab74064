"""Derivatives of gradients: those of the formula, or an error that names what has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_dispatch import attend
from attn_dispatch.errors import BackendFailed
from attn_dispatch.spec.orders import GATHER, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tests.support import ring_ranks
from tests.support.calls import formula, qkv
from tests.support.pairwise import crossed
from tests.support.ring_calls import part
from tests.support.ring_ranks import Ranks

PATTERNS = (Dense(), Dense(is_causal=True), Window(4, 2), Dilated((4, 16), (1, 2)), Neighborhood((4, 4), (3, 3)))
BACKENDS = {
    "sdpa": PATTERNS[:2] + PATTERNS[3:4],
    "sdpa_mask": PATTERNS,
    "tiles": PATTERNS,
    "native": PATTERNS,
    "flex": PATTERNS,
}
REFUSAL = "no second derivatives.*backend='manual'"

Attend = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]
LOSSES: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "out": lambda results: results[0].square().sum(),
    "linear": lambda results: results[0].sum(),  # out's gradient depends on nothing
    "lse": lambda results: results[1].sum(),
    "both": lambda results: results[0].square().sum() + results[1].square().sum(),
}


@pytest.fixture(autouse=True)
def _nothing_is_measured(set_mode: Callable[[str], None]) -> None:
    set_mode("off")


def first(run: Attend, loss: str, x: Sequence[Tensor], create_graph: bool = True) -> tuple[Tensor, ...]:
    """dq, dk and dv; q, k and v are no leaves."""
    q, k, v = (each * 1 for each in x)
    return torch.autograd.grad(LOSSES[loss](run(q, k, v)), x, create_graph=create_graph, materialize_grads=True)


def second(run: Attend, loss: str, x: Sequence[Tensor], of: int) -> tuple[Tensor, ...]:
    """The gradients of |dq|^2, |dk|^2 or |dv|^2."""
    return torch.autograd.grad(first(run, loss, x)[of].square().sum(), x, materialize_grads=True)


def wanting(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.to(dtype).requires_grad_() for x in qkv()]


def runs(pattern: Pattern, **options: Any) -> Attend:
    return lambda q, k, v: attend(q, k, v, pattern, return_lse=True, **options)


def checkpointed(use_reentrant: bool, run: Attend) -> Attend:
    def again(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        found: Sequence[Tensor] = checkpoint(run, q, k, v, use_reentrant=use_reentrant)
        return found

    return again


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_manual_has_them(pattern: Pattern, loss: str) -> None:
    x = wanting(torch.float64)
    for of in range(3):
        found = second(runs(pattern, backend="manual"), loss, x, of)
        exact = second(lambda q, k, v: formula(q, k, v, pattern), loss, x, of)
        assert all(map(torch.allclose, found, exact))


def test_manual_has_them_by_finite_differences() -> None:
    """Grouped heads, masks, dropout, and a query that sees no key."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 5, heads, 2, dtype=torch.float64, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    key_mask = torch.tensor([[True, True, False, True, True], [False] * 5])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        options: dict[str, Any] = {"key_mask": key_mask, "seq_lens": torch.tensor([4, 5]), "dropout_p": 0.3}
        found: Tensor = attend(q, k, v, Window(2, 1), backend="manual", **options)
        return found

    assert torch.autograd.gradgradcheck(run, (q, k, v), fast_mode=True)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("backend", "pattern"), [(b, p) for b, each in BACKENDS.items() for p in each], ids=str)
def test_others_raise(backend: str, pattern: Pattern, loss: str) -> None:
    run = runs(pattern, backend=backend)
    for of in range(3):
        if (loss, of) != ("lse", 2):  # dv is zero then, and so are its derivatives
            with pytest.raises(BackendFailed, match=REFUSAL):
                second(run, loss, wanting(), of)


def test_half_precision_raises() -> None:
    for backend in ("sdpa_float32", "native", "sdpa"):
        with pytest.raises(BackendFailed, match=REFUSAL):
            second(runs(Dense(), backend=backend), "linear", wanting(torch.bfloat16), 0)


@pytest.mark.parametrize("backend", ["sdpa", "native", "manual"])
def test_one_input_that_wants_gradients(backend: str) -> None:
    """What a gradient penalty is about, with a loss beside it from which a gradient comes anyway."""
    q, k, v = qkv(dtype=torch.float64 if backend == "manual" else torch.float32)
    q.requires_grad_()

    def total(run: Attend) -> Tensor:
        loss = run(q, k, v)[0].square().sum()
        (grad,) = torch.autograd.grad(loss, q, create_graph=True)
        return torch.autograd.grad(loss + grad.square().sum(), q)[0]

    run = runs(Dense(), backend=backend)
    if backend == "manual":
        assert torch.allclose(total(run), total(lambda q, k, v: formula(q, k, v, Dense())))
    else:
        with pytest.raises(BackendFailed, match=REFUSAL):
            total(run)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize("backend", [*BACKENDS, "manual"])
def test_a_graph_alone_changes_no_gradient(backend: str) -> None:
    run = runs(Dense(), backend=backend)
    found, expected = (first(run, "both", wanting(), create_graph) for create_graph in (True, False))
    assert all(map(torch.equal, found, expected))
    assert all(x.requires_grad for x in found)


@pytest.mark.usefixtures("uncompiled_flex")
def test_checkpoints() -> None:
    """A reentrant one cannot be asked for them: PyTorch refuses `autograd.grad` through it."""
    x = wanting(torch.float64)
    found = second(checkpointed(False, runs(Window(4, 2), backend="manual")), "both", x, 0)
    exact = second(lambda q, k, v: formula(q, k, v, Window(4, 2)), "both", x, 0)
    assert all(map(torch.allclose, found, exact))
    for backend in BACKENDS:
        with pytest.raises(BackendFailed, match=REFUSAL):
            second(checkpointed(False, runs(Dense(), backend=backend)), "linear", wanting(), 0)


# --- over many ranks --------------------------------------------------------------------------------------------------


def over_ranks(order: str, loss: str) -> str:
    """A job: what the derivative of a gradient raises."""
    mesh = ring_ranks.group()
    try:
        second(runs(Dense(), mesh=mesh, order=order), loss, part(mesh, grads="qkv"), 0)
    except BackendFailed as error:
        return str(error)
    return ""


@crossed(lambda loss, order: {"order": order}, loss=("out", "linear"), order=(RING, GATHER, ULYSSES))
def test_over_ranks(ranks: Ranks, order: str, loss: str) -> None:
    for said in ranks.everywhere(over_ranks, order, loss, ranks=2):
        assert "no second derivatives" in said
