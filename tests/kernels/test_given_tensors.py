"""Tensors that a kernel reads by their address, and what that leaves out: tangents, signs, and changes in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import attend
from attn_dispatch.calls import tensor_match
from attn_dispatch.errors import BackendFailed
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.flex import attention
from attn_dispatch.ring.engine.parts import SOLVERS
from attn_dispatch.spec.pattern import Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.shapes import problem_of
from tests.support.interpreted import INTERPRETED
from tests.support.random_calls import LAYOUTS

PRIVATE: Any = torch  #: for names that type checkers do not know
PATTERNS: dict[str, Pattern] = {
    "native": Dilated((8, 16), (1, 2)),
    "triton": Window(5, 0),  # of fewer tiles, which are programs of its interpreter
    "triton_tiles": Neighborhood((4, 4), (3, 3)),
    "flex": Dilated((8, 16), (1, 2)),
}
interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton is not installed, or there is a GPU for it")
pytestmark = pytest.mark.usefixtures("triton_interpreter", "uncompiled_flex")


#: The pattern and dtype of every backend that a CPU can run.
EVERY: dict[str, tuple[Pattern, torch.dtype]] = {
    **{name: (pattern, torch.float32) for name, pattern in PATTERNS.items()},
    "sdpa": (Dilated((8, 16), (1, 2)), torch.float32),
    "sdpa_float32": (Dilated((8, 16), (1, 2)), torch.bfloat16),
    "sdpa_mask": (Neighborhood((4, 4), (3, 3)), torch.float32),
    "tiles": (Neighborhood((4, 4), (3, 3)), torch.float32),
    "manual": (Neighborhood((4, 4), (3, 3)), torch.float64),
}


def of_backends(name: str, values: Iterable[Any], backends: Iterable[str] = PATTERNS) -> pytest.MarkDecorator:
    """Every run takes all values for `native`, and one for each other: Triton's interpreter is slow."""
    every = list(values)

    def marks(backend: str, place: int, value: Any) -> list[Any]:
        few = backend == "native" or (value == every[place % len(every)] and backend != "triton_tiles")
        return [interpreted] * ("triton" in backend) + [pytest.mark.full] * (not few)

    rows = [(backend, place, value) for place, backend in enumerate(backends) for value in every]
    return pytest.mark.parametrize(("backend", name), [pytest.param(r[0], r[2], marks=marks(*r)) for r in rows])


def in_layouts(*names: str) -> pytest.MarkDecorator:
    return of_backends("layout", LAYOUTS, names)


def called(backend: str, inputs: Sequence[Tensor], **tensors: Any) -> Any:
    q, k, v = inputs
    return attend(q, k, v, PATTERNS[backend], backend=backend, **tensors)


@of_backends("which", (0, 1, 2))
def test_tangents_are_refused(backend: str, which: int) -> None:
    """Dropped, they would be zeros without a word; a level without tangents changes nothing."""
    inputs = [torch.randn(1, 16, 2, 16) for _ in range(3)]
    out = called(backend, inputs)
    forward_ad = PRIVATE.autograd.forward_ad
    with forward_ad.dual_level():
        assert torch.equal(called(backend, inputs), out)
        inputs[which] = forward_ad.make_dual(inputs[which], torch.randn(1, 16, 2, 16))
        with pytest.raises(BackendFailed, match=f"{backend} has no forward-mode derivatives"):
            called(backend, inputs)


@pytest.mark.parametrize("backend", ["native", "flex", *["triton"] * INTERPRETED])
@pytest.mark.parametrize("term", ["bias", "alibi_slopes"])
def test_tangents_of_score_terms_are_refused(backend: str, term: str) -> None:
    x, given = torch.randn(1, 16, 2, 16), torch.rand((2,) if term == "alibi_slopes" else (1, 2, 16, 16))
    forward_ad = PRIVATE.autograd.forward_ad
    with forward_ad.dual_level():
        terms = {term: forward_ad.make_dual(given, torch.ones_like(given))}
        with pytest.raises(BackendFailed, match=f"{backend} has no forward-mode derivatives"):
            called(backend, (x, x, x), **terms)


@of_backends("mask", ("seq_lens", "key_mask"))
def test_a_mask_changed_before_the_backward_pass_is_an_error(backend: str, mask: str) -> None:
    """The backward pass reads it again; that of `flex`, without its compiler, does not."""
    inputs = [torch.randn(1, 16, 2, 16, requires_grad=True) for _ in range(3)]
    given = torch.tensor([11]) if mask == "seq_lens" else torch.arange(16)[None] < 11
    expected = torch.autograd.grad(called(backend, inputs, **{mask: given.clone()}).square().sum(), inputs)
    out = called(backend, inputs, **{mask: given})
    given.fill_(16)
    if backend == "flex":
        found = torch.autograd.grad(out.square().sum(), inputs)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out.square().sum(), inputs)


