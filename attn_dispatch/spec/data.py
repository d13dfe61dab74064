"""Masks made of data: patterns that hold integer or bool tensors, and their forms, which are what a problem holds.

Problems and their keys never hold the tensors: a form is the pattern without them. Backends get them beside q, k and v,
as `pattern_data`; `form.bound(data)` is the pattern again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar

from attn_dispatch import process_state
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.checks import boolean, choice, integer
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.spec.reach import Offsets

if TYPE_CHECKING:
    import torch
    from torch import Tensor, dtype

T = TypeVar("T")
FAR = 2**30  #: positions are cut to +-FAR, so that they fit an int32
SPARSEST = -40  #: half octaves; the density of a pattern without pairs
MOST_UNEVEN = 2  #: octaves


class Form(Pattern):
    """A pattern that holds tensors, without them: frozen and hashable. Base of the forms.

    `density` is the share of the query-key pairs that are seen, in half octaves below 1; `imbalance` is how much more
    the query that sees most sees than the mean one, in octaves up to `MOST_UNEVEN`. None: not known.
    """

    __slots__ = ()
    holds_data = True
    density: int | None
    imbalance: int | None

    @abstractmethod
    def bound(self, data: Tensor) -> DataPattern:  # type: ignore[override]
        """The pattern of these tensors."""

    def _counts(self, *_: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise TypeError(f"{self} is a form: bound() makes a pattern of it")

    def pairs(self, q_len: int, k_len: int, offsets: Offsets) -> int:
        return round(q_len * k_len * 2 ** ((self.density or 0) / 2))

    def seen(self, queries: Tensor, q_len: int, k_len: int, offsets: Offsets) -> Tensor:
        return queries.new_ones(k_len) > 0  # which ones the data say: see `hidden.Hidden`

    def _classes(self) -> str:
        density = "" if self.density is None else f", density={2 ** (self.density / 2):.2g}"
        return density + (f", longest row {2**self.imbalance}x" if self.imbalance else "")


class DataFacts(NamedTuple):
    """What the values of a pattern's tensors say: the classes of its form, and the pattern without tensors that sees
    the same, if there is one.
    """

    density: int
    imbalance: int
    plain: Pattern | None


class DataPattern(Pattern):
    """Base of the patterns that hold tensors. They are made once and used by all layers: what a backend derives from
    the tensors is kept as long as the pattern is. They have no hash; problems hold their `form`.

    They can be copied and pickled; `torch.load` takes them with `weights_only=False`.

    `data` is what backends get. `given` are the caller's tensors by name, with their version counters.
    """

    __slots__ = ("_facts", "data", "given")
    holds_data = True
    _facts: dict[int, DataFacts]
    data: Tensor
    given: tuple[tuple[str, Tensor, int | None], ...]
    __hash__ = None  # type: ignore[assignment]

    def _hold(self, data: Tensor, **given: Tensor) -> None:
        self.data, self._facts = data, {}
        self._note(**given)

    def _note(self, **given: Tensor) -> None:
        import torch

        traced = torch.compiler.is_compiling()  # which knows no versions
        self.given = () if traced else tuple((name, x, _version(x)) for name, x in given.items())

    def __reduce__(self) -> tuple[Any, ...]:
        # Its own tensors alone: copies of the caller's have other version counters.
        return _bound, (self.form(None, 1, 1), self.data)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, where: torch.device | str) -> Self:
        """The pattern on another device. Raises InvalidInput where the caller's tensors were changed in place."""
        self._check_versions()
        moved = self.data.to(where)
        return self if moved is self.data else self.form(None, 1, 1).bound(moved)  # type: ignore[return-value]

    @property
    @abstractmethod
    def queries(self) -> int:
        """How many there are; of `Blocks`, in whole blocks."""

    @abstractmethod
    def form(self, k_len: int | None, heads: int, kv_heads: int) -> Form:
        """What a problem holds of it. Without k_len no value is read: its classes are unknown."""

    @abstractmethod
    def check_rows(self, batch: int, q_len: int, heads: int, kv_heads: int) -> None:
        """Raise InvalidInput where the tensors do not fit these sizes."""

    def check_call(self, where: torch.device, batch: int, q_len: int, k_len: int, heads: int, kv_heads: int) -> None:
        """Raise InvalidInput where the tensors do not fit a call of these sizes, on this device."""
        self.check(q_len, k_len)
        if self.device != where:
            raise InvalidInput(f"the tensors of {self} must be on q's device {where}")
        self.check_rows(batch, q_len, heads, kv_heads)

    def check(self, q_len: int, k_len: int) -> None:
        self._check_versions()

    def _check_versions(self) -> None:
        for name, x, version in self.given:
            if _version(x) != version:
                kind = type(self).__name__
                raise InvalidInput(f"{name} was changed in place after its {kind} was made: make a new {kind}")

    def facts(self, k_len: int | None) -> DataFacts | None:
        """Found once for a number of keys, which waits for the tensors' device. None where no value can be read: in
        graphs and transforms.
        """
        from attn_dispatch.spec.tracing import graphed, is_transformed, make_plain

        if not isinstance(k_len, int):  # None, or symbolic
            return None
        if (known := self._facts.get(k_len)) is not None:
            return known
        if self.data.is_meta or graphed(self.data) or is_transformed():
            return None
        key = "facts", k_len, self.form(None, 1, 1)
        self._facts[k_len] = derived(self.data, key, lambda: make_plain(self._read, k_len))
        return self._facts[k_len]

    @abstractmethod
    def _read(self, k_len: int) -> DataFacts:
        """The facts, from the tensors' values."""

    def _classes(self, k_len: int | None) -> tuple[int, int] | tuple[None, None]:
        """The density and imbalance of a form."""
        found = self.facts(k_len)
        return (None, None) if found is None else (found.density, found.imbalance)


