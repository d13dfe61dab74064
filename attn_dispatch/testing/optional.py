"""Checks of the optional members of a backend that compute: see `CHECKS`.

What the first three compute is no pattern: it is written as a dense problem with a bias, the logarithm of how often
each query sees each key, so that the oracle gives the expected results and their tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.kernels import formula
from attn_dispatch.kernels.autograd import gradients
from attn_dispatch.kernels.contract import Backend, adapted, asks_specialized, refusals_of, specialized
from attn_dispatch.kernels.numerics import merge_, sum_dtype
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import CONTIGUOUS, Problem
from attn_dispatch.tuning.example import Example, double, exactly, make
from attn_dispatch.tuning.hard_cases import nan_memory
from attn_dispatch.tuning.oracle import Oracle

OTHER_KEYS = 5  #: that queries of `partial` see besides
PARTS = (0.5, -0.1, 1.1, 0.97, 0.001, 0.3, 0.2)  #: of the keys that rows have; below 0 is none, above 1 all


def problem_of_partial(backend: Backend, problem: Problem) -> Problem | None:
    """The problem of which `partial` is asked as part of this one; None where it is not."""
    odd = problem.score_terms or problem.dropout_p or problem.pattern.holds_data
    if backend.partial is None or problem.scale <= 0 or odd:
        return None
    part = replace(problem, return_lse=True, strides=CONTIGUOUS, has_seq_lens=False, has_key_mask=problem.masked)
    return None if refusals_of(backend, part) else part


def partial_failures(backend: Any, problem: Problem) -> list[str]:
    """What is wrong with the passes of `problem_of_partial`, whose queries see some keys more.

    Every other query sees no key but the part's, so that lse over all keys is infinite for those that see none of it.
    """
    batch, q_len, heads, own = problem.batch, problem.q_len, problem.heads, problem.k_len
    example = make(replace(problem, k_len=own + OTHER_KEYS, has_key_mask=False, pattern=Dense()))
    seen = make(problem).masks.get("key_mask")
    counts = problem.pattern.multiplicity(q_len, own, heads, key_mask=seen, device=problem.device)
    counts = counts.expand(batch, heads, q_len, own)
    others = torch.zeros(q_len, OTHER_KEYS, dtype=counts.dtype, device=problem.device)
    others[::2] = 1
    oracle = _oracle(example, torch.cat((counts, others.expand(batch, heads, -1, -1)), -1))
    q, k, v = (x.detach() for x in (example.q, example.k, example.v))
    keys, values = (double(x[:, own:]).repeat_interleave(heads // problem.kv_heads, 2) for x in (k, v))
    passes, others = backend.partial(problem, seen), exactly(others)
    with torch.no_grad():
        part_out, part_lse = passes.forward(q, k[:, :own], v[:, :own])
        failures = [
            f"forward gave {name} {list(x.shape)}, not {list(shape)}"
            for name, x, shape in (("out", part_out, q.shape), ("lse", part_lse, (batch, heads, q_len)))
            if tuple(x.shape) != tuple(shape)
        ]
        if failures:
            return failures
        out, lse = formula.formula(double(q), keys, values, others, problem.scale)
        lse = lse.transpose(1, 2).contiguous()
        merge_(out, lse, double(part_out), double(part_lse).transpose(1, 2))
        lse = lse.transpose(1, 2)
        found = {"out": out.to(q), "lse": lse.to(problem.device, sum_dtype(problem.dtype))}
        if oracle.grad is not None:
            whole = lse.masked_fill(lse == -math.inf, math.inf)
            saved = q, k[:, :own], v[:, :own], found["out"], whole.to(found["lse"])
            dq, dk, dv = passes.backward(oracle.grad, oracle.grad_lse, saved)[:3]
            more = _dq_of(oracle, q, keys, values, others, out, whole)
            known = [oracle.expected[name].value[:, own:].to(problem.dtype) for name in ("dk", "dv")]
            found["dq"] = (double(dq) + more).to(problem.dtype)
            for name, x, rest in zip(("dk", "dv"), (dk, dv), known, strict=True):
                found[name] = torch.cat((exactly(x).to(problem.dtype), rest), 1)
        return list(oracle.check(found).failures)


def _dq_of(oracle: Oracle, q: Tensor, keys: Tensor, values: Tensor, counts: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The part of dq, in float64, that comes from some keys, with out and lse over all keys."""
    assert oracle.grad is not None
    assert oracle.grad_lse is not None
    scale, grad = oracle.example.problem.scale, double(oracle.grad)
    scores = torch.einsum("bqhd,bkhd->bhqk", double(q) * scale, keys)
    weights = counts * (scores - lse[..., None]).exp()
    of_weights = torch.einsum("bqhd,bkhd->bhqk", grad, values)
    of_rows = double(oracle.grad_lse) - (grad * out).sum(-1).transpose(1, 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights * (of_weights + of_rows[..., None]), keys) * scale


