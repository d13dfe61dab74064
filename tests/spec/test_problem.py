"""Problem.of: checks of arguments, and the key."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, zeros

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Window
from attn_dispatch.spec.problem import Call, Problem
from tests.support.fakes import SILICON

Q = (2, 12, 4, 8)  #: batch, q_len, heads, head_dim


def problem(*tensors: Tensor, **arguments: Any) -> Problem:
    """A problem of q, k and v; one tensor is used for all three, none for zeros of shape Q."""
    q, k, v = tensors if len(tensors) == 3 else (tensors or (zeros(*Q),)) * 3
    return Problem.of(q, k, v, **arguments)


# --- invalid arguments ------------------------------------------------------------------------------------------------

x = zeros(*Q)
BAD_TENSORS: dict[str, tuple[Any, Any, Any, str]] = {
    "q-list": ([1.0], x, x, "q must be a torch.Tensor, got list"),
    "k-none": (x, None, x, "k must be a torch.Tensor, got NoneType"),
    "v-numpy": (x, x, np.zeros(Q), "v must be a torch.Tensor, got ndarray"),
    "rank-3": (x, zeros(2, 12, 8), x, "k must have 4 axes, [batch, len, heads, head_dim]"),
    "empty-batch": (zeros(0, 12, 4, 8), x, x, "q must have at least one entry on every axis, got [0, 12, 4, 8]"),
    "empty-len": (x, x[:, :0], x, "k must have at least one entry on every axis, got [2, 0, 4, 8]"),
    "sparse": (x.to_sparse(), x, x, "q must be a dense strided tensor, got layout torch.sparse_coo"),
    "nested": (x, torch.nested.nested_tensor([x[0]], layout=torch.jagged), x, "k must be a dense strided tensor"),
    "int": (
        x.int(),
        x.int(),
        x.int(),
        "q must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64, got",
    ),
    "mixed-dtypes": (
        x,
        x.half(),
        x,
        "q, k and v must share one dtype, got torch.float32, torch.float16, torch.float32",
    ),
    "mixed-devices": (x, x, x.to("meta"), "q, k and v must be on one device, got cpu, cpu, meta"),
    "batch": (x, x[:1], x[:1], "q and k must have one batch size, got 2 and 1"),
    "k-and-v-len": (x, x, x[:, :5], "k and v must have one shape, got [2, 12, 4, 8] and [2, 5, 4, 8]"),
    "v-head-dim": (x, x, x[..., :4], "k and v must have one shape"),
    "head-dim": (x, x[..., :4], x[..., :4], "q and k must have one head_dim, got 8 and 4"),
    "heads": (x, x[:, :, :3], x[:, :, :3], "the heads of k and v must divide those of q, got 3 and 4"),
}
BRANCHES: dict[str, Any] = {"segment_lengths": (4, 8), "dilation_rates": (1, 2)}
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"layout": "nbhd"}, "layout must be one of ('bnhd', 'bhnd'), got 'nbhd'"),
    "pattern-str": (
        {"pattern": "dense"},
        "pattern must be one of Dense, Window, Dilated, Neighborhood, Reordered, Ranges, Blocks or None",
    ),
    "pattern-and-causal": ({"pattern": Dense(), "is_causal": True}, "give pattern or the shorthands"),
    "segments-alone": ({"segment_lengths": (4,)}, "go together, but dilation_rates is None"),
    "rates-alone": ({"dilation_rates": (4,)}, "go together, but segment_lengths is None"),
    "branches": (BRANCHES | {"dilation_rates": (1,)}, "segment_lengths has 2 entries and dilation_rates 1"),
    "segment-zero": (BRANCHES | {"segment_lengths": (4, 0)}, "segment_lengths must be integers >= 1, got 0"),
    "is_causal-int": ({"is_causal": 1}, "is_causal must be True or False, got 1"),
    "is_causal-beside-pattern": ({"pattern": Dense(), "is_causal": None}, "is_causal must be True or False, got None"),
    "grid": ({"pattern": Neighborhood((3, 5), (3,))}, "grid (3, 5) holds 15 tokens, but the sequence has 12"),
    "scale-nan": ({"scale": math.nan}, "scale must be a finite number or None, got nan"),
    "scale-bool": ({"scale": True}, "scale must be a finite number or None, got True"),
    "scale-huge": ({"scale": 10**400}, "scale must be a finite number or None, got 1000"),
    "softcap-zero": ({"softcap": 0}, "softcap must be a number > 0, 1e+30 at most, or None, got 0"),
    "softcap-bool": ({"softcap": True}, "or None, got True"),
    "dropout-one": ({"dropout_p": 1.0}, "dropout_p must be a number with 0 <= dropout_p < 1, got 1.0"),
    "dropout-negative": ({"dropout_p": -0.1}, "dropout_p must be a number with 0 <= dropout_p < 1, got -0.1"),
    "dropout-none": ({"dropout_p": None}, "dropout_p must be a number with 0 <= dropout_p < 1, got None"),
    "seq_lens-list": ({"seq_lens": [1, 2]}, "seq_lens must be an int32 or int64 tensor, got list"),
    "seq_lens-float": ({"seq_lens": zeros(2)}, "seq_lens must be an int32 or int64 tensor, got a torch.float32 tensor"),
    "seq_lens-shape": ({"seq_lens": torch.tensor([3])}, "seq_lens must have shape [batch] = [2], got [1]"),
    "seq_lens-negative": ({"seq_lens": torch.tensor([3, -1])}, "seq_lens must lie in 0..12, got [3, -1]"),
    "seq_lens-long": ({"seq_lens": torch.tensor([13, 1])}, "seq_lens must lie in 0..12, got [13, 1]"),
    "seq_lens-device": (
        {"seq_lens": torch.zeros(2, dtype=torch.int64, device="meta")},
        "seq_lens must be on q's device",
    ),
    "key_mask-list": ({"key_mask": [[True]]}, "key_mask must be a bool tensor (True = may be seen), got list"),
    "key_mask-float": ({"key_mask": zeros(2, 12)}, "key_mask must be a bool tensor (True = may be seen), got a"),
    "key_mask-shape": ({"key_mask": zeros(2, 11).bool()}, "shape [batch, k_len] = [2, 12], got [2, 11]"),
    "key_mask-device": ({"key_mask": zeros(2, 12, device="meta").bool()}, "key_mask must be on q's device"),
    "return_lse": ({"return_lse": 1}, "return_lse must be True or False, got 1"),
    "first_head": ({"first_head": 2}, "first_head and all_heads go together, but all_heads is None"),
    "all_heads": ({"all_heads": 2}, "first_head and all_heads go together, but first_head is None"),
    "negative first_head": ({"first_head": -1, "all_heads": 8}, "first_head must be an integer >= 0, got -1"),
    "too few heads": ({"first_head": 5, "all_heads": 8}, "q holds heads 5 to 8, but all_heads is 8"),
    "device": ({"device": "cuda:0"}, "device cuda:0 is only for meta tensors; q, k and v are on cpu"),
}


def refused(message: str, *tensors: Any, **arguments: Any) -> None:
    with pytest.raises(InvalidInput) as raised:
        Problem.of(*tensors, **arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("case", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_wrong_tensors(case: tuple[Any, Any, Any, str]) -> None:
    *tensors, message = case
    refused(message, *tensors)


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    """Also of calls without rows or tokens."""
    refused(message, x, x, x, **arguments)
    device = arguments.get("device")
    call = Call(x, x, x, **{name: value for name, value in arguments.items() if name != "device"})
    for given in (x[:0], x[:, :0]):
        with pytest.raises(InvalidInput):
            Problem.of_call(call._replace(q=given, k=given, v=given), device, may_be_empty=True)


# --- fields -----------------------------------------------------------------------------------------------------------


def test_fields() -> None:
    keys = zeros(2, 15, 2, 8, dtype=torch.bfloat16)
    found = problem(zeros(*Q, dtype=torch.bfloat16), keys, keys, dropout_p=0.25, return_lse=True)
    assert (found.batch, found.q_len, found.k_len, found.heads, found.kv_heads, found.head_dim) == (2, 12, 15, 4, 2, 8)
    assert (found.dtype, found.device, found.pattern) == (torch.bfloat16, torch.device("cpu"), Dense())
    assert (found.scale, found.dropout_p, found.needs_grad, found.return_lse) == (8**-0.5, 0.25, False, True)
    assert found.default_scale
    assert not found.masked


def test_meta_tensors_are_described_for_a_device_that_computes() -> None:
    found = problem(zeros(*Q, device="meta"), device="cpu")
    assert found == problem()


def test_autocast_decides_the_dtype_but_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert problem().dtype == torch.bfloat16
        assert problem(zeros(*Q), zeros(*Q).half(), zeros(*Q)).dtype == torch.bfloat16
        assert problem(zeros(*Q).double()).dtype == torch.float64
        refused("must share one dtype", zeros(*Q).double(), x, x)


# --- the key ----------------------------------------------------------------------------------------------------------


def of_shape(*shape: int) -> Callable[[], str]:
    return lambda: key(zeros(*shape))


def key(*tensors: Tensor, silicon: str = SILICON, **arguments: Any) -> str:
    return problem(*tensors, **arguments).key(silicon)


def with_grad() -> str:
    return key(x, x, x.clone().requires_grad_())


def deterministic() -> str:
    torch.use_deterministic_algorithms(True)
    try:
        return key()
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def key_at_precision(name: str, dtype: torch.dtype) -> str:
    with precision(name):
        return key(x.to(dtype))


def keys_of(*shape: int) -> Callable[[], str]:
    return lambda: key(x, zeros(*shape), zeros(*shape))


SWAPPED = zeros(2, 4, 12, 8).transpose(1, 2)  #: x in another memory layout
CHANGES: dict[str, Callable[[], str]] = {
    "batch": of_shape(3, 12, 4, 8),
    "len": of_shape(2, 13, 4, 8),
    "heads": of_shape(2, 12, 5, 8),
    "head_dim": of_shape(2, 12, 4, 16),
    "k_len": keys_of(2, 13, 4, 8),
    "kv_heads": keys_of(2, 12, 2, 8),
    "one-kv-head": keys_of(2, 12, 1, 8),
    "float16": lambda: key(x.half()),
    "bfloat16": lambda: key(x.bfloat16()),
    "float64": lambda: key(x.double()),
    "causal": lambda: key(is_causal=True),
    "window": lambda: key(pattern=Window(3, 0)),
    "wider-window": lambda: key(pattern=Window(4, 0)),
    "dilated": lambda: key(**BRANCHES),
    "dilated-block": lambda: key(pattern=Dilated((4, 8), (1, 2), offsets="block")),
    "dilated-split": lambda: key(pattern=Dilated((4, 8), (1, 2), heads="split")),
    "neighborhood": lambda: key(pattern=Neighborhood((3, 4), (3, 3))),
    "neighborhood-shift": lambda: key(pattern=Neighborhood((3, 4), (3, 3), edges="shift")),
    "strides-q": lambda: key(SWAPPED, x, x),
    "strides-k": lambda: key(x, SWAPPED, x),
    "strides-v": lambda: key(x, x, SWAPPED),
    "strides-gaps": lambda: key(zeros(2, 12, 4, 16)[..., :8], x, x),
    "strides-expanded": lambda: key(x[:, :, :1].expand(Q), x, x),
    "dropout": lambda: key(dropout_p=0.1),
    "scale": lambda: key(scale=1.0),
    "grad": with_grad,
    "lse": lambda: key(return_lse=True),
    "seq_lens": lambda: key(seq_lens=torch.tensor([3, 4])),
    "key_mask": lambda: key(key_mask=torch.ones(2, 12, dtype=torch.bool)),
    "deterministic": deterministic,
    "precision-high": lambda: key_at_precision("high", torch.float32),
    "precision-medium": lambda: key_at_precision("medium", torch.float32),
    "silicon": lambda: key(silicon="cpu-made-up-8c-4t"),
    "ranks-2": lambda: replace(problem(), ranks=2).key(SILICON),
    "ranks-3": lambda: replace(problem(), ranks=3).key(SILICON),
}


def test_each_change_has_a_key_of_its_own() -> None:
    with precision("highest"):
        found = {name: change() for name, change in {"plain": key, **CHANGES}.items()}
    assert len(set(found.values())) == len(found)
    assert all(len(value) == 20 and int(value, 16) >= 0 for value in found.values())


def without_grad() -> str:
    with torch.no_grad():
        return with_grad()


def moved_in_memory() -> str:
    return key(zeros(3, 12, 4, 8)[1:])


def transposed() -> str:
    one = zeros(2, 4, 12, 8)
    return key(one, one, one, layout="bhnd")


SAME: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
    "scale-values": (lambda: key(scale=0.1), lambda: key(scale=-3)),
    "scale-default": (key, lambda: key(scale=8**-0.5)),
    "dropout-values": (lambda: key(dropout_p=0.1), lambda: key(dropout_p=0.9)),
    "dropout-none": (key, lambda: key(dropout_p=0)),
    "lists": (
        lambda: key(segment_lengths=[4, 8], dilation_rates=np.array([1, 2])),
        lambda: key(pattern=Dilated((4, 8), (1, 2))),
    ),
    "branch-order": (lambda: key(**BRANCHES), lambda: key(segment_lengths=(8, 4), dilation_rates=(2, 1))),
    "longer-segment": (
        lambda: key(segment_lengths=(4, 12), dilation_rates=(1, 2)),
        lambda: key(segment_lengths=(4, 99), dilation_rates=(1, 2)),
    ),
    "one-segment": (lambda: key(is_causal=True), lambda: key(pattern=Dilated((64,), (1,), is_causal=True))),
    "layout": (lambda: key(SWAPPED), transposed),
    "wide-window": (key, lambda: key(pattern=Window(11, 11))),
    "wide-causal-window": (lambda: key(is_causal=True), lambda: key(pattern=Window(11, 0))),
    "wide-neighborhood": (key, lambda: key(pattern=Neighborhood((12,), (23,)))),
    "values": (key, lambda: key(torch.ones(Q))),
    "no-grad": (key, without_grad),
    "storage-offset": (key, moved_in_memory),
    "storage-offset-odd": (key, lambda: key(zeros(769)[1:].view(Q))),
    "mask-values": (
        lambda: key(key_mask=torch.ones(2, 12, dtype=torch.bool)),
        lambda: key(key_mask=torch.zeros(2, 12, dtype=torch.bool)),
    ),
    "seq_lens-dtype": (
        lambda: key(seq_lens=torch.tensor([3, 4])),
        lambda: key(seq_lens=torch.tensor([0, 12], dtype=torch.int32)),
    ),
    "precision-of-halves": (
        lambda: key_at_precision("highest", torch.bfloat16),
        lambda: key_at_precision("medium", torch.bfloat16),
    ),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_the_key_is_unchanged(one: Callable[[], str], other: Callable[[], str]) -> None:
    assert one() == other()
