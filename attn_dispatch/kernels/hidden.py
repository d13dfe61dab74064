"""Zeroes keys that no query sees, and padding queries, before a kernel reads them: 0 * NaN is NaN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import Passes
from attn_dispatch.kernels.device_cache import DeviceCache, derived_on
from attn_dispatch.kernels.heads import heads_by_kind
from attn_dispatch.kernels.numerics import multiplicity_of
from attn_dispatch.spec import tracing
from attn_dispatch.spec.data import Form
from attn_dispatch.spec.orders import permutation, token_order_of
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem

ENTRIES = 2**22  #: query-key pairs that are looked at at once
SMALL = 1e12  #: products with entries below overflow where queries or gradients are over 1e24


class Hidden(NamedTuple):
    """Masks of tokens that must not affect any result, even if they hold NaN.

    Args:
        keys: bool [batch or 1, k_len, kv_heads or 1, 1]: keys and values that no query sees; None: none.
        queries: bool [batch, q_len, 1, 1]: padding; None: none.
        biased: a problem with a bias or a pattern that holds tensors, and its tensors: what they hide together takes
            long to find.
    """

    keys: Tensor | None
    queries: Tensor | None
    biased: tuple[Problem, Mapping[str, Tensor]] | None = None

    @classmethod
    def of(
        cls,
        problem: Problem,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        pattern: bool = True,
        masked_keys: bool = True,
    ) -> Hidden:
        """The hidden tokens of a call.

        Args:
            tensors: by attend()'s names; `seq_lens`, `key_mask` and `bias` hide tokens.
            pattern, masked_keys: False where the kernel never reads keys hidden by the pattern, or by masks.
        """
        tensors = tensors or {}
        seq_lens, key_mask, bias = (tensors.get(name) for name in ("seq_lens", "key_mask", "bias"))
        queries = None if seq_lens is None else padding_mask(problem.q_len, seq_lens)[:, :, None, None]
        keys = unseen_keys(problem) if pattern else None
        if masked_keys and (masked := hidden_by_masks(problem.k_len, seq_lens, key_mask)) is not None:
            keys = _either(keys, masked[:, :, None, None])
        mixed = bias is not None or (pattern and "pattern_data" in tensors)
        return cls(keys, queries, (problem, tensors) if mixed else None)

    def __bool__(self) -> bool:
        return any(each is not None for each in self)

    def zeroed(self, q: Tensor, k: Tensor, v: Tensor, *, where_needed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with hidden tokens, and their gradients, set to zero; unchanged tensors are not copied.

        Args:
            where_needed: keys that can do no harm may stay as they are.
        """
        keys = self.keys
        asked = self.biased is not None or (where_needed and keys is not None)
        if asked and _known_small(k) and _known_small(v):
            keys = None if where_needed else keys
        elif self.biased is not None:
            found = keys_hidden_together(*self.biased)
            keys = keys if found is None else _either(keys, found)
        return _zeroed(q, self.queries), _zeroed(k, keys), _zeroed(v, keys)

    def of_queries(self, x: Tensor | None) -> Tensor | None:
        """A gradient of out [batch, q_len, heads, head_dim], or of lse [batch, heads, q_len], with zeros at padding."""
        if x is None or self.queries is None:
            return x
        return _zeroed(x, self.queries if x.ndim == 4 else self.queries[:, None, :, 0, 0])

    def around(self, passes: Passes) -> Passes:
        """`passes` on zeroed tensors. Copies live during a pass; autograd saves the originals."""
        return _Zeroed(passes, self) if self else passes


