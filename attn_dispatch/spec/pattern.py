"""Which keys a query sees, and how many times: the definition that every backend must agree with.

A pattern is a frozen, hashable value. Its `multiplicity` is the definition; nothing else here computes attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.checks import ascending, boolean, choice, integer, integers, neighborhood
from attn_dispatch.spec.reach import Axis, Band, Offsets, Reach, grid_pairs, grid_reach, grid_seen
from attn_dispatch.text import where_true

if TYPE_CHECKING:
    from torch import Tensor, device


class Pattern(ABC):
    """Base of the patterns. Positions count tokens from 0.

    Where there are fewer queries than keys they are the last tokens: query i is token `i + k_len - q_len`.
    """

    __slots__ = ()
    holds_data: ClassVar[bool] = False  #: whether it holds tensors, or is the form of one that does

    @property
    def natural(self) -> Pattern:
        """The pattern on tokens in natural order: itself, except for `Reordered`."""
        return self

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """(segment length, dilation rate) of each branch of a dilated pattern; else empty."""
        return ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of a neighbourhood's grid; else empty."""
        return ()

    def multiplicity(
        self,
        q_len: int,
        k_len: int | None = None,
        heads: int = 1,
        *,
        seq_lens: Tensor | None = None,
        key_mask: Tensor | None = None,
        h_pos: Sequence[int] | None = None,
        q_pos: Tensor | None = None,
        k_pos: Tensor | None = None,
        device: device | str | None = None,
    ) -> Tensor:
        """How many times each query sees each key.

        Args:
            q_len, k_len: lengths in tokens; `k_len` defaults to `q_len`.
            heads: number of query heads.
            seq_lens: [batch]; tokens at and past a row's length are padding.
            key_mask: [batch, k_len] bool; False hides a key.
            h_pos: the heads to evaluate; all of them by default.
            q_pos, k_pos: 1-D integer tensors of positions to evaluate; all of them by default.
            device: of the result, where no tensor is passed.

        Returns:
            int32 [heads, queries, keys], or [batch, heads, queries, keys] when `seq_lens` or `key_mask` is given, or
            where the pattern holds tensors by row.
            It may be an expanded view: do not write to it.

        Raises:
            InvalidInput: the pattern does not fit these lengths.
        """
        import torch

        k_len = q_len if k_len is None else k_len
        self.check(q_len, k_len)
        where = next((t.device for t in (q_pos, k_pos, seq_lens, key_mask) if t is not None), device)
        q_pos = torch.arange(q_len, device=where) if q_pos is None else q_pos
        k_pos = torch.arange(k_len, device=where) if k_pos is None else k_pos
        which = range(heads) if h_pos is None else h_pos
        counts = self._counts(q_pos, k_pos, q_len, k_len, heads, which).to(torch.int32)
        counts = counts.expand(*counts.shape[:-3], len(which), len(q_pos), len(k_pos))
        if key_mask is not None:
            counts = counts * key_mask[:, None, None, k_pos]
        if seq_lens is not None:
            lens = seq_lens[:, None, None, None]
            counts = counts * (k_pos < lens) * (q_pos[:, None] < lens)
        return counts

    @abstractmethod
    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        """[(batch,) len(h_pos) or 1, queries, keys], bool or integer."""

    def bound(self, data: Tensor | None) -> Pattern:
        """The pattern with its tensors: itself, except for the forms of `spec.data`."""
        return self

    def head_offsets(self, head: int, heads: int) -> Offsets:
        """The head's offset in each branch: heads with equal offsets see the same keys. () where all heads do."""
        return ()

    def bands(self, q_len: int, k_len: int, offsets: Offsets) -> tuple[Band, ...] | None:
        """The branches of the heads with these offsets as bands; None where the pattern is on a grid."""
        return None

    def reaches(self, queries: Tensor, keys: Tensor, q_len: int, k_len: int, offsets: Offsets) -> list[Reach]:
        """The branches of the heads with these offsets in normal form: their sum is the multiplicity.

        Args:
            queries, keys: int64 positions.
            q_len, k_len: tokens in the whole sequences.

        Raises:
            TypeError: the pattern has no normal form.
        """
        bands = self.bands(q_len, k_len, offsets)
        if bands is None:
            raise TypeError(f"no normal form of {self!r}")
        return [band.reach(queries, keys, k_len) for band in bands]

    def pairs(self, q_len: int, k_len: int, offsets: Offsets) -> int:
        """Query-key pairs of a head with these offsets, each as often as the query sees the key."""
        return sum(band.pairs(q_len, k_len) for band in self.bands(q_len, k_len, offsets) or ())

    def seen(self, queries: Tensor, q_len: int, k_len: int, offsets: Offsets) -> Tensor:
        """Bool [k_len]: keys that at least one of these queries, int64 positions, sees in a head with these offsets."""
        import torch

        bands = self.bands(q_len, k_len, offsets) or ()
        return torch.stack([queries.new_zeros(k_len) > 0, *(band.seen(queries, k_len) for band in bands)]).any(0)

    def lengthened(self, length: int, longer: int) -> Pattern | None:
        """The pattern where the sequence grows from `length` keys to `longer`; None where it fixes their number."""
        return self

    def check(self, q_len: int, k_len: int) -> None:  # noqa: B027 - most patterns fit all lengths
        """Raise InvalidInput where the pattern cannot be used with these lengths."""

    def simplify(self, q_len: int, k_len: int, heads: int) -> Pattern:
        """The simplest pattern with the same multiplicity at these lengths, so that equal calls share a decision."""
        return self

    def of_heads(self, first_head: int, all_heads: int) -> Pattern:
        """The pattern of tensors that hold a share of `all_heads`, from `first_head` on."""
        return self

    later: ClassVar[dict[str, Any]] = {}  #: fields that are younger than stored keys, with their values in those

    def to_dict(self) -> dict[str, Any]:
        """The class name as "kind", and the fields as JSON values, without `later` ones that change nothing."""
        plain = {"kind": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]
        given = {name: plain[name] for name in self.later} != self.later
        return plain if given else {name: value for name, value in plain.items() if name not in self.later}


