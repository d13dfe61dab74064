"""Random calls of attend() over all arguments, and what should come out of them: in float64, by the definition.

Tensors lie at odd addresses and in unusual strides, are huge, tiny or empty; what no query sees may be NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.spec.data import Blocks, DataPattern, Ranges
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.testing.drawn import random_pattern

PRIVATE: Any = torch  #: for names that type checkers do not know
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDINGS = 8  #: of an entry, on its way from inputs to results: scores, weights, sums, products and what is stored


def with_steps(x: Tensor) -> Tensor:
    """Every other entry of each axis of a tensor; between them lie NaN, zeros, or False."""
    for axis in range(x.ndim):
        gaps = torch.full_like(x, math.nan if x.is_floating_point() else 0)
        x = torch.stack((x, gaps), axis + 1).flatten(axis, axis + 1)
    return x[(slice(None, None, 2),) * x.ndim]


def one_entry_on(x: Tensor) -> Tensor:
    """At an address that 16 does not divide."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


def reversed_axes(x: Tensor) -> Tensor:
    axes = list(reversed(range(x.ndim)))
    return x.permute(axes).contiguous().permute(axes)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "steps": with_steps,
    "odd address": one_entry_on,
    "reversed axes": reversed_axes,
    "expanded": lambda x: x[:1].expand(x.shape),
    "negative": lambda x: PRIVATE._neg_view(-x) if x.is_floating_point() else x,
}
PLAIN = "plain"  #: contiguous


@dataclass
class Call:
    """A call of attend(): its tensors and other arguments, in layout "bnhd"; gradients of out, and maybe of lse."""

    pattern: Pattern
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    grads: list[Tensor] = field(default_factory=list[Tensor])
    needing: tuple[str, ...] = ()  #: the tensors that need gradients
    counts: Tensor | None = None  #: of a pattern that holds tensors: see `random_data_pattern`

    def arguments(self) -> tuple[list[Tensor], dict[str, Any]]:
        """q, k, v and the keywords of attend(); the tensors that need gradients are leaves."""
        given = {name: x.detach().requires_grad_(name in self.needing) for name, x in self.tensors.items()}
        qkv = [given.pop(name) for name in "qkv"]
        return qkv, {**given, **self.options, "pattern": self.pattern, "return_lse": True}

    def results(self, attend: Callable[..., Any]) -> dict[str, Tensor]:
        """out, lse and gradients, by the names of the tensors."""
        qkv, keywords = self.arguments()
        heads_first = self.options.get("layout") == "bhnd"
        inputs = [x.transpose(1, 2) for x in qkv] if heads_first else qkv
        out, lse = attend(*inputs, **keywords)
        out = out.transpose(1, 2) if heads_first else out
        found = {"out": out, "lse": lse}
        if self.needing:
            leaves = [dict(zip("qkv", qkv), **keywords)[name] for name in self.needing]
            results = [out, lse][: len(self.grads)]
            grads = [self.grads[0], *[g.masked_fill(lse == -math.inf, 0.0) for g in self.grads[1:]]]
            found.update(zip(self.needing, torch.autograd.grad(results, leaves, grads, allow_unused=True)))
        return {name: x.detach() for name, x in found.items() if x is not None}


# --- what is drawn ----------------------------------------------------------------------------------------------------