def _readable(x: Tensor) -> bool:
    """Whether there are values, and they are not those of a graph or mapped."""
    from attn_dispatch.private import is_wrapped
    from attn_dispatch.spec.tracing import graphed

    return not (x.is_meta or graphed(x) or is_wrapped(x))


def _bound(form: Form, data: Tensor) -> DataPattern:
    return form.bound(data)


def _either(*sizes: int) -> str:
    return " or ".join(map(str, sorted(set(sizes))))


EMPTY = DataFacts(SPARSEST, 0, None)  #: of a pattern without queries or keys


def _facts(mean: float, most: float, plain: Pattern | None) -> DataFacts:
    """From the shares of the keys that rows of the data see: their mean, and the largest."""
    if not mean:
        return DataFacts(SPARSEST, 0, plain)
    density, imbalance = max(SPARSEST, round(2 * math.log2(min(1.0, mean)))), round(math.log2(most / mean))
    return DataFacts(density, min(MOST_UNEVEN, imbalance), plain)


def _int32(x: Tensor) -> Tensor:
    """A copy that is cut to +-FAR."""
    return x.long().clamp(-FAR, FAR).int()


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _usable(x: Tensor) -> Tensor:
    """A tensor that autograd can save: those of inference mode are copied."""
    import torch

    if torch.compiler.is_compiling() or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


# --- intervals ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RangesForm(Form):
    """The form of `Ranges`: the number of intervals of each query, and whether each row of the batch has its own."""

    intervals: int
    by_row: bool
    density: int | None = None
    imbalance: int | None = None

    def __post_init__(self) -> None:
        integer("intervals", self.intervals, 1)
        boolean("by_row", self.by_row)
        _check_classes(self)

    def bound(self, data: Tensor) -> Ranges:  # type: ignore[override]
        found = object.__new__(Ranges)
        found._hold(data)
        return found

    def __str__(self) -> str:
        return f"Ranges({self.intervals} per query{', by row' * self.by_row}{self._classes()})"


