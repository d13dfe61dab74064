"""Rows whose keys end at different places, and the alignment of the first query with the first key."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Window, attend, explain
from attn_dispatch.calls.widths import ALIGNMENTS
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Pattern
from tests.support.pairwise import crossed

pytestmark = pytest.mark.usefixtures("short_trials")

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 60, 4, 2, 16

IDS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)


def tensors(batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    shapes = [(batch, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, k, v


@pytest.mark.full
@crossed(
    lambda pattern, q_len, layout: {"pattern": type(pattern).__name__, "q_len": q_len, "layout": layout},
    pattern=(Dense(), Dense(is_causal=True), Window(3, 0, sinks=2), Dilated((8, 16), (1, 2), is_causal=True)),
    q_len=(1, 4),
    layout=("bnhd", "bhnd"),
)
def test_key_lens(pattern: Pattern, q_len: int, layout: str) -> None:
    """Each row is a call of its own, whose keys end at its length; what follows may be NaN."""
    lengths = torch.tensor([40, 40, 25, 60, 4])
    q, k, v = tensors(len(lengths))
    q, mask = q[:, :q_len], torch.arange(LENGTH) % 7 > 0
    bias, slopes = torch.randn(len(lengths), 1, q_len, LENGTH), torch.rand(len(lengths), HEADS)
    for row, length in enumerate(lengths.tolist()):
        k[row, length:] = v[row, length:] = math.nan
    for x in (q, k, v):
        x.requires_grad_()
    terms: dict[str, Any] = {"bias": bias, "alibi_slopes": slopes} if q_len > 1 else {}
    given = [x if layout == "bnhd" else x.transpose(1, 2) for x in (q, k, v)]
    out, lse = attend(
        given[0], given[1], given[2], pattern, key_lens=lengths, layout=layout, return_lse=True,
        key_mask=mask.expand(len(lengths), -1), **terms,
    )  # fmt: skip
    out = out if layout == "bnhd" else out.transpose(1, 2)
    exact = []
    for row, length in enumerate(lengths.tolist()):
        own: dict[str, Any] = {"bias": bias[row, None, ..., :length], "alibi_slopes": slopes[row]} if terms else {}
        one, keys, values = q[row, None], k[row, None, :length], v[row, None, :length]
        exact.append(
            attend(one, keys, values, pattern, backend="manual", return_lse=True, key_mask=mask[None, :length], **own)
        )
    wanted, wanted_lse = (torch.cat([each[i] for each in exact]) for i in (0, 1))
    assert torch.allclose(out, wanted, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, atol=1e-12)
    grads, exact_grads = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted))
    assert all(torch.allclose(x, y, atol=1e-12) for x, y in zip(grads, exact_grads))


def test_key_lens_with_a_sink_and_empty_rows() -> None:
    q, k, v = tensors()
    sink = torch.randn(HEADS, dtype=torch.float64)
    out, lse = attend(q[:, :1], k, v, key_lens=torch.tensor([0, 9]), sink=sink, return_lse=True)
    assert not out[0].any()
    assert torch.equal(lse[0, :, 0], sink)
    wanted = attend(q[1:, :1], k[1:, :9], v[1:, :9], sink=sink, backend="manual")
    assert torch.allclose(out[1:], wanted)


def test_key_lens_between_graphs() -> None:
    q, k, v = tensors()
    lengths = torch.tensor([30, 40])
    found = torch.compile(attend, backend="eager")(q[:, :2], k, v, key_lens=lengths)
    assert torch.allclose(found, attend(q[:, :2], k, v, key_lens=lengths))


@pytest.mark.parametrize(("q_len", "k_len"), [(10, 25), (25, 10), (10, 10), (1, 10), (10, 1)])
def test_upper_left(q_len: int, k_len: int) -> None:
    """As PyTorch's causal_upper_left: query i sees the keys up to i."""
    q, k, v = tensors()
    q, k, v = q[:, :q_len], k[:, :k_len], v[:, :k_len]
    seen = torch.arange(k_len) <= torch.arange(q_len)[:, None]
    mask, bias = torch.rand(BATCH, k_len) > 0.3, torch.randn(1, 1, q_len, k_len)
    mask[:, 0] = True
    hidden = torch.zeros(q_len, k_len).masked_fill(~seen, -math.inf)
    several: list[dict[str, Any]] = [{}, {"key_mask": mask}, {"bias": bias}]
    for more in several:
        out, lse = attend(q, k, v, is_causal=True, alignment="upper_left", return_lse=True, **more)
        given: dict[str, Any] = {**more, "bias": more.get("bias", 0.0) + hidden[None, None]}
        wanted, wanted_lse = attend(q, k, v, backend="manual", return_lse=True, **given)
        assert torch.allclose(out, wanted)
        assert torch.allclose(lse, wanted_lse)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    plain = attend(q, k, v, Dense(is_causal=True), alignment="upper_left")
    assert torch.allclose(compiled(q, k, v, is_causal=True, alignment="upper_left"), plain)
    assert explain(q, k, v, is_causal=True, alignment="upper_left").choice


