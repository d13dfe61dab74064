"""Packed documents, sinks, shares of heads, steps with a cache of keys, rows of keys of their own lengths, alignments,
values of another width, and nothing to compute: each against the formula in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Neighborhood, Window, attend, explain, profile, record
from attn_dispatch.backends import manual
from attn_dispatch.calls.widths import ALIGNMENTS
from attn_dispatch.decisions import unmeasured
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels import registry
from attn_dispatch.recording import read_record
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.folder import Store
from tests.support.calls import counted, forget, formula
from tests.support.pairwise import crossed, thinned

pytestmark = pytest.mark.usefixtures("no_trials")

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 60, 4, 2, 16
#: Of equal lengths, of others, and a row of one document.
IDS = torch.stack([torch.arange(4).repeat_interleave(torch.tensor([10, 10, 25, 15])), torch.full((LENGTH,), 7)])
PATTERNS: tuple[Pattern, ...] = (
    Dense(),
    Dense(is_causal=True),
    Window(3, 0, sinks=2),
    Dilated((8, 16), (1, 2), is_causal=True),
)


Three = tuple[Tensor, Tensor, Tensor]


def tensors(seed: int = 0, length: int = LENGTH, batch: int = BATCH, width: int = HEAD_DIM) -> Three:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, *each) for each in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, width))]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def plain(**sizes: int) -> Three:
    """Without gradients."""
    q, k, v = (x.detach() for x in tensors(**sizes))
    return q, k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ids: Tensor, sink: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The formula, document by document."""
    outs, lses = [], []
    for row, documents in enumerate(ids):
        for each in documents.unique_consecutive():
            at = torch.tensor([row])[:, None], (documents == each).nonzero().flatten()
            out, lse = formula(q[at], k[at], v[at], pattern, seen=None if key_mask is None else key_mask[at])
            total = lse if sink is None else torch.logaddexp(lse, sink[:, None])
            outs.append(out if sink is None else out * (lse - total).exp().mT[..., None])
            lses.append(total)
    return torch.cat(outs, 1).view(q.shape), torch.cat(lses, 2).view(-1, *q.shape[:2]).transpose(0, 1)


@pytest.mark.parametrize("sink", [-40.0, -20.0, 0.0, 40.0])
def test_the_gradient_of_a_sink_that_takes_little(sink: float) -> None:
    """Where float32 rounds the share of the other keys to 1, the share of the sink still has its digits."""
    found = []
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(1, 3, 1, 4, dtype=dtype)
        score = torch.tensor([sink], dtype=dtype, requires_grad=True)
        out = attend(x, x, x, sink=score)
        found.append([out.detach().double(), *torch.autograd.grad(out.sum(), score)])
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(single.double(), double.double(), rtol=1e-5, atol=0.0)


