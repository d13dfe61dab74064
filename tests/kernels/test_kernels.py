"""The dense kernels' adapters: workarounds on the CPU; on meta tensors, that the CUDA ops accept the calls."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attn_dispatch.backends import manual
from attn_dispatch.backends.sdpa_cudnn import Cudnn
from attn_dispatch.dispatch import attend
from attn_dispatch.kernels import dense, registry
from attn_dispatch.kernels.dense import CpuFlash, CudaEfficient, CudaFlash, DenseCall, Kernel
from attn_dispatch.kernels.formula import formula
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.testing.allocations import allocated_peak
from attn_dispatch.testing.cases import Case
from tests.support.calls import setting
from tests.support.pairwise import thinned

SHAPES = ((2, 40, 3, 16), (1, 33, 2, 7))


@pytest.mark.parametrize("kernel", [CudaFlash(), CudaEfficient(), Cudnn()], ids=["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["dense", "causal"])
def test_cuda_ops_accept_the_calls(kernel: Kernel, shape: tuple[int, ...], is_causal: bool) -> None:
    """Arguments, padding and shapes only: a meta tensor holds no values."""
    q, k, v, grad = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(4))
    call = DenseCall(q, k, v, is_causal, 0.5)
    out, lse = kernel.forward(call)
    assert tuple(out.shape) == shape
    assert tuple(lse.shape) == (shape[0], shape[2], shape[1])
    grads = kernel.backward(call, grad, out, lse)
    assert [tuple(x.shape) for x in grads] == [shape] * 3


@pytest.mark.parametrize("mask_shape", [(1, 1, 33, 33), (2, 1, 1, 33)], ids=["bias", "keys"])
def test_cuda_mask_is_expanded_and_aligned(mask_shape: tuple[int, ...]) -> None:
    shape = (2, 33, 3, 16)
    q, k, v, grad = (torch.empty(shape, dtype=torch.float16, device="meta") for _ in range(4))
    mask = torch.empty(mask_shape, device="meta")
    kernel, call = CudaEfficient(), DenseCall(q, k, v, False, 0.5, mask)
    out, lse = kernel.forward(call)
    grads = kernel.backward(call, grad, out, lse)
    assert [tuple(x.shape) for x in grads] == [shape] * 3


def test_efficient_backward_gets_contiguous_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op assumes contiguous rows of lse and out; a branch's views are not contiguous."""
    seen: dict[str, torch.Tensor] = {}

    def op(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: None, out: torch.Tensor,
           lse: torch.Tensor, *rest: object, **named: object) -> tuple[torch.Tensor, ...]:  # fmt: skip
        seen.update(q=q, k=k, v=v, grad=grad, out=out, lse=lse)
        return q, k, v, q

    monkeypatch.setattr(dense, "aten", types.SimpleNamespace(_scaled_dot_product_efficient_attention_backward=op))
    whole = torch.randn(1, 128, 8, 16)
    part = whole[:, 1::2, 1::2]
    lse = torch.randn(1, 128, 8)[:, 1::2, 1::2].transpose(1, 2)
    CudaEfficient().backward(DenseCall(part, part, part, False, 0.5), part, part, lse)
    assert seen["lse"].is_contiguous()
    assert seen["out"].transpose(1, 2).is_contiguous()
    torch.testing.assert_close(seen["out"].transpose(1, 2), part, rtol=0, atol=0)


@pytest.mark.parametrize(
    "view",
    [
        torch.randn(1, 40, 2, 65)[..., :64],
        torch.randn(1, 40, 2, 64)[:, :, :1].expand(1, 40, 2, 64),
        torch.randn(40 * 2 * 64 + 1)[1:].view(1, 40, 2, 64),
        torch.randn(1, 40, 64, 2).transpose(2, 3),
        torch.randn(1, 40, 64).as_strided((1, 40, 1, 64), (2560, 64, 1, 1)),
    ],
    ids=["odd rows", "expanded", "odd start", "turned", "one head"],
)
def test_cuda_rows_start_on_whole_vectors(view: torch.Tensor) -> None:
    aligned = dense.vector_aligned(view)
    assert aligned.data_ptr() % 16 == 0
    assert all(stride * 4 % 16 == 0 and stride > 0 for stride in aligned.stride()[:-1])
    torch.testing.assert_close(aligned, view, rtol=0, atol=0)
    assert dense.vector_aligned(aligned) is aligned


@pytest.mark.parametrize("name", ["sdpa", "sdpa_float32", "sdpa_mask", "manual"])
def test_large_gradients_through_lse_in_float16(name: str) -> None:
    """As with a gradient scaler: values that float32 can hold must not overflow."""
    problem = Case("half", Dilated((8, 16), (1, 2), True), (1, 24, 2, 8)).problem(torch.float16, needs_grad=True)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 24, 2, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    result = registry.load(name).run(q, k, v, problem)
    assert isinstance(result, tuple)
    (dq,) = torch.autograd.grad((result[1] * 1e5).sum(), q, retain_graph=True)
    (small,) = torch.autograd.grad(result[1].sum(), q)
    assert bool(dq.isfinite().any())
    finite = dq.isfinite()
    size = float(dq[finite].abs().max())
    assert float((dq - small.float() * 1e5)[finite].abs().max()) < 8 * torch.finfo(torch.float16).eps * size