UPPER: dict[str, Any] = {"is_causal": True, "alignment": "upper_left"}


@pytest.mark.parametrize(
    ("batch", "q_len", "k_len", "given"),
    [
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
    q, k, v = tensors()
    q, k, v = q[:batch, :q_len], k[:batch, :k_len], v[:batch, :k_len, :, :8]
    out, lse = attend(q, k, v, return_lse=True, **given)
    assert out.shape == (batch, q_len, HEADS, 8)
    assert not out.any()
    assert torch.equal(lse, torch.full((batch, HEADS, q_len), -math.inf, dtype=torch.float64))


def test_both_alignments_of_documents_are_one() -> None:
    q, k, v = tensors(1)
    ids = torch.arange(LENGTH)[None] // 13
    several: list[dict[str, Any]] = [{"documents": ids}, {"cu_seqlens": torch.tensor([0, 13, 26, 39, 52, LENGTH])}]
    for given in several:
        found, plain = (attend(q, k, v, pattern=Dense(is_causal=True), alignment=each, **given) for each in ALIGNMENTS)
        assert torch.equal(found, plain)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"key_lens": torch.tensor([1])}, r"key_lens must have shape \[batch\] = \[2\], got \[1\]"),
        ({"key_lens": torch.tensor([1, 61])}, r"key_lens must lie in 0\.\.60, got \[1, 61\]"),
        ({"key_lens": torch.tensor([1.0, 2.0])}, "key_lens must be an int32 or int64 tensor"),
        (
            {"key_lens": torch.tensor([1, 2]), "documents": IDS},
            "key_lens cannot be given with documents",
        ),
        ({"key_lens": torch.tensor([1, 2]), "seq_lens": torch.tensor([1, 2])}, "cannot be given with seq_lens"),
        ({"key_lens": torch.tensor([1, 2]), "bias": torch.zeros(5, 1, 1, 100)}, "bias must have shape"),
        (
            {"key_lens": torch.tensor([1, 2]), "key_mask": torch.ones(5, 20, dtype=torch.bool)},
            "key_mask must have shape",
        ),
        ({**UPPER, "bias": torch.zeros(1, 1, 60, 100)}, "bias must have shape"),
        ({"alignment": "left"}, r"alignment must be one of \('lower_right', 'upper_left'\), got 'left'"),
        ({"alignment": "upper_left"}, r"for causal Dense attention of whole tensors, not for Dense\(\)"),
        ({"alignment": "upper_left", "pattern": Window(3, 0)}, r"not for Window\(left=3, right=0\)"),
        ({**UPPER, "key_lens": torch.tensor([1, 2])}, "not with key_lens"),
        ({"alignment": "upper_left", "documents": IDS}, r"not for Dense\(\)"),
    ],
    ids=str,
)
def test_wrong_lengths_and_alignments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        attend(*tensors(), **given)


def test_tensors_are_checked_before_they_are_cut() -> None:
    q, k, v = tensors()
    for more in ({"key_lens": torch.tensor([3, 4])}, UPPER):
        given: dict[str, Any] = more
        with pytest.raises(InvalidInput, match="q and k must have one batch size"):
            attend(torch.cat([q, q]), k, v, **given)
        with pytest.raises(InvalidInput, match="k and v must have one shape"):
            attend(q, k, v[:, :50], **given)
