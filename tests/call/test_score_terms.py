"""Softcap, bias and ALiBi: out, lse and every gradient against the formula in float64; and who refuses them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Window, attend, explain, register
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.flex import attention
from attn_dispatch.kernels.formula import LARGEST_BIAS
from attn_dispatch.spec.pattern import Pattern
from tests.support.calls import Plugin, close, status
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import crossed, thinned
from tests.support.score_terms import (
    BATCH,
    HEADS,
    KV_HEADS,
    LENGTH,
    PATTERNS,
    TERMS,
    agree,
    expected,
    inputs_of,
    tensors,
    terms,
)

pytestmark = pytest.mark.usefixtures("no_trials", "triton_interpreter")

BACKENDS = ("manual", "sdpa_mask", "native", "flex", *["triton"] * INTERPRETED)


def with_each(names: str, rows: Iterable[Any]) -> pytest.MarkDecorator:
    """Of backends and these rows; of Triton's interpreter, which is slow, every run takes the first row."""
    every = [
        pytest.param(backend, *row, marks=[pytest.mark.full] * (backend == "triton" and number > 0))
        for number, row in enumerate(rows)
        for backend in BACKENDS
    ]
    return pytest.mark.parametrize(("backend", *names.split()), every)


# --- every backend ----------------------------------------------------------------------------------------------------


@crossed(lambda pattern, name, q_len: {"name": name, "q_len": q_len}, pattern=PATTERNS, name=TERMS, q_len=(LENGTH, 5))
def test_out_lse_and_gradients(pattern: Pattern, name: str, q_len: int) -> None:
    q, k, v = tensors(q_len=q_len)
    given = terms(name, q_len=q_len)
    found = attend(q, k, v, pattern, return_lse=True, **given)
    exact = expected(q, k, v, pattern, **given)
    assert agree(found, exact)
    finite = exact[1] > -math.inf
    loss, target = (out.sin().sum() + lse[finite].square().sum() for out, lse in (found, exact))
    inputs = inputs_of(given, q, k, v)
    assert agree(torch.autograd.grad(loss, inputs), torch.autograd.grad(target, inputs), 1e-8)


@crossed(pattern=PATTERNS, name=TERMS, dtype=(torch.float32, torch.bfloat16))
def test_native(pattern: Pattern, name: str, dtype: torch.dtype) -> None:
    """Its gradients are its own. What a mask hides may hold NaN."""
    q, k, v = tensors(dtype)
    given: dict[str, Any] = terms(name, dtype)
    seen = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 7 != 3
    wide: dict[str, Any] = {name: x.detach().double() if isinstance(x, Tensor) else x for name, x in given.items()}
    leaves: Any = [x.detach().double().requires_grad_() for x in inputs_of(given, q, k, v)]
    wide |= dict(zip(["bias"], leaves[3:]))
    exact = attend(leaves[0], leaves[1], leaves[2], pattern, key_mask=seen, backend="manual", **wide)
    with torch.no_grad():
        for x in (k, v):
            x[~seen] = math.nan
    found = attend(q, k, v, pattern, key_mask=seen, backend="native", **given)
    results = (found, *torch.autograd.grad(found.double().sin().sum(), inputs_of(given, q, k, v)))
    rtol = max(2 * torch.finfo(dtype).eps, 1e-5)
    for x, y in zip(results, (exact, *torch.autograd.grad(exact.sin().sum(), leaves)), strict=True):
        assert (x.double() - y).abs().max() <= rtol * y.abs().max()


def test_who_computes_what() -> None:
    found = {name: getattr(registry.load(name), "score_terms", ()) for name in registry.names()}
    every = ("softcap", "bias", "bias's gradient", "alibi_slopes")
    assert {name: terms for name, terms in found.items() if terms} == {
        "manual": every,
        "native": every,
        **dict.fromkeys(("flex", "triton", "triton_tiles"), ("softcap", "bias", "alibi_slopes")),
        "sdpa_mask": ("bias", "alibi_slopes"),
        "flash": ("softcap",),
    }


@thinned("name", TERMS, 3)
def test_others_refuse_by_name(name: str) -> None:
    q, k, v = tensors(torch.float32)
    given = terms(name, torch.float32)
    with pytest.raises(NoBackend, match=r"tiles: .*does not compute (softcap|bias|alibi_slopes)"):
        attend(q, k, v, backend="tiles", **given)
    explanation = explain(q, k, v, **given)
    assert status(explanation, "sdpa") == status(explanation, "tiles") == "unsupported"
    assert explanation.choice != "sdpa"


