"""Rows of which every score is hugely negative: of masks that hold -1e9 or the lowest number in place of -inf.

Their softmax is that of scores without what all have in common, which is all that float32 can tell of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Neighborhood, Window, attend
from tests.support.interpreted import INTERPRETED

ROWS = slice(3, 6)  #: those with such scores
LOWEST = "lowest"
SIZES = (-1e4, -1e9, -1e20, LOWEST)
EXACT = ("native", "manual")  #: which take weights from scores, where lse is too large to tell them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = pytest.mark.usefixtures("triton_interpreter", "uncompiled_flex")


def low(size: float | str, dtype: torch.dtype) -> float:
    lowest = torch.finfo(dtype).min
    return max(float(size), lowest) if size != LOWEST else lowest


def tensors(tokens: int, dtype: torch.dtype, head_dim: int = 16) -> list[Tensor]:
    """q, zeros in ROWS, k, v and the gradient of out: [1, tokens, 2, head_dim]."""
    q, k, v, grad = torch.randn(4, 1, tokens, 2, head_dim, dtype=dtype)
    q[:, ROWS] = 0
    return [q, k, v, grad]


def gradients(inputs: Sequence[Tensor], grad: Tensor, pattern: Any = None, **options: Any) -> list[Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (x.detach().clone().requires_grad_() for x in inputs)
    out = attend(q, k, v, pattern, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Within a few roundings of the largest entry: in half precision, weights are rounded too."""
    return float((found - expected).abs().max()) <= 8 * torch.finfo(found.dtype).eps * float(expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("tokens", [7, 150])
def test_a_bias_that_all_keys_share_changes_nothing(
    backend: str, size: float | str, dtype: torch.dtype, tokens: int
) -> None:
    *inputs, grad = tensors(tokens, dtype)
    found = []
    for value in (low(size, dtype), 0.0):
        bias = torch.zeros(1, 1, tokens, tokens, dtype=dtype)
        bias[:, :, ROWS] = value
        found.append(gradients(inputs, grad, bias=bias, backend=backend))
    assert all(is_close(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", [*EXACT, "sdpa_mask", "flex"])
def test_rows_whose_result_nobody_uses_have_no_gradient(backend: str, size: float | str, dtype: torch.dtype) -> None:
    """Padding in a batch of transformers: a finite row must add exactly nothing."""
    *inputs, grad = tensors(16, dtype)
    grad[:, ROWS] = 0
    bias = torch.zeros(1, 1, 16, 16, dtype=dtype)
    bias[:, :, ROWS] = low(size, dtype)
    out, *grads = gradients(inputs, grad, bias=bias, backend=backend)
    assert is_close(out[:, ROWS], inputs[2].float().mean(1, keepdim=True).to(dtype).expand(-1, 3, -1, -1))
    others = [i for i in range(16) if not ROWS.start <= i < ROWS.stop]
    expected = gradients([inputs[0][:, others], *inputs[1:]], grad[:, others], backend=backend)[1:]
    assert not grads[0][:, ROWS].any()
    assert is_close(grads[0][:, others], expected[0])
    assert all(is_close(*pair) for pair in zip(grads[1:], expected[1:], strict=True))


@pytest.mark.parametrize("backend", [*EXACT, "sdpa_mask", "flex"])
@pytest.mark.parametrize("slope", [1e4, 1e9, 1e20])
def test_alibi_so_steep_that_only_the_nearest_keys_count(backend: str, slope: float) -> None:
    """Of two keys as near, each has half of the weight."""
    *inputs, grad = tensors(17, torch.float32)
    inputs[0][:, 1::2] = 0  # whose own key is hidden
    key_mask = torch.arange(17)[None] % 2 == 0
    grad[:, 1::2] *= backend in EXACT
    weights = torch.eye(17)
    for i in range(1, 17, 2):
        weights[i, i], weights[i, i - 1], weights[i, i + 1] = 0.0, 0.5, 0.5
    options = {"alibi_slopes": torch.full((2,), slope), "key_mask": key_mask, "backend": backend}
    out, dq, dk, dv = gradients(inputs, grad, **options)
    assert is_close(out, torch.einsum("ij,bjhd->bihd", weights, inputs[2]))
    assert is_close(dv, torch.einsum("ij,bihd->bjhd", weights, grad))
    assert dq.isfinite().all()
    assert dk.isfinite().all()


OWN = {
    "native": Dilated((8, 16), (1, 2)),
    "manual": Neighborhood((4, 4), (3, 3)),
    "triton": Window(5, 5),
    "triton_tiles": Neighborhood((4, 4), (3, 3)),
}
PATTERNS = {**OWN, "sdpa": Dense(), "sdpa_mask": Window(3, 3), "flex": Window(3, 3)}


def each(patterns: Iterable[str], *sizes: float) -> pytest.MarkDecorator:
    """Backends and sizes; Triton's interpreter is slow."""

    def marks(backend: str, size: float) -> list[Any]:
        why = "Triton is not installed, or there is a GPU for it"
        return [pytest.mark.skipif(not INTERPRETED, reason=why), *[pytest.mark.full] * (size != sizes[-1])]

    pairs = [(backend, size) for backend in patterns for size in sizes]
    params = [pytest.param(*pair, marks=marks(*pair) if "triton" in pair[0] else []) for pair in pairs]
    return pytest.mark.parametrize(("backend", "size"), params)


@each(PATTERNS, 2.0**12, 2.0**30, 2.0**60, -(2.0**12), -(2.0**30), -(2.0**60))
def test_scores_that_are_huge_and_equal(backend: str, size: float) -> None:
    """Products of q and k that are exact in float32: the softmax is that of zeros."""
    *_, v, grad = tensors(16, torch.float32)
    q, k = torch.full_like(v, abs(size) ** 0.5), torch.full_like(v, math.copysign(abs(size) ** 0.5, size))
    out, *grads = gradients((q, k, v), grad, PATTERNS[backend], backend=backend)
    expected = gradients((q * 0, k, v), grad, PATTERNS[backend], backend=backend)
    assert is_close(out, expected[0])
    assert backend not in EXACT or is_close(grads[2], expected[3])
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("length", [9, 13, 16, 17, 22])
def test_equal_keys_have_equal_weights(length: int) -> None:
    """The last rows of a block are added in the order of the others, whatever the processor's register tile."""
    *_, v, grad = tensors(length, torch.float32)
    q = torch.full_like(v, 2.0**15)
    out, _, _, dv = gradients((q, q, v), grad, Dense(), backend="native")
    expected, _, _, mean = gradients((q * 0, q, v), grad, Dense(), backend="native")
    assert is_close(out, expected)
    assert is_close(dv, mean)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@each(OWN, math.nan, math.inf)
def test_what_is_not_a_number_is_not_hidden(backend: str, size: float) -> None:
    *inputs, grad = tensors(16, torch.float32)
    inputs[0][:, ROWS] = size
    out, dq, *_ = gradients(inputs, grad, PATTERNS[backend], backend=backend)
    assert all(x[:, ROWS].isnan().all() and x[:, : ROWS.start].isfinite().all() for x in (out, dq))


@each(OWN, 1e5, 1e30, 1e10)
def test_a_huge_scale_and_one_key(backend: str, size: float) -> None:
    """One key has all of the weight, whatever its score. PyTorch's kernels give NaN from about 1e9 on."""
    *_, v, grad = tensors(16, torch.float32)
    x = torch.randn(1, 16, 2, 16)
    pattern = Neighborhood((4, 4), (1, 1)) if backend == "triton_tiles" else Window(0, 0)
    out, dq, dk, dv = gradients((x, x, v), grad, pattern, scale=size, backend=backend)
    assert torch.equal(out, v)
    assert backend not in EXACT or is_close(dv, grad)
    assert dq.isfinite().all()
    assert dk.isfinite().all()
