"""merge(): the attention over some keys and that over others are the attention over all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Window, attend, merge
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.testing import oracle
from tests.support.calls import drawn
from tests.support.graphs import compile_
from tests.support.pairwise import crossed

pytestmark = pytest.mark.usefixtures("no_trials")

BATCH, LENGTH, HEADS, WIDTH = 2, 24, 4, 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PATTERNS = (Dense(), Dense(is_causal=True), Window(3, 0), Dilated((8, 24), (4, 3), is_causal=True))
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def parts(dtype: torch.dtype = torch.float64, layout: str = "bnhd") -> Parts:
    """Two partial results. Query 0 sees no key of the first, 1 none of the second, 2 none at all."""
    outs, scores = ([drawn(BATCH, LENGTH, HEADS, each, seed=s) for s in (0, 1)] for each in (WIDTH, 1))
    found = []
    for out, score, empty in zip(outs, scores, ([0, 2], [1, 2])):
        out[:, empty], score[:, empty] = 0.0, -math.inf
        lse = score[..., 0].transpose(1, 2).to(torch.float64 if dtype == torch.float64 else torch.float32)
        found += [(out.transpose(1, 2) if layout == "bhnd" else out).to(dtype), lse]
    return tuple(x.contiguous().requires_grad_() for x in found)  # type: ignore[return-value]


@crossed(pattern=PATTERNS, dtype=DTYPES, layout=("bnhd", "bhnd"))
def test_two_parts_are_the_whole_with_its_gradients(pattern: Pattern, dtype: torch.dtype, layout: str) -> None:
    """Among the parts' rows are some that see no key, of one part or of both."""
    q, k, v = (drawn(BATCH, LENGTH, HEADS, WIDTH, seed=s, dtype=dtype).requires_grad_() for s in range(3))
    grad, grad_lse = drawn(BATCH, LENGTH, HEADS, WIDTH, seed=3, dtype=dtype), drawn(BATCH, HEADS, LENGTH, seed=4)
    first = torch.arange(LENGTH) % 9 >= 4
    whole = pattern.multiplicity(LENGTH, LENGTH, HEADS) > 0
    assert pattern == Dense() or not all((whole & mask).any(-1).all() for mask in (first, ~first))
    axes = (0, 2, 1, 3) if layout == "bhnd" else (0, 1, 2, 3)
    given: list[Any] = [*(x.permute(axes) for x in (q, k, v)), pattern]
    masks = (mask.expand(BATCH, LENGTH) for mask in (first, ~first))
    a, b = (attend(*given, key_mask=mask, layout=layout, return_lse=True) for mask in masks)
    out, lse = merge(*a, *b, layout=layout)
    assert (out.dtype, lse.dtype) == (dtype, a[1].dtype)
    out = out.permute(axes)
    empty = ~whole.any(-1).expand(BATCH, HEADS, LENGTH)
    assert torch.equal(lse == -math.inf, empty)
    loss = (out * grad).sum() + (lse.masked_fill(empty, 0.0) * grad_lse.to(lse.dtype)).sum()
    results = (out, lse, *torch.autograd.grad(loss, (q, k, v)))
    q, k, v = (x.detach() for x in (q, k, v))
    expected = oracle(q, k, v, pattern, grad=grad, grad_lse=grad_lse.to(lse.dtype))
    for name, found in zip(("out", "lse", "dq", "dk", "dv"), results, strict=True):
        error = (found.double() - expected[name].value).abs().masked_fill(found == expected[name].value, 0.0)
        assert error.max() <= expected[name].tolerance, name


def test_keys_that_are_cut_into_three() -> None:
    q, k, v = (drawn(BATCH, LENGTH, HEADS, WIDTH, seed=s, dtype=torch.float64) for s in range(3))
    cut = [attend(q, k[:, at], v[:, at], return_lse=True) for at in (slice(5), slice(5, 23), slice(23, None))]
    torch.testing.assert_close(merge(*merge(*cut[0], *cut[1]), *cut[2]), attend(q, k, v, return_lse=True))