@dataclass(slots=True)
class _Zeroed:
    passes: Passes
    hidden: Hidden

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.passes.forward(*self.hidden.zeroed(q, k, v, where_needed=True))

    def backward(self, grad: Tensor | None, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, *results = saved
        of_queries, zeroed = self.hidden.of_queries, self.hidden.zeroed(q, k, v, where_needed=True)
        return self.passes.backward(of_queries(grad), of_queries(grad_lse), (*zeroed, *results))


def padding_mask(length: int, seq_lens: Tensor) -> Tensor:
    """Bool [batch, length]: True for tokens at and past `seq_lens`."""
    return torch.arange(length, device=seq_lens.device) >= seq_lens[:, None]


def hidden_by_masks(k_len: int, seq_lens: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Bool [batch, k_len]: the keys that masks hide; None without masks."""
    hidden = None if key_mask is None else ~key_mask
    return hidden if seq_lens is None else _either(hidden, padding_mask(k_len, seq_lens))


def without_padding(out: Tensor, lse: Tensor, seq_lens: Tensor | None) -> None:
    """Write 0 into out [batch, len, heads, head_dim] and -inf into lse [batch, len, heads] at padding queries."""
    if seq_lens is not None:
        padding = padding_mask(out.shape[1], seq_lens)
        out.masked_fill_(padding[:, :, None, None], 0.0)
        lse.masked_fill_(padding[:, :, None], -torch.inf)


def _known_small(x: Tensor) -> bool:
    """Whether all entries are so small that 0 times a product with them is 0, as far as that can be asked without a
    synchronization or in a graph. To read them all takes less time than a copy.
    """
    asked = x.device.type == "cpu" and not tracing.graphed(x) and not tracing.is_transformed()
    return asked and bool(torch.linalg.vector_norm(x.detach()) < SMALL)


def keys_hidden_together(problem: Problem, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Keys that no query of the heads which share them sees, by pattern, masks and bias together: bool [1 or batch,
    k_len, kv_heads or 1, 1]. None: surely none. What a pattern's tensors hide alone is kept as long as they are.
    """
    data = tensors.get("pattern_data")
    if data is None or "bias" in tensors or "seq_lens" in tensors or tracing.graphed(data) or tracing.is_transformed():
        return _hidden_together(problem, tensors)

    def find(data: Tensor) -> Tensor | None:
        found = _hidden_together(replace(problem, has_key_mask=False), {"pattern_data": data})
        return found if found.any() else None

    key = "hidden", problem.q_len, problem.k_len, problem.heads, problem.kv_heads
    return derived_on(problem.device, data, key, find)


def _hidden_together(problem: Problem, tensors: Mapping[str, Tensor]) -> Tensor:
    group, seen = problem.heads // problem.kv_heads, None
    by_row = problem.masked or getattr(problem.pattern, "by_row", False)
    rows = max(1, *problem.bias[:1], problem.batch * by_row)
    step = max(1, ENTRIES // (problem.k_len * problem.heads * rows))
    for start in range(0, problem.q_len, step):
        queries = torch.arange(start, min(start + step, problem.q_len), device=problem.device)
        counts = multiplicity_of(problem, range(problem.heads), queries, tensors)
        assert counts is not None  # there is a bias, or a pattern that holds tensors
        some = (counts > 0).any(-2)
        some = some if some.ndim == 3 else some[None]  # [1 or batch, 1 or heads, keys]
        seen = some if seen is None else seen | some
    assert seen is not None
    seen = seen if seen.shape[1] == 1 else torch.unflatten(seen, 1, (-1, group)).any(2)
    return ~seen.transpose(1, 2).unsqueeze(-1)


def unseen_keys(problem: Problem) -> Tensor | None:
    """Keys that no query sees in the pattern: bool [1, k_len, kv_heads or 1, 1]; None: none."""
    if not may_hide(problem):
        return None
    # A graph takes no tensor that another mode has made, and its own must not reach other calls.
    return _find_unseen(*_key(problem)) if tracing.graphed() else _unseen(problem)


def copied_bytes(problem: Problem, *, masked_keys: bool = True, padding: bool = True) -> int:
    """Bytes of the zeroed copies in a pass.

    Args:
        masked_keys, padding: whether copies are made of keys hidden by masks, and of padding queries.
    """
    hides = (masked_keys and problem.masked) or may_hide(problem) or bool(problem.bias)
    keys = 2 * problem.k_len * problem.kv_heads * hides
    queries = problem.q_len * problem.heads * (padding and problem.has_seq_lens) * (2 if problem.needs_grad else 1)
    masks = 2 * (problem.q_len + problem.k_len * problem.kv_heads) * (keys + queries > 0)
    if isinstance(problem.pattern, Form):  # counts, while it is found what they hide
        masks += 16 * min(ENTRIES, problem.heads * problem.q_len * problem.k_len)
    return problem.batch * ((keys + queries) * problem.head_dim * problem.dtype.itemsize + masks)


@lru_cache(maxsize=4096)
def may_hide(problem: Problem) -> bool:
    """Whether the pattern may hide a key: True wherever `unseen_keys` finds one, without a table of all tokens."""
    natural, q_len, k_len = problem.pattern.natural, problem.q_len, problem.k_len
    if natural.axes:
        return q_len < k_len  # each token of a grid sees itself
    for kind in heads_by_kind(natural, problem.heads, problem.heads // problem.kv_heads):
        bands = (band for offsets in kind for band in natural.bands(q_len, k_len, offsets) or ())
        runs, covered = (band.run(range(q_len), k_len) for band in bands if band.rate == 1), 0
        for run in sorted(runs, key=lambda run: run.start):
            covered = max(covered, run.stop) if run.start <= covered else covered
        if covered < k_len:
            return True
    return False


def _key(problem: Problem) -> tuple[Pattern, int, int, int, int, torch.device]:
    group = problem.heads // problem.kv_heads
    return problem.pattern, problem.q_len, problem.k_len, problem.heads, group, problem.device


def _found_unseen(problem: Problem) -> Tensor | None:
    found = _find_unseen(*_key(problem))
    return found if found.any() else None


_unseen = DeviceCache(_found_unseen, _key)


def _find_unseen(pattern: Pattern, q_len: int, k_len: int, heads: int, group: int, device: torch.device) -> Tensor:
    """The same mask in the caller's modes, without a look at its values: it may hide no key."""
    natural, columns = pattern.natural, dict[int, Tensor]()
    with torch.device("cpu"):
        queries = torch.arange(q_len)
        for kind, members in heads_by_kind(natural, heads, group).items():
            seen = torch.stack([natural.seen(queries, q_len, k_len, offsets) for offsets in set(kind)]).any(0)
            columns |= dict.fromkeys(members, seen)
        hidden = ~torch.stack([columns[head] for head in sorted(columns)], dim=1)
    at = permutation(token_order_of(pattern), natural, k_len)
    return (hidden if at is None else hidden[at])[None, :, :, None].to(device)


def _zeroed(x: Tensor, where: Tensor | None) -> Tensor:
    return x if where is None else x.masked_fill(where, 0.0)


def _either(found: Tensor | None, other: Tensor) -> Tensor:
    return other if found is None else found | other
