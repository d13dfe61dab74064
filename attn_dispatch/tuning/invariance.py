"""The check that admits a backend to calls that ask for batch invariance: rows of small problems of a family have
the same bits alone, in a batch, padded, packed, in parts and decoded, in one thread and in several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import gradients
from attn_dispatch.kernels.contract import Backend, refusals_of, runner
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.problem import CONTIGUOUS, Problem
from attn_dispatch.spec.tensors import stride_class
from attn_dispatch.tuning.hard_cases import EVEN, fitted

TOKENS, PADDING = 333, 45  #: of a row, multiples of no tile
LONG = 1700  #: keys, which a backend may split between threads
QUERIES = 70  #: at the end of LONG keys
WINDOW, SINKS = 150, 4
SOFTCAP = 20.0
GROUP = 4  #: query heads for each head of k and v, where a problem has several
PARTS = ((0, 7), (131, 200), (264, 333))  #: queries of a row that are computed with the keys before them
DECODED = (0, 15, 64, 191, 192, 300, 332)
THREADS = (1, 2, 3)
LENGTHS = (57, TOKENS, 31)  #: of documents in a row

Bits = tuple[Tensor, ...]


def family_of(problem: Problem) -> Problem | None:
    """The problem whose variants stand for all like this one, whatever their lengths, batch and masks; None for
    those that no check covers.
    """
    if problem.dropout_p or problem.ranks > 1 or isinstance(problem.pattern, Form):
        return None
    return _family(replace(problem, given=None)) if problem.pattern.natural is problem.pattern else None


def _is_band(pattern: Pattern) -> bool:
    """Whether it has no segments and no grid: `Dense` or `Window`."""
    return not (pattern.branches or pattern.axes)


@lru_cache(4096)
def _family(problem: Problem) -> Problem:
    pattern, heads, kv_heads = problem.pattern, problem.heads, problem.kv_heads
    tokens = EVEN if pattern.axes else TOKENS
    if _is_band(pattern):  # one family: of one query, each is the same as another
        pattern = Window(WINDOW, 0, SINKS) if getattr(pattern, "sinks", 0) else Dense(is_causal=True)
        kv_heads, heads = 2, 2 if heads == kv_heads else 2 * GROUP
    else:
        pattern = fitted(pattern, tokens).simplify(tokens, tokens, heads)
    return replace(
        problem,
        pattern=pattern,
        batch=1,
        q_len=tokens,
        k_len=tokens,
        heads=heads,
        kv_heads=kv_heads,
        scale=problem.head_dim**-0.5,
        softcap=SOFTCAP if problem.softcap else 0.0,
        return_lse=True,
        has_seq_lens=False,
        has_key_mask=False,
        strides=CONTIGUOUS,
        bias=(1, heads if problem.bias[1] > 1 else 1) if problem.bias else (),
        bias_needs_grad=False,
        alibi_axes=min(1, problem.alibi_axes),
        is_document=False,
    )


class Refused(Exception):
    """A backend does not take a variant."""


def difference(backend: Backend, family: Problem) -> str:
    """What gives a row of this family other bits than it has alone; empty if nothing does."""
    patterns: list[Pattern] = [family.pattern]
    if _is_band(family.pattern):
        patterns += [Dense(), Window(WINDOW, 0), Window(WINDOW, WINDOW)]
    for pattern in patterns:
        try:
            for what, found, expected in _Variants(backend, family, pattern).all():
                if not all(_same_bits(*each) for each in zip(found, expected, strict=True)):
                    return f"gives a row of {pattern} other bits {what}"
        except Refused as error:
            return f"takes no variant of {pattern} that a row may be in: {error}"
    return ""


def _same_bits(x: Tensor, y: Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.contiguous().view(whole), y.contiguous().view(whole))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Variants:
    backend: Backend
    family: Problem
    pattern: Pattern

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        pattern, grid = self.pattern, bool(self.pattern.axes)
        self.grows = not grid and (getattr(pattern, "is_causal", False) or getattr(pattern, "right", None) == 0)
        self.pads = not grid
        self.slopes = torch.rand(self.family.heads, generator=self.generator).to(self.family.device)

    def drawn(self, batch: int, queries: int, keys: int) -> list[Tensor]:
        """q, k, v and the gradient of out."""
        family, found = self.family, []
        for rows, heads in ((queries, family.heads), *2 * [(keys, family.kv_heads)], (queries, family.heads)):
            x = torch.randn(batch, rows, heads, family.head_dim, generator=self.generator)
            found.append(x.to(family.device, family.dtype))
        return found

    def bias(self, queries: int, keys: int) -> Tensor | None:
        if not self.family.bias:
            return None
        drawn = torch.randn(*self.family.bias, queries, keys, generator=self.generator)
        return drawn.to(self.family.device, self.family.dtype)

    def call(
        self, given: list[Tensor], bias: Tensor | None, lengths: tuple[int, ...] | None = None, **tensors: Tensor
    ) -> Bits:
        """out, lse and, for problems with gradients of all keys' queries, dq, dk and dv."""
        (q, k, v, grad), family = given, self.family
        batch, (q_len, k_len) = len(q), (x.shape[1] for x in (q, k))
        tensors |= {} if bias is None else {"bias": bias}
        tensors |= {"alibi_slopes": self.slopes} if family.alibi_axes else {}
        own = [stride_class(tuple(x.shape), x.stride(), x.element_size()) for x in (q, k, v)]
        problem = replace(
            family,
            pattern=self.pattern
            if getattr(self.pattern, "sinks", 0)
            else self.pattern.simplify(q_len, k_len, family.heads),
            batch=batch,
            q_len=q_len,
            k_len=k_len,
            strides=(own[0], own[1], own[2]),
            has_seq_lens="seq_lens" in tensors,
            has_key_mask="key_mask" in tensors,
            needs_grad=family.needs_grad and q_len == k_len,
        )
        if why := refusals_of(self.backend, problem):
            raise Refused(f"{problem}: {'; '.join(map(str, why))}")
        run = runner(self.backend, NATURAL, problem, None if tensors or lengths else (q, k, v))
        if lengths is not None and self.backend.run_documents is not None:
            run = partial(self.backend.run_documents, lengths=lengths)
        if not problem.needs_grad:
            with torch.no_grad():
                return tuple(run(q, k, v, problem, **tensors))
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out, lse = run(*inputs, problem, **tensors)
            return out.detach(), lse.detach(), *gradients((out,), inputs, (grad,))

    def all(self) -> Iterator[tuple[str, Bits, Bits]]:
        """What is done with a row, its tensors then, and its tensors alone."""
        tokens = self.family.q_len
        alone, bias = self.drawn(1, tokens, tokens), self.bias(tokens, tokens)
        whole = self.call(alone, bias)
        yield from self.in_threads(lambda: self.call(alone, bias), whole)
        others = self.drawn(2, tokens, tokens)
        batch = [torch.cat([other[:1], x, other[1:]]) for x, other in zip(alone, others)]
        yield "in a batch", _rows(self.call(batch, bias), 1, 0, tokens), whole
        if self.pads:
            yield from self.padded(alone, bias, whole)
        if self.pads and bias is None and self.backend.run_documents is not None:
            before, after = (self.drawn(1, length, length) for length in (LENGTHS[0], LENGTHS[2]))
            packed = [torch.cat(each, 1) for each in zip(before, alone, after)]
            yield "packed", _rows(self.call(packed, None, LENGTHS), 0, LENGTHS[0], LENGTHS[0] + tokens), whole
        parts = [(tokens - n, tokens) for n in (69, 3, 1)]
        if self.grows:
            parts = [*PARTS, *((i, i + 1) for i in DECODED)]
        for first, last in parts:
            what = "decoded" if last - first == 1 else "in parts"
            part = self.of_part(alone, bias, first, last)
            yield what, part, _rows(whole[:2], 0, first, last)
        if _is_band(self.pattern):
            yield from self.at_long_keys()

    def in_threads(self, call: Callable[[], Bits], expected: Bits) -> Iterator[tuple[str, Bits, Bits]]:
        for number in THREADS if self.family.device.type == "cpu" else ():
            with _threads(number):
                found = call()
            yield f"in {number} threads", found, expected

    def padded(self, alone: list[Tensor], bias: Tensor | None, whole: Bits) -> Iterator[tuple[str, Bits, Bits]]:
        family, tokens = self.family, self.family.q_len
        more, other = self.drawn(1, PADDING, PADDING), self.drawn(1, tokens + PADDING, tokens + PADDING)
        right = [torch.cat([torch.cat(each[:2], 1), each[2]]) for each in zip(alone, more, other)]
        left = [torch.cat([torch.cat(each[:2], 1), each[2]]) for each in zip(more, alone, other)]
        seen = torch.ones(2, tokens + PADDING, dtype=torch.bool, device=family.device)
        lens = torch.tensor([tokens, tokens + PADDING], device=family.device)
        wide = None if bias is None else torch.nn.functional.pad(bias, (0, PADDING, 0, PADDING))
        yield "padded, with seq_lens", _rows(self.call(right, wide, seq_lens=lens), 0, 0, tokens), whole
        hides = seen.clone()
        hides[0, tokens:] = False
        # dk and dv: the queries of padding see keys, which their gradients reach.
        yield "padded, with key_mask", _rows(self.call(right, wide, key_mask=hides)[:2], 0, 0, tokens), whole[:2]
        if _is_band(self.pattern) and not getattr(self.pattern, "sinks", 0):
            hides = seen.clone()
            hides[0, :PADDING] = False
            wide = None if bias is None else torch.nn.functional.pad(bias, (PADDING, 0, PADDING, 0))
            found = self.call(left, wide, key_mask=hides)[:2]
            yield "padded on the left", _rows(found, 0, PADDING, PADDING + tokens), whole[:2]

    def of_part(self, given: list[Tensor], bias: Tensor | None, first: int, last: int) -> Bits:
        """Queries with all keys up to the last one, as in a cache."""
        q, k, v, grad = given
        ahead = k.shape[1] - q.shape[1]
        some = [q[:, first:last], k[:, : last + ahead], v[:, : last + ahead], grad[:, first:last]]
        return self.call(some, None if bias is None else bias[:, :, first:last, : last + ahead])[:2]

    def at_long_keys(self) -> Iterator[tuple[str, Bits, Bits]]:
        given, bias = self.drawn(1, QUERIES, LONG), self.bias(QUERIES, LONG)
        whole = self.call(given, bias)
        yield from self.in_threads(lambda: self.call(given, bias), whole)
        batch = [torch.cat([x, other]) for x, other in zip(given, self.drawn(1, QUERIES, LONG))]
        yield "in a batch", _rows(self.call(batch, bias), 0, 0, QUERIES), whole
        for first in (QUERIES - 33, QUERIES - 9, QUERIES - 1):
            what, expected = "decoded" if first == QUERIES - 1 else "in parts", _rows(whole, 0, first, QUERIES)

            def part(first: int = first) -> Bits:
                return self.of_part(given, bias, first, QUERIES)

            yield what, part(), expected
            for name, found, _ in self.in_threads(part, expected):
                yield f"{what} {name}", found, expected


def _rows(found: Bits, b: int, first: int, last: int) -> Bits:
    """Some tokens of a row of the batch, of out, lse and gradients."""
    out, lse, *grads = (x[b : b + 1] for x in found)
    return out[:, first:last], lse[:, :, first:last], *(x[:, first:last] for x in grads)
