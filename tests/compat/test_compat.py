"""attend() under the names of other functions, against these or against their definition."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from attn_dispatch import Dense, compat
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


def blocks(causal: bool, own: tuple[int, ...], other: tuple[int, ...]) -> Any:
    name = "BlockDiagonalCausalMask" if causal else "BlockDiagonalMask"
    return mask_of(name, q_seqinfo=starts(*own), k_seqinfo=starts(*other))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("own", [(0, 5, 9, 20), (0, 3, 3, 20)])
@pytest.mark.parametrize("other", [(0, 5, 9, 20), (0, 8, 9, 15), (0, 4, 6, 6)])
def test_block_diagonal_masks(causal: bool, own: tuple[int, ...], other: tuple[int, ...]) -> None:
    q, k = drawn(1, 20, 2, 8), drawn(1, other[-1], 2, 8, seed=1)
    out = compat.memory_efficient_attention(q, k, k, blocks(causal, own, other))
    for a, b, c, d in zip(own, own[1:], other, other[1:]):
        seen = (
            torch.arange(d - c) <= torch.arange(b - a)[:, None]
            if causal
            else torch.ones(b - a, d - c, dtype=torch.bool)
        )
        assert close(out[0, a:b], definition(q[0, a:b], k[0, c:d], k[0, c:d], seen)[0])


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
    for causal in (False, True):
        with pytest.raises(InvalidInput, match=text):
            compat.memory_efficient_attention(q, k, k, blocks(causal, tuple(own), tuple(other)))


def test_what_xformers_has_and_attend_not() -> None:
    x = drawn(1, 6, 2, 8)
    with pytest.raises(InvalidInput, match="got PagedBlockDiagonalMask"):
        compat.memory_efficient_attention(x, x, x, mask_of("PagedBlockDiagonalMask"))
    with pytest.raises(InvalidInput, match="op must be None"):
        compat.memory_efficient_attention(x, x, x, op=object())
    numbers: Any = [1.0]
    with pytest.raises(InvalidInput, match=r"must have 3 to 5 axes, the same number each, got \['list'"):
        compat.memory_efficient_attention(numbers, x, x)
