"""attend() under the names of other functions, against these or against their definition."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from attn_dispatch import Dense, Neighborhood, compat
from attn_dispatch.decisions.call import observing
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import Problem
from tests.support.calls import close, drawn, formula
from tests.support.pairwise import crossed

pytestmark = pytest.mark.usefixtures("no_trials")


def definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, added: Tensor | float = 0.0, cap: float = 0.0) -> Any:
    """out [q_len, heads, head_dim] and lse [heads, q_len] in float64 of one sequence; `seen` is [q_len, k_len]."""
    bias = (torch.zeros(seen.shape).double() + added).masked_fill(~seen, -math.inf)
    out, lse = formula(q[None], k[None], v[None], Dense(), softcap=cap or None, bias=bias)
    return out[0], lse[0]


def distance(q_len: int, k_len: int) -> Tensor:
    """Of a key from a query, where the last ones are aligned."""
    return torch.arange(k_len) - (torch.arange(q_len)[:, None] + k_len - q_len)


# --- flash-attn -------------------------------------------------------------------------------------------------------


@crossed(
    causal=(False, True),
    window_size=((-1, -1), (5, -1), (5, 3), (-1, 4), (3, 0)),
    q_len=(12, 7),
    softcap=(0.0, 2.0),
    alibi=(False, True),
    probabilities=(False, True),
)
def test_flash_attn_func(
    causal: bool, window_size: tuple[int, int], q_len: int, softcap: float, alibi: bool, probabilities: bool
) -> None:
    q, k, v = drawn(2, q_len, 4, 8), drawn(2, 12, 2, 8, seed=1), drawn(2, 12, 2, 8, seed=2)
    slopes = torch.tensor([[0.5, 0.25, 0.1, 0.0], [1.0, 2.0, 0.3, 0.2]]) if alibi and not softcap else None
    found = compat.flash_attn_func(
        q, k, v, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=slopes,
        return_attn_probs=probabilities, deterministic=True,
    )  # fmt: skip
    out, lse = found[:2] if probabilities else (found, None)
    far = distance(q_len, 12)
    left, right = window_size[0], 0 if causal else window_size[1]
    seen = ((far >= -left) | (left < 0)) & ((far <= right) | (right < 0))
    for row in range(2):
        added = 0.0 if slopes is None else -slopes[row, :, None, None] * far.abs()
        wanted, wanted_lse = definition(q[row], k[row], v[row], seen, added, softcap)
        assert close(out[row], wanted)
        assert lse is None or close(lse[row], wanted_lse)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("by_sequence", [False, True])
def test_flash_attn_varlen_func(same: bool, by_sequence: bool) -> None:
    starts = [0, 5, 5, 16, 20]
    other = starts if same else [0, 9, 11, 30, 34]
    q, k, v = drawn(20, 4, 8), drawn(other[-1], 2, 8, seed=1), drawn(other[-1], 2, 8, seed=2)
    slopes = torch.rand(4, 4) if by_sequence else torch.rand(4)
    out, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, torch.tensor(starts, dtype=torch.int32), torch.tensor(other, dtype=torch.int32), 11, 19, causal=True,
        alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    for row, (a, b, c, d) in enumerate(zip(starts, starts[1:], other, other[1:])):
        if a == b:
            continue
        far = distance(b - a, d - c)
        own = slopes[row] if by_sequence else slopes
        wanted, wanted_lse = definition(q[a:b], k[c:d], v[c:d], far <= 0, -own[:, None, None] * far.abs())
        assert close(out[a:b], wanted)
        assert close(lse[:, a:b], wanted_lse)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [len, heads, head_dim] in float64, its first dimensions turned by angles [len, half of them]."""
    half, x = angles.shape[1], x.double().clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    both = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * angles)[:, None]
    x[..., first], x[..., second] = both.real, both.imag
    return x