def random_call(rng: Random, dtype: torch.dtype, longest: int = 40) -> Call:
    """A valid one. Scores are below 1e4, and what is computed of them below the largest float16."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    q_len, k_len = _lengths(rng, longest)
    batch, kv_heads, head_dim = rng.choice([0, *[1] * 5, *[2] * 5, 3]), rng.choice([1, 1, 2, 3]), rng.randint(1, 20)
    heads, width = kv_heads * rng.choice([1, 1, 2, 4]), rng.choice([head_dim] * 4 + [rng.randint(1, 20)])
    size = _sizes(rng, dtype)

    def drawn(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * factor).to(dtype)

    tensors = {
        "q": drawn(batch, q_len, heads, head_dim, factor=size["scores"]),
        "k": drawn(batch, k_len, kv_heads, head_dim),
        "v": drawn(batch, k_len, kv_heads, width, factor=size["values"]),
    }
    if rng.random() < 0.1:
        tensors["q"][:, rng.randint(0, q_len) :] = 0
    call = Call(random_pattern(rng, q_len, k_len) if q_len and k_len else Dense(rng.random() < 0.5), tensors, {})
    if q_len and k_len and rng.random() < 0.3:
        call.pattern, call.counts = random_data_pattern(rng, generator, batch, q_len, k_len, (kv_heads, heads))
    _add_masks(rng, generator, call)
    _add_terms(rng, drawn, call)
    _add_options(rng, call)
    if rng.random() < 0.5:
        out = drawn(batch, q_len, heads, width)
        wide = dtype if dtype == torch.float64 else torch.float32
        call.grads = [out, drawn(batch, heads, q_len).to(wide)][: rng.choice([1, 2])]
        call.needing = tuple(name for name in ("q", "k", "v", "bias", "sink") if name in tensors and rng.random() < 0.8)
    for name, x in tensors.items():
        layout = rng.choice([PLAIN, PLAIN, *LAYOUTS])
        tensors[name] = x if layout == PLAIN or (layout == "expanded" and name not in "qkv") else LAYOUTS[layout](x)
    if rng.random() < 0.3:
        _hide_nan(call)
    return call


def random_data_pattern(
    rng: Random, generator: torch.Generator, batch: int, q_len: int, k_len: int, heads: tuple[int, int]
) -> tuple[DataPattern, Tensor]:
    """One that holds tensors, of any dtype and layout; and how often each query sees each key, by its definition:
    [1 or batch, 1 or heads, q_len, k_len].
    """
    rows, kind, keys = rng.choice([1, batch]), rng.choice([torch.int32, torch.int64]), torch.arange(k_len)

    def drawn(low: int, high: int, *shape: int) -> Tensor:
        return laid(torch.randint(low, high + 1, shape, generator=generator).to(kind))

    def laid(x: Tensor) -> Tensor:
        name = rng.choice([PLAIN, *LAYOUTS])
        return LAYOUTS[name](x) if name != PLAIN and x.numel() else x

    if q_len == k_len and rng.random() < 0.2:
        ids, left, is_causal = drawn(0, 1, rows, q_len).cumsum(1), rng.choice([None, 0, 5, 50]), rng.random() < 0.5
        ids = laid(torch.where(ids % 3 == 0, -1, 5 * ids - 10))
        same = (ids[:, :, None] == ids[:, None]) & (ids != -1)[:, None]
        window = Window(left, 0 if is_causal else left).multiplicity(q_len)
        return Ranges.spans(ids, is_causal, left), (same | (window > 0))[:, None].long()
    if rng.random() < 0.4:
        shape = (rows, *rng.choice([(), (1,), (2,), (3,)]), q_len)
        first, length = drawn(-5, k_len + 4, *shape), drawn(-3, rng.choice([0, 5, k_len, 2**31 - 100]), *shape)
        last = laid(first + length)
        seen = (first[..., None] <= keys) & (keys <= last[..., None])
        return Ranges(first, last), (seen if seen.ndim == 4 else seen[:, None]).sum(1, keepdim=True)
    size = rng.choice([1, 2, 16, 37, 64, rng.randint(1, 256)]), rng.choice([1, 3, 8, 32, 128, rng.randint(1, 256)])
    blocks, tables = [-(-n // block) for n, block in zip((q_len, k_len), size)], rng.choice([1, *heads])
    if rng.random() < 0.5:
        table = drawn(-1, blocks[1] - 1, rows, tables, blocks[0], rng.randint(0, 2 * blocks[1]))
        counts = (table[..., None] == torch.arange(blocks[1])).sum(3)
    else:
        share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        table = laid(torch.rand(rows, tables, *blocks, generator=generator) < share)
        counts = table.long()
    within = rng.choice([None, None, Dense(is_causal=True), Window(rng.randint(0, 20), rng.choice([None, 0, 9]))])
    counts = counts[:, :, torch.arange(q_len)[:, None] // size[0], keys // size[1]].repeat_interleave(heads[1] // tables, 1)
    return Blocks(table, size, within), counts if within is None else counts * within.multiplicity(q_len, k_len)


def _lengths(rng: Random, longest: int) -> tuple[int, int]:
    q_len = rng.choice([0, 1, *[rng.randint(1, longest) for _ in range(12)]])
    return q_len, rng.choice([q_len, q_len, rng.randint(q_len, longest), rng.randint(rng.randint(0, 1), longest)])


def _sizes(rng: Random, dtype: torch.dtype) -> dict[str, float]:
    values = {torch.float16: (1e-3, 1.0, 100.0)}.get(dtype, (1e-30, 1.0, 1e6))
    return {"scores": rng.choice([0.0, 1e-6, 1.0, 1.0, 1.0, 30.0, 300.0]), "values": rng.choice([*values, 1.0])}


def _add_masks(rng: Random, generator: torch.Generator, call: Call) -> None:
    batch, q_len, k_len = len(call.tensors["q"]), call.tensors["q"].shape[1], call.tensors["k"].shape[1]
    kind = rng.choice(["", "", "", "seq_lens", "documents", "cu_seqlens", "key_lens", "upper_left"])
    packs = isinstance(call.pattern, Dense | Window | Dilated | Ranges) and q_len == k_len
    fills = isinstance(call.pattern, Dense | Window | Ranges) or getattr(call.pattern, "within", None) == Dense()

    def counts(low: int, high: int, size: int) -> Tensor:
        kind = rng.choice([torch.int32, torch.int64])
        return torch.randint(low, high + 1, (size,), generator=generator).to(kind)

    if kind == "seq_lens" and q_len == k_len:
        call.tensors["seq_lens"] = counts(0, q_len, batch)
    elif kind == "documents" and packs:
        call.tensors["documents"] = counts(0, 1, batch * q_len).view(batch, q_len).cumsum(1)
    elif kind == "cu_seqlens" and packs and batch == 1:
        inner = sorted(rng.randint(0, q_len) for _ in range(rng.randint(0, 3)))
        call.tensors["cu_seqlens"] = torch.tensor([0, *inner, q_len], dtype=rng.choice([torch.int32, torch.int64]))
    elif kind == "key_lens" and fills:
        call.tensors["key_lens"] = counts(0, k_len, batch)
    elif kind == "upper_left":
        call.pattern, call.counts = Dense(is_causal=True), None
    if kind == "upper_left" or (kind in ("documents", "cu_seqlens") and call.pattern == Dense(is_causal=True)):
        call.options["alignment"] = "upper_left"
    if rng.random() < 0.3:
        share = rng.choice([0.1, 0.5, 0.95])
        call.tensors["key_mask"] = torch.rand(batch, k_len, generator=generator) < share


def _add_terms(rng: Random, drawn: Callable[..., Tensor], call: Call) -> None:
    (batch, q_len, heads, _), k_len = call.tensors["q"].shape, call.tensors["k"].shape[1]
    if rng.random() < 0.15:
        call.options["softcap"] = rng.choice([0.5, 30.0])
    if rng.random() < 0.2 and k_len and batch:
        bias = drawn(rng.choice([1, batch]), rng.choice([1, heads]), q_len, k_len)
        if rng.random() < 0.5:
            bias[drawn(*bias.shape) > 0.8] = -math.inf
        call.tensors["bias"] = bias
    refused = call.counts is not None and "key_lens" in call.tensors
    if rng.random() < 0.15 and not (refused or (call.options.get("alignment") and q_len > k_len)):
        shape = rng.choice([(heads,), (batch, heads)])
        call.tensors["alibi_slopes"] = drawn(*shape).abs().float()
    if rng.random() < 0.15:
        call.tensors["sink"] = drawn(heads)


def _add_options(rng: Random, call: Call) -> None:
    heads = call.tensors["q"].shape[2]
    if rng.random() < 0.3:
        call.options["scale"] = rng.choice([0.0, round(rng.uniform(-1, 1), 3)])
    if rng.random() < 0.3:
        call.options["layout"] = "bhnd"
    if rng.random() < 0.1:
        first = rng.randint(0, 3)
        call.options |= {"first_head": first, "all_heads": first + heads + rng.randint(0, 3)}


def _hide_nan(call: Call) -> None:
    """Fill keys and values that no query sees, and padding queries, with NaN."""
    counts = counts_of(call)
    unseen = ~seen_keys(call, counts)
    for name in "kv":
        call.tensors[name] = call.tensors[name].masked_fill(unseen, math.nan)
    if "seq_lens" in call.tensors:
        padding = torch.arange(call.tensors["q"].shape[1]) >= call.tensors["seq_lens"][:, None]
        call.tensors["q"] = call.tensors["q"].masked_fill(padding[..., None, None], math.nan)


# --- the definition ---------------------------------------------------------------------------------------------------


def counts_of(call: Call) -> Tensor:
    """How often each query sees each key, masks counted in: [batch, heads, q_len, k_len]."""
    q, k = call.tensors["q"], call.tensors["k"]
    batch, heads = q.shape[0], q.shape[2]
    found = torch.zeros(batch, heads, q.shape[1], k.shape[1], dtype=torch.int64)
    first, every = call.options.get("first_head") or 0, call.options.get("all_heads") or heads
    for row, rows, keys in _documents(call):
        q_len, k_len = rows.stop - rows.start, keys.stop - keys.start
        if not (q_len and k_len):
            continue
        if call.options.get("alignment"):
            counts = torch.ones(q_len, k_len, dtype=torch.int64).tril()[None]
        elif call.counts is not None:
            counts = call.counts.expand(batch, heads, -1, -1)[row, :, rows, keys]
        else:
            heads_of = range(first, first + heads)
            counts = call.pattern.multiplicity(q_len, k_len, every, h_pos=heads_of)
        found[row, :, rows, keys] = counts
    if "seq_lens" in call.tensors:
        inside = torch.arange(q.shape[1]) < call.tensors["seq_lens"][:, None]
        found *= inside[:, None, :, None] & inside[:, None, None]
    if "key_mask" in call.tensors:
        found *= call.tensors["key_mask"][:, None, None]
    if "bias" in call.tensors:
        found *= call.tensors["bias"].detach() != -math.inf
    return found


def seen_keys(call: Call, counts: Tensor) -> Tensor:
    """Whether any query sees a key: bool [batch, k_len, kv_heads, 1]."""
    kv_heads = call.tensors["k"].shape[2]
    return grouped(counts.any(2), 1, kv_heads).any(2).mT[..., None]


def grouped(x: Tensor, axis: int, kv_heads: int) -> Tensor:
    """An axis of heads as two: key heads, and the heads of each."""
    return x.reshape(*x.shape[:axis], kv_heads, x.shape[axis] // kv_heads, *x.shape[axis + 1 :])


def _documents(call: Call) -> Iterator[tuple[int, slice, slice]]:
    """Each batch row's documents: its queries and its keys."""
    (batch, q_len), k_len = call.tensors["q"].shape[:2], call.tensors["k"].shape[1]
    for row in range(batch):
        if "key_lens" in call.tensors:
            yield row, slice(0, q_len), slice(0, int(call.tensors["key_lens"][row]))
        elif "documents" in call.tensors or "cu_seqlens" in call.tensors:
            if "documents" in call.tensors:
                changes = (call.tensors["documents"][row].diff() != 0).nonzero().flatten() + 1
                starts = [0, *changes.tolist(), q_len]
            else:
                starts = call.tensors["cu_seqlens"].tolist()
            for start, end in pairwise(starts):
                yield row, slice(start, end), slice(start, end)
        else:
            yield row, slice(0, q_len), slice(0, k_len)