@dataclass(frozen=True, slots=True)
class Dense(Pattern):
    """Every key once; with `is_causal`, keys with `j <= i + (k_len - q_len)`: the last query sees all keys."""

    is_causal: bool = False

    def __post_init__(self) -> None:
        boolean("is_causal", self.is_causal)

    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        if self.is_causal:
            return (k_pos <= q_pos[:, None] + (k_len - q_len))[None]
        return (k_pos >= 0).expand(1, len(q_pos), len(k_pos))

    def bands(self, q_len: int, k_len: int, offsets: Offsets) -> tuple[Band, ...]:
        return (Band(high=k_len - q_len if self.is_causal else None),)

    def simplify(self, q_len: int, k_len: int, heads: int) -> Pattern:
        return Dense() if q_len == 1 else self

    def __str__(self) -> str:
        return "Dense(causal)" if self.is_causal else "Dense()"


@dataclass(frozen=True, slots=True, repr=False)
class Window(Pattern):
    """Keys with `-left <= j - (i + k_len - q_len) <= right`. None leaves a side open; `right=0` is causal.

    Args:
        left, right: tokens, or None.
        sinks: number of first keys in the sequence that each query sees besides its window, where `right` allows.

    Source: Xiao et al. 2023, Efficient Streaming Language Models with Attention Sinks.
    """

    left: int | None = None
    right: int | None = None
    sinks: int = 0
    later = {"sinks": 0}

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            side = getattr(self, name)
            object.__setattr__(self, name, None if side is None else integer(name, side, 0, "None or an integer"))
        object.__setattr__(self, "sinks", integer("sinks", self.sinks, 0))

    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        distance = k_pos - (q_pos[:, None] + (k_len - q_len))
        seen = (distance >= -(k_len + q_len if self.left is None else self.left)) | (k_pos < self.sinks)
        return (seen if self.right is None else seen & (distance <= self.right))[None]

    def bands(self, q_len: int, k_len: int, offsets: Offsets) -> tuple[Band, ...]:
        ahead = k_len - q_len
        low = None if self.left is None else ahead - self.left
        window = Band(low, None if self.right is None else ahead + self.right)
        return (window, Band(high=low - 1, stop=self.sinks)) if self.sinks and low is not None else (window,)

    def simplify(self, q_len: int, k_len: int, heads: int) -> Pattern:
        left = None if self.left is not None and self.left + self.sinks >= k_len - 1 else self.left
        right = None if self.right is not None and self.right >= q_len - 1 else self.right
        if left is None and right in (None, 0):
            return Dense(is_causal=right == 0)
        return Window(left, right, 0 if left is None else self.sinks)

    def __repr__(self) -> str:
        sinks = f", sinks={self.sinks}" if self.sinks else ""
        return f"Window(left={self.left}, right={self.right}{sinks})"


