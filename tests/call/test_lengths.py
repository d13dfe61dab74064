"""Keys that end at different places, the alignment of first tokens, values of another width, nothing to compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Window, attend, explain
from attn_dispatch.calls.widths import ALIGNMENTS
from attn_dispatch.spec.pattern import Pattern
from tests.support.calls import drawn, formula
from tests.support.pairwise import crossed, thinned

pytestmark = pytest.mark.usefixtures("no_trials")

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 60, 4, 2, 16
IDS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
UPPER: dict[str, Any] = {"is_causal": True, "alignment": "upper_left"}


def tensors(batch: int = BATCH, width: int = HEAD_DIM) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, width))
    q, k, v = (drawn(batch, LENGTH, *shape, seed=n, dtype=torch.float64) for n, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("pattern", [Window(3, 0, sinks=2), Dilated((8, 16), (1, 2), is_causal=True)], ids=str)
def test_key_lens(pattern: Pattern, layout: str) -> None:
    """Each row is a call of its own, whose keys end at its length; what follows may be NaN."""
    lengths = torch.tensor([40, 40, 25, 60, 4])
    q, k, v = tensors(len(lengths))
    bias, mask = torch.randn(len(lengths), 1, 4, LENGTH), (torch.arange(LENGTH) % 7 > 0).expand(len(lengths), -1)
    for row, length in enumerate(lengths.tolist()):
        k[row, length:] = v[row, length:] = math.nan
    inputs = [x.requires_grad_() for x in (q[:, :4].clone(), k, v)]
    given: Any = [x if layout == "bnhd" else x.transpose(1, 2) for x in inputs]
    more: dict[str, Any] = {"layout": layout, "key_mask": mask, "bias": bias, "return_lse": True}
    out, lse = attend(given[0], given[1], given[2], pattern, key_lens=lengths, **more)
    out = out if layout == "bnhd" else out.transpose(1, 2)
    exact = []
    for row, length in enumerate(lengths.tolist()):
        one, keys, values = (x[row, None, :length] for x in inputs)
        hidden: dict[str, Any] = {"bias": bias[row, None, ..., :length], "seen": mask[row, None, :length]}
        exact.append(formula(one, keys, values, pattern, **hidden))
    wanted, wanted_lse = (torch.cat([each[i] for each in exact]) for i in (0, 1))
    assert torch.allclose(out, wanted, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, atol=1e-12)
    grads, exact_grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, wanted))
    assert all(torch.allclose(x, y, atol=1e-12) for x, y in zip(grads, exact_grads))


def test_key_lens_with_a_sink_empty_rows_and_in_a_graph() -> None:
    q, k, v = tensors()
    sink = torch.randn(HEADS, dtype=torch.float64)
    out, lse = attend(q[:, :1], k, v, key_lens=torch.tensor([0, 9]), sink=sink, return_lse=True)
    assert not out[0].any()
    assert torch.equal(lse[0, :, 0], sink)
    wanted = attend(q[1:, :1], k[1:, :9], v[1:, :9], sink=sink, backend="manual")
    assert torch.allclose(out[1:], wanted)
    compiled, k = torch.compile(attend, backend="aot_eager", fullgraph=True), k.requires_grad_()
    for lengths in (torch.tensor([30, 40]), torch.tensor([0, 60])):
        found, wanted = (each(q[:, :2], k, v, key_lens=lengths) for each in (compiled, attend))
        assert torch.allclose(found, wanted)
        (grad,), (exact,) = (torch.autograd.grad(x.square().sum(), k) for x in (found, wanted))
        assert torch.allclose(grad, exact)


@thinned(("q_len", "k_len"), [(10, 25), (25, 10), (10, 10), (1, 10), (10, 1)], 3)
def test_upper_left(q_len: int, k_len: int) -> None:
    """As PyTorch's causal_upper_left: query i sees the keys up to i."""
    q, k, v = tensors()
    q, k, v = q[:, :q_len], k[:, :k_len], v[:, :k_len]
    seen = torch.arange(k_len) <= torch.arange(q_len)[:, None]
    mask, bias = torch.rand(BATCH, k_len) > 0.3, torch.randn(1, 1, q_len, k_len)
    mask[:, 0] = True
    hidden = torch.zeros(1, 1, q_len, k_len).masked_fill(~seen, -math.inf)
    several: list[dict[str, Any]] = [{}, {"key_mask": mask}, {"bias": bias}]
    for more in several:
        found = attend(q, k, v, return_lse=True, **UPPER, **more)
        wanted = formula(q, k, v, Dense(), bias=more.get("bias", 0.0) + hidden, seen=more.get("key_mask"))
        assert all(map(torch.allclose, found, wanted))
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(q, k, v, **UPPER), attend(q, k, v, Dense(is_causal=True), alignment="upper_left"))
    assert explain(q, k, v, **UPPER).choice


