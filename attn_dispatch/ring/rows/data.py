"""Patterns that hold tensors, over ranks: each rank has the tensors of the whole sequence, on the CPU too."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.native.data_tables import refused_within
from attn_dispatch.spec.data import Blocks, DataPattern, Form, Ranges, derived
from attn_dispatch.spec.pattern import Dense, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Offsets, Reach
from attn_dispatch.spec.tracing import make_plain

P = ParamSpec("P")
T = TypeVar("T")
AT_ONCE = 2**14  #: queries whose keys are marked at once


@dataclass(frozen=True, eq=False)
class Held(Pattern):
    """A pattern of the whole sequence with its tensors, as a sum of intervals of keys for each query.

    Args:
        whole: the pattern, on the CPU. form: what problems hold of it.
        digest: of its tensors, which must be the same on every rank.
        made: what `Kept` functions return for it.
    """

    whole: DataPattern
    form: Form
    digest: str
    made: dict[Any, Any] = field(default_factory=dict[Any, Any])

    @classmethod
    def of(cls, pattern: DataPattern, heads: int, kv_heads: int) -> Held:
        """Made once for a pattern, of which it reads the values. Raises InvalidInput: it cannot be over ranks."""
        if isinstance(pattern, Blocks) and refused_within(pattern.within):
            raise InvalidInput(f"within of Blocks must be Dense or Window over a mesh, got {pattern.within}")
        # The number of tokens is not known before ranks have compared their arguments.
        form, key = pattern.form(pattern.queries, heads, kv_heads), ("ring", pattern.form(None, heads, kv_heads))
        return derived(pattern.data, key, lambda: make_plain(cls._of, pattern, form))

    @classmethod
    def _of(cls, pattern: DataPattern, form: Form) -> Held:
        data = pattern.data.detach().cpu().contiguous()
        digest = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        return cls(form.bound(data), form, f"{list(data.shape)} {digest[:16]}")

    def rows(self) -> list[Held]:
        """The pattern of each row of the batch; of all rows, where they share it."""
        axis = 1 if isinstance(self.whole, Ranges) else 0
        data = torch.split(self.whole.data, 1, axis)
        return [self] if len(data) == 1 else [replace(self, whole=self.form.bound(x), made={}) for x in data]

    def head_offsets(self, head: int, heads: int) -> Offsets:
        """The number of the head's table."""
        tables = self.whole.data.shape[1] if isinstance(self.whole, Blocks) else 1
        return () if tables == 1 else (head * tables // heads,)

    def to_dict(self) -> dict[str, Any]:
        return self.form.to_dict()

    def _counts(self, *args: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.whole._counts(*args)

    def intervals(self, queries: Tensor, length: int, offsets: Offsets) -> Tensor:
        """The first and last keys that queries see: int64 [2, rows, intervals, queries]; none: `first > last`."""
        if isinstance(self.whole, Ranges):
            first, last = self.whole.data[..., queries].long()
            return torch.stack([first.clamp(min=0), last.clamp(max=length - 1)])
        assert isinstance(self.whole, Blocks)
        (qb, kb), counts = self.whole.size, self.whole.block_counts(length)
        blocks, at = torch.unique(queries // qb, return_inverse=True)
        counts = counts[:, offsets[0] or 0 if offsets else 0, blocks]
        times = range(1, int(counts.max()) + 1) if counts.numel() else ()
        none = torch.zeros(2, *counts.shape[:2], 1, dtype=torch.int64)
        runs = torch.cat([none, *(_runs(counts >= each) for each in times)], -1)
        first, stop = runs.transpose(2, 3)[..., at] * kb
        bands = self.whole.within.bands(length, length, ()) or ()
        cuts = [band.between(queries, length) for band in bands]
        return torch.cat([torch.stack([first.maximum(low), (stop - 1).minimum(high)]) for low, high in cuts], 2)

    def _different(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Queries that stand for all that see the same keys, and which of them stands for each."""
        if isinstance(self.whole, Blocks) and self.whole.within == Dense():
            blocks, at = torch.unique(queries // self.whole.size[0], return_inverse=True)
            return blocks * self.whole.size[0], at
        return queries, torch.arange(len(queries))

    def places(self, queries: Tensor, keys: Tensor, length: int, offsets: Offsets) -> Tensor:
        """The same among some keys, by their places; `keys` are ascending positions."""
        queries, at = self._different(queries)
        first, last = self.intervals(queries, length, offsets)
        first, last = torch.searchsorted(keys, first), torch.searchsorted(keys, last, right=True) - 1
        some = first <= last
        most = max(1, int(some.sum(1).max())) if some.numel() else 1
        order = (~some).byte().argsort(dim=1, stable=True)[:, :most]
        return torch.stack([first.gather(1, order), last.gather(1, order)])[..., at]

    def see_any(self, queries: Tensor, keys: Tensor, length: int, offsets: Offsets) -> Tensor:
        """Bool [queries]: which of them see any of these keys."""
        first, last = self.places(queries, keys, length, offsets)
        found: Tensor = torch.any((first <= last).flatten(0, 1), 0)
        return found

    def reaches(self, queries: Tensor, keys: Tensor, q_len: int, k_len: int, offsets: Offsets) -> list[Reach]:
        """The normal form for ascending keys, of a pattern that rows of the batch share."""
        first, last = self.places(queries, keys, q_len, offsets)[:, 0]
        at = torch.arange(len(keys))
        return [Reach((low,), (high,), (at,)) for low, high in zip(first, last)]

    def seen(self, queries: Tensor, q_len: int, k_len: int, offsets: Offsets) -> Tensor:
        return self._seen(queries, k_len, offsets).any(0)

    def _seen(self, queries: Tensor, length: int, offsets: Offsets) -> Tensor:
        """Bool [rows, length]: the keys that any of these queries sees."""
        edges = torch.zeros(len(self.rows()), length + 1, dtype=torch.int64)
        for part in torch.split(self._different(queries)[0], AT_ONCE):
            first, last = self.intervals(part, length, offsets).flatten(2)
            one, none = (first <= last).long(), first > last
            edges.scatter_add_(1, first.masked_fill(none, length), one)
            edges.scatter_add_(1, (last + 1).masked_fill(none, length), -one)
        return edges[:, :-1].cumsum(1) > 0

    def unseen(self, length: int, heads: int, kv_heads: int) -> Tensor | None:
        """Keys that no query sees: bool [1 or batch, length, 1 or kv_heads, 1]; None: none."""
        key = "unseen", length, heads, kv_heads
        if key not in self.made:
            self.made[key] = make_plain(self._unseen, *key[1:])
        found: Tensor | None = self.made[key]
        return found

    def _unseen(self, length: int, heads: int, kv_heads: int) -> Tensor | None:
        kinds = dict.fromkeys(self.head_offsets(head, heads) for head in range(heads))
        seen = torch.stack([self._seen(torch.arange(length), length, each) for each in kinds], 2)
        seen = seen if len(kinds) <= kv_heads else torch.unflatten(seen, 2, (kv_heads, -1)).any(3)
        return None if seen.all() else ~seen[..., None]


def _runs(seen: Tensor) -> Tensor:
    """First and end of each run of seen blocks [rows, q blocks, k blocks]: int64 [2, rows, q blocks, runs].

    They are 0 and 0 where a block of queries has fewer.
    """
    edges = pad(seen, (1, 1)).diff(dim=-1).flatten(0, 1).nonzero()  # a first and an end by turns
    row, (first, end) = edges[::2, 0].contiguous(), (edges[start::2, 1] for start in (0, 1))
    number = torch.arange(len(row)) - torch.searchsorted(row, row)
    most = int(number.max()) + 1 if len(row) else 0
    found = torch.zeros(2, seen.shape[0] * seen.shape[1], most, dtype=torch.int64)
    found[:, row, number] = torch.stack([first, end])
    return torch.unflatten(found, 1, seen.shape[:2])


class Kept(Generic[P, T]):
    """A function of a problem or a pattern, and of other values with a hash. Its last results are kept; those for
    patterns that hold tensors as long as these.
    """

    def __init__(self, make: Callable[P, T]) -> None:
        self.make, self.cached = make, lru_cache(maxsize=16)(make)
        self.cache_clear = self.cached.cache_clear

    def __call__(self, *args: P.args, **named: P.kwargs) -> T:
        first, *rest = args
        pattern = first.pattern if isinstance(first, Problem) else first
        if not isinstance(pattern, Held):
            return self.cached(*args, **named)  # type: ignore[arg-type]
        # Without the pattern, which holds the key.
        sizes = replace(first, pattern=Dense()) if isinstance(first, Problem) else None
        key = self.make, sizes, *rest, *named.items()
        if key not in pattern.made:
            pattern.made[key] = self.make(*args, **named)
        found: T = pattern.made[key]
        return found