class Ranges(DataPattern):
    """Query i sees the keys `first[i] <= j <= last[i]`, cut to the keys that there are; none where first > last.

    Args:
        first, last: integers [1 or batch, q_len], positions of keys; or [1 or batch, branches, q_len]: a key counts as
            often as branches see it. They get no gradient.
            Over ranks, the same on each: those of the whole sequence.
    """

    __slots__ = ()

    def __init__(self, first: Tensor, last: Tensor) -> None:
        import torch

        for name, x in (("first", first), ("last", last)):
            _check_integers(name, x, (2, 3), "[1 or batch, (branches,) q_len]")
        if first.ndim == 3 and not first.shape[1]:
            raise InvalidInput(f"first must have a branch at least, got {list(first.shape)}")
        if first.shape != last.shape or first.device != last.device:
            got = f"{list(first.shape)} on {first.device} and {list(last.shape)} on {last.device}"
            raise InvalidInput(f"first and last must have one shape and device, got {got}")
        both = torch.stack([_int32(first), _int32(last)])
        self._hold(_usable(both if both.ndim == 4 else both[:, :, None]), first=first, last=last)

    @classmethod
    def spans(cls, ids: Tensor, is_causal: bool = True, left: int | None = None) -> Ranges:
        """Tokens of one id, which stand together, see each other both ways; besides, each sees a window.

        Args:
            ids: integers [1 or batch, len]; -1: the token is in no span.
            is_causal: the window is `Window(left, 0)`; else `Window(left, left)`.
            left: tokens; None: an open side.

        Raises:
            InvalidInput: an argument is wrong, or tokens of one id do not stand together.
        """
        import torch

        _check_integers("ids", ids, (2,), "[1 or batch, len]")
        boolean("is_causal", is_causal)
        left = None if left is None else min(FAR, integer("left", left, 0, "None or an integer"))
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        change = ids[:, 1:] != ids[:, :-1]
        edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
        begins, ends = torch.cat([edge, change], 1), torch.cat([change, edge], 1)
        _check_together(ids, begins)
        first = torch.where(begins, at, 0).cummax(1).values
        last = torch.where(ends, at, ids.shape[1]).flip(1).cummin(1).values.flip(1)
        alone = ids == -1
        low = torch.zeros_like(at) if left is None else at - left
        high = at if is_causal else torch.full_like(at, FAR) if left is None else at + left
        found = cls(low.minimum(torch.where(alone, low, first)), high.maximum(torch.where(alone, high, last)))
        found._note(ids=ids)
        return found

    @property
    def queries(self) -> int:
        return self.data.shape[-1]

    def form(self, k_len: int | None, heads: int, kv_heads: int) -> RangesForm:
        _, rows, branches, _ = self.data.shape
        return RangesForm(branches, rows > 1, *self._classes(k_len))

    def check_rows(self, batch: int, q_len: int, heads: int, kv_heads: int) -> None:
        _, rows, branches, length = self.data.shape
        if rows not in (1, batch) or length != q_len:
            names = " and ".join(name for name, *_ in self.given) or "first and last"
            allowed = f"[{_either(1, batch)}, (branches,) {q_len}], the queries of the call"
            raise InvalidInput(f"{names} of Ranges must have shape {allowed}, got {[rows, branches, length]}")

    def clipped(self, low: Tensor, high: Tensor) -> Ranges:
        """The intervals cut to `low` to `high`, integers [1 or batch, q_len]."""
        first, last = self.data
        return Ranges(first.maximum(low[:, None]), last.minimum(high[:, None]))

    def bounds(self, k_len: int) -> tuple[Tensor, Tensor]:
        """First and last keys of a sequence, int64 [rows, intervals, q_len]; none: `first > last`."""
        first, last = self.data.long()
        return first.clamp(min=0), last.clamp(max=k_len - 1)

    def _read(self, k_len: int) -> DataFacts:
        import torch

        _, _, branches, q_len = self.data.shape
        if not self.data.numel() or not k_len:
            return EMPTY
        first, last = self.bounds(k_len)
        keys = (last - first + 1).clamp(min=0)
        token = torch.arange(q_len, device=self.device) + k_len - q_len
        # The only window that it can be: of all queries, the furthest they see.
        left, right = (x.masked_fill(keys == 0, -1).amax() for x in (token - first, last - token))
        low, high = (token - left).clamp(min=0), (token + right).clamp(max=k_len - 1)
        alike = torch.where(keys > 0, (first == low) & (last == high), low > high).all()
        seen = keys.sum(1)
        pairs, most, *sides, is_window = torch.stack([seen.sum(), seen.max(), left, right, alike.long()]).tolist()
        window = Window(*sides).simplify(q_len, k_len, 1) if is_window and branches == 1 and min(sides) >= 0 else None
        # Of one query any interval to the end is a window: another one, to be decided on, at each step of decoding.
        return _facts(pairs / seen.numel() / k_len, most / k_len, window if q_len > 1 or window == Dense() else None)

    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        first, last = self.data[..., q_pos, None]
        seen: Tensor = ((first <= k_pos) & (k_pos <= last)).sum(1, keepdim=True)
        return seen if len(seen) > 1 else seen[0]

    def __repr__(self) -> str:
        return f"Ranges(first, last: {list(self.data.shape[1:])} on {self.device})"


