"""Wrong arguments are refused by name, with the value and what is allowed; before anything is cut or computed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dilated, Neighborhood, Reordered, Window, attend
from attn_dispatch.decisions.graphs.encoding import TENSORS
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import Problem

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 36, 4, 2, 16
IDS = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
ZEROS = torch.zeros(1, 1, LENGTH, LENGTH)
BOTH = torch.tensor([1, 2])
UPPER: dict[str, Any] = {"is_causal": True, "alignment": "upper_left"}
Case = tuple[dict[str, Any], str]


def tensors(rows: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.zeros(rows, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


SCORES: list[Case] = [
    ({"softcap": 0.0}, "softcap must be a number > 0, 1e+30 at most, or None, got 0.0"),
    ({"softcap": math.nan}, "softcap must be a number > 0"),
    ({"softcap": True}, "softcap must be a number > 0"),
    ({"bias": [1.0]}, "bias must be a floating-point tensor, got list"),
    ({"bias": ZEROS > 0}, "floating-point tensor, got a torch.bool"),
    ({"bias": ZEROS[0, 0]}, "bias must have shape [1 or batch, 1 or heads, q_len, k_len]"),
    ({"bias": ZEROS.expand(1, 2, -1, -1)}, "= [1 or 2, 1 or 4, 36, 36], got [1, 2, 36, 36]"),
    ({"bias": ZEROS[:, :, :1]}, "got [1, 1, 1, 36]"),
    ({"alibi_slopes": torch.zeros(KV_HEADS)}, "alibi_slopes must have shape [heads] = [4]"),
    ({"alibi_slopes": torch.zeros(HEADS).long()}, "alibi_slopes must be a floating-point"),
    ({"alibi_slopes": torch.zeros(HEADS, requires_grad=True)}, "alibi_slopes get no gradient"),
    (
        {"alibi_slopes": torch.zeros(HEADS), "pattern": Reordered(Neighborhood((6, 6), (3, 3)), "hilbert")},
        "give tokens in natural order, not Reordered",
    ),
    ({"sink": 0.0}, "sink must be a floating-point tensor, got float"),
    ({"sink": torch.zeros(HEADS).long()}, "must be a floating-point tensor, got a torch.int64"),
    ({"sink": torch.zeros(3)}, "sink must have shape [heads] = [4], got [3]"),
]
LENGTHS: list[Case] = [
    ({"key_lens": BOTH[:1]}, "key_lens must have shape [batch] = [2], got [1]"),
    ({"key_lens": torch.tensor([1, 37])}, "key_lens must lie in 0..36, got [1, 37]"),
    ({"key_lens": BOTH * 1.0}, "key_lens must be an int32 or int64 tensor"),
    ({"key_lens": BOTH.to("meta")}, "key_lens is on the meta device and holds no data"),
    ({"key_lens": BOTH, "documents": IDS}, "key_lens cannot be given with documents"),
    ({"key_lens": BOTH, "seq_lens": BOTH}, "cannot be given with seq_lens"),
    ({"key_lens": BOTH, "bias": torch.zeros(5, 1, 1, 100)}, "bias must have shape"),
    ({"key_lens": BOTH, "key_mask": torch.ones(5, 20) > 0}, "key_mask must have shape"),
    ({**UPPER, "bias": torch.zeros(1, 1, 36, 100)}, "bias must have shape"),
    ({"alignment": "left"}, "alignment must be one of ('lower_right', 'upper_left'), got 'left'"),
    ({"alignment": "upper_left"}, "for causal Dense and Window attention of whole tensors, not for Dense()"),
    ({"alignment": "upper_left", "pattern": Window(3, 0, sinks=1)}, "not for Window(left=3, right=0, sinks=1)"),
    ({**UPPER, "key_lens": BOTH}, "not with key_lens"),
    ({"documents": IDS, "cu_seqlens": torch.tensor([0, 36])}, "give documents or cu_seqlens, not both"),
    ({"documents": [[0]]}, "documents must be an int32 or int64 tensor, got list"),
    ({"documents": IDS * 1.0}, "documents must be an int32 or int64 tensor, got torch.float32"),
    ({"documents": IDS[:, 1:]}, "documents must have shape [batch, len] = [2, 36], got [2, 35]"),
    (
        {"documents": torch.arange(LENGTH).expand(2, -1) % 2},
        "documents must have equal ids side by side, but 0 begins more than once in a row",
    ),
    ({"cu_seqlens": torch.tensor([0, 36])}, "cu_seqlens needs a batch of one row, got 2"),
    (
        {"documents": IDS, "seq_lens": BOTH},
        "documents and cu_seqlens cannot be given with seq_lens; let the padding be a document of its own",
    ),
    ({"documents": IDS, "pattern": Neighborhood((6, 5), (3,))}, "grid (6, 5) holds 30 tokens, but"),
]


@pytest.mark.parametrize(("given", "text"), [*SCORES, *LENGTHS], ids=lambda x: str(x)[:40])
def test_arguments(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        attend(*tensors(), **given)
    assert text in str(raised.value)


def test_shares_of_heads() -> None:
    several: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"first_head": 2}, {}, "first_head needs all_heads, which is None, got 2"),
        ({"first_head": 2, "all_heads": 5}, {}, "heads 2 to 5 are given, but all_heads is 5"),
        (
            {"first_head": 0, "all_heads": 8},
            {"first_head": 0, "all_heads": 8},
            "to the pattern or to the call, not both",
        ),
    ]
    for given, more, text in several:
        with pytest.raises(InvalidInput, match=text):
            attend(*tensors(), Dilated((8,), (2,), **given), **more)


def test_scores_are_refused_though_there_are_no_rows() -> None:
    for given, _ in SCORES:
        with pytest.raises(InvalidInput):
            attend(*tensors(0), **given)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0], "cu_seqlens must rise from 0 to 36, got [0]"),
        ([1, 36], "cu_seqlens must rise from 0 to 36, got [1, 36]"),
        ([0, 30, 20, 36], "cu_seqlens must rise from 0 to 36, got [0, 30, 20, 36]"),
        ([0, *range(30), 35], "cu_seqlens must rise from 0 to 36, got [0, 0, 1, 2, 3, 4, 5, ... 35]"),
    ],
)
def test_starts(starts: list[int], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        attend(*tensors(1), cu_seqlens=torch.tensor(starts))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("q", "k", "arguments", "message"),
    [
        ((0, 5, 4, 8), (2, 5, 4, 8), {}, "q and k must have one batch size, got 0 and 2"),
        ((0, 5, 4, 8), (0, 5, 3, 8), {}, "the heads of k and v must divide those of q, got 3 and 4"),
        ((0, 5, 4, 8), (0, 5, 4, 6), {}, "q and k must have one head_dim, got 8 and 6"),
        ((2, 5, 0, 8), (2, 5, 0, 8), {}, "q must have at least one entry on every axis"),
        ((2, 5, 4, 0), (2, 5, 4, 0), {}, "q must have at least one entry on every axis"),
        ((2, 5, 4, 8), (2, 0, 4, 8), {"pattern": Neighborhood((5,), (3,))}, "Neighborhood needs q_len <= k_len"),
        ((2, 0, 4, 8), (2, 0, 4, 8), {"segment_lengths": 4}, "dilation_rates is None"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"scale": math.nan}, "scale must be a finite number"),
        ((2, 0, 4, 8), (2, 5, 4, 8), {"order": "random"}, "order must be None or one of"),
        ((2, 5, 4, 8), (2, 0, 4, 8), {"backend": "abacus"}, "backend must be None or one of"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"key_mask": "x"}, "key_mask must be a bool tensor"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"documents": torch.zeros(0, 4).long()}, "documents must have shape"),
        ((0, 5, 4, 8), (0, 5, 4, 8), {"key_lens": torch.zeros(1).long()}, "key_lens must have shape"),
    ],
)
def test_shapes(q: tuple[int, ...], k: tuple[int, ...], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        attend(torch.zeros(q), torch.zeros(k), torch.zeros(k), **arguments)
    assert message in str(raised.value)


def test_tensors_are_checked_before_they_are_cut_or_padded() -> None:
    q, k, v = tensors()
    several: list[dict[str, Any]] = [{"key_lens": BOTH}, UPPER]
    for given in several:
        with pytest.raises(InvalidInput, match="q and k must have one batch size"):
            attend(torch.cat([q, q]), k, v, **given)
        with pytest.raises(InvalidInput, match="k and v must have one shape"):
            attend(q, k, v[:, :30], **given)
    x, values = torch.zeros(1, 5, 4, 8), torch.zeros(1, 5, 4, 6).long()
    several = [{}, UPPER, {"key_lens": torch.tensor([0])}]
    for given in several:
        with pytest.raises(InvalidInput, match=r"v must be one of torch\.float16"):
            attend(x[:, :0], x, values, **given)
    for width in (8, 64):
        with pytest.raises(InvalidInput, match="q and k must have one head_dim, got 32 and 16"):
            attend(torch.zeros(1, 5, 4, 32), torch.zeros(1, 5, 4, 16), torch.zeros(1, 5, 4, width))


def test_keys_and_groups() -> None:
    """The value of a softcap cannot change what is fast; whether there is one can, and so do the others."""
    plain = Problem.of(*tensors())
    capped = [replace(plain, softcap=value) for value in (2.0, 50.0)]
    assert capped[0].key("cpu-x") == capped[1].key("cpu-x") != plain.key("cpu-x")
    others = [replace(plain, bias=(1, 1)), replace(plain, bias=(2, 4)), replace(plain, alibi_axes=1)]
    assert len({each.key("cpu-x") for each in (*others, capped[0], plain)}) == 5
    assert "softcap" in str(capped[0])
    for each in (*others, *capped):
        assert Problem.from_dict(each.to_dict()) == each


@pytest.mark.parametrize(
    "wrong",
    [{"softcap": -1.0}, {"bias": [3, 4]}, {"bias": [1]}, {"alibi_axes": 3}, {"bias_needs_grad": True},
     {"ranks": 2, "softcap": 1.0}], ids=str,
)  # fmt: skip
def test_fields_from_a_file_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Problem.from_dict({**Problem.of(*tensors()).to_dict(), **wrong})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", [*TENSORS[:-2], "sink"])  # but a seed and what patterns hold
def test_sparse_and_nested_tensors(name: str) -> None:
    for x in (torch.ones(BATCH, LENGTH).to_sparse(), torch.nested.nested_tensor([torch.ones(3)])):
        given: Any = {name: x}
        with pytest.raises(InvalidInput, match=f"{name} must be a dense strided tensor, got"):
            attend(*tensors(), **given)


@pytest.mark.parametrize("name", ["seq_lens", "key_mask", "bias", "alibi_slopes"])
def test_a_sparse_tensor_after_a_dense_one(name: str) -> None:
    """A route that was found for dense tensors does not run sparse ones of the same shape."""
    dense: Any = {"seq_lens": IDS[:, 0] + 3, "key_mask": IDS == 0, "bias": ZEROS, "alibi_slopes": torch.ones(HEADS)}
    attend(*tensors(), **{name: dense[name]})
    with pytest.raises(InvalidInput, match=f"{name} must be a dense strided tensor, got"):
        attend(*tensors(), **{name: dense[name].to_sparse()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_tensors_that_have_no_sizes_or_no_entries() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 2, 8), torch.zeros(5, 2, 8)])
    x = torch.zeros(2, 5, 2, 8)
    with pytest.raises(InvalidInput, match="q must be a dense strided tensor, got a nested one"):
        attend(nested, x, x)
    with pytest.raises(InvalidInput, match="q must have at least one entry on every axis"):
        attend(x[..., :0], x[..., :0], x)
