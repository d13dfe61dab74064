"""Softcap, bias and ALiBi: out, lse and every gradient against the formula in float64; and who refuses them."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, attend, explain, register
from attn_dispatch.backends import flex, native
from attn_dispatch.errors import BackendFailed, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import refuse_score_terms
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.candidates import Request
from attn_dispatch.tuning.choice import Admitted
from attn_dispatch.tuning.example import make
from attn_dispatch.tuning.gate import Gate
from attn_dispatch.tuning.rounds import exhausted
from tests.support.calls import Plugin, close, status
from tests.support.pairwise import crossed, parameters, thinned
from tests.support.score_terms import (
    BATCH,
    HEADS,
    LENGTH,
    PATTERNS,
    TERMS,
    agree,
    expected,
    inputs_of,
    tensors,
    terms,
)

pytestmark = pytest.mark.usefixtures("short_trials")

BACKENDS = ("manual", "sdpa_mask", "native", "flex")
FLEX_TERMS = ("softcap", "bias and slopes")  #: of flex in every run


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


def slow(backend: str, _pattern: Pattern, name: str, *_: Any) -> bool:
    return backend == "flex" and name not in FLEX_TERMS


ADMITTED = ("backend", "pattern", "name", "dtype", "backward")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Of flex's slow cases those in float32.
ROWS = [
    row for row in product(BACKENDS, PATTERNS, TERMS, DTYPES, (False, True)) if not slow(*row) or row[3] == DTYPES[0]
]


def pairs(backend: str, pattern: Pattern, name: str, dtype: torch.dtype, backward: bool) -> dict[str, Any]:
    return {"backend": backend, "name": name, "backward": backward}


@pytest.mark.full
@pytest.mark.parametrize(ADMITTED, parameters(ROWS, pairs, too_slow=slow))
def test_the_gate_admits_every_backend_that_accepts(
    backend: str, pattern: Pattern, name: str, dtype: torch.dtype, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate compares with float64 within its derived tolerance, in hard cases with biases of -inf and NaN too."""
    monkeypatch.setattr(flex, "compiling", False)
    q, k, v = (x.requires_grad_(backward) for x in (y.detach() for y in tensors(dtype)))
    given = terms(name, dtype)
    if "bias" in given:
        given["bias"] = given["bias"].detach().requires_grad_(backward and backend in ("manual", "native"))
    request = Request.of(Problem.of(q, k, v, pattern, return_lse=True, **given))
    able = [each for each in request.candidates_with(0) if each.name == backend and each.row is None]
    if refuse_score_terms(registry.load(backend), request.problem) or registry.load(backend).refusals(request.problem):
        assert able == []
        return
    assert able
    for candidate in able:  # in each token order
        gate = Gate(request.problem, request.address, make(request.problem))
        found = gate.admit(candidate)
        assert isinstance(found, Admitted), found
        rejected = exhausted(gate.check_hard_cases(candidate))
        # Without its compiler, which no trial does without, PyTorch's flex_attention has no right gradients there.
        assert rejected is None or (backend == "flex" and "hugely negative rows" in rejected.reason), rejected


def test_who_computes_what() -> None:
    found = {name: getattr(registry.load(name), "score_terms", ()) for name in registry.names()}
    every = ("softcap", "bias", "bias's gradient", "alibi_slopes")
    assert {name: terms for name, terms in found.items() if terms} == {
        "manual": every,
        "native": every,
        "flex": ("softcap", "bias", "alibi_slopes"),
        "sdpa_mask": ("bias", "alibi_slopes"),
        "flash": ("softcap",),
    }


def test_native_caps_or_adds() -> None:
    problem = Problem.of(*tensors(torch.float32), **terms("all", torch.float32))
    assert [str(each) for each in native.refusals(problem)] == ["caps scores, or adds to them, not both"]


@thinned("name", TERMS, 3)
def test_others_refuse_by_name(name: str) -> None:
    q, k, v = tensors(torch.float32)
    given = terms(name, torch.float32)
    with pytest.raises(NoBackend, match=r"tiles: .*does not compute (softcap|bias|alibi_slopes)"):
        attend(q, k, v, backend="tiles", **given)
    explanation = explain(q, k, v, **given)
    assert status(explanation, "sdpa") == status(explanation, "tiles") == "unsupported"
    assert explanation.choice != "sdpa"


def test_a_plugin_that_does_not_declare_them_is_not_asked() -> None:
    plugin = Plugin()
    register(plugin)
    q, k, v = (x.detach() for x in tensors(torch.float32))
    attend(q, k, v, softcap=2.0)
    assert plugin.known == {}
    with pytest.raises(NoBackend, match="planted: does not compute softcap"):
        attend(q, k, v, softcap=2.0, backend="planted")


# --- with everything else ---------------------------------------------------------------------------------------------


@thinned("name", TERMS, 3)
def test_masks_layouts_and_values_of_another_width(name: str) -> None:
    q, k, v = tensors()
    given = terms(name)
    seen = torch.arange(LENGTH)[None] % torch.tensor([[3], [5]]) > 0
    lens = torch.tensor([30, 36])
    both = seen & (torch.arange(LENGTH) < lens[:, None])
    by_head: Any = [x.transpose(1, 2) for x in (q, k, v[..., :5])]
    out, lse = attend(
        *by_head, layout="bhnd", key_mask=seen, seq_lens=lens,
        return_lse=True, **given,
    )  # fmt: skip
    exact, exact_lse = expected(q, k, v[..., :5], Dense(), seen=both, **given)
    for row, length in enumerate(lens.tolist()):
        assert agree(
            (out[row, :, :length], lse[row, :, :length]),
            (exact[row, :length].transpose(0, 1), exact_lse[row, :, :length]),
        )
        assert not out[row, :, length:].any()
        assert (lse[row, :, length:] == -math.inf).all()


