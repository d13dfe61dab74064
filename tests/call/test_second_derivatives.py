"""Derivatives of gradients: those of the formula, or an error that names what has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import attend
from attn_dispatch.errors import BackendFailed, NoBackend
from attn_dispatch.spec.orders import GATHER, RING, ULYSSES
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tests.support import ring_ranks
from tests.support.calls import close, drawn, formula, qkv
from tests.support.pairwise import crossed, parameters, thinned
from tests.support.ring_calls import part
from tests.support.ring_ranks import Ranks
from tests.support.score_terms import BATCH, HEADS, LENGTH, TERMS, tensors, terms

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


def checkpointed(run: Attend) -> Attend:
    return partial(checkpoint, run, use_reentrant=False)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_manual_has_them(pattern: Pattern, loss: str) -> None:
    x = wanting(torch.float64)
    for of in range(3):
        found = second(runs(pattern, backend="manual"), loss, x, of)
        exact = second(lambda q, k, v: formula(q, k, v, pattern), loss, x, of)
        assert all(map(torch.allclose, found, exact))


def test_manual_has_them_by_finite_differences() -> None:
    """Grouped heads, masks, terms of the scores, dropout, and a query that sees no key."""
    shapes = ((2, 5, 4, 2), (2, 5, 2, 2), (2, 5, 2, 2), (1, 4, 5, 5))
    inputs = [drawn(*shape, seed=n, dtype=torch.float64).requires_grad_() for n, shape in enumerate(shapes)]
    given: dict[str, Any] = {"seq_lens": torch.tensor([4, 5]), "softcap": 3.0, "alibi_slopes": torch.rand(2, 4)}
    given["key_mask"] = torch.tensor([[True, True, False, True, True], [False] * 5])

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(0)
        found: Tensor = attend(q, k, v, Window(2, 1), bias=bias, dropout_p=0.3, backend="manual", **given)
        return found

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(
    ("backend", "pattern", "loss"),
    parameters(
        [(b, p, loss) for b, each in BACKENDS.items() for p in each for loss in LOSSES],
        lambda backend, pattern, loss: {"backend": backend, "loss": loss},
    ),
)
def test_others_raise(backend: str, pattern: Pattern, loss: str) -> None:
    run = runs(pattern, backend=backend)
    for of in range(3):
        if (loss, of) != ("lse", 2):  # dv is zero then, and so are its derivatives
            with pytest.raises(BackendFailed, match=REFUSAL):
                second(run, loss, wanting(), of)


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
def test_checkpoints() -> None:
    """A reentrant one cannot be asked for them: PyTorch refuses `autograd.grad` through it."""
    x = wanting(torch.float64)
    found = second(checkpointed(runs(Window(4, 2), backend="manual")), "both", x, 0)
    exact = second(lambda q, k, v: formula(q, k, v, Window(4, 2)), "both", x, 0)
    assert all(map(torch.allclose, found, exact))
    for backend in BACKENDS:
        with pytest.raises(BackendFailed, match=REFUSAL):
            second(checkpointed(runs(Dense(), backend=backend)), "linear", wanting(), 0)


# --- transforms of torch.func, and forward mode -----------------------------------------------------------------------

FUNC: Any = torch.func
FORWARD_AD: Any = torch.autograd.forward_ad


def loss_of(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).square().sum()


def dual(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with FORWARD_AD.dual_level():
        found: Tensor = FORWARD_AD.unpack_dual(f(FORWARD_AD.make_dual(x, x.cos()))).tangent
    return found


def forward_over_reverse(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """By autograd alone: the tangent of a gradient."""
    with FORWARD_AD.dual_level():
        y = FORWARD_AD.make_dual(x.detach().requires_grad_(), x.cos())
        (grad,) = torch.autograd.grad(loss_of(f)(y), y, create_graph=True)
        found: Tensor = FORWARD_AD.unpack_dual(grad).tangent
    return found.detach()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: FUNC.vmap(f)(torch.stack([x, 2 * x])),
    "grad": lambda f, x: FUNC.grad(loss_of(f))(x),
    "jacrev": lambda f, x: FUNC.jacrev(lambda y: f(y).sum((0, 2, 3)))(x),
    "grads of examples": lambda f, x: FUNC.vmap(FUNC.grad(loss_of(f)))(torch.stack([x, 2 * x])),
    "jvp": lambda f, x: FUNC.jvp(f, (x,), (x.cos(),))[1],
    "dual": dual,
    "jacfwd": lambda f, x: FUNC.jacfwd(lambda y: f(y).sum((0, 2, 3)))(x),
    "hessian vector": lambda f, x: FUNC.jvp(FUNC.grad(loss_of(f)), (x,), (x.cos(),))[1],
    "hessian": lambda f, x: FUNC.hessian(lambda y: loss_of(f)(y[..., :1] * x))(x),
    "forward over reverse": forward_over_reverse,
    "twice": lambda f, x: FUNC.grad(lambda y: FUNC.grad(loss_of(f))(y).square().sum())(x),
}
FIRST = ("vmap", "grad", "jacrev", "grads of examples")  #: what every backend with a backward pass has


@pytest.mark.usefixtures("uncompiled_flex")
@crossed(
    lambda name, backend, pattern: {"name": name, "backend": backend},
    too_slow=lambda name, backend, pattern: backend in ("sdpa_mask", "tiles", "flex"),
    name=tuple(TRANSFORMS),
    backend=(None, "manual", *BACKENDS),
    pattern=(Dense(is_causal=True), Window(4, 2), Dilated((4, 16), (1, 2))),
)
def test_transforms_are_right_or_refused(name: str, backend: str | None, pattern: Pattern) -> None:
    q, k, v = (x[:, :, :, :3] for x in qkv())
    no_window = backend == "sdpa" and isinstance(pattern, Window)
    lacks = backend not in (None, "manual") and name not in FIRST
    with ExitStack() as stack:
        if no_window or lacks or (backend is None and name == "twice"):
            text = "computes Dense, Dilated" if no_window and not lacks else "backend='manual'|computes Dense, Dilated"
            stack.enter_context(pytest.raises((BackendFailed, NoBackend), match=text))
        found = TRANSFORMS[name](lambda x: attend(x, k, v, pattern, backend=backend), q)
        assert close(found, TRANSFORMS[name](lambda x: formula(x, k, v, pattern)[0], q).double())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["jvp", "dual"])
def test_a_graph_does_not_drop_tangents(name: str) -> None:
    """PyTorch gives none, or wrong ones, for an operator that has none."""
    q, k, v = qkv()

    def run(x: Tensor) -> Any:
        return attend(x, k, v, is_causal=True)

    compiled: Any = torch.compile(run, backend="aot_eager")
    compiled(q)
    for graph in (make_fx(run)(q), compiled):
        with suppress(BackendFailed):
            assert close(TRANSFORMS[name](graph, q), TRANSFORMS[name](run, q).double())


@thinned(("name", "packed"), product(TERMS, [{}, {"documents": torch.arange(LENGTH).expand(BATCH, -1) // 10}]), 3)
def test_tangents_of_every_tensor(name: str, packed: dict[str, Any]) -> None:
    """The weighted sum of the results' tangents is that of the gradients: with masks, terms, a sink, NaN in padding."""
    x, sink = dict(zip("qkv", tensors())), torch.randn(HEADS, dtype=torch.float64).requires_grad_()
    given = terms(name) | {"sink": sink, "key_mask": torch.rand(BATCH, LENGTH) < 0.8}
    given |= packed or {"seq_lens": torch.tensor([LENGTH, 20])}
    if not packed:
        with torch.no_grad():
            x["q"][1, 20:] = x["k"][1, 20:] = x["v"][1, 20:] = math.nan
    wanting = {**x, "sink": sink, **{n: y for n, y in given.items() if n == "bias"}}

    def run(*tensors: Tensor, **more: Any) -> Any:
        return attend(**{**given, **dict(zip(wanting, tensors)), **more}, pattern=Window(9, 0), return_lse=True)

    out, lse = run(*wanting.values())
    total = out.sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
    plain = [y.detach() for y in wanting.values()]
    tangents = [torch.randn_like(y) for y in plain]
    pairs = zip(torch.autograd.grad(total, list(wanting.values())), tangents)
    expected = torch.stack([(grad * tangent).nansum() for grad, tangent in pairs]).sum()
    twice = [torch.stack([t, 2 * t]) for t in tangents]
    found = FUNC.vmap(lambda *t: FUNC.jvp(run, tuple(plain), t)[1])(*twice)
    for row, factor in enumerate((1, 2)):
        tangent = found[0][row].sum() + found[1][row].masked_fill(lse == -math.inf, 0.0).sum()
        assert torch.allclose(tangent, factor * expected)
    weights = torch.ones_like(out)
    if not packed:
        weights[1, 20:] = math.nan
    grads = FUNC.grad(lambda *y: (run(*y)[0] * weights).sum(), tuple(range(len(plain))))(*plain)
    through = FUNC.grad(lambda *y: (run(*y, backend="manual")[0] * weights).sum(), tuple(range(len(plain))))(*plain)
    assert all(map(torch.allclose, through, grads))


