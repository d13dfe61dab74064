"""What no query sees, and padding queries: zeroed before a kernel reads them, since 0 * NaN is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Call
from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.spec.orders import permutation
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reordered import kept_in

HELD = 64  #: problems whose unseen keys are held


@dataclass(frozen=True, slots=True)
class Hidden:
    """What never matters, whatever its bits.

    Args:
        keys: bool [batch or 1, k_len, kv_heads or 1, 1]: keys and values that no query sees; None where there are none.
        queries: bool [batch, q_len, 1, 1]: padding; None where there is none.
    """

    keys: Tensor | None
    queries: Tensor | None

    @classmethod
    def of(
        cls,
        problem: Problem,
        seq_lens: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        pattern: bool = True,
        masked_keys: bool = True,
    ) -> Hidden:
        """What is hidden in a call. A kernel that never reads keys that the pattern, or that masks hide, says so."""
        queries = None if seq_lens is None else past(problem.q_len, seq_lens)[:, :, None, None]
        keys = unseen(problem) if pattern else None
        if masked_keys and key_mask is not None:
            keys = _either(keys, ~key_mask[:, :, None, None])
        if masked_keys and seq_lens is not None:
            keys = _either(keys, past(problem.k_len, seq_lens)[:, :, None, None])
        return cls(keys, queries)

    def __bool__(self) -> bool:
        return self.keys is not None or self.queries is not None

    def zeroed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors with zeros there, and gradients of zero; those without anything hidden are not copied."""
        return _zeroed(q, self.queries), _zeroed(k, self.keys), _zeroed(v, self.keys)

    def of_queries(self, x: Tensor | None) -> Tensor | None:
        """A gradient of out [batch, q_len, heads, head_dim], or of lse [batch, heads, q_len], with zeros at padding."""
        if x is None or self.queries is None:
            return x
        return _zeroed(x, self.queries if x.ndim == 4 else self.queries[:, None, :, 0, 0])

    def around(self, call: Call) -> Call:
        """The passes of `call` on zeroed tensors. Copies live as long as a pass; what is recorded are the originals."""
        return _Zeroed(call, self) if self else call


@dataclass(frozen=True, slots=True)
class _Zeroed:
    call: Call
    hidden: Hidden

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.call.forward(*self.hidden.zeroed(q, k, v))

    def backward(
        self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *results = saved
        of_queries = self.hidden.of_queries
        return self.call.backward(of_queries(grad), of_queries(grad_lse), (*self.hidden.zeroed(q, k, v), *results))


def past(length: int, seq_lens: Tensor) -> Tensor:
    """bool [batch, length]: tokens at and past the lengths."""
    return torch.arange(length, device=seq_lens.device) >= seq_lens[:, None]


def unseen(problem: Problem) -> Tensor | None:
    """Keys that the pattern shows to no query: bool [1, k_len, kv_heads or 1, 1]; None where there are none."""
    return _unseen(
        problem.pattern, problem.q_len, problem.k_len, problem.heads, problem.heads // problem.kv_heads, problem.device
    )


def copied_bytes(problem: Problem, *, masked_keys: bool = True, padding: bool = True) -> int:
    """Bytes that zeroed copies take in a pass: of keys that masks hide, and of padding queries, where they are made."""
    keys = 2 * problem.k_len * problem.kv_heads * ((masked_keys and problem.masked) or unseen(problem) is not None)
    queries = problem.q_len * problem.heads * (padding and problem.has_seq_lens) * (2 if problem.needs_grad else 1)
    masks = 2 * (problem.q_len + problem.k_len * problem.kv_heads) * (keys + queries > 0)
    return problem.batch * ((keys + queries) * problem.head_dim * problem.dtype.itemsize + masks)


@lru_cache(maxsize=HELD)
def _unseen(pattern: Pattern, q_len: int, k_len: int, heads: int, group: int, device: torch.device) -> Tensor | None:
    with torch.inference_mode(False):
        natural, kinds = pattern.natural, heads_by_kind(pattern.natural, heads, group)
        bands = {offsets: natural.bands(q_len, k_len, offsets) or () for kind in kinds for offsets in kind}
        if bands == {(): ()}:
            return None  # every token of a neighbourhood sees itself
        if all(band.segment is None for some in bands.values() for band in some):
            return _outside([band.run(range(q_len), k_len) for some in bands.values() for band in some], k_len, device)
        # A token that a branch selects sees itself there; one without a rate selects all of them.
        of_kind = {kind: {band for offsets in kind for band in bands[offsets]} for kind in kinds}
        if all(any(band.rate == 1 for band in some) for some in of_kind.values()):
            return None
        at = permutation(kept_in(pattern), natural, k_len)
        at = torch.arange(k_len) if at is None else at
        seen = torch.zeros(heads // group, k_len, dtype=torch.bool)
        for segment, rate in {(band.segment or k_len, band.rate) for some in of_kind.values() for band in some}:
            place = at % segment % rate
            for kind, members in kinds.items():
                for band in of_kind[kind]:
                    if (band.segment or k_len, band.rate) == (segment, rate):
                        seen[members] |= place == band.offset
        return None if seen.all() else ~seen.T[None, :, :, None].to(device)


def _outside(runs: list[range], k_len: int, device: torch.device) -> Tensor | None:
    """What is in none of these runs of keys, bool [1, k_len, 1, 1]; None where nothing is."""
    covered = 0
    for run in sorted(runs, key=lambda run: run.start):
        covered = max(covered, run.stop) if run.start <= covered else covered
    if covered == k_len:
        return None
    at = torch.arange(k_len, device=device)
    found = torch.ones_like(at, dtype=torch.bool)
    for run in runs:
        found &= (at < run.start) | (at >= run.stop)
    return found[None, :, None, None]


def _zeroed(x: Tensor, where: Tensor | None) -> Tensor:
    return x if where is None else x.masked_fill(where, 0.0)


def _either(found: Tensor | None, other: Tensor) -> Tensor:
    return other if found is None else found | other
