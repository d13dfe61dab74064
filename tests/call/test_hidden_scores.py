"""What hides keys together, the largest biases, and gradients that transforms and graphs must not lose."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Window, attend
from attn_dispatch.backends import flex
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.formula import LARGEST_BIAS
from tests.support.calls import close
from tests.support.score_terms import BATCH, HEADS, KV_HEADS, LENGTH, agree, expected, tensors

pytestmark = pytest.mark.usefixtures("short_trials")

BACKENDS = ("manual", "sdpa_mask", "native", "flex")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by", ["causal", "seq_lens", "key_mask"])
def test_what_a_bias_hides_together_with_others(backend: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key is seen by the last query alone, from which the bias hides it."""
    monkeypatch.setattr(flex, "compiling", False)
    q, k, v = (x.detach() for x in tensors(torch.float32))
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    more: dict[str, Any] = {"is_causal": True}
    if by == "seq_lens":
        more = {"seq_lens": torch.tensor([20, 20])}
    elif by == "key_mask":
        more = {"key_mask": torch.ones(BATCH, LENGTH, dtype=torch.bool), "pattern": Window(LENGTH, 0)}
    last = 19 if by == "seq_lens" else LENGTH - 1
    bias[..., : last + 1, last] = -math.inf
    exact = attend(q, k, v, bias=bias, backend="manual", **more)
    for x in (k, v):
        x[:, last] = math.nan
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v, bias=bias, backend=backend, **more)
    assert close(out, exact.double())
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), (q, k, v)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_biases_of_the_largest_numbers(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """finfo.min hides keys beside others, and a row of it alone is a mean. NaN in hidden entries does not matter."""
    monkeypatch.setattr(flex, "compiling", False)
    q, k, v = (x.detach() for x in tensors(torch.float32))
    bias = torch.zeros(1, 1, LENGTH, LENGTH, dtype=dtype)
    bias[..., :5] = torch.finfo(dtype).min
    bias[..., 7, :] = torch.finfo(dtype).min
    bias[..., 30:] = math.nan
    seen = (torch.arange(LENGTH) < 30).expand(BATCH, -1)
    out = attend(q, k, v, bias=bias, key_mask=seen, backend=backend)
    plain = attend(q, k[:, 5:30], v[:, 5:30], backend="manual")
    others = torch.arange(LENGTH) != 7
    assert close(out[:, others], plain[:, others].double())
    mean = v[:, :30].mean(1).repeat_interleave(HEADS // KV_HEADS, 1)
    assert close(out[:, 7], mean.double())


@pytest.mark.parametrize("backend", ["manual", "sdpa_mask", "native"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_lse_of_the_largest_biases(backend: str, kind: torch.dtype) -> None:
    q, k, v = (x.detach() for x in tensors(kind))
    bias = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min)
    _, lse = attend(q, k, v, bias=bias, backend=backend, return_lse=True)
    assert close(lse / LARGEST_BIAS, torch.full_like(lse, -1.0).double())


def test_a_mapped_bias_with_autograd_outside() -> None:
    q, k, v = (torch.stack([x.detach()] * 3) for x in tensors())
    bias = torch.randn(3, 1, 1, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    q.requires_grad_()

    def call(lse: bool, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return attend(q, k, v, bias=bias, return_lse=lse)

    for lse in (False, True):
        found = torch.vmap(partial(call, lse))(q, k, v, bias)
        out = found[0] if lse else found
        grads = torch.autograd.grad(out.square().sum(), (q, bias))
        exact, _ = expected(q[0], k[0], v[0], Dense(), bias=bias[0])
        wanted = torch.autograd.grad(exact.square().sum(), (q, bias))
        assert agree([x[0] for x in grads], [x[0] for x in wanted])


def test_slopes_get_no_gradient_in_graphs_either() -> None:
    q, k, v = (x.detach() for x in tensors())
    slopes = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)
    for call in (attend, torch.compile(attend, backend="eager")):
        with pytest.raises(InvalidInput, match="alibi_slopes get no gradient"):
            call(q, k, v, alibi_slopes=slopes)
    with pytest.raises(InvalidInput, match="alibi_slopes get no gradient"):
        torch.func.grad(lambda x: attend(q, k, v, alibi_slopes=x).sum())(slopes.detach())