def test_derivatives_of_every_kind() -> None:
    """Of both orders, forward mode and mapped ones."""
    finite = [x.detach()[:, :2, :3].masked_fill(x[:, :2, :3] == -math.inf, 0.5) for x in parts(layout="bhnd")]

    def joined(*each: Tensor) -> tuple[Tensor, Tensor]:
        return merge(*each, layout="bhnd")

    given = [x.requires_grad_() for x in finite]
    assert torch.autograd.gradcheck(joined, given, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(joined, given)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rows_without_keys(dtype: torch.dtype) -> None:
    """One part alone is as it was, with its whole gradient; neither gives 0, -inf and no gradient; never NaN."""
    given = out_a, lse_a, out_b, lse_b = parts(dtype)
    out, lse = merge(*given)
    assert torch.equal(out[:, 0], out_b[:, 0])
    assert torch.equal(out[:, 1], out_a[:, 1])
    assert torch.equal(lse[..., :2], torch.stack([lse_b[..., 0], lse_a[..., 1]], -1))
    assert (out[:, 2] == 0).all()
    assert (lse[..., 2] == -math.inf).all()
    loss = (out.square() + out).sum() + lse.sigmoid().sum()
    grads = torch.autograd.grad(loss, given, create_graph=True)
    assert all(x.isfinite().all() for x in grads)
    assert not any(x[:, 2].any() for x in grads[::2])
    assert not any(x[..., 2].any() for x in grads[1::2])
    assert not grads[1][..., 0].any()
    assert torch.equal(grads[2][:, 0], 2 * out_b[:, 0] + 1)
    torch.testing.assert_close(grads[3][..., 0], lse.sigmoid()[..., 0] * (1 - lse.sigmoid()[..., 0]))
    second = torch.autograd.grad(torch.cat([x.flatten() for x in grads]).square().sum(), given)
    assert all(x.isfinite().all() for x in second)


@pytest.mark.parametrize("distance", [30.0, 90.0, 1e4, 3e38])
def test_parts_of_very_different_weight(distance: float) -> None:
    """The smaller share keeps its digits; what a mask of the smallest numbers left is not taken for no key."""
    one = torch.ones(1, 1, 1, 1)
    lse = [torch.tensor([[[x]]], requires_grad=True) for x in (-distance, 0.0)]
    out, joint = merge(one, lse[0], 2 * one, lse[1])
    assert out.item() == 2.0
    assert joint.item() == pytest.approx(math.exp(-distance), rel=1e-5, abs=1e-44)
    for x in (out, joint):
        first, second = torch.autograd.grad(x.sum(), lse, retain_graph=True)
        share = math.exp(-distance)
        assert first.item() == pytest.approx(-share if x is out else share, rel=1e-5, abs=1e-44)
        assert second.item() == pytest.approx(share if x is out else 1.0, rel=1e-5, abs=1e-44)
    out, joint = merge(one, lse[0], 0 * one, torch.full((1, 1, 1), -math.inf))
    assert (out.item(), joint.item()) == (1.0, lse[0].item())


@pytest.mark.usefixtures("fresh_compiler")
def test_it_is_compiled_whole_and_mapped() -> None:
    given = parts(torch.float32)
    expected = merge(*given)

    def graded(*each: Tensor) -> Any:
        out, lse = merge(*each)
        return torch.autograd.grad(out.square().sum() + lse.sigmoid().sum(), each)

    compiled = compile_(merge, backend="aot_eager", fullgraph=True)
    found = compiled(*given)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found[0].square().sum() + found[1].sigmoid().sum(), given)
    torch.testing.assert_close(grads, graded(*given))
    mapped = torch.vmap(merge)(*(torch.stack([x, 0.5 * x]) for x in given))
    for one, other in zip(mapped, zip(expected, merge(*(0.5 * x for x in given)))):
        torch.testing.assert_close(one, torch.stack(other))


def test_it_runs_on_meta_tensors_and_on_nothing() -> None:
    out, lse = merge(*(x.detach().to("meta") for x in parts(torch.bfloat16)))
    assert (out.shape, lse.shape) == ((BATCH, LENGTH, HEADS, WIDTH), (BATCH, HEADS, LENGTH))
    assert merge(*(x[:0] for x in parts()))[0].shape == (0, LENGTH, HEADS, WIDTH)


WRONG: dict[str, Any] = {
    "out_b must be .*bfloat16.* got .*float16": lambda a, la, b, lb: (a, la, b.half(), lb),
    "lse_a must be .*float32.* as out_a is .*bfloat16: got .*float64": lambda a, la, b, lb: (a, la.double(), b, lb),
    "lse_b must be .*float32.* got .*bfloat16": lambda a, la, b, lb: (a, la, b, lb.bfloat16()),
    r"out_b must be \[2, 24, 4, 8\]": lambda a, la, b, lb: (a, la, b[:, 1:], lb[..., 1:]),
    r"lse_a must be \[2, 4, 24\].* got \[2, 24, 4\]": lambda a, la, b, lb: (a, la.transpose(1, 2), b, lb),
    "lse_b must be .*on cpu.* on meta": lambda a, la, b, lb: (a, la, b, lb.to("meta")),
    "out_a must be one of .*int32": lambda a, la, b, lb: (a.int(), la, b, lb),
    "out_a must have 4 axes": lambda a, la, b, lb: (a[0], la, b, lb),
    "lse_b must be a torch.Tensor, got float": lambda a, la, b, lb: (a, la, b, 1.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        merge(*WRONG[message](*(x.detach() for x in parts(torch.bfloat16))))


def test_a_wrong_layout_is_named() -> None:
    with pytest.raises(InvalidInput, match="layout must be one of 'bnhd', 'bhnd', got 'nbhd'"):
        merge(*parts(), layout="nbhd")