def _check_together(ids: Tensor, begins: Tensor) -> None:
    if not _readable(ids):
        return
    for row, starts in zip(ids, begins):
        runs = row[starts & (row != -1)]
        if len(runs.unique()) < len(runs):
            raise InvalidInput("ids must have the tokens of one id side by side in each row, got an id in two places")


# --- blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksForm(Form):
    """The form of `Blocks`.

    Args:
        size: queries and keys of a block.
        heads: "all" share a table, "kv_heads" have one each, or "heads".
        is_list: key blocks are listed; else the table is of bools.
    """

    size: tuple[int, int]
    heads: str
    by_row: bool
    is_list: bool
    within: Pattern
    density: int | None = None
    imbalance: int | None = None

    def __post_init__(self) -> None:
        _check_size(self.size)
        choice("heads", self.heads, ("all", "kv_heads", "heads"))
        for name in ("by_row", "is_list"):
            boolean(name, getattr(self, name))
        _check_within(self.within)
        _check_classes(self)

    def bound(self, data: Tensor) -> Blocks:  # type: ignore[override]
        found = object.__new__(Blocks)
        found.size, found.within = self.size, self.within
        found._hold(data)
        return found

    def head_offsets(self, head: int, heads: int) -> Offsets:
        return self.within.head_offsets(head, heads) if self.heads == "all" else (head,)

    def check(self, q_len: int, k_len: int) -> None:
        self.within.check(q_len, k_len)

    def lengthened(self, length: int, longer: int) -> BlocksForm | None:
        within = self.within.lengthened(length, longer)
        return None if within is None else replace(self, within=within)

    def of_heads(self, first_head: int, all_heads: int) -> BlocksForm:
        return replace(self, within=self.within.of_heads(first_head, all_heads))

    def to_dict(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"kind": type(self).__name__, **plain, "within": self.within.to_dict()}

    def __str__(self) -> str:
        kind = f"{'list' if self.is_list else 'table'} for {self.heads}{', by row' * self.by_row}"
        within = "" if self.within == Dense() else f", within {self.within}"
        return f"Blocks({self.size[0]} x {self.size[1]}, {kind}{within}{self._classes()})"