@of_backends("through", ("out", "lse"))
def test_views_of_negative_values(backend: str, through: str) -> None:
    """Of which the memory holds the values without their sign, as of a conjugate's imaginary part."""
    tensors = [torch.randn(1, 16, 2, 16) for _ in range(3)]
    grad = torch.randn(1, 16, 2, 16) if through == "out" else torch.randn(1, 2, 16)
    results = []
    for sign in (torch.neg, PRIVATE._neg_view):
        inputs = [sign(x).requires_grad_() for x in tensors]
        assert {x.is_neg() for x in inputs} == {sign is not torch.neg}
        out, lse = called(backend, inputs, return_lse=True)
        alone = called(backend, [x.detach() for x in inputs])
        given = -grad if backend == "flex" else sign(grad)  # FlexAttention raises where the gradient is such a view
        grads = torch.autograd.grad(out if through == "out" else lse, inputs, given, allow_unused=True)
        results.append([out, lse, alone, *(torch.zeros(()) if x is None else x for x in grads)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def plain(x: Tensor) -> Tensor:
    return x.resolve_neg().clone(memory_format=torch.contiguous_format)


def laid_out(layout: str, tensors: dict[str, Tensor], but: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The tensors in an unusual layout, and contiguous ones of the same values."""
    unusual = {name: x if name in but else LAYOUTS[layout](x) for name, x in tensors.items()}
    return [unusual, {name: plain(x) for name, x in unusual.items()}]


@in_layouts(*EVERY)
def test_every_tensor_in_any_layout(backend: str, layout: str) -> None:
    """Masks, terms of the scores and gradients as well as q, k and v."""
    pattern, dtype = EVERY[backend]
    terms = "bias" in registry.load(backend).score_terms
    given = {
        "q": torch.randn(2, 16, 2, 16, dtype=dtype),
        "k": torch.randn(2, 16, 1, 16, dtype=dtype),
        "v": torch.randn(2, 16, 1, 16, dtype=dtype),
        "grad": torch.randn(2, 16, 2, 16, dtype=dtype),
        "grad_lse": torch.randn(2, 2, 16, dtype=torch.promote_types(dtype, torch.float32)),
        "seq_lens": torch.tensor([15, 9]),
        "key_mask": torch.rand(2, 16) < 0.9,
        **({"bias": torch.randn(2, 2, 16, 16), "alibi_slopes": torch.rand(2, 2)} if terms else {}),
    }
    # FlexAttention raises where the gradient is a view of negative values.
    but = ("grad", "grad_lse") if (backend, layout) == ("flex", "negative") else ()
    found = []
    for tensors in laid_out(layout, given, but):
        grads = tensors.pop("grad"), tensors.pop("grad_lse")
        inputs = [tensors.pop(name).requires_grad_() for name in "qkv"]
        if backend in ("native", "manual"):  # the others have no gradient of a bias
            inputs.append(tensors["bias"].requires_grad_())
        q, k, v = inputs[:3]
        out, lse = attend(q, k, v, pattern, **tensors, backend=backend, return_lse=True)
        found.append([out, lse, *torch.autograd.grad((out, lse), inputs, grads)])
    for unusual, expected in zip(*found, strict=True):
        torch.testing.assert_close(unusual, expected)


@in_layouts("native", "sdpa", "tiles", "triton")
def test_the_backward_pass_of_a_part_takes_results_in_any_layout(backend: str, layout: str) -> None:
    """Over ranks they are rows and heads of the whole out and lse."""
    assert backend in SOLVERS["cpu"] + SOLVERS["cuda"]
    shape, pattern = (2, 16, 2, 16), EVERY[backend][0]
    key_mask = torch.rand(2, 16) < 0.9
    problem = problem_of(shape, pattern, torch.float32, torch.device("cpu"), backward=True)
    problem = replace(problem, has_key_mask=True)
    q, k, v, grad = torch.randn(4, *shape)
    solver: Any = registry.load(backend)
    forward = solver.partial(problem, key_mask).forward(q, k, v)
    given: dict[str, Tensor] = dict(zip(("q", "k", "v", "out", "lse"), (q, k, v, *forward)))
    given.update(grad=grad, grad_lse=torch.randn(2, 2, 16), key_mask=key_mask)
    found = []
    for tensors in laid_out(layout, given):
        passes = solver.partial(problem, tensors.pop("key_mask"))
        found.append(passes.backward(tensors.pop("grad"), tensors.pop("grad_lse"), tuple(tensors.values())))
    for unusual, expected in zip(*found, strict=True):
        torch.testing.assert_close(unusual, expected)


def test_flex_compiles_for_no_views_of_negative_values() -> None:
    """PyTorch's compiler has no FlexAttention of them."""
    x = torch.randn(1, 16, 2, 16)
    for view in (PRIVATE._neg_view(x), PRIVATE._neg_view(x.transpose(1, 2))):
        assert not attention._heads_first(view).is_neg()
        assert torch.equal(attention._heads_first(view), -attention._heads_first(view.neg()))


@pytest.mark.parametrize("guarded", [True, False], ids=["guards", "attributes"])
def test_a_negative_view_fits_no_other_tensor(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory has the other sign, and functions for hits read the memory."""
    monkeypatch.setattr(tensor_match, "_guards_work", lambda: guarded)
    tensors = list(torch.randn(3, 1, 8, 2, 8))
    fit = tensor_match.fits(*tensors)
    assert fit(*tensors)
    for place in range(3):
        other = [PRIVATE._neg_view(x) if place == i else x for i, x in enumerate(tensors)]
        assert not fit(*other)
