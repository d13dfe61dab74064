"""Softcap, bias and ALiBi: wrong arguments, and what is remembered of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Neighborhood, Reordered, attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import Problem

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 36, 4, 2, 16


def tensors(rows: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.zeros(rows, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


ZEROS = torch.zeros(1, 1, LENGTH, LENGTH)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "softcap 0": ({"softcap": 0.0}, r"softcap must be a number > 0, 1e\+30 at most, or None, got 0\.0"),
    "softcap nan": ({"softcap": math.nan}, "softcap must be a number > 0"),
    "softcap bool": ({"softcap": True}, "softcap must be a number > 0"),
    "bias list": ({"bias": [1.0]}, "bias must be a floating-point tensor, got list"),
    "bias bool": ({"bias": ZEROS > 0}, r"floating-point tensor, got a torch\.bool"),
    "bias axes": ({"bias": ZEROS[0, 0]}, r"bias must have shape \[1 or batch, 1 or heads, q_len, k_len\]"),
    "bias heads": ({"bias": ZEROS.expand(1, 2, -1, -1)}, r"= \[1 or 2, 1 or 4, 36, 36\], got \[1, 2, 36, 36\]"),
    "bias of one query": ({"bias": ZEROS[:, :, :1]}, r"got \[1, 1, 1, 36\]"),
    "slopes": ({"alibi_slopes": torch.zeros(KV_HEADS)}, r"alibi_slopes must have shape \[heads\] = \[4\]"),
    "slopes of integers": ({"alibi_slopes": torch.zeros(HEADS).long()}, "alibi_slopes must be a floating-point"),
    "slopes with gradients": ({"alibi_slopes": torch.zeros(HEADS, requires_grad=True)}, "alibi_slopes get no gradient"),
    "slopes and an order": (
        {"alibi_slopes": torch.zeros(HEADS), "pattern": Reordered(Neighborhood((6, 6), (3, 3)), "hilbert")},
        "give tokens in natural order, not Reordered",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("rows", [BATCH, 0])
def test_wrong_input(case: str, rows: int) -> None:
    """Where there are no rows, too."""
    given, text = WRONG[case]
    with pytest.raises(InvalidInput, match=text if rows else None):
        attend(*tensors(rows), **given)


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
    [
        {"softcap": -1.0},
        {"bias": [3, 4]},
        {"bias": [1]},
        {"alibi_axes": 3},
        {"bias_needs_grad": True},
        {"ranks": 2, "softcap": 1.0},
    ],
    ids=str,
)
def test_fields_from_a_file_are_checked(wrong: dict[str, Any]) -> None:
    q, k, v = tensors()
    plain = Problem.of(q, k, v).to_dict()
    with pytest.raises(InvalidInput):
        Problem.from_dict({**plain, **wrong})