@pytest.mark.usefixtures("short_trials")
def test_a_plugin_that_does_not_declare_them_is_not_asked(
    set_mode: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode("tune")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which takes seconds in a trial
    plugin = Plugin()
    register(plugin)
    q, k, v = (x.detach() for x in tensors(torch.float32))
    attend(q, k, v, softcap=2.0)
    assert plugin.known == {}
    with pytest.raises(NoBackend, match="planted: does not compute softcap"):
        attend(q, k, v, softcap=2.0, backend="planted")


# --- with everything else ---------------------------------------------------------------------------------------------


def test_a_bias_changed_in_place_before_the_backward_pass() -> None:
    for backend in ("manual", "native", *["triton"] * INTERPRETED):
        q, k, v = tensors(torch.float32)
        bias = torch.zeros(1, 1, LENGTH, LENGTH)
        out = attend(q, k, v, bias=bias, backend=backend)
        bias += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@thinned("name", TERMS, 3)
def test_autocast_leaves_the_terms_as_they_are(name: str) -> None:
    q, k, v = tensors(torch.float32)
    given = terms(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, backend="manual", **given)
    wide: dict[str, Any] = {key: x.double() if isinstance(x, Tensor) else x for key, x in given.items()}
    q, k, v = (x.bfloat16().double() for x in (q, k, v))
    exact, _ = expected(q, k, v, Dense(), **wide)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= torch.finfo(out.dtype).eps * exact.abs().max()).all()


# --- what hides keys together, and the largest biases -----------------------------------------------------------------


@with_each("by", [["causal"], ["seq_lens"], ["key_mask"]])
def test_what_a_bias_hides_together_with_others(backend: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key is seen by the last query alone, from which the bias hides it."""
    monkeypatch.setattr(attention, "compiling", False)
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


@with_each("dtype", [[torch.float32], [torch.float64]])
def test_biases_of_the_largest_numbers(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """finfo.min hides keys beside others, and a row of it alone is a mean. NaN in hidden entries does not matter."""
    monkeypatch.setattr(attention, "compiling", False)
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


@with_each("queries dtype", product([2, LENGTH], [torch.float32, torch.bfloat16]))
def test_nan_in_a_bias(backend: str, dtype: torch.dtype, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an entry that is seen it reaches out, lse and dq of its query, in every dtype; in a hidden one nothing."""
    monkeypatch.setattr(attention, "compiling", False)
    dtype = torch.float16 if (backend, dtype) == ("triton", torch.bfloat16) else dtype  # as far as it is interpreted
    q, k, v = tensors(dtype, q_len=queries)
    bias = torch.zeros(BATCH, HEADS, queries, LENGTH, dtype=dtype)
    bias[..., 0], bias[..., 1:, LENGTH - 1] = -math.inf, math.nan
    bias[:, :, 0, LENGTH - queries + 1 :] = math.nan  # causal hides it
    seen = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    seen[0, -1] = False
    out, lse = attend(q, k, v, Dense(True), bias=bias, key_mask=seen, backend=backend, return_lse=True)
    dq, dv = torch.autograd.grad(out.sum() + lse.sum(), (q, v))
    last = torch.zeros(BATCH, queries, HEADS, dtype=torch.bool)
    last[1:, -1] = True  # its key is hidden in row 0, and in other rows from other queries
    for found in (out.isnan(), dq.isnan()):
        assert torch.equal(found, last[..., None].expand_as(found))
    assert torch.equal(lse.isnan(), last.transpose(1, 2))
    assert dv[0].isfinite().all()
    assert dv[1:, -1].isnan().all()


@pytest.mark.parametrize("backend", ["manual", "sdpa_mask", "native"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_lse_of_the_largest_biases(backend: str, kind: torch.dtype) -> None:
    q, k, v = (x.detach() for x in tensors(kind))
    bias = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min)
    _, lse = attend(q, k, v, bias=bias, backend=backend, return_lse=True)
    assert close(lse / LARGEST_BIAS, torch.full_like(lse, -1.0).double())


# --- in graphs --------------------------------------------------------------------------------------------------------


@thinned("name", TERMS, 3)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(name: str) -> None:
    q, k, v = tensors()
    given = terms(name)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = compiled(q, k, v, is_causal=True, return_lse=True, **given)
    exact = expected(q, k, v, Dense(is_causal=True), **given)
    assert agree(found, exact)
    inputs = inputs_of(given, q, k, v)
    loss, target = found[0].square().sum(), exact[0].square().sum()
    assert agree(torch.autograd.grad(loss, inputs), torch.autograd.grad(target, inputs), 1e-8)


@pytest.mark.parametrize(
    ("of_bias", "of_slopes", "rows"),
    [(None, None, BATCH), (0, None, BATCH), (0, None, 1), (None, 0, BATCH)],
    ids=["alone", "with bias", "with a shared bias", "with slopes"],
)
def test_vmap_and_grad(of_bias: int | None, of_slopes: int | None, rows: int) -> None:
    q, k, v = (torch.stack([x.detach().roll(n, 1) for n in range(3)]) for x in tensors())
    bias, slopes = torch.randn(3, rows, HEADS, LENGTH, LENGTH, dtype=torch.float64), torch.rand(3, HEADS)
    in_dims = (0, 0, 0, of_bias, of_slopes)
    given = (q, k, v, bias[0] if of_bias is None else bias, slopes[0] if of_slopes is None else slopes)

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, bias=bias, alibi_slopes=slopes)
        return out.square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=in_dims)(*given)
    for number in range(3):
        *own, own_slopes = (x if axis is None else x[number] for x, axis in zip(given, in_dims))
        own = [x.clone().requires_grad_() for x in own]
        out, _ = expected(own[0], own[1], own[2], Dense(), bias=own[3], alibi_slopes=own_slopes)
        exact = torch.autograd.grad(out.square().sum(), own)
        assert agree([x[number] for x in found], exact, 1e-8)


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