@crossed(
    filled=("all", 6, "tensor"),
    new=(0, 3),
    rotary=(None, True, False),
    window=((False, (-1, -1)), (True, (-1, -1)), (True, (4, -1)), (False, (3, 1))),
    moved=(False, True),
    leftpad=(False, True),
    alibi=(False, True),
)
def test_flash_attn_with_kvcache(
    filled: Any, new: int, rotary: bool | None, window: Any, moved: bool, leftpad: bool, alibi: bool
) -> None:
    """Each row against float64, and the cache afterwards; what no row fills or sees is NaN."""
    if new and filled == "all":
        filled = 8
    causal, sides = window
    lengths = [12, 12] if filled == "all" else [filled] * 2 if isinstance(filled, int) else [9, 4]
    rows, first = [2, 0] if moved else [0, 1], [2, 0] if leftpad else [0, 0]
    q, k_cache, v_cache = drawn(2, 3, 4, 16), *(drawn(3 if moved else 2, 12, 2, 16, seed=i) for i in (1, 2))
    for row, start, length in zip(rows, first, lengths):
        for cache in (k_cache, v_cache):
            cache[row, :start], cache[row, length:] = math.nan, math.nan
    k, v = (drawn(2, new, 2, 16, seed=i) if new else None for i in (3, 4))
    angles = torch.rand(16, 6).double() if rotary is not None and new else None
    given: dict[str, Any] = {
        "cache_seqlens": None if filled == "all" else filled if isinstance(filled, int) else torch.tensor(lengths),
        "cache_batch_idx": torch.tensor(rows, dtype=torch.int32) if moved else None,
        "cache_leftpad": torch.tensor(first, dtype=torch.int32) if leftpad else None,
        "alibi_slopes": torch.rand(2, 4) if alibi else None,
    }
    if angles is not None:
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary}
    before = k_cache.clone(), v_cache.clone()
    out, lse = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, causal=causal, window_size=sides, return_softmax_lse=True, **given
    )
    for i, (row, start, length) in enumerate(zip(rows, first, lengths)):
        end, own_q = length + new, q[i].double()
        for cache, was, added in ((k_cache, before[0], k), (v_cache, before[1], v)):
            wanted = was[row, start:end].double()
            if added is not None:
                last = added[i].double()
                if angles is not None and cache is k_cache:
                    last = turned(last, angles[length:end], bool(rotary))
                wanted[length - start :] = last
            assert close(cache[row, start:end], wanted)
        if angles is not None:
            steps = torch.arange(3) if causal or sides != (-1, -1) else torch.zeros(3, dtype=torch.long)
            own_q = turned(own_q, angles[length + steps], bool(rotary))
        far = distance(3, end - start)
        left, right = sides[0], 0 if causal else sides[1]
        seen = ((far >= -left) | (left < 0)) & ((far <= right) | (right < 0))
        bias = -given["alibi_slopes"][i, :, None, None] * far.abs() if alibi else 0.0
        own_k, own_v = (cache[row, start:end] for cache in (k_cache, v_cache))
        wanted, wanted_lse = definition(own_q, own_k, own_v, seen, bias)
        assert close(out[i], wanted)
        assert close(lse[i], wanted_lse)