class Blocks(DataPattern):
    """Queries see the keys of chosen blocks: `c[h, i, j] = c_within[i, j] * table[h, i // qb, j // kb]`.

    Args:
        table: bool [1 or batch, 1 or kv_heads or heads, ceil(q_len / qb), ceil(k_len / kb)]; or integers [.., q blocks,
            most]: numbers of key blocks, -1 for none; an entry counts as often as it stands. It gets no gradient.
            Over ranks, the same on each: that of the whole sequence.
        size: (qb, kb), queries and keys of a block, or one number for both. The last blocks may be shorter.
        within: a pattern that is multiplied with it: `Dense` or `Window`, say. Blocks are counted from query 0 and key
            0; `within` takes queries at the end of longer keys for the last tokens, as always.
    """

    __slots__ = ("size", "within")
    size: tuple[int, int]
    within: Pattern

    def __init__(self, table: Tensor, size: int | tuple[int, int], within: Pattern | None = None) -> None:
        import torch

        within = Dense() if within is None else within
        _check_within(within)
        shape = "[1 or batch, 1 or kv_heads or heads, q blocks, most], or a bool one [.., q blocks, k blocks]"
        _check_integers("table", table, (4,), shape, torch.bool)
        self.size = _check_size(tuple(size) if isinstance(size, list | tuple) else (size, size))
        self.within = within
        # No tensor of the caller's: what is derived of it lives as long as this pattern, and is of its size.
        self._hold(_usable(table.detach() if table.dtype == torch.bool else _int32(table)), table=table)

    @property
    def is_list(self) -> bool:
        return self.data.element_size() > 1

    @property
    def queries(self) -> int:
        return self.data.shape[2] * self.size[0]

    def form(self, k_len: int | None, heads: int, kv_heads: int) -> BlocksForm:
        rows, tables = self.data.shape[:2]
        scope = "all" if tables == 1 else "kv_heads" if tables == kv_heads < heads else "heads"
        return BlocksForm(self.size, scope, rows > 1, self.is_list, self.within, *self._classes(k_len))

    def check(self, q_len: int, k_len: int) -> None:
        super().check(q_len, k_len)
        self.within.check(q_len, k_len)
        (qb, kb), (rows, columns) = self.size, self.data.shape[2:]
        q_blocks, k_blocks = -(-q_len // qb), -(-k_len // kb)
        if rows != q_blocks or not (self.is_list or columns == k_blocks):
            allowed = f"[.., {q_blocks}, {'most' if self.is_list else k_blocks}]"
            lengths = f"for {q_len} queries and {k_len} keys in blocks of {qb} x {kb}"
            raise InvalidInput(f"table of Blocks must have shape {allowed} {lengths}, got {list(self.data.shape)}")
        if self.is_list:
            _check_entries(self.data, k_blocks)

    def check_rows(self, batch: int, q_len: int, heads: int, kv_heads: int) -> None:
        rows, tables = self.data.shape[:2]
        if rows not in (1, batch) or tables not in (1, kv_heads, heads):
            allowed = f"[{_either(1, batch)}, {_either(1, kv_heads, heads)}, ..], by batch and heads"
            raise InvalidInput(f"table of Blocks must have shape {allowed}, got {list(self.data.shape)}")

    def block_counts(self, k_len: int) -> Tensor:
        """How often each block of queries sees each block of keys: int32 [rows, tables, q blocks, k blocks]."""
        from attn_dispatch.spec.tracing import graphed, is_transformed, make_plain

        k_blocks = -(-k_len // self.size[1])
        if graphed(self.data) or is_transformed():  # what is made then is of use there alone
            return self._block_counts(k_blocks)
        return derived(self.data, ("counts", k_blocks), lambda: make_plain(self._block_counts, k_blocks))

    def _block_counts(self, k_blocks: int) -> Tensor:
        import torch

        if not self.is_list:
            return self.data.int()
        found = self.data.new_zeros(*self.data.shape[:3], k_blocks + 1)
        at = torch.where((self.data >= 0) & (self.data < k_blocks), self.data, k_blocks).long()
        return found.scatter_add_(3, at, torch.ones_like(at, dtype=torch.int32))[..., :k_blocks]

    def _read(self, k_len: int) -> DataFacts:
        import torch

        counts = self.block_counts(k_len)
        if not counts.numel():
            return EMPTY
        seen = (counts > 0).sum(-1)
        blocks, most, is_whole = torch.stack([seen.sum(), seen.max(), (counts == 1).all().long()]).tolist()
        return _facts(blocks / counts.numel(), most / counts.shape[-1], self.within if is_whole else None)

    def _counts(self, q_pos: Tensor, k_pos: Tensor, q_len: int, k_len: int, heads: int, h_pos: Sequence[int]) -> Tensor:
        import torch

        counts = self.block_counts(k_len)
        tables = torch.tensor([head * counts.shape[1] // heads for head in h_pos], device=counts.device)
        found = counts[:, tables[:, None, None], (q_pos // self.size[0])[:, None], k_pos // self.size[1]]
        if self.within != Dense():
            found = found * self.within.multiplicity(q_len, k_len, heads, h_pos=h_pos, q_pos=q_pos, k_pos=k_pos)
        return found if len(found) > 1 else found[0]

    def __repr__(self) -> str:
        return f"Blocks(table: {list(self.data.shape)} on {self.device}, {self.size}, within={self.within})"


def _check_integers(name: str, x: object, axes: tuple[int, ...], shape: str, *more: dtype) -> None:
    import torch

    kinds = torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, *more
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_nested:
        raise InvalidInput(f"{name} must be an integer tensor {shape}, got {type(x).__name__}")
    if x.dtype not in kinds or x.ndim not in axes:
        got = f"{list(x.shape)} of {x.dtype}"
        raise InvalidInput(f"{name} must be an integer tensor {shape}, got {got}")


def _check_size(size: tuple[object, ...]) -> tuple[int, int]:
    if len(size) != 2:
        raise InvalidInput(f"size must be an integer or (queries, keys), got {size!r}")
    return integer("size", size[0], 1), integer("size", size[1], 1)


def _check_within(within: object) -> None:
    if not isinstance(within, Pattern) or within.holds_data or within.natural is not within:
        raise InvalidInput(f"within must be a pattern without tensors, in natural order, got {within!r}")


def _check_classes(form: Form) -> None:
    density, imbalance = form.density, form.imbalance
    if density is not None and not (isinstance(density, int) and SPARSEST <= density <= 0):
        raise InvalidInput(f"density must be None or half octaves in {SPARSEST}..0, got {density!r}")
    if imbalance is not None and not (isinstance(imbalance, int) and 0 <= imbalance <= MOST_UNEVEN):
        raise InvalidInput(f"imbalance must be None or octaves in 0..{MOST_UNEVEN}, got {imbalance!r}")


def _check_entries(table: Tensor, k_blocks: int) -> None:
    if table.device.type != "cpu" or not table.numel() or not _readable(table):
        return
    low, high = derived(table, "entries", lambda: (int(table.min()), int(table.max())))
    if low < -1 or high >= k_blocks:
        raise InvalidInput(f"table of Blocks must have entries in -1..{k_blocks - 1}, got {low} to {high}")


# --- what is derived of the tensors ---------------------------------------------------------------------------

_lock = process_state.lock()
_kept: Any = None  # made at the first use: WeakTensorKeyDictionary needs torch


def derived(data: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returns for a pattern's tensors, kept as long as they are; of threads that make it at once, one's."""
    global _kept
    key = key, _version(data)  # changed in place: made again
    with _lock:
        if _kept is None:
            from torch.utils.weak import WeakTensorKeyDictionary

            _kept = WeakTensorKeyDictionary()
        found = _kept.setdefault(data, {})
        if key in found:
            return found[key]  # type: ignore[no-any-return]
    made = make()  # without the lock: it may wait for a thread that derives too
    with _lock:
        return found.setdefault(key, made)  # type: ignore[no-any-return]