def test_a_route_of_plain_tensors_is_not_that_of_tangents() -> None:
    q, k, v = qkv()
    for level in (False, True, False):
        for _ in range(2):
            with FORWARD_AD.dual_level() if level else nullcontext():
                out = attend(FORWARD_AD.make_dual(q, k) if level else q, k, v, is_causal=True)
                assert (FORWARD_AD.unpack_dual(out).tangent is not None) == level if level else True
    with FORWARD_AD.dual_level():
        several: list[dict[str, Any]] = [{}, {"documents": torch.arange(16)[None] // 5}]
        for given in several:
            attend(q, k, v, **given)  # without tangents, at a level where others have some
            assert FORWARD_AD.unpack_dual(attend(q, k, FORWARD_AD.make_dual(v, k), **given)).tangent is not None


def seen_by_a_mode(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with FlopCounterMode(display=False):
        return torch.autograd.grad(f(x), x)[0]


@pytest.mark.parametrize("transform", [lambda f, x: FUNC.grad(f)(x), seen_by_a_mode], ids=["grad", "mode"])
def test_dropout_inside_transforms_and_modes(transform: Callable[..., Tensor]) -> None:
    q, k, v = qkv()

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        found: Tensor = attend(x, k, v, dropout_p=0.5).square().sum()
        return found

    x = q.clone().requires_grad_()
    torch.testing.assert_close(transform(loss, q), torch.autograd.grad(loss(x), x)[0], rtol=1e-4, atol=1e-4)


def over_ranks(order: str, loss: str) -> str:
    """A job: what the derivative of a gradient raises."""
    mesh = ring_ranks.group()
    try:
        second(runs(Dense(), mesh=mesh, order=order), loss, part(mesh, grads="qkv"), 0)
    except BackendFailed as error:
        return str(error)
    return ""


@pytest.mark.full
@crossed(lambda loss, order: {"order": order}, loss=("out", "linear"), order=(RING, GATHER, ULYSSES))
def test_over_ranks(ranks: Ranks, order: str, loss: str) -> None:
    for said in ranks.everywhere(over_ranks, order, loss, ranks=2):
        assert "no second derivatives" in said