def test_wrong_caches() -> None:
    q, cache = drawn(2, 1, 4, 8), drawn(2, 9, 4, 8, seed=1)
    new, ones, usual = drawn(2, 1, 4, 8, seed=2), torch.ones(4, 4), {"cache_seqlens": 3}
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {"block_table": ones}, "block_table must be None"),
        ((new,), usual, "k and v must be given together"),
        ((new, new), {}, "k and v need cache_seqlens"),
        ((new[:, :, :1], new), usual, r"k must be \[2, 1, 4, 8\], .* got \[2, 1, 1, 8\]"),
        ((new, new.double()), usual, "v must be .* got .*float64"),
        ((new, new), {"cache_seqlens": 9}, "cache_seqlens must lie in 0..8, got 9"),
        ((new, new), {"cache_seqlens": torch.tensor([3, 9])}, r"cache_seqlens must lie in 0..8, got \[3, 9\]"),
        ((), {"cache_seqlens": torch.ones(2)}, "cache_seqlens must be an int32 or int64 tensor"),
        ((), {"cache_seqlens": -1}, "cache_seqlens must be an integer >= 0, got -1"),
        ((), {"cache_batch_idx": torch.tensor([0, 2])}, r"cache_batch_idx must lie in 0..1, got \[0, 2\]"),
        ((), {"cache_leftpad": torch.tensor([0])}, r"cache_leftpad must be .* \[2\]"),
        ((), {"rotary_cos": ones, "rotary_sin": ones}, "need k and v"),
        ((new, new), usual | {"rotary_cos": ones[:3], "rotary_sin": ones[:3]}, "a row for position 3, got 3"),
        ((new, new), usual | {"rotary_cos": torch.ones(4, 5), "rotary_sin": torch.ones(4, 5)}, "at most 4 columns"),
        ((new, new), usual | {"rotary_cos": ones, "rotary_sin": ones[:, :2]}, "rotary_sin must be a tensor"),
        ((new, new), usual | {"rotary_cos": ones}, "so must rotary_cos and rotary_sin"),
    ]
    for more, given, text in wrong:
        with pytest.raises(InvalidInput, match=text):
            compat.flash_attn_with_kvcache(q, cache, cache, *more, **given)
    with pytest.raises(InvalidInput, match="q requires a gradient, which a cache has not"):
        compat.flash_attn_with_kvcache(q.requires_grad_(), cache, cache)


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": -1.0}, {"alibi_slopes": torch.ones(3)}, {"softmax_scale": math.nan}, {"q": drawn(2, 1, 3, 8)},
        {"rotary_cos": torch.ones(3, 4), "rotary_sin": torch.ones(3, 4)}, {"cache_leftpad": torch.tensor([0, 12])},
    ],
    ids=str,
)  # fmt: skip
def test_a_refused_call_writes_nothing(given: dict[str, Any]) -> None:
    q, new, cache = drawn(2, 1, 4, 8), drawn(2, 1, 2, 8, seed=1), drawn(2, 9, 2, 8, seed=2)
    before = cache.clone()
    with pytest.raises(InvalidInput):
        compat.flash_attn_with_kvcache(
            **{"q": q, "k_cache": cache, "v_cache": cache, "k": new, "v": new, "cache_seqlens": 5, **given}
        )
    assert torch.equal(cache, before)


def test_no_sequences() -> None:
    none, starts = drawn(0, 4, 8), torch.tensor([0], dtype=torch.int32)
    assert compat.flash_attn_varlen_func(none, none, none, starts, starts, 0, 0).shape == none.shape