@pytest.mark.full
@thinned(("name", "rows"), product(TERMS, ("rows that differ", "equal rows")), 3)
def test_documents(name: str, rows: str) -> None:
    q, k, v = tensors()
    given = terms(name)
    cuts = [[0, 7, 14, 36], [0, 7, 14, 36] if rows == "equal rows" else [0, 20, 36]]
    ids = torch.stack([torch.bucketize(torch.arange(LENGTH), torch.tensor(row[1:]), right=True) for row in cuts])
    found = attend(q, k, v, is_causal=True, documents=ids, return_lse=True, **given)
    outs, lses = [], []
    for row, starts in enumerate(cuts):
        parts = []
        for start, end in pairwise(starts):
            place, own = slice(start, end), dict(given)
            if "bias" in given:
                bias = given["bias"]
                own["bias"] = bias[min(row, len(bias) - 1)][None][:, :, place, place]
            if "alibi_slopes" in given and given["alibi_slopes"].ndim == 2:
                own["alibi_slopes"] = given["alibi_slopes"][row]
            one, keys, values = (x[row : row + 1, place] for x in (q, k, v))
            parts.append(expected(one, keys, values, Dense(is_causal=True), **own))
        outs.append(torch.cat([out for out, _ in parts], 1))
        lses.append(torch.cat([lse for _, lse in parts], 2))
    exact = torch.cat(outs), torch.cat(lses)
    assert agree(found, exact)
    inputs = inputs_of(given, q, k, v)
    loss, target = found[0].square().sum(), exact[0].square().sum()
    assert agree(torch.autograd.grad(loss, inputs), torch.autograd.grad(target, inputs), 1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_bias_hides_never_matters(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "compiling", False)
    q, k, v = (x.detach() for x in tensors(torch.float32))
    bias = torch.zeros(1, HEADS, LENGTH, LENGTH)
    bias[..., 20:] = -math.inf
    exact = attend(q[:, :20], k[:, :20], v[:, :20], backend="manual")
    for x in (k, v):
        x[:, 20:] = torch.tensor([math.nan, math.inf, -math.inf, math.nan] * 4)[:, None, None]
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v, bias=bias, backend=backend)
    assert close(out[:, :20], exact.double())
    for grad in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert grad.isfinite().all()
        assert backend == "manual" or grad[:, 20:].any() == (grad.shape[2] == HEADS)


@pytest.mark.full
@thinned("name", TERMS, 3)
def test_second_derivatives(name: str) -> None:
    q, k, v = (x[:1, :4, :, :3].detach().requires_grad_() for x in tensors())
    given = {key: x[:1, :, :4, :4] if key == "bias" else x for key, x in terms(name).items()}
    if given.get("alibi_slopes") is not None:
        given["alibi_slopes"] = given["alibi_slopes"].view(-1, HEADS)[0]
    if "bias" in given:
        given["bias"] = given["bias"].detach().nan_to_num(neginf=-1.0).requires_grad_()
    names = [key for key in ("bias",) if key in given]

    def call(*inputs: Any) -> Any:
        return attend(*inputs[:3], backend="manual", **{**given, **dict(zip(names, inputs[3:]))})

    inputs = (q, k, v, *(given[key] for key in names))
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_second_derivatives_of_native_are_refused() -> None:
    q, k, v = tensors(torch.float32)
    bias = torch.zeros(1, 1, LENGTH, LENGTH, requires_grad=True)
    out = attend(q, k, v, bias=bias, backend="native")
    (grad,) = torch.autograd.grad(out.square().sum(), bias, create_graph=True)
    with pytest.raises(BackendFailed, match="no second derivatives"):
        torch.autograd.grad(grad.sum(), bias)


def test_a_bias_changed_in_place_before_the_backward_pass() -> None:
    for backend in ("manual", "native"):
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


@pytest.mark.parametrize("mapped", ["alone", "with bias", "with a shared bias", "with slopes"])
def test_vmap_and_grad(mapped: str) -> None:
    examples = [tensors(q_len=LENGTH + each, k_len=LENGTH) for each in (0, 0, 0)]
    q, k, v = (torch.stack([each[i].detach() for each in examples]) for i in range(3))
    rows = 1 if mapped == "with a shared bias" else BATCH
    bias = torch.randn(3, rows, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    slopes = torch.rand(3, HEADS)
    in_dims = (
        0,
        0,
        0,
        0 if mapped.startswith("with ") and "bias" in mapped else None,
        0 if "slopes" in mapped else None,
    )
    each_bias = bias if in_dims[3] == 0 else bias[0]
    each_slopes = slopes if in_dims[4] == 0 else slopes[0]

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor) -> Tensor:
        out: Tensor = attend(q, k, v, bias=bias, alibi_slopes=slopes)
        return out.square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=in_dims)(
        q, k, v, each_bias, each_slopes
    )
    for number in range(3):
        own = [x[number].detach().requires_grad_() for x in (q, k, v)]
        own_bias = (each_bias[number] if in_dims[3] == 0 else each_bias).detach().requires_grad_()
        own_slopes = each_slopes[number] if in_dims[4] == 0 else each_slopes
        out, _ = expected(own[0], own[1], own[2], Dense(), bias=own_bias, alibi_slopes=own_slopes)
        exact = torch.autograd.grad(out.square().sum(), [*own, own_bias])
        assert agree([x[number] for x in found], exact, 1e-8)
