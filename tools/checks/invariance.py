"""Random rows, alone and in all that may be computed with them, held to the same bits.

    python -m tools.checks invariance --pairs 100000 --backend native

A pair is a row's out and lse alone and in one call with others: a batch, padded, packed, in parts or decoded, in 1, 2
or 3 threads.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch import Dense, Dilated, Window, attend, batch_invariant
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.tuning.invariance import THREADS, _threads

TAKES = "15 minutes"
HEAD_DIMS = (32, 40, 64, 80, 96, 128, 33)
LONG = 0.04  #: share of rows with more keys than a backend adds at once
Result = tuple[Tensor, Tensor]


class Pair(NamedTuple):
    """Tensors of one row alone, and of the same in a call with others."""

    what: str
    alone: tuple[Tensor, ...]
    found: tuple[Tensor, ...]

    def differing(self) -> int:
        """Bits that differ."""
        return sum(_differing(x, y) for x, y in zip(self.alone, self.found, strict=True))


def _differing(x: Tensor, y: Tensor) -> int:
    if x.shape != y.shape or x.dtype != y.dtype:
        return 8 * max(x.nbytes, y.nbytes)
    x, y = (each.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for each in (x, y))
    if torch.equal(x, y):
        return 0
    changed = x ^ y
    return sum(int((changed >> bit & 1).sum()) for bit in range(8))


class Row:
    """A row with a pattern and what is done to its scores, drawn by a seed."""

    def __init__(self, seed: int, backend: str | None) -> None:
        self.draw = draw = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        self.head_dim, self.kv_heads, group = draw.choice(HEAD_DIMS), draw.randint(1, 3), draw.choice((1, 1, 2, 4, 8))
        self.heads = self.kv_heads * group
        self.tokens = draw.randint(1, 300)
        if draw.random() < LONG:
            self.tokens, self.kv_heads, self.heads = draw.randint(700, 2500), 1, group
        self.pattern = self.some_pattern()
        self.more: dict[str, Any] = {"backend": backend, "return_lse": True}
        self.bias: Tensor | None = None
        match draw.randint(0, 9):
            case 0:
                self.more["softcap"] = 20.0
            case 1:
                self.more["alibi_slopes"] = torch.rand(self.heads, generator=self.generator)
            case 2:
                self.bias = torch.randn(1, self.heads, self.tokens, self.tokens, generator=self.generator)
        if draw.random() < 0.2:
            self.more["sink"] = torch.randn(self.heads, generator=self.generator)
        if draw.random() < 0.2:
            self.more["scale"] = draw.choice((-0.3, 0.5))
        self.qkv = self.tensors(1, self.tokens)

    def some_pattern(self) -> Pattern:
        draw = self.draw
        left, right = draw.randint(0, self.tokens), draw.randint(0, self.tokens)
        longnet = Dilated((16, 64), (1, 2), is_causal=True)
        windows = Window(left, 0), Window(left, right), Window(left, 0, sinks=draw.randint(1, 5))
        return draw.choice((Dense(), Dense(is_causal=True), Dense(is_causal=True), *windows, longnet))

    @property
    def is_causal(self) -> bool:
        return getattr(self.pattern, "is_causal", False) or getattr(self.pattern, "right", None) == 0

    def tensors(self, batch: int, tokens: int) -> list[Tensor]:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        shapes = ((batch, tokens, each, self.head_dim) for each in heads)
        return [torch.randn(shape, generator=self.generator).to(self.dtype) for shape in shapes]

    def attend(
        self, qkv: list[Tensor], first: int = 0, part: tuple[int, int] | None = None, **arguments: Any
    ) -> Result:
        """The call, where the row begins `first` tokens after others, or of some queries with all keys before."""
        if self.bias is not None:
            after = 0 if part else qkv[0].shape[1] - first - self.tokens
            some = self.bias[:, :, slice(*part), : part[1]] if part else self.bias
            arguments["bias"] = pad(some, (first, after, first, after)).to(self.dtype)
        q, k, v = qkv
        with _threads(self.draw.choice(THREADS)):
            out, lse = attend(q, k, v, self.pattern, **self.more, **arguments)
        return out, lse

    def pairs(self) -> Iterator[Pair]:
        """Every situation that the pattern allows."""
        n, draw = self.tokens, self.draw
        alone = self.attend(self.qkv)

        def pair(what: str, found: Result, b: int = 0, first: int = 0, part: tuple[int, int] = (0, n)) -> Pair:
            out, lse = found
            last = first + part[1] - part[0]
            rows = alone[0][:, slice(*part)], alone[1][:, :, slice(*part)]
            return Pair(what, rows, (out[b : b + 1, first:last], lse[b : b + 1, :, first:last]))

        yield pair("threads", self.attend(self.qkv))
        others = self.tensors(draw.randint(1, 4), n)
        b = draw.randint(0, len(others[0]))
        batch = [torch.cat([x[:b], own, x[b:]]) for own, x in zip(self.qkv, others)]
        yield pair("batch", self.attend(batch), b)
        more = draw.randint(1, 100)
        wide = [
            torch.cat([x, pad(own, (0, 0, 0, 0, 0, more), value=1.0)])
            for own, x in zip(self.qkv, self.tensors(1, n + more))
        ]
        yield pair("seq_lens", self.attend(wide, seq_lens=torch.tensor([n + more, n])), 1)
        seen = torch.ones(2, n + more, dtype=torch.bool)
        seen[1, n:] = False
        yield pair("key_mask", self.attend(wide, key_mask=seen), 1)
        if isinstance(self.pattern, Dense | Window) and not getattr(self.pattern, "sinks", 0):
            wide = [x.roll(more, 1) for x in wide]
            yield pair("key_mask, on the left", self.attend(wide, more, key_mask=seen.roll(more, 1)), 1, more)
        before, after = draw.randint(1, 90), draw.randint(1, 90)
        packed = [torch.cat(each, 1) for each in zip(self.tensors(1, before), self.qkv, self.tensors(1, after))]
        starts = torch.tensor([0, before, before + n, before + n + after])
        yield pair("packed", self.attend(packed, before, cu_seqlens=starts), 0, before)
        for last in {n, draw.randint(1, n), draw.randint(1, n)} if self.is_causal else {n}:
            for count in {1, min(last, draw.randint(1, 16)), draw.randint(1, last)}:
                part = last - count, last
                qkv = [self.qkv[0][:, slice(*part)], *(x[:, :last] for x in self.qkv[1:])]
                yield pair("decoded" if count == 1 else "part", self.attend(qkv, part=part), part=part)
                if draw.random() < 0.5:
                    both = [torch.cat([x, x.flip(1)]) for x in qkv]
                    yield pair("part in a batch", self.attend(both, part=part), part=part)


def count(pairs: int, backend: str | None, first_seed: int = 0) -> tuple[Counter[str], list[str]]:
    """How many pairs of each kind were compared, and a line for each that differs."""
    found, wrong, seed = Counter[str](), list[str](), first_seed
    with batch_invariant():
        while found.total() < pairs:
            row = Row(seed, backend)
            for pair in row.pairs():
                found[pair.what] += 1
                if bits := pair.differing():
                    what = f"{row.pattern} {row.dtype} [{row.tokens}, {row.heads}, {row.head_dim}]"
                    wrong.append(f"seed {seed}, {pair.what}: {bits} bits of {what} {sorted(row.more)}")
            seed += 1
    return found, wrong


def main() -> None:
    """Compare, and print what differs."""
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=100_000)
    options.add_argument("--backend", default="native")
    options.add_argument("--seed", type=int, default=0, help="of the first row")
    given = options.parse_args()
    found, wrong = count(given.pairs, given.backend, given.seed)
    print(*wrong, sep="\n")
    kinds = ", ".join(f"{number} {what}" for what, number in sorted(found.items()))
    print(f"{len(wrong)} of {found.total()} pairs differ ({kinds})")
    sys.exit(bool(wrong))