def expected(call: Call) -> dict[str, tuple[Tensor, Tensor]]:
    """out, lse and gradients in float64, and the largest error of each entry of a correct result."""
    tensors = {name: x.detach().double() if x.is_floating_point() else x for name, x in call.tensors.items()}
    counts = counts_of(call)
    q, k, v = (tensors[name] for name in "qkv")
    group, scale = q.shape[2] // k.shape[2], call.options.get("scale")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    seen = counts.any(-1, keepdim=True)
    used = seen_keys(call, counts)
    q = q.where(seen.transpose(1, 2), torch.zeros(())) if "seq_lens" in tensors else q
    keys, values = (x.where(used, torch.zeros(()).double()).repeat_interleave(group, 2) for x in (k, v))
    plain = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    sizes = torch.einsum("bqhd,bkhd->bhqk", q.abs(), keys.abs()) * abs(scale)
    scores, slope, cap = plain, torch.ones_like(plain), call.options.get("softcap")
    if cap:
        scores = cap * torch.tanh(plain / cap)
        slope = 1 - torch.tanh(plain / cap).square()
    for added in _added(call, tensors, counts):
        scores, sizes = scores + added, sizes + added.abs()
    sink = tensors.get("sink")
    logs = torch.where(counts > 0, scores + counts.clamp(min=1).double().log(), -math.inf)
    parts = logs if sink is None else torch.cat((logs, sink.view(1, -1, 1, 1).expand(*logs.shape[:3], 1)), -1)
    lse = parts.logsumexp(-1) if parts.shape[-1] else torch.full(parts.shape[:3], -math.inf).double()
    p = (logs - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    out = torch.einsum("bhqk,bkhd->bqhd", p, values)
    bounds = {"out": torch.einsum("bhqk,bkhd->bqhd", p, values.abs()), "lse": 1 + lse.nan_to_num(neginf=0.0).abs()}
    found = {"out": out, "lse": lse}
    if call.needing:
        weights = [g.detach().double() for g in call.grads]
        terms = p, q, keys, values, out, scale, slope, call, lse
        found |= _gradients(weights, *terms)
        bounds |= _gradients([g.abs() for g in weights], *terms, bounds=True)
    eps, wide = torch.finfo(call.tensors["q"].dtype).eps, torch.finfo(torch.float32).eps
    if call.tensors["q"].dtype == torch.float64:
        wide = eps
    most = float(sizes.where(counts > 0, torch.zeros(()).double()).max()) if counts.any() else 0.0
    rounding = eps + wide * (q.shape[3] + k.shape[1] + 2 * most)
    # What is smaller than any normal number may be 0, in each term of a sum.
    largest = 1 + max((float(x.abs().max()) for x in (q, keys, values, *call.grads) if x.numel()), default=0.0)
    tiny = torch.finfo(call.tensors["q"].dtype).tiny * largest * (1 + q.shape[1] * group + k.shape[1])
    names = [name for name in found if name in ("out", "lse", *call.needing)]
    return {name: (found[name], ROUNDINGS * rounding * bounds[name] + tiny) for name in names}


def _added(call: Call, tensors: dict[str, Tensor], counts: Tensor) -> Iterator[Tensor]:
    if "bias" in tensors:
        yield tensors["bias"].where(tensors["bias"] != -math.inf, torch.zeros(()).double())
    if "alibi_slopes" in tensors:
        slopes = tensors["alibi_slopes"]
        distance = torch.zeros(counts.shape[0], 1, *counts.shape[2:], dtype=torch.float64)
        for row, rows, keys in _documents(call):
            lengths = rows.stop - rows.start, keys.stop - keys.start
            offset = 0 if call.options.get("alignment") else lengths[1] - lengths[0]
            at = torch.arange(lengths[0])[:, None] + offset - torch.arange(lengths[1])
            distance[row, 0, rows, keys] = at.abs().double()
        yield -slopes.view(-1, slopes.shape[-1], 1, 1) * distance


def _gradients(
    given: list[Tensor], p: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float, slope: Tensor,
    call: Call, lse: Tensor, *, bounds: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """The gradients by the formula; for `bounds` with every product's absolute value."""
    if bounds:
        q, keys, values, out, scale = q.abs(), keys.abs(), values.abs(), out.abs(), abs(scale)
        slope = torch.ones_like(slope)  # 1 - tanh^2 loses digits near 0
    kv_heads = call.tensors["k"].shape[2]
    products = torch.einsum("bqhd,bkhd->bhqk", given[0], values)
    sums = torch.einsum("bqhd,bqhd->bhq", given[0], out)
    of_lse = given[1].masked_fill(lse == -math.inf, 0.0) if len(given) > 1 else torch.zeros_like(sums)
    ds = p * (products + (sums if bounds else -sums)[..., None] + of_lse[..., None])
    inner = ds * slope
    found = {
        "q": torch.einsum("bhqk,bkhd->bqhd", inner, keys) * scale,
        "k": grouped(torch.einsum("bhqk,bqhd->bkhd", inner, q), 2, kv_heads).sum(3) * scale,
        "v": grouped(torch.einsum("bhqk,bqhd->bkhd", p, given[0]), 2, kv_heads).sum(3),
    }
    if "bias" in call.tensors:
        found["bias"] = ds.sum_to_size(call.tensors["bias"].shape)
    if "sink" in call.tensors:
        share = (call.tensors["sink"].detach().double().view(1, -1, 1) - lse).exp()
        found["sink"] = (share * ((sums if bounds else -sums) + of_lse)).sum((0, 2))
    return found


def failures(call: Call, attend: Callable[..., Any]) -> list[str]:
    """What is wrong with the results of a call."""
    found, wanted = call.results(attend), expected(call)
    texts = []
    for name, (value, tolerance) in wanted.items():
        given = found.get(name, torch.zeros_like(value)).double()
        if given.shape != value.shape:
            texts.append(f"{name} has shape {list(given.shape)}, not {list(value.shape)}")
            continue
        same = (given == value) | ((given - value).abs() <= tolerance)
        if not same.all():
            worst = (given - value).abs().sub(tolerance).masked_fill(same, -math.inf).nan_to_num(nan=math.inf).argmax()
            pair = given.flatten()[worst], value.flatten()[worst], tolerance.expand_as(value).flatten()[worst]
            is_, should, error = map(float, pair)
            texts.append(f"{name}: {is_:.6g}, not {should:.6g} +- {error:.2g}; {int((~same).sum())} are wrong")
    return texts


def title(call: Call) -> str:
    """The call, to be found again."""
    tensors = ", ".join(f"{name} {list(x.shape)}" for name, x in call.tensors.items())
    return f"{call.tensors['q'].dtype} {call.pattern}, {tensors}, {call.options}, gradients of {call.needing}"
