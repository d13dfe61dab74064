"""Stride classes: their names, and random tensors with a given class."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, zeros

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.tensors import DTYPES, check_sink, is_stride_class, randn, stride_class


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """4-D views by permuting, slicing, stepping and expanding."""
    dtype = draw(st.sampled_from(DTYPES))
    view = zeros(*draw(st.lists(st.integers(1, 9), min_size=4, max_size=4)), dtype=dtype)
    for axis in range(4):
        if draw(st.booleans()):
            start, step = draw(st.integers(0, view.shape[axis] - 1)), draw(st.integers(1, 8))
            view = view[(slice(None),) * axis + (slice(start, None, step),)]
        if view.shape[axis] == 1 and draw(st.booleans()):
            view = view.expand(*(3 if i == axis else -1 for i in range(4)))
    return view.permute(draw(st.permutations(range(4))))


def class_of(tensor: Tensor) -> str:
    return stride_class(tuple(tensor.shape), tensor.stride(), tensor.dtype.itemsize)


@given(views())
def test_randn_has_the_requested_stride_class(view: Tensor) -> None:
    kind = class_of(view)
    assert is_stride_class(kind)
    made = randn(tuple(view.shape), kind, view.dtype, torch.device("cpu"), torch.Generator())
    assert (made.shape, made.dtype, class_of(made)) == (view.shape, view.dtype, kind)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (zeros(2, 3, 4, 8), "bnhd"),
        (zeros(2, 4, 3, 8).transpose(1, 2), "bhnd"),
        (zeros(1, 3, 4, 8), "nhd"),
        (zeros(2, 3, 3, 4, 8)[:, :, 1], "bnhd+gaps"),
        (zeros(2, 3, 4, 7), "bnhd+unaligned"),
        (zeros(2, 3, 4, 9)[..., :8], "bnhd+gaps+unaligned"),
        (zeros(2, 3, 1, 8).expand(2, 3, 4, 8), "bnd+expanded:h"),
        (zeros(1, 1, 1, 1), ""),
        (zeros(1, 1, 1, 16)[..., ::2], "d+gaps"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_stride_classes(tensor: Tensor, kind: str) -> None:
    assert class_of(tensor) == kind


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_a_sink_has_an_entry_for_each_head(layout: str) -> None:
    q = zeros(2, 3, 4, 8) if layout == "bnhd" else zeros(2, 4, 3, 8)
    check_sink(zeros(4), q, layout)
    for sink in (zeros(3), zeros(4, 1), zeros(4, device="meta")):
        with pytest.raises(InvalidInput, match=r"sink must (have shape \[heads\] = \[4\]|be on q's device cpu), got"):
            check_sink(sink, q, layout)
    for wrong in ([0.0] * 4, zeros(4).int()):
        with pytest.raises(InvalidInput, match="sink must be a floating-point tensor, got"):
            check_sink(wrong, q, layout)


def test_the_same_values_in_every_order() -> None:
    """The memory layout must not change the values of a trial."""
    made = [
        randn((2, 3, 4, 8), kind, torch.float32, torch.device("cpu"), torch.Generator().manual_seed(3))
        for kind in ("bnhd", "dhnb", "bnhd+gaps", "bhnd+gaps+unaligned")
    ]
    assert all(torch.equal(made[0], other) for other in made[1:])