def problem_of_documents(backend: Backend, problem: Problem) -> Problem | None:
    """The problem of packed rows with which `run_documents` is called for one like this; None where it is not."""
    common = problem.pattern.lengthened(1, 2) is not None and problem.q_len == problem.k_len
    common = common and not isinstance(problem.pattern, Form)  # documents cut the intervals of these
    if backend.run_documents is None or not common or problem.bias or problem.dropout_p:
        return None
    rows = replace(problem, has_seq_lens=False, is_document=True)
    return None if refusals_of(backend, rows) or not backend.takes_documents(rows) else rows


def documents_failures(backend: Any, problem: Problem) -> list[str]:
    """What is wrong with the results of `problem_of_documents`, of documents of several lengths."""
    first = (problem.q_len + 1) // 2
    rest = problem.q_len - first  # a single token, where there is room, and the others
    lengths = tuple(length for length in (first, min(1, rest), rest - 1) if length > 0)
    example = make(problem)
    shape = (problem.batch, problem.heads, problem.q_len, problem.q_len)
    counts, start = torch.zeros(shape, dtype=torch.int32, device=problem.device), 0
    for length in lengths:
        inside = slice(start, start := start + length)
        some = problem.pattern.multiplicity(length, length, problem.heads, device=problem.device)
        counts[:, :, inside, inside] = some
    return _failures(backend, problem, example, counts, partial(backend.run_documents, lengths=lengths))


def problem_of_key_lens(backend: Backend, problem: Problem) -> Problem | None:
    """The problem of which `takes_key_lens` is asked for one like this; None where it is not, or is false."""
    rows = replace(problem, batch=len(PARTS), needs_grad=False, bias_needs_grad=False, has_seq_lens=False)
    odd = problem.bias or problem.alibi_axes or problem.dropout_p or problem.pattern.holds_data
    takes = None if odd or refusals_of(backend, rows) else backend.takes_key_lens
    return rows if takes is not None and takes(rows) else None


def key_lens_failures(backend: Any, problem: Problem) -> list[str]:
    """What is wrong with the results of rows with none of the keys, some and all; NaN is in what nothing sees."""
    q_len, k_len, heads, device = problem.q_len, problem.k_len, problem.heads, problem.device
    lengths = torch.tensor([math.ceil(part * k_len) for part in PARTS], device=device)
    counts = torch.zeros(problem.batch, heads, q_len, k_len, dtype=torch.int32, device=device)
    for row, length in zip(counts, lengths.clamp(0, k_len).tolist()):
        some = problem.pattern.multiplicity(q_len, max(1, length), heads, device=device)
        row[..., :length] = some[..., :length]
    unseen = ~counts.any(2).any(1)[..., None, None]

    def run(q: Tensor, k: Tensor, v: Tensor, *given: Problem, **masks: Tensor) -> Any:
        k, v = (x.masked_fill(unseen, math.nan) for x in (k, v))
        return backend.run(q, k, v, *given, key_lens=lengths.int() if k_len % 2 else lengths, **masks)

    return _failures(backend, problem, make(problem), counts, run)


def _failures(backend: Any, problem: Problem, example: Example, counts: Tensor, run: Any) -> list[str]:
    """What is wrong with what `run` makes of an example whose queries see keys so often, but for its masks."""
    given, seen = {name: x for name, x in example.masks.items() if name != "bias"}, example.masks.get("key_mask")
    oracle = _oracle(example, counts if seen is None else counts * seen[:, None, None])
    of_dense = SimpleNamespace(run=lambda q, k, v, dense, **tensors: run(q, k, v, problem, **given))
    with nan_memory(problem, in_torch=backend.first_call_ms is None):
        found = oracle.run(adapted(of_dense))
    return list(oracle.check(found).failures)