@dataclass(frozen=True, slots=True)
class Dilated(Pattern):
    """LongNet's dilated attention: branch b cuts the sequence into segments and selects every r-th token of each.

    Position t lies in segment `t // w` and is selected for a head with offset o when `(t % w) % r == o`, with
    `w = min(segment_lengths[b], N)` and `r = dilation_rates[b]`. A branch adds 1 where query and key are both
    selected, share a segment and, if causal, `j <= i`. N need not be a multiple of w, nor w of r. Fewer queries than
    keys are the last of the N tokens, so that a cache holds what a sequence handed over at once would.

    Args:
        segment_lengths: tokens per segment, one for each branch.
        dilation_rates: one for each branch.
        is_causal: a query sees no later key.
        offsets: "mod" gives head h the offset `h % r`; "block" gives it `h // ceil(heads / r)`.
        heads: "all": every head is in every branch; "split": each branch has a consecutive run of heads, all with
            the offset `b % r`.
        first_head, all_heads: where tensors hold a share of the heads: the number of their first head among all.

    Source: Ding et al. 2023, LongNet, section 2.2; torchscale uses "block", fkodom's library "split".
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    is_causal: bool = False
    offsets: Literal["mod", "block"] = "mod"
    heads: Literal["all", "split"] = "all"
    first_head: int = 0
    all_heads: int | None = None
    later = {"first_head": 0, "all_heads": None}

    def __post_init__(self) -> None:
        lengths = integers("segment_lengths", self.segment_lengths)
        rates = integers("dilation_rates", self.dilation_rates)
        if len(lengths) != len(rates):
            counts = f"segment_lengths has {len(lengths)} entries and dilation_rates {len(rates)}"
            raise InvalidInput(f"{counts}: each branch needs both")
        boolean("is_causal", self.is_causal)
        choice("offsets", self.offsets, ("mod", "block"))
        choice("heads", self.heads, ("all", "split"))
        object.__setattr__(self, "first_head", integer("first_head", self.first_head, 0))
        if self.all_heads is not None:
            object.__setattr__(self, "all_heads", integer("all_heads", self.all_heads, 1, "None or an integer"))
        elif self.first_head:
            raise InvalidInput(f"first_head needs all_heads, which is None, got {self.first_head}")
        if self.heads == "all":
            # A sum does not depend on the order of its terms; only "split" assigns heads by branch number.
            lengths, rates = cast("tuple[tuple[int, ...], ...]", tuple(zip(*ascending(zip(lengths, rates)))))
        if self.heads == "split" or set(rates) == {1}:
            object.__setattr__(self, "offsets", "mod")
        object.__setattr__(self, "segment_lengths", lengths)
        object.__setattr__(self, "dilation_rates", rates)

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.segment_lengths, self.dilation_rates))

    def head_offset(self, branch: int, head: int, heads: int) -> int | None:
        """The offset of a head in a branch; None where the head is not in the branch."""
        rate = self.dilation_rates[branch]
        head, heads = head + self.first_head, self.all_heads or heads
        if self.heads == "split":
            size, extra = divmod(heads, len(self.segment_lengths))
            first = branch * size + min(branch, extra)
            return branch % rate if first <= head < first + size + (branch < extra) else None
        return head % rate if self.offsets == "mod" else head // -(-heads // rate)

    def head_offsets(self, head: int, heads: int) -> Offsets:
        return tuple(self.head_offset(branch, head, heads) for branch in range(len(self.branches)))

    def bands(self, q_len: int, k_len: int, offsets: Offsets) -> tuple[Band, ...]:
        ahead = k_len - q_len
        high, cuts = ahead if self.is_causal else None, zip(self.branches, offsets)
        mine = ((min(w, k_len), r, offset) for (w, r), offset in cuts if offset is not None)
        return tuple(Band(None, high, *cut, ahead=ahead) for cut in mine)

    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        import torch

        counts = torch.zeros(len(h_pos), len(q_pos), len(k_pos), dtype=torch.int32, device=q_pos.device)
        q_pos = q_pos + (k_len - q_len)
        for branch, (length, rate) in enumerate(self.branches):
            length = min(length, k_len)
            by_head = [self.head_offset(branch, head, heads) for head in h_pos]
            offsets = torch.tensor([-1 if o is None else o for o in by_head], device=q_pos.device)[:, None]
            q_selected = q_pos % length % rate == offsets
            k_selected = k_pos % length % rate == offsets
            together = q_pos[:, None] // length == k_pos // length
            if self.is_causal:
                together &= k_pos <= q_pos[:, None]
            counts += q_selected[:, :, None] & k_selected[:, None, :] & together
        return counts

    def lengthened(self, length: int, longer: int) -> Pattern:
        return replace(self, segment_lengths=tuple(longer if w == length else w for w in self.segment_lengths))

    def check(self, q_len: int, k_len: int) -> None:
        _check_not_longer(self, q_len, k_len)

    def simplify(self, q_len: int, k_len: int, heads: int) -> Pattern:
        if self.all_heads is not None and self.first_head + heads > self.all_heads:
            given = f"heads {self.first_head} to {self.first_head + heads - 1} are given"
            raise InvalidInput(f"{given}, but all_heads is {self.all_heads}")
        lengths = tuple(min(length, k_len) for length in self.segment_lengths)
        if len(lengths) == 1 and lengths[0] == k_len and self.dilation_rates == (1,):
            return Dense(self.is_causal).simplify(q_len, k_len, heads)
        alike = self.heads == "all" and all(
            head % rate == self.head_offset(branch, head, heads)
            for branch, rate in enumerate(self.dilation_rates)
            for head in range(heads)
        )
        plain = replace(self, segment_lengths=lengths, is_causal=self.is_causal and q_len > 1)
        if alike or (self.first_head, self.all_heads or heads) == (0, heads):
            plain = replace(plain, first_head=0, all_heads=None)
        return replace(plain, offsets="mod") if alike else plain

    def of_heads(self, first_head: int, all_heads: int) -> Pattern:
        if self.all_heads is not None:
            raise InvalidInput("give first_head and all_heads to the pattern or to the call, not both")
        return replace(self, first_head=first_head, all_heads=all_heads)

    def __str__(self) -> str:
        share = f"heads from {self.first_head} of {self.all_heads}"
        options = {"causal": self.is_causal, "offsets=block": self.offsets == "block"}
        options |= {"heads=split": self.heads == "split", share: bool(self.first_head or self.all_heads)}
        return f"Dilated({', '.join([str(self.segment_lengths), str(self.dilation_rates), *where_true(options)])})"


@dataclass(frozen=True, slots=True)
class Neighborhood(Pattern):
    """The sequence is a row-major 1-D to 3-D grid; a key must be a neighbour of the query on every axis.

    On an axis of length L with window w, dilation e and stride s, query x and key y must share the residue
    `x % e == y % e`. With `x' = x // e`, `y' = y // e` and n members in that residue class:

    * edges="clip": `|x' - y'| <= (w - 1) / 2`, cut at the border; causal: also `y' <= x'`. Needs an odd w and `s = 1`.
    * edges="shift": `lo <= y' < lo + w`, `lo = clip(g + s // 2 - w // 2, 0, n - w)`, where `g = x' - x' % s`, so that
      every query sees w keys; causal: `min(g + s - 1, n - 1) - w < y' <= x'`. Needs `w * e <= L` and `s <= w`.

    Args:
        grid: tokens per axis; their product is the sequence length.
        window, dilation, is_causal, stride: one for each axis, or one for all.
        edges: "clip" or "shift".

    Source: Hassani et al. 2023, Neighborhood Attention, and 2025, Generalized Neighborhood Attention; NATTEN 0.21
    computes "shift".
    """

    grid: tuple[int, ...]
    window: tuple[int, ...]
    dilation: tuple[int, ...] = (1,)
    is_causal: tuple[bool, ...] = (False,)
    edges: Literal["clip", "shift"] = "clip"
    stride: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        fields = neighborhood(self.grid, self.window, self.dilation, self.is_causal, self.edges, self.stride)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        seen = (k_pos >= 0).expand(len(q_pos), len(k_pos))
        q_pos, stride = q_pos + (k_len - q_len), k_len
        for axis in self.axes:
            stride //= axis.size
            seen = seen & axis.sees((q_pos // stride % axis.size)[:, None], k_pos // stride % axis.size)
        return seen[None]

    @property
    def axes(self) -> tuple[Axis, ...]:
        shift = [self.edges == "shift" for _ in self.grid]
        each = zip(self.grid, self.window, self.dilation, self.is_causal, shift, self.stride)
        return tuple(Axis(*fields) for fields in each)

    def reaches(self, queries: Tensor, keys: Tensor, q_len: int, k_len: int, offsets: Offsets) -> list[Reach]:
        return [grid_reach(self.axes, queries + (k_len - q_len), keys)]

    def pairs(self, q_len: int, k_len: int, offsets: Offsets) -> int:
        return grid_pairs(self.axes, q_len)

    def seen(self, queries: Tensor, q_len: int, k_len: int, offsets: Offsets) -> Tensor:
        return grid_seen(self.axes, queries + (k_len - q_len))

    def lengthened(self, length: int, longer: int) -> None:
        return None

    def check(self, q_len: int, k_len: int) -> None:
        _check_not_longer(self, q_len, k_len)
        product = 1
        for size in self.grid:  # may be symbolic
            product *= size
        if product != k_len:
            raise InvalidInput(f"grid {self.grid} holds {product} tokens, but the sequence has {k_len}")

    def simplify(self, q_len: int, k_len: int, heads: int) -> Pattern:
        if len(self.grid) > 1 or self.edges == "shift" or self.dilation != (1,):
            return self
        half = (self.window[0] - 1) // 2
        return Window(half, 0 if self.is_causal[0] else half).simplify(q_len, k_len, heads)

    @property
    def later(self) -> dict[str, Any]:  # type: ignore[override]
        return {"stride": (1,) * len(self.grid)}

    def __str__(self) -> str:
        options = {f"dilation={self.dilation}": max(self.dilation) > 1, f"causal={self.is_causal}": any(self.is_causal)}
        options |= {"edges=shift": self.edges == "shift", f"stride={self.stride}": max(self.stride) > 1}
        return f"Neighborhood({', '.join([f'grid={self.grid}', f'window={self.window}', *where_true(options)])})"


def _check_not_longer(pattern: Pattern, q_len: int, k_len: int) -> None:
    if q_len > k_len:
        raise InvalidInput(f"{type(pattern).__name__} needs q_len <= k_len, got {q_len} and {k_len}")