def test_both_alignments_of_documents_are_one() -> None:
    q, k, v = tensors(1)
    ids = torch.arange(LENGTH)[None] // 13
    several: list[dict[str, Any]] = [{"documents": ids}, {"cu_seqlens": torch.tensor([0, 13, 26, 39, 52, LENGTH])}]
    for given in several:
        found, plain = (attend(q, k, v, pattern=Dense(is_causal=True), alignment=each, **given) for each in ALIGNMENTS)
        assert torch.equal(found, plain)


@crossed(
    pattern=(Dense(is_causal=True), Window(3, 0), Dilated((8, 20), (1, 2))), layout=("bnhd", "bhnd"), width=(1, 10, 40)
)
def test_values_of_another_width(pattern: Pattern, layout: str, width: int) -> None:
    """As in multi-head latent attention. The scale is that of the keys' width."""
    inputs = [x.requires_grad_() for x in tensors(width=width)]
    given: Any = [x if layout == "bnhd" else x.transpose(1, 2) for x in inputs]
    out, lse = attend(given[0], given[1], given[2], pattern, return_lse=True, layout=layout, backend="manual")
    torch.testing.assert_close(attend(given[0], given[1], given[2], pattern, layout=layout, backend="manual"), out)
    right = formula(inputs[0], inputs[1], inputs[2], pattern)
    torch.testing.assert_close((out if layout == "bnhd" else out.transpose(1, 2), lse), right)
    found, expected = (torch.autograd.grad(x.square().sum() + y.sum(), inputs) for x, y in ((out, lse), right))
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("short_trials")
def test_widths_are_explained_as_computed(set_mode: Callable[[str], None]) -> None:
    set_mode("tune")
    q, k, v = tensors(width=40)
    attend(q, k, v)
    found = explain(q, k, v)
    assert (found.source, "[2, 60, 4, 40]" in found.problem) == ("measured", True)


@pytest.mark.parametrize(
    ("batch", "q_len", "k_len", "given"),
    [
        (0, 5, 5, {}),
        (2, 0, 5, {"layout": "bhnd"}),
        (2, 5, 0, {"sink": torch.full((HEADS,), 0.25, dtype=torch.float64)}),
        (2, 0, 5, UPPER),
        (2, 5, 0, UPPER),
        (0, 5, 3, UPPER),
        (1, 5, 0, {"key_lens": torch.tensor([0])}),
        (2, 5, 5, {"key_lens": torch.tensor([0, 0])}),
        (0, 5, 5, {"key_lens": torch.zeros(0).long()}),
        (2, 0, 0, {"documents": IDS[:, :0], **UPPER}),
        (0, 5, 5, {"documents": IDS[:0, :5]}),
        (1, 0, 0, {"cu_seqlens": torch.tensor([0, 0, 0])}),
    ],
)
def test_without_rows_queries_or_keys(batch: int, q_len: int, k_len: int, given: dict[str, Any]) -> None:
    """As PyTorch's attention has it: empty results, and zeros without keys; -inf, or the sink, in lse."""
    q, k, v = tensors(width=8)
    axes = (1, 2) if given.get("layout") == "bhnd" else (1, 1)
    inputs = [x[:batch, :n].transpose(*axes).requires_grad_() for x, n in ((q, q_len), (k, k_len), (v, k_len))]
    out, lse = attend(inputs[0], inputs[1], inputs[2], return_lse=True, **given)
    assert out.transpose(*axes).shape == (batch, q_len, HEADS, 8)
    assert not out.any()
    assert lse.shape == (batch, HEADS, q_len)
    assert (lse == (0.25 if "sink" in given else -math.inf)).all()
    for grad in torch.autograd.grad(out.sum(), inputs, materialize_grads=True):
        assert not grad.any()