def _oracle(example: Example, counts: Tensor) -> Oracle:
    """The expected results of a row whose queries see keys so often, besides what the example's score terms are."""
    dense = replace(example.problem, pattern=Dense(), has_key_mask=False, is_document=False)
    dense = replace(dense, bias=tuple(counts.shape[:2]))
    masks = {name: x for name, x in example.masks.items() if name != "key_mask"}
    return Oracle.of(replace(example, problem=dense, masks={**masks, "bias": double(counts).log()}))


def problem_of_specialized(backend: Backend, problem: Problem) -> Problem | None:
    """The problem of which `specialized` is asked, without gradients unless it takes them; None where it is not."""
    forward = replace(problem, needs_grad=backend.specialized_trains and problem.needs_grad, bias_needs_grad=False)
    return forward if asks_specialized(backend, forward) and not refusals_of(backend, forward) else None


def specialized_failures(backend: Any, problem: Problem) -> list[str]:
    """Where its functions do otherwise than `run`, also for other tensors than those that they were made for."""
    example = make(problem)
    inputs = tuple(x.requires_grad_(problem.needs_grad) for x in (example.q, example.k, example.v))
    failures: list[str] = []
    for heads_first, axes in ((False, ""), (True, "heads first: ")):
        call = specialized(backend, NATURAL, problem, _of_axes(inputs, heads_first), heads_first=heads_first)
        results = []
        if call is None:
            continue
        for other, given in (("", inputs), ("for other tensors ", tuple(map(_halved, inputs)))):
            with nan_memory(problem, in_torch=backend.first_call_ms is None):
                result = call(*_of_axes(given, heads_first), problem)
            expected = backend.run(*given, problem)
            failures += [f"{axes}{other}{each}" for each in _differences(result, expected, problem, heads_first)]
            if problem.needs_grad and not failures:
                grads = (gradients(_pair(x)[:1], given, _pair(x)[:1]) for x in (result, expected))
                wrong = [name for name, x, y in zip("qkv", *grads) if not torch.equal(x, y)]
                failures += [f"{axes}{other}{name} differs" for name in wrong]
            results += [(x, x.clone()) for x in _pair(result) if x is not None]
        if not all(torch.equal(x, known) for x, known in results):
            failures.append(f"{axes}a second call changed the result of the first")
    return failures


def _pair(result: Any) -> tuple[Any, Any]:
    return result if isinstance(result, tuple) else (result, None)


def _of_axes(inputs: tuple[Tensor, ...], heads_first: bool) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in inputs) if heads_first else inputs


def _halved(x: Tensor) -> Tensor:
    """A tensor of the same strides and offset in other memory, with -x/2 in it and what lies around it."""
    memory = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()) * -0.5
    return memory.as_strided(x.shape, x.stride(), x.storage_offset()).requires_grad_(x.requires_grad)


def _differences(found: Any, expected: Any, problem: Problem, heads_first: bool) -> Iterator[str]:
    """How the result of a specialized function differs from that of `run`."""
    (out, lse), (known, known_lse) = _pair(found), _pair(expected)
    pairs = [("out", out, known.transpose(1, 2) if heads_first else known)]
    if problem.return_lse and lse is None:
        yield "lse was asked for and not returned"
    elif problem.return_lse:
        pairs.append(("lse", lse, known_lse))
    for name, x, y in pairs:
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"{name} is {list(x.shape)} of {x.dtype}, that of run {list(y.shape)} of {y.dtype}"
        elif not torch.equal(x, y):
            yield f"{name} differs from that of run by up to {float((double(x) - double(y)).abs().max()):.2e}"


CHECKS = {
    "partial": (problem_of_partial, partial_failures),
    "run_documents": (problem_of_documents, documents_failures),
    "takes_key_lens": (problem_of_key_lens, key_lens_failures),
    "specialized": (problem_of_specialized, specialized_failures),
}  #: of each optional member: the problem to ask of it, and what is wrong with its results