@pytest.mark.parametrize("tensor", ["q", "k", "v", "grad"])
def test_cpu_rows_need_not_be_contiguous(tensor: str) -> None:
    """The op itself reads such rows wrongly without an error."""
    torch.manual_seed(0)
    given = {name: torch.randn(1, 20, 2, 8) for name in ("q", "k", "v", "grad")}
    turned = dict(given)
    turned[tensor] = given[tensor].transpose(1, 3).contiguous().transpose(1, 3)
    kernel = CpuFlash()

    def results(x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        call = DenseCall(x["q"], x["k"], x["v"], True, 0.3)
        out, lse = kernel.forward(call)
        return [out, lse, *kernel.backward(call, x["grad"], out, lse)]

    for one, other in zip(results(given), results(turned)):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.full
@thinned("free", [2**22, 2**24], 2, ["4MiB", "16MiB"])
def test_manual_stays_within_free_memory(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("long", Dilated((256, 1024), (1, 2)), (1, 2048, 4, 8))
    monkeypatch.setattr(manual, "available_bytes", lambda device: free)
    problem = case.problem(torch.float32, needs_grad=False)
    q, k, v = (torch.randn(1, 2048, 4, 8) for _ in range(3))
    (out, lse), peak = allocated_peak(lambda: manual.run(q, k, v, problem))
    assert peak - (out.numel() + lse.numel()) * 4 <= free
    assert peak <= manual.workspace_bytes(problem) + problem.result_bytes


# --- the formula in float32, against itself in float64 ----------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, counts: Tensor) -> Tensor:
    """As in PyTorch's documentation of scaled_dot_product_attention."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k).masked_fill(counts == 0, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


@pytest.mark.parametrize("pattern", [Dense(), Window(9, 0)], ids=str)
@pytest.mark.parametrize("size", [1.0, 200.0, 1e4])
def test_large_scores_cost_no_more_than_their_own_rounding(pattern: Pattern, size: float) -> None:
    """Whole numbers as scores are exact: what is left is the softmax's own error, as in PyTorch's formula."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (2, 64, 2, 8), generator=generator).float()
    k = torch.randint(-2, 3, (2, 64, 2, 8), generator=generator).float() + size / 8
    v, grad = (torch.randn(2, 64, 2, 8, generator=generator) for _ in range(2))
    counts = pattern.multiplicity(64, 64, 2)
    errors = []
    functions: tuple[Callable[..., Tensor], ...] = (
        lambda q, k, v: formula(q, k, v, counts, 1.0)[0],
        lambda q, k, v: plain(q, k, v, counts),
    )
    for function in functions:
        results = []
        for kind in (torch.float32, torch.float64):
            x = [each.to(kind).requires_grad_() for each in (q, k, v)]
            out = function(*x)
            results.append([out, *torch.autograd.grad(out, x, grad.to(kind))])
        errors.append([((one - other).abs().max() / other.abs().max()).item() for one, other in zip(*results)])
    mine, theirs = errors
    assert mine == theirs


# --- which weights manual drops ---------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def _default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    with setting(torch.get_default_dtype, torch.set_default_dtype, request.param):
        yield


@pytest.mark.usefixtures("_default_dtype")
def test_the_share_of_dropped_weights() -> None:
    """Whatever the default dtype: there are few random numbers in bfloat16."""
    q = torch.zeros(1, 4096, 1, 64, dtype=torch.float32)
    k, v = torch.zeros(1, 64, 1, 64, dtype=torch.float32), torch.eye(64, dtype=torch.float32)[None, :, None, :]
    torch.manual_seed(0)
    out = attend(q, k, v, dropout_p=0.001, backend="manual")
    dropped = float((out == 0).float().mean())
    assert dropped == pytest.approx(0.001, abs=0.0003)  # 5 standard deviations of 262,144 draws


@pytest.mark.parametrize("free", [(2**14, 2**30), (2**30, 2**14)], ids=["less-first", "more-first"])
def test_a_recomputed_call_drops_the_same_weights(free: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Activation checkpointing restores the seed, not the memory that is free, on which pieces depend."""
    monkeypatch.setattr(manual, "CHUNK_BYTES", 2**16)
    x = torch.randn(1, 128, 2, 8)

    def f(q: Tensor) -> Any:
        return attend(q, x, x, dropout_p=0.5, backend="manual").square()

    def gradient(*, recompute: bool) -> Tensor:
        monkeypatch.setattr(manual, "available_bytes", lambda device: free[0])
        q = x.clone().requires_grad_()
        torch.manual_seed(0)
        out: Tensor = checkpoint(f, q, use_reentrant=False) if recompute else f(q)
        monkeypatch.setattr(manual, "available_bytes", lambda device: free[1])
        (found,) = torch.autograd.grad(out.sum(), q)
        return found

    torch.testing.assert_close(gradient(recompute=True), gradient(recompute=False))


def test_the_memory_of_a_call_with_dropout() -> None:
    """What is drawn takes memory, too."""
    problem = Case("long", Dense(), (1, 1024, 2, 8)).problem(torch.float32, needs_grad=True)
    problem = replace(problem, dropout_p=0.5)
    q, k, v = (torch.randn(1, 1024, 2, 8, requires_grad=True) for _ in range(3))

    def call() -> None:
        torch.autograd.grad(manual.run(q, k, v, problem)[0].sum(), (q, k, v))

    _, peak = allocated_peak(call)
    assert peak <= manual.workspace_bytes(problem) + problem.result_bytes
