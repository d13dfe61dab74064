"""Packed documents, sinks, shares of heads, and steps with a cache of keys: each against the formula in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Dense, Dilated, Neighborhood, Window, attend, explain, profile, record
from attn_dispatch.backends import manual
from attn_dispatch.decisions import unmeasured
from attn_dispatch.kernels import registry
from attn_dispatch.recording import read_record
from attn_dispatch.settings import cache_folder
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.store.folder import Store
from tests.support.calls import counted, forget
from tests.support.pairwise import crossed

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


def tensors(seed: int = 0, length: int = LENGTH, batch: int = BATCH) -> Three:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes)
    return q, k, v


def expected(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, ids: Tensor, sink: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The formula, document by document."""
    outs, lses = [], []
    for row, documents in enumerate(ids):
        for each in documents.unique_consecutive():
            where = (documents == each).nonzero().flatten()
            counts = pattern.multiplicity(len(where), heads=q.shape[2]).double()
            counts = counts if key_mask is None else counts * key_mask[row, where]
            keys, values = (x[row, where].repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (k, v))
            scores = HEAD_DIM**-0.5 * torch.einsum("ihd,jhd->hij", q[row, where], keys) + counts.log()
            if sink is not None:
                scores = torch.cat([scores, sink[:, None, None].expand(HEADS, len(where), 1)], -1)
                values = torch.cat([values, torch.zeros_like(values[:1])])
            outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
            lses.append(scores.logsumexp(-1))
    shape = q.shape
    return torch.cat(outs).view(shape), torch.cat([x.t() for x in lses]).view(shape[:-1]).transpose(1, 2)


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
    q, k, v = (x.detach() for x in tensors())
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
    q, k, v = (x.detach().float() for x in tensors())
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
    q, k, v = (x.detach().float() for x in tensors(length=200, batch=1))
    for length in range(33, 200, 6):
        attend(q[:, length - 1 : length], k[:, :length], v[:, :length], **options)
    assert counted(measured=3)
    assert len(list(Store(cache_folder()).all())) == 3
    keys = {explain(q[:, :1], k[:, :n], v[:, :n], **options).key for n in (33, 40, 64, 65, 128, 129, 199)}
    assert len(keys) == 3


def test_recorded_steps_are_profiled_as_calls_look_them_up(tmp_path: Path, set_mode: Callable[[str], None]) -> None:
    q, k, v = (x.detach().float() for x in tensors(length=120, batch=1))
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


@pytest.mark.parametrize(
    "pattern",
    [
        Neighborhood((9, 7), (3, 5)),
        Neighborhood((9, 8), (3, 3), (2, 1), edges="shift"),
        Neighborhood((4, 3, 5), (3, 3, 3), is_causal=(True, False, True)),
    ],
    ids=str,
)
def test_unseen_tokens_of_a_grid(pattern: Neighborhood) -> None:
    length = math.prod(pattern.grid)
    for q_len in range(1, length):
        seen = pattern.multiplicity(q_len, length)[0].any(0)
        assert torch.equal(pattern.seen(torch.arange(q_len), q_len, length, ()), seen)


@pytest.mark.usefixtures("short_trials")
def test_where_the_shared_choice_cannot_run_a_length_has_its_own(
    monkeypatch: pytest.MonkeyPatch, set_mode: Callable[[str], None]
) -> None:
    set_mode("tune")
    q, k, v = (x.detach().float() for x in tensors(batch=1))
    monkeypatch.setattr(unmeasured, "can_run", lambda problem, name: False)
    for length in (40, 50):
        attend(q[:, :1], k[:, :length], v[:, :length])
    assert len({explain(q[:, :1], k[:, :n], v[:, :n]).key for n in (40, 50)}) == 2