def test_what_is_wrong_or_flash_attn_alone_has() -> None:
    x, starts = drawn(9, 4, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    usual = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    varlen: list[tuple[dict[str, Any], str]] = [
        ({"cu_seqlens_q": [0, 4, 9]}, "cu_seqlens_q must be an int32 or int64 tensor"),
        ({"cu_seqlens_k": starts.float()}, "cu_seqlens_k must be an int32 or int64 tensor"),
        ({"cu_seqlens_k": starts + 1}, "cu_seqlens_k must rise from 0 to 9, got"),
        ({"alibi_slopes": torch.ones(3, 4)}, r"\[sequences, heads\], got \[3, 4\] for 2 sequences"),
        ({"block_table": starts}, "block_table must be None"),
    ]
    for given, text in varlen:
        with pytest.raises(InvalidInput, match=text):
            compat.flash_attn_varlen_func(x, x, x, **{**usual, **given})
    plain: list[tuple[dict[str, Any], str]] = [
        ({"dropout_p": 0.5, "return_attn_probs": True}, "return_attn_probs gives no dropout pattern"),
        *(({"window_size": (side, 0)}, "window_size must be two integers") for side in (math.inf, 2.5, "1")),
    ]
    for given, text in plain:
        with pytest.raises(InvalidInput, match=text):
            compat.flash_attn_func(x[None], x[None], x[None], **given)


@pytest.mark.usefixtures("fresh_compiler")
def test_flash_attn_compiled() -> None:
    """Whole; deterministic passes between graphs, which do not hold the mode."""
    q, starts = drawn(20, 4, 8), torch.tensor([0, 5, 20], dtype=torch.int32)

    def run(q: Tensor, deterministic: bool = False) -> Any:
        one = compat.flash_attn_func(q[None], q[None], q[None], causal=True, deterministic=deterministic)
        return one[0] + compat.flash_attn_varlen_func(q, q, q, starts, starts, 15, 15, window_size=(3, 0))

    whole: Any = torch.compile(run, backend="eager", fullgraph=True)
    assert close(whole(q), run(q).double())
    between: Any = torch.compile(run, backend="eager")
    seen = list[Problem]()
    with observing(seen.append):
        assert close(between(q, True), run(q).double())
    assert seen[0].deterministic


# --- scaled_dot_product_attention -------------------------------------------------------------------------------------


@crossed(
    shape=((2, 4), (3,), (), (2, 1, 4)),
    lengths=((9, 9), (5, 9), (9, 5), (1, 6)),
    kind=("none", "causal", "keys", "bool", "float", "row"),
    width=(8, 6),
)
def test_sdpa(shape: tuple[int, ...], lengths: tuple[int, int], kind: str, width: int) -> None:
    q_len, k_len = lengths
    q, k = drawn(*shape, q_len, 8), drawn(*shape, k_len, 8, seed=1)
    v = drawn(*shape, k_len, width, seed=2)
    generator = torch.Generator().manual_seed(3)
    rows = shape[:1] if len(shape) > 1 else ()
    masks: dict[str, Any] = {
        "keys": torch.rand(*rows, *[1] * (len(shape) - len(rows)), 1, k_len, generator=generator) > 0.3,
        "bool": torch.rand(q_len, k_len, generator=generator) > 0.3,
        "float": torch.randn(*shape, q_len, k_len, generator=generator),
        "row": torch.randn(1, k_len, generator=generator),
    }
    for name in ("keys", "bool"):
        masks[name][..., 0] = True  # a row without keys is NaN in some of PyTorch's kernels
    options: dict[str, Any] = {"attn_mask": masks.get(kind), "is_causal": kind == "causal", "scale": 0.7}
    given: Any = [x.requires_grad_() for x in (q, k, v)]
    found = compat.scaled_dot_product_attention(*given, **options)
    exact: Any = [x.detach().double().requires_grad_() for x in given]
    wide = masks.get(kind)
    options["attn_mask"] = wide.double() if wide is not None and wide.dtype != torch.bool else wide
    expected = torch_sdpa(*exact, **options)
    assert found.shape == expected.shape
    assert close(found, expected)
    pairs = zip(torch.autograd.grad(found.sum(), given), torch.autograd.grad(expected.sum(), exact))
    assert all(close(x, y) for x, y in pairs)


@pytest.mark.parametrize("kind", ["none", "causal", "bool"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((4,), (2, 4)), ((2, 4), (4,)), ((), (2, 4)), ((2, 4), ()), ((1, 4), (2, 4)), ((2, 1), (2, 4)),
        ((3, 1, 4), (2, 4)), ((0, 4), (0, 4)), ((0,), (0,)), ((2, 0), (2, 0)), ((0, 4), (1, 4)), ((0, 2, 4), (0, 2, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_axes_of_sdpa_that_are_missing_broadcast_or_empty(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], kind: str
) -> None:
    q, k, v = (drawn(*shape, n, 8, seed=n).requires_grad_() for shape, n in ((shapes[0], 5), *[(shapes[1], 9)] * 2))
    mask = distance(5, 9) % 3 < 2 if kind == "bool" else None
    found, expected = (
        function(q, k, v, attn_mask=mask, is_causal=kind == "causal")
        for function in (compat.scaled_dot_product_attention, torch_sdpa)
    )
    assert found.shape == expected.shape
    assert close(found, expected.double())
    grads, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected))
    assert all(close(x, y.double()) for x, y in zip(grads, wanted))


def test_sdpa_with_grouped_heads() -> None:
    q, k = drawn(2, 6, 9, 8), drawn(2, 2, 9, 8)
    assert close(
        compat.scaled_dot_product_attention(q, k, k, enable_gqa=True), torch_sdpa(q, k, k, enable_gqa=True).double()
    )
    with pytest.raises(InvalidInput, match="enable_gqa must be True where heads differ, got 6 and 2"):
        compat.scaled_dot_product_attention(q, k, k)


def test_wrong_arguments_of_sdpa() -> None:
    x, options = drawn(2, 4, 9, 8), list[tuple[dict[str, Any], str]]()
    options += [
        ({"attn_mask": torch.ones(9, 9), "is_causal": True}, "give attn_mask or is_causal, not both"),
        ({"attn_mask": torch.ones(9, 9).long()}, "attn_mask must be a bool or floating-point tensor"),
        ({"attn_mask": torch.ones(3, 9)}, "attn_mask must be broadcastable to [2, 4, 9, 9], got [3, 9]"),
        ({"attn_mask": torch.ones(3, 1, 1, 9, 9)}, "to [2, 4, 9, 9], got [3, 1, 1, 9, 9]"),
        ({"enable_gqa": torch.ones(2)}, "enable_gqa must be True or False"),
        ({"is_causal": torch.ones(2)}, "is_causal must be True or False"),
    ]
    for given, message in options:
        with pytest.raises(InvalidInput) as raised:
            compat.scaled_dot_product_attention(x, x, x, **given)
        assert message in str(raised.value)


# --- xFormers ---------------------------------------------------------------------------------------------------------


def mask_of(name: str, **fields: Any) -> Any:
    """A stand-in for one of xFormers' masks, of which the name and the fields are read."""
    return type(name, (), fields)()


def starts(*each: int) -> Any:
    return SimpleNamespace(seqstart_py=each)


MASKS: dict[str, tuple[Any, Any]] = {
    "none": (None, lambda far, q, k: far == far),
    "top-left": (mask_of("LowerTriangularMask"), lambda far, q, k: torch.arange(k) <= torch.arange(q)[:, None]),
    "bottom-right": (mask_of("LowerTriangularFromBottomRightMask"), lambda far, q, k: far <= 0),
    "local": (
        mask_of("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=4),
        lambda far, q, k: (far <= 0) & (far > -4),
    ),
    "window": (
        mask_of("LocalAttentionFromBottomRightMask", window_left=3, window_right=2),
        lambda far, q, k: (far >= -3) & (far <= 2),
    ),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", [(9, 9), (5, 9), (9, 5)])
def test_memory_efficient_attention(name: str, lengths: tuple[int, int]) -> None:
    (q_len, k_len), (mask, rule) = lengths, MASKS[name]
    q, k, v = drawn(2, q_len, 3, 8), drawn(2, k_len, 3, 8, seed=1), drawn(2, k_len, 3, 8, seed=2)
    out = compat.memory_efficient_attention(q, k, v, mask)
    seen = rule(distance(q_len, k_len), q_len, k_len)
    for row in range(2):
        assert close(out[row], definition(q[row], k[row], v[row], seen)[0])


def test_other_shapes_and_a_tensor() -> None:
    q, k = drawn(2, 6, 2, 3, 8), drawn(2, 6, 2, 1, 8).expand(-1, -1, -1, 3, -1)
    flat, whole = q.flatten(2, 3), k.flatten(2, 3)
    for one, other in product((k, drawn(2, 6, 2, 3, 8, seed=1)), repeat=2):
        out = compat.memory_efficient_attention(q, one, other)
        expected = compat.memory_efficient_attention(flat, one.flatten(2, 3), other.flatten(2, 3))
        assert close(out.flatten(2, 3), expected.double())
    with pytest.raises(InvalidInput, match="same number of groups of heads"):
        compat.memory_efficient_attention(q, drawn(2, 6, 3, 2, 8), drawn(2, 6, 3, 2, 8))
    added = drawn(2, 2, 3, 6, 6)
    out = compat.memory_efficient_attention(q, k, k, added)
    expected = compat.memory_efficient_attention(flat, whole, whole, added.flatten(1, 2))
    assert close(out.flatten(2, 3), expected.double())
    single, bias = drawn(2, 6, 8), drawn(2, 6, 6)
    out = compat.memory_efficient_attention(single, single, single, bias)
    for row in range(2):
        x = single[row, :, None]
        assert close(out[row], definition(x, x, x, torch.ones(6, 6, dtype=torch.bool), bias[row])[0][:, 0])


def blocks(name: str, own: tuple[int, ...], other: tuple[int, ...], lengths: Any = None, **fields: Any) -> Any:
    of_k = starts(*other)
    if lengths is not None:
        of_k.seqlen_py = lengths
    return mask_of(f"BlockDiagonal{name}", q_seqinfo=starts(*own), k_seqinfo=of_k, **fields)


def at_most(low: int, high: int) -> Any:
    return lambda far: (far >= low) & (far <= high)


#: Of the masks of blocks: their fields, whether the first query and key are aligned, and the distances that are seen.
BLOCKS: dict[str, tuple[dict[str, int], bool, Any]] = {
    "Mask": ({}, False, at_most(-99, 99)),
    "CausalMask": ({}, True, at_most(-99, 0)),
    "CausalFromBottomRightMask": ({}, False, at_most(-99, 0)),
    "CausalLocalAttentionMask": ({"_window_size": 3}, True, at_most(-2, 0)),
    "CausalLocalAttentionFromBottomRightMask": ({"_window_size": 3}, False, at_most(-2, 0)),
    "PaddedKeysMask": ({}, False, at_most(-99, 99)),
    "CausalWithOffsetPaddedKeysMask": ({}, False, at_most(-99, 0)),
    "LocalAttentionPaddedKeysMask": ({"window_left": 2, "window_right": 1}, False, at_most(-2, 1)),
    "CausalLocalAttentionPaddedKeysMask": ({"_window_size": 3}, False, at_most(-2, 0)),
    "GappyKeysMask": ({}, False, at_most(-99, 99)),
    "CausalWithOffsetGappyKeysMask": ({}, False, at_most(-99, 0)),
}


@crossed(
    name=BLOCKS,
    own=((0, 5, 9, 20), (0, 3, 3, 20), (0, 5, 10, 15)),
    other=((0, 5, 9, 20), (0, 8, 9, 15), (0, 4, 6, 6), (0, 7, 14, 21)),
)
def test_masks_of_blocks(name: str, own: tuple[int, ...], other: tuple[int, ...]) -> None:
    """The space behind a block's keys holds NaN; gradients are those of the definition."""
    fields, upper_left, rule = BLOCKS[name]
    lengths = [max(0, d - c - 1) for c, d in pairwise(other)] if "Keys" in name else None
    q, k = drawn(1, own[-1], 2, 8), drawn(1, other[-1], 2, 8, seed=1)
    ends = other[1:] if lengths is None else tuple(c + n for c, n in zip(other, lengths))
    for end, last in zip(ends, other[1:]):
        k[:, end:last] = math.nan
    q, k, mask = q.requires_grad_(), k.requires_grad_(), blocks(name, own, other, lengths, **fields)
    sizes = zip(pairwise(own), zip(other, ends))
    if name == "CausalLocalAttentionMask" and any(b - a > d - c + 2 for (a, b), (c, d) in sizes):
        with pytest.raises(InvalidInput, match="let out the queries that see no key"):  # xFormers makes no such mask
            compat.memory_efficient_attention(q, k, k, mask)
        return
    out = compat.memory_efficient_attention(q, k, k, mask)
    wanted = []
    for a, b, c, d in zip(own, own[1:], other, ends):
        far = torch.arange(d - c) - torch.arange(b - a)[:, None] if upper_left else distance(b - a, d - c)
        if b > a:
            wanted.append(definition(q[0, a:b], k[0, c:d], k[0, c:d], rule(far))[0])
    whole = torch.cat(wanted)
    assert close(out[0], whole)
    for x, y in zip(*(torch.autograd.grad(each.square().sum(), (q, k)) for each in (out, whole))):
        assert close(x, y.double())


@pytest.mark.skipif(find_spec("xformers") is None, reason="xformers is not installed")
def test_every_mask_of_xformers() -> None:
    """What they materialize is what is computed; only those with pages of keys are refused."""
    masks = xformers_masks()
    kinds = {name for name, kind in vars(masks).items() if isinstance(kind, type) and hasattr(kind, "materialize")}
    kinds -= {"AttentionBias"}
    own, other, padded = [3, 5, 2], [4, 6, 5], [4, 6, 5]
    made: list[tuple[Any, int]] = [
        (masks.LowerTriangularMask(), 12),
        (masks.LowerTriangularMask().add_bias(drawn(1, 2, 10, 12)), 12),
        (masks.LowerTriangularFromBottomRightMask(), 12),
        (masks.LowerTriangularFromBottomRightMask().make_local_attention(4), 12),
        (masks.LocalAttentionFromBottomRightMask(window_left=2, window_right=1), 12),
    ]
    plain = masks.BlockDiagonalMask.from_seqlens(own, other)
    made += [(plain, 15), (plain.make_causal(), 15), (plain.make_causal_from_bottomright(), 15)]
    made += [(plain.make_local_attention(3), 15), (plain.make_local_attention_from_bottomright(3), 15)]
    for name in ("BlockDiagonalPaddedKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask"):
        made.append((getattr(masks, name).from_seqlens(own, 7, padded), 21))
    local = masks.BlockDiagonalLocalAttentionPaddedKeysMask
    made.append((local.from_seqlens_local(own, 7, padded, window_left=2, window_right=1), 21))
    made.append((masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(own, 7, padded, 3), 21))
    for name in ("BlockDiagonalGappyKeysMask", "BlockDiagonalCausalWithOffsetGappyKeysMask"):
        made.append((getattr(masks, name).from_seqlens(own, [9, 2, 14, 21], padded), 21))
    assert {type(mask).__name__ for mask, _ in made} == {name for name in kinds if not name.startswith("Paged")}
    for mask, keys in made:
        q, k = drawn(1, 10, 2, 8), drawn(1, keys, 2, 8, seed=1)
        out = compat.memory_efficient_attention(q, k, k, mask)
        bias = mask.materialize((1, 2, 10, keys))
        assert close(out, formula(q, k, k, Dense(), bias=bias.double())[0]), type(mask).__name__


def xformers_masks() -> Any:
    """The module of its masks alone: the library may import beside a GPU only."""
    (folder,) = find_spec("xformers").submodule_search_locations  # type: ignore[union-attr, misc]
    spec: Any = spec_from_file_location("attn_bias", Path(folder) / "ops" / "fmha" / "attn_bias.py")
    module = module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"attn_bias": module}):  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("own", "other", "values", "what"),
    [
        ([0, 4, 13], [0, 8, 20], 20, "q"),
        ([0, 4, 9], [0, 8, 20], 20, "q"),
        ([0, 4, 10], [0, 8, 12], 20, "k"),
        ([0, 8, 4, 10], [0, 8, 9, 20], 20, "q"),
        ([0, 4, 10], [0, 4, 8, 20], 20, "lengths"),
    ],
)
def test_starts_of_other_tensors(own: list[int], other: list[int], values: int, what: str) -> None:
    """Queries without a result, and keys that nobody sees, are not passed over in silence."""
    q, k = drawn(1, 10, 2, 8), drawn(1, values, 2, 8)
    text = "equal lengths" if what == "lengths" else f"{what}.* must rise from 0 to"
    for name in BLOCKS:
        with pytest.raises(InvalidInput, match=text):
            compat.memory_efficient_attention(q, k, k, blocks(name, tuple(own), tuple(other)))


def test_what_xformers_has_and_attend_not() -> None:
    x = drawn(1, 6, 2, 8)
    with pytest.raises(InvalidInput, match="got PagedBlockDiagonalMask"):
        compat.memory_efficient_attention(x, x, x, mask_of("PagedBlockDiagonalMask"))
    with pytest.raises(InvalidInput, match="op must be None"):
        compat.memory_efficient_attention(x, x, x, op=object())
    numbers: Any = [1.0]
    with pytest.raises(InvalidInput, match=r"must have 3 to 5 axes, the same number each, got \['list'"):
        compat.memory_efficient_attention(numbers, x, x)


# --- NATTEN -----------------------------------------------------------------------------------------------------------


NEAR: dict[str, dict[str, Any]] = {
    "plain": {},
    "dilation": {"dilation": 2, "kernel_size": 2},
    "stride": {"stride": 2},
    "causal": {"is_causal": True},
}


@crossed(grid=((11,), (5, 6), (4, 4, 4)), near=tuple(NEAR), added=(None, 7, 0))
def test_neighborhoods_with_additional_keys(grid: tuple[int, ...], near: str, added: int | None) -> None:
    axes, tokens = len(grid), math.prod(grid)
    options = {"kernel_size": 3, **NEAR[near]}
    q, k, v = (drawn(2, *grid, heads, 8, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2)))
    extra = [] if added is None else [drawn(2, added, 2, 8, seed=i).requires_grad_() for i in (5, 6)]
    more = dict(zip(("additional_keys", "additional_values"), extra))
    function = getattr(compat, f"na{axes}d")
    out, lse = function(q, k, v, **options, **more, return_lse=True)
    assert torch.equal(function(q, k, v, **options, **more), out)
    assert out.shape == q.shape
    kernel = options.pop("kernel_size")
    seen = Neighborhood(grid, (kernel,) * axes, edges="shift", **options).multiplicity(tokens)[0] > 0
    seen = torch.cat([seen, torch.ones(tokens, added or 0, dtype=torch.bool)], 1)
    flat_q, *flat = (x.flatten(1, axes) for x in (q, k, v))
    all_k, all_v = (torch.cat([x, *more], 1) for x, *more in zip(flat, *([extra] if extra else [])))
    bias = torch.zeros(seen.shape).double().masked_fill(~seen, -math.inf)
    wanted, wanted_lse = formula(flat_q, all_k, all_v, Dense(), bias=bias)
    assert close(out.flatten(1, axes), wanted)
    assert close(lse.flatten(1, axes).transpose(1, 2), wanted_lse)
    given = [q, k, v, *extra]
    pairs = zip(*(torch.autograd.grad(each.double().square().sum(), given) for each in (out, wanted)))
    assert all(close(x, y.double()) for x, y in pairs)


def test_wrong_arguments_of_natten() -> None:
    x = drawn(1, 5, 6, 2, 8)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x[0], x, x, 3), {}, r"query must be a tensor \[batch, x, y, heads, head_dim\], got \[5, 6, 2, 8\]"),
        ((x, x[:, :4], x, 3), {}, "query, key and value must have the same x, y"),
        ((x, x, x, 3), {"additional_keys": x[:, 0]}, "must be given together"),
        ((x, x, x, 7), {}, "NATTEN needs kernel_size"),
        ((x, x, x, 3), {"return_lse": 1}, "return_lse must be True or False"),
    ]
    for given, more, text in wrong:
        with pytest.raises(InvalidInput, match=text):
            compat.na2d(*given, **more)