@crossed(pattern=PATTERNS, layout=("bnhd", "bhnd"), with_sink=(False, True), masked=(False, True))
def test_documents_and_sinks_are_the_formula(pattern: Pattern, layout: str, with_sink: bool, masked: bool) -> None:
    q, k, v = tensors()
    sink = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True) if with_sink else None
    key_mask = None
    if masked and (with_sink or pattern == Dense()):  # else rows without keys, which the plain formula has no value for
        key_mask = torch.arange(LENGTH).expand(BATCH, -1) % 5 != 2
    given: Three = (q, k, v) if layout == "bnhd" else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    more: Any = {"documents": IDS, "key_mask": key_mask, "sink": sink, "layout": layout, "backend": "manual"}
    out, lse = attend(*given, pattern, return_lse=True, **more)
    torch.testing.assert_close(attend(*given, pattern, **more), out)
    out = out.transpose(1, 2) if layout == "bhnd" else out
    right = expected(q, k, v, pattern, IDS, sink, key_mask)
    torch.testing.assert_close((out, lse), right)
    inputs = [x for x in (q, k, v, sink) if x is not None]
    weights = [torch.randn_like(x) for x in right]
    found = torch.autograd.grad((out, lse), inputs, weights)
    torch.testing.assert_close(found, torch.autograd.grad(right, inputs, weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sink_keeps_the_dtype(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in tensors())
    out, lse = attend(q, k, v, sink=torch.zeros(HEADS), return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = tensors()
    key_mask = torch.arange(LENGTH).expand(BATCH, -1) > 20
    none = torch.full((HEADS,), -math.inf, dtype=torch.float64)
    options: Any = {"key_mask": key_mask, "is_causal": True, "return_lse": True, "backend": "manual"}
    torch.testing.assert_close(attend(q, k, v, sink=none, **options), attend(q, k, v, **options))


def test_rows_with_the_same_documents_are_one_call_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = plain()
    same = IDS[:1].expand(BATCH, -1)
    calls: list[tuple[int, ...]] = []
    run = manual.run

    def noted(q: Tensor, *args: Any, **more: Any) -> Any:
        calls.append(tuple(q.shape))
        return run(q, *args, **more)

    monkeypatch.setattr(manual, "run", noted)
    out = attend(q, k, v, documents=same, backend="manual")
    assert calls == [(4, 10, HEADS, HEAD_DIM), (2, 15, HEADS, HEAD_DIM), (2, 25, HEADS, HEAD_DIM)]
    torch.testing.assert_close(out, expected(q, k, v, Dense(), same, None, None)[0])


# --- shares of heads --------------------------------------------------------------------------------------------------

BY_HEAD = (
    Dilated((16, 32), (2, 4)),
    Dilated((16, 32), (1, 3), is_causal=True, offsets="block"),
    Dilated((8, 16, 32), (1, 2, 4), heads="split"),
    Neighborhood((6, 10), (3, 5)),
)


@pytest.mark.parametrize("backend", ["manual", "sdpa", "tiles", "native"])
@pytest.mark.parametrize("pattern", BY_HEAD, ids=str)
def test_a_share_of_the_heads_goes_by_their_numbers_among_all(pattern: Pattern, backend: str | None) -> None:
    q, k, v = (x.float() for x in plain())
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    if backend is not None and registry.load(backend).refusals(Problem.of(q, k, v, pattern)):
        pytest.skip(f"{backend} refuses it")
    whole = attend(q, k, v, pattern, backend="manual")
    for first, last in ((0, 1), (1, 3), (3, 4)):
        here = slice(first, last)
        share: Any = {"first_head": first, "all_heads": HEADS}
        out = attend(q[:, :, here], k[:, :, here], v[:, :, here], pattern, backend=backend, **share)
        torch.testing.assert_close(out, whole[:, :, first:last])


@pytest.mark.parametrize("backend", ["manual", "sdpa", "sdpa_mask", "tiles", "native"])
@pytest.mark.parametrize(
    ("q_len", "pattern"), [(2, Dilated((7,), (7,), is_causal=True, heads="split")), (5, Dilated((5,), (11,), False))]
)
def test_where_no_query_is_selected(q_len: int, pattern: Dilated, backend: str) -> None:
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    more: Any = {"first_head": 6, "all_heads": 8} if q_len == 5 else {}
    out, lse = attend(x[:, 5 - q_len :], x, x, pattern, backend=backend, return_lse=True, **more)
    assert (out.any(), (lse == -math.inf).all()) == (False, True)
    assert not torch.autograd.grad(out.sum(), x)[0].any()


# --- steps with a cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"is_causal": True}, {"pattern": Dilated((64, 256), (1, 2), is_causal=True)}])
@pytest.mark.usefixtures("short_trials")
def test_a_growing_cache_shares_decisions(options: dict[str, Any], set_mode: Callable[[str], None]) -> None:
    set_mode("tune")
    q, k, v = (x.float() for x in plain(length=200, batch=1))
    for length in range(33, 200, 6):
        attend(q[:, length - 1 : length], k[:, :length], v[:, :length], **options)
    assert counted(measured=3)
    assert len(list(Store(cache_folder()).all())) == 3
    keys = {explain(q[:, :1], k[:, :n], v[:, :n], **options).key for n in (33, 40, 64, 65, 128, 129, 199)}
    assert len(keys) == 3


def test_recorded_steps_are_profiled_as_calls_look_them_up(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    q, k, v = (x.float() for x in plain(length=120, batch=1))
    steps = range(65, 120, 9)

    def decode() -> None:
        for length in steps:
            attend(q[:, length - 1 : length], k[:, :length], v[:, :length], is_causal=True)

    set_mode("off")
    with record(tmp_path / "steps"):
        decode()
    (one,) = read_record(tmp_path / "steps")
    assert one.k_len == 128
    set_mode("tune")
    for problems in (tmp_path / "steps", [replace(one, k_len=100)]):
        profile(problems, budget_s=0.3, progress=False)
    assert len(list(Store(cache_folder()).all())) == 1
    set_mode("locked")
    forget()
    decode()


@pytest.mark.usefixtures("short_trials")
def test_where_the_shared_choice_cannot_run_a_length_has_its_own(
    monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None]
) -> None:
    set_mode("tune")
    q, k, v = (x.float() for x in plain(batch=1))
    monkeypatch.setattr(unmeasured, "can_run", lambda problem, name: False)
    for length in (40, 50):
        attend(q[:, :1], k[:, :length], v[:, :length])
    assert len({explain(q[:, :1], k[:, :n], v[:, :n]).key for n in (40, 50)}) == 2


# --- keys that end at different places, alignments, widths, nothing to compute ----------------------------------------

UPPER: dict[str, Any] = {"is_causal": True, "alignment": "upper_left"}


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
@pytest.mark.parametrize("pattern", [Window(3, 0, sinks=2), Dilated((8, 16), (1, 2), is_causal=True)], ids=str)
def test_key_lens(pattern: Pattern, layout: str) -> None:
    """Each row is a call of its own, whose keys end at its length; what follows may be NaN."""
    lengths = torch.tensor([40, 40, 25, 60, 4])
    q, k, v = plain(batch=len(lengths))
    bias, mask = torch.randn(len(lengths), 1, 4, LENGTH), (torch.arange(LENGTH) % 7 > 0).expand(len(lengths), -1)
    for row, length in enumerate(lengths.tolist()):
        k[row, length:] = v[row, length:] = math.nan
    inputs = [x.requires_grad_() for x in (q[:, :4].clone(), k, v)]
    given: Any = [x if layout == "bnhd" else x.transpose(1, 2) for x in inputs]
    more: dict[str, Any] = {"layout": layout, "key_mask": mask, "bias": bias, "return_lse": True}
    out, lse = attend(given[0], given[1], given[2], pattern, key_lens=lengths, **more)
    out = out if layout == "bnhd" else out.transpose(1, 2)
    exact = []
    for row, length in enumerate(lengths.tolist()):
        one, keys, values = (x[row, None, :length] for x in inputs)
        hidden: dict[str, Any] = {"bias": bias[row, None, ..., :length], "seen": mask[row, None, :length]}
        exact.append(formula(one, keys, values, pattern, **hidden))
    wanted, wanted_lse = (torch.cat([each[i] for each in exact]) for i in (0, 1))
    assert torch.allclose(out, wanted, atol=1e-12)
    assert torch.allclose(lse, wanted_lse, atol=1e-12)
    grads, exact_grads = (torch.autograd.grad(x.square().sum(), inputs) for x in (out, wanted))
    assert all(torch.allclose(x, y, atol=1e-12) for x, y in zip(grads, exact_grads))


def test_key_lens_with_a_sink_empty_rows_and_in_a_graph() -> None:
    q, k, v = plain()
    sink = torch.randn(HEADS, dtype=torch.float64)
    out, lse = attend(q[:, :1], k, v, key_lens=torch.tensor([0, 9]), sink=sink, return_lse=True)
    assert not out[0].any()
    assert torch.equal(lse[0, :, 0], sink)
    wanted = attend(q[1:, :1], k[1:, :9], v[1:, :9], sink=sink, backend="manual")
    assert torch.allclose(out[1:], wanted)
    compiled, k = torch.compile(attend, backend="aot_eager", fullgraph=True), k.requires_grad_()
    for lengths in (torch.tensor([30, 40]), torch.tensor([0, 60])):
        found, wanted = (each(q[:, :2], k, v, key_lens=lengths) for each in (compiled, attend))
        assert torch.allclose(found, wanted)
        (grad,), (exact,) = (torch.autograd.grad(x.square().sum(), k) for x in (found, wanted))
        assert torch.allclose(grad, exact)


@thinned(("q_len", "k_len"), [(10, 25), (25, 10), (10, 10), (1, 10), (10, 1)], 3)
def test_upper_left(q_len: int, k_len: int) -> None:
    """As PyTorch's causal_upper_left: query i sees the keys up to i."""
    q, k, v = plain()
    q, k, v = q[:, :q_len], k[:, :k_len], v[:, :k_len]
    seen = torch.arange(k_len) <= torch.arange(q_len)[:, None]
    mask, bias = torch.rand(BATCH, k_len) > 0.3, torch.randn(1, 1, q_len, k_len)
    mask[:, 0] = True
    hidden = torch.zeros(1, 1, q_len, k_len).masked_fill(~seen, -math.inf)
    several: list[dict[str, Any]] = [{}, {"key_mask": mask}, {"bias": bias}]
    for more in several:
        found = attend(q, k, v, return_lse=True, **UPPER, **more)
        wanted = formula(q, k, v, Dense(), bias=more.get("bias", 0.0) + hidden, seen=more.get("key_mask"))
        assert all(map(torch.allclose, found, wanted))
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(q, k, v, **UPPER), attend(q, k, v, Dense(is_causal=True), alignment="upper_left"))
    assert explain(q, k, v, **UPPER).choice


@thinned(
    ("q_len", "k_len", "left", "right"),
    product((1, 10, 12), (1, 10, 13, 25), (2, 4, None), (0, 2, None)),
    3,
)
def test_upper_left_windows(q_len: int, k_len: int, left: int | None, right: int | None) -> None:
    """Query i sees keys from i - left to i + right; queries after all of these are refused."""
    q, k, v = plain()
    q, k, v = q[:, :q_len], k[:, :k_len], v[:, :k_len]
    far = torch.arange(k_len) - torch.arange(q_len)[:, None]
    seen = (far >= (-99 if left is None else -left)) & (far <= (99 if right is None else right))
    if left is not None and q_len > k_len + left:
        with pytest.raises(InvalidInput, match=f"needs q_len <= k_len \\+ {left}, got {q_len} and {k_len}"):
            attend(q, k, v, Window(left, right), alignment="upper_left")
        return
    mask = torch.rand(BATCH, k_len) > 0.3
    hidden = torch.zeros(1, 1, q_len, k_len).masked_fill(~seen, -math.inf)
    found = attend(q, k, v, Window(left, right), alignment="upper_left", key_mask=mask, return_lse=True)
    assert all(map(torch.allclose, found, formula(q, k, v, Dense(), bias=hidden, seen=mask)))


def test_both_alignments_of_documents_are_one() -> None:
    q, k, v = plain(batch=1)
    ids = torch.arange(LENGTH)[None] // 13
    several: list[dict[str, Any]] = [{"documents": ids}, {"cu_seqlens": torch.tensor([0, 13, 26, 39, 52, LENGTH])}]
    for given in several:
        found, other = (attend(q, k, v, pattern=Dense(is_causal=True), alignment=each, **given) for each in ALIGNMENTS)
        assert torch.equal(found, other)


@crossed(
    pattern=(Dense(is_causal=True), Window(3, 0), Dilated((8, 20), (1, 2))), layout=("bnhd", "bhnd"), width=(1, 10, 40)
)
def test_values_of_another_width(pattern: Pattern, layout: str, width: int) -> None:
    """As in multi-head latent attention. The scale is that of the keys' width."""
    inputs = [x.requires_grad_() for x in plain(width=width)]
    given: Any = [x if layout == "bnhd" else x.transpose(1, 2) for x in inputs]
    out, lse = attend(given[0], given[1], given[2], pattern, return_lse=True, layout=layout, backend="manual")
    torch.testing.assert_close(attend(given[0], given[1], given[2], pattern, layout=layout, backend="manual"), out)
    right = formula(inputs[0], inputs[1], inputs[2], pattern)
    torch.testing.assert_close((out if layout == "bnhd" else out.transpose(1, 2), lse), right)
    found, expected = (torch.autograd.grad(x.square().sum() + y.sum(), inputs) for x, y in ((out, lse), right))
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("short_trials")
def test_widths_are_explained_as_computed(set_mode: Callable[[str], None]) -> None:
    set_mode("tune")
    q, k, v = plain(width=40)
    attend(q, k, v)
    found = explain(q, k, v)
    assert (found.source, "[2, 60, 4, 40]" in found.problem) == ("measured", True)


@pytest.mark.parametrize(
    ("batch", "q_len", "k_len", "given"),
    [
        (0, 5, 5, {}),
        (2, 0, 5, {"layout": "bhnd"}),
        (2, 5, 0, {"sink": torch.full((HEADS,), 0.25, dtype=torch.float64)}),
        (2, 0, 5, UPPER),
        (2, 5, 0, UPPER),
        (0, 5, 3, UPPER),
        (1, 5, 0, {"key_lens": torch.tensor([0])}),
        (2, 5, 5, {"key_lens": torch.tensor([0, 0])}),
        (0, 5, 5, {"key_lens": torch.zeros(0).long()}),
        (2, 0, 0, {"documents": IDS[:, :0], **UPPER}),
        (0, 5, 5, {"documents": IDS[:0, :5]}),
        (1, 0, 0, {"cu_seqlens": torch.tensor([0, 0, 0])}),
    ],
)
def test_without_rows_queries_or_keys(batch: int, q_len: int, k_len: int, given: dict[str, Any]) -> None:
    """As PyTorch's attention has it: empty results, and zeros without keys; -inf, or the sink, in lse."""
    q, k, v = plain(width=8)
    axes = (1, 2) if given.get("layout") == "bhnd" else (1, 1)
    inputs = [x[:batch, :n].transpose(*axes).requires_grad_() for x, n in ((q, q_len), (k, k_len), (v, k_len))]
    out, lse = attend(inputs[0], inputs[1], inputs[2], return_lse=True, **given)
    assert out.transpose(*axes).shape == (batch, q_len, HEADS, 8)
    assert not out.any()
    assert lse.shape == (batch, HEADS, q_len)
    assert (lse == (0.25 if "sink" in given else -math.inf)).all()
    for grad in torch.autograd.grad(out.sum(), inputs, materialize_grads=True):
        assert not grad.any()
