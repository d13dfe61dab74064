"""The runs of keys that each query sees by a mask function of (batch, head, query, key).

The function gets positions that note whether they are of queries or of keys. What it computes of one kind is computed;
where a query is compared with a key, the keys that it sees lie between a few edges, which sorting finds. Where it
does anything else, it is asked about all pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_dispatch.errors import NoBackend
from attn_dispatch.integrations.mask_functions import Distance, Facts, Unreadable
from attn_dispatch.private import NoOverrides, tree_leaves
from attn_dispatch.spec.data import Ranges

MOST_RUNS = 3  #: intervals of keys that a query may see
MOST_EDGES = 64  #: of the keys that a query sees by a part of a mask
END = 2**40  #: no edge; past every key
#: What a mask function may do with positions of one kind, and ask of them.
ELEMENTWISE = {"add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "floor_divide", "mod", "remainder"}
ELEMENTWISE |= {"neg", "abs", "device", "dtype"}
ELEMENTWISE |= {"eq", "ne", "le", "lt", "ge", "gt", "and", "rand", "or", "ror", "xor", "not", "invert", "where"}
ELEMENTWISE |= {"clamp", "clip", "minimum", "maximum", "to", "long", "int", "bool", "new_ones", "new_zeros"}
PIECE = 2**22  #: pairs of queries and keys that a mask function is asked about at once

Near = tuple[Tensor, Tensor] | None  #: first and end of the keys that matter, [rows, queries]; None: all do


def evaluated(
    function: Any, queries: Tensor, keys: Tensor, batch: int, seen: Callable[[int, int], Tensor]
) -> Facts | Ranges:
    """The bounds of distances, where these say all of a mask, else the intervals of keys that each query sees.

    Args:
        function: of broadcast tensors; None: it has to be asked about all pairs.
        queries, keys: positions; distances are those of queries at the end of the keys.
        seen: what it returns of some queries, bool [batch, queries, keys]: of the first one's number, and how many.

    Raises:
        Unreadable: a query sees more than MOST_RUNS runs of keys.
    """
    q_len, k_len = len(queries), len(keys)
    try:
        edges = edges_of(function, queries, keys, batch)
    except Unreadable:
        step = max(1, PIECE // max(1, batch * k_len))
        pieces = (_of_pairs(seen(at, min(step, q_len - at)), at) for at in range(0, q_len, step))
        found = torch.cat(list(pieces), -1)
    else:
        found = _intervals(edges, 0)
    found = found[:, :1] if bool((found == found[:, :1]).all()) else found
    runs = int((found[0] <= found[1]).any(-1).any(0).sum())
    if found.shape[1] > 1 or runs != 1:
        return Ranges(*found[:, :, : max(1, runs)])
    first, last = found[:, 0, 0]
    at = torch.arange(k_len - q_len, k_len, device=first.device)
    low, high = int((first - at).min()), int((last - at).max())
    if low > 0 or high < 0 or not (_is_moved(first, at, low, k_len) and _is_moved(last, at, high, k_len)):
        return Ranges(*found[:, :, :1])
    return Facts(low if bool(first.any()) else None, high if bool((last < k_len - 1).any()) else None)


def _is_moved(x: Tensor, at: Tensor, by: int, k_len: int) -> bool:
    return torch.equal(x, (at + by).clamp(0, k_len - 1))


def _of_pairs(seen: Tensor, first_query: int) -> Tensor:
    """`_intervals` of bool [batch, queries, keys]."""
    batch, q_len, _ = seen.shape
    seen = seen[:1] if seen.stride(0) == 0 else seen
    edges = torch.unflatten(_packed(seen.flatten(0, 1), 2 * MOST_RUNS + 2), 0, (-1, q_len))
    return _intervals(edges, first_query).expand(-1, batch, -1, -1)


def _packed(seen: Tensor, most: int) -> Tensor:
    """The first edges [rows, most] of bool [rows, keys]."""
    rows, at = pad(seen, (1, 1)).diff(dim=1).nonzero().unbind(1)
    counts = rows.bincount(minlength=len(seen))
    number = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    few = number < most
    found = rows.new_full((len(seen), most), END)
    found[rows[few], number[few]] = at[few]
    return found


def _intervals(edges: Tensor, first_query: int) -> Tensor:
    """The first and last keys [2, batch, MOST_RUNS, queries] of the runs of each query; of none: 1 and 0."""
    if edges.shape[2] > 2 * MOST_RUNS and bool((many := edges[..., 2 * MOST_RUNS] < END).any()):
        query = first_query + int(many.int().argmax()) % edges.shape[1]
        raise Unreadable(f"query {query} sees over {MOST_RUNS} runs of keys")
    edges = pad(edges, (0, 2 * MOST_RUNS - edges.shape[2]), value=END)
    first, end = edges[..., ::2], edges[..., 1::2]
    none = first == END
    return torch.stack([first.masked_fill(none, 1), (end - 1).masked_fill(none, 0)]).transpose(2, 3)


# --- without all pairs ----------------------------------------------------------------------------------------


class _UnknownError(Exception):
    """Something is not modelled. No TypeError: after one in `==`, Python compares by identity."""


def edges_of(function: Any, queries: Tensor, keys: Tensor, batch: int) -> Tensor:
    """Where the keys that a query sees begin and end, by turns: int64 [batch, queries, edges], then END.

    Raises:
        Unreadable: the function does something that is not modelled here, or a query sees many runs of keys.
    """
    rows = torch.arange(batch, device=keys.device)[:, None, None, None]
    places = (rows, None), (rows[:1], None), (queries[None, None, :, None], True), (keys[None, None, None], False)
    try:
        found = _condition(function(*(_Positions.of(*each) for each in places))).edges(None)
    except (_UnknownError, NoBackend, TypeError, AttributeError, RuntimeError, LookupError) as error:
        raise Unreadable(str(error)) from error
    edges = _merged(found, keys.new_tensor([[[0, len(keys)]]]), torch.logical_and)
    return edges.expand(batch, len(queries), -1)


class _Positions(Tensor):
    """What a function computes of rows of the batch and queries alone, [1 or batch, 1, queries, 1], or of keys alone.

    `of_queries` is None where it is of rows alone.
    """

    of_queries: bool | None

    @classmethod
    def of(cls, x: Tensor, of_queries: bool | None) -> _Positions:
        found = x.as_subclass(cls)
        found.of_queries = of_queries
        return found

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        places = [x for x in given if isinstance(x, _Positions)]
        kinds = {x.of_queries for x in places} - {None}
        if len(kinds) > 1 or any(isinstance(x, _Pairwise) for x in given):
            return _pairwise(function, args, kwargs)
        with NoOverrides():
            _check_elementwise(function, given, args)
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.device | torch.dtype):
                return found
            shapes = [(1,) * (4 - x.ndim) + tuple(x.shape) for x in places]
            if not isinstance(found, Tensor) or found.shape not in ((), tuple(map(max, *shapes, shapes[0]))):
                raise _UnknownError(f"{_name(function)} of positions gives {found}")
            return cls.of(found, kinds.pop() if kinds else None)


def _name(function: Any) -> str:
    name: str = function.__self__.__name__ if function.__name__ == "__get__" else function.__name__  # of a property
    return name.strip("_").removeprefix("bitwise_").removeprefix("logical_")


def _check_elementwise(function: Any, given: list[Any], args: Any) -> None:
    """Where a function computes of each position on its own, all at once are as good. Raises _UnknownError."""
    name = _name(function)
    tables = [x for x in given if isinstance(x, Tensor) and not isinstance(x, _Positions) and x.numel() > 1]
    if name == "getitem" and not isinstance(args[0], _Positions):
        tables = [x for x in tables if x is not args[0]]
    elif name not in ELEMENTWISE:
        raise _UnknownError(f"{name} of positions")
    if tables:
        raise _UnknownError(f"{name} of positions and a tensor {list(tables[0].shape)}")


def _plain(x: Tensor) -> Tensor:
    """[1 or batch, queries or 1, keys or 1]"""
    x = x.as_subclass(Tensor)
    return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))[:, 0]


def _pairwise(function: Any, args: Any, kwargs: Any = None) -> Any:
    """An operator of a query and a key, or of what was computed of both."""
    name = _name(function)
    if name == "abs" and len(args) == 1 and not kwargs:
        return abs(args[0])
    if kwargs or len(args) != 2:
        raise _UnknownError(f"{name} of queries and keys")
    one, other = args
    if name in ("and", "or"):
        one, other = _condition(one), _condition(other)
        return one & other if name == "and" else one | other
    if name == "sub" and not (isinstance(one, _Pairwise) or isinstance(other, _Pairwise)):
        return _Distance(one, other)
    return _compared(name, one, other)


class _Pairwise:
    """What was computed of both a query and a key."""

    def _refuse(self, *_: object) -> NoReturn:
        raise _UnknownError(f"a {type(self).__name__} that decides what is done, or is compared")

    __bool__ = __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _pairwise(function, args, kwargs)


class _Condition(_Pairwise):
    """A condition: `edges` of keys that are near, maybe of others too. The cheapest of several `terms` come first."""

    device = None  # whatever is moved there stays where it is

    def __init__(self, edges: Callable[[Near], Tensor], cost: int, *terms: _Condition) -> None:
        self.edges, self.cost, self.terms = edges, cost, terms or (self,)

    def __and__(self, other: Any) -> _Condition:
        terms = sorted((*self.terms, *_condition(other).terms), key=lambda each: each.cost)
        return _Condition(lambda near: _all(terms, near), terms[-1].cost, *terms)

    def __or__(self, other: Any) -> _Condition:
        return self._merged(_condition(other), torch.logical_or)

    def __invert__(self) -> _Condition:
        return self._merged(_condition(True), torch.logical_xor)

    __rand__, __ror__ = __and__, __or__

    def _merged(self, other: _Condition, operator: Any) -> _Condition:
        cost = max(self.cost, other.cost)
        return _Condition(lambda near: _merged(self.edges(near), other.edges(near), operator), cost)

    def to(self, *args: Any, **more: Any) -> _Condition:
        return self


def _condition(x: Any) -> _Condition:
    """A bool for each query, each key or each row, or for all of them, as a condition."""
    if isinstance(x, _Condition):
        return x
    x = x if isinstance(x, Tensor) else torch.tensor(x)
    if x.dtype != torch.bool or not (isinstance(x, _Positions) or x.numel() == 1):
        raise _UnknownError(f"a condition that is a {x.dtype} {list(x.shape)}")
    seen = _plain(x)
    if seen.shape[2] > 1:
        return _Condition(lambda near: _of_keys(seen[:, 0], near), 4)
    return _Condition(lambda near: torch.where(seen, 0, END), 0)


class _Distance(Distance, _Pairwise):
    abs = Distance.__abs__


MIRRORED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}


def _compared(name: str, one: Any, other: Any) -> _Condition:
    """The condition that compares a query with a key. Raises _UnknownError."""
    if name not in MIRRORED or isinstance(one, _Pairwise) or isinstance(other, _Pairwise):
        raise _UnknownError(f"{name} of queries and keys")
    if other.of_queries:
        name, one, other = MIRRORED[name], other, one
    queries, keys = _plain(one), _plain(other)
    if any(x.is_floating_point() or x.is_complex() for x in (queries, keys)):
        raise _UnknownError("a comparison of other than integers")
    if keys.shape[2] == 1:  # one number for all keys
        seen = getattr(torch, name)(queries, keys)
        return _Condition(lambda near: torch.where(seen, 0, END), 0)
    queries, keys = queries[..., 0].long(), keys[:, 0].long()
    if name == "ne":
        return ~_compared("eq", one, other)
    if name == "eq":
        return _Condition(lambda near: _equal(queries, keys, near), 2)
    if bool((keys.diff(dim=1) < 0).any()):
        raise _UnknownError("keys in no order")
    return _Condition(lambda near: _ordered(name, queries, keys), 1)


# --- edges ----------------------------------------------------------------------------------------------------


def _ordered(name: str, queries: Tensor, keys: Tensor) -> Tensor:
    """The edges of keys, which ascend, before or after a query's."""
    rows = max(len(queries), len(keys))
    keys, queries = keys.expand(rows, -1).contiguous(), queries.expand(rows, -1).contiguous()
    at = torch.searchsorted(keys, queries, right=name in ("ge", "lt"))
    first, end = (torch.zeros_like(at), at) if name in ("ge", "gt") else (at, torch.full_like(at, END))
    return torch.stack([first, end], -1)


def _equal(queries: Tensor, keys: Tensor, near: Near) -> Tensor:
    """Runs of equal keys are sorted by row and value, so that each query's stand side by side."""
    batch = max(len(queries), len(keys))
    both = torch.cat([queries.expand(batch, -1), keys.expand(batch, -1)], 1)
    values, ids = torch.unique(both, return_inverse=True)
    ids = ids + torch.arange(batch, device=ids.device)[:, None] * len(values)
    queries, keys = ids[:, : queries.shape[1]].contiguous(), ids[:, queries.shape[1] :]
    change = keys.diff(dim=1) != 0
    rows, first = pad(change, (1, 0), value=True).nonzero().unbind(1)
    end = pad(change, (0, 1), value=True).nonzero()[:, 1] + 1
    named, order = keys[rows, first].sort(stable=True)
    low, high = torch.searchsorted(named, queries), torch.searchsorted(named, queries, right=True)
    high = high if near is None else torch.where(near[0] < near[1], high, low)
    at = low[..., None] + torch.arange(_few((high - low).max()), device=low.device)
    runs = torch.stack([first[order], end[order]], -1)[at.clamp(max=len(order) - 1)]
    return torch.where((at < high[..., None])[..., None], runs, END).flatten(2)


def _few(number: int | Tensor) -> int:
    """Raises _UnknownError."""
    if int(number) > MOST_EDGES:
        raise _UnknownError("many runs of keys")
    return int(number)


def _of_keys(seen: Tensor, near: Near) -> Tensor:
    """The edges of bool [rows, keys], the same for all queries."""
    edges = _packed(seen, max(1, int((pad(seen, (1, 1)).diff(dim=1)).sum(1).max())))
    if near is None:
        return edges[:, None, : _few(edges.shape[1])]
    rows = max(len(edges), len(near[0]))
    edges, low, high = (x.expand(rows, -1).contiguous() for x in (edges, *near))
    first, last = torch.searchsorted(edges, low, right=True), torch.searchsorted(edges, high)
    at = first[..., None] + torch.arange(_few((last - first).max().clamp(min=0)), device=first.device)
    inside = edges.gather(1, at.flatten(1).clamp(max=edges.shape[1] - 1)).view_as(at)
    start = torch.where(first % 2 == 1, 0, END)[..., None]  # whether the first one is seen
    return torch.cat([start, torch.where(at < last[..., None], inside, END)], -1)


def _all(terms: list[_Condition], near: Near) -> Tensor:
    """Each of the terms is asked about the keys that those before it leave."""
    found = terms[0].edges(near)
    for each in terms[1:]:
        found = _merged(found, each.edges(_hull(found)), torch.logical_and)
    return found


def _hull(edges: Tensor) -> tuple[Tensor, Tensor]:
    """The first key that is seen, and the end of the last ones."""
    edges = edges.sort(-1).values
    counts = (edges < END).sum(-1, keepdim=True)
    last = torch.where(counts % 2 == 1, END, edges.gather(-1, (counts - 1).clamp(min=0)))
    return edges[..., 0], last[..., 0]


def _merged(one: Tensor, other: Tensor, operator: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The edges of what `operator` makes of two conditions; it makes nothing of two that do not hold."""
    rows = tuple(map(max, one.shape[:2], other.shape[:2]))
    both, order = torch.cat([x.expand(*rows, -1) for x in (one, other)], 2).sort(-1)
    ones = (order < one.shape[2]).cumsum(-1)
    last = torch.searchsorted(both, both, right=True)  # after all edges at one key
    ones = ones.gather(-1, last - 1)
    now = operator(ones % 2 == 1, (last - ones) % 2 == 1)
    edges = torch.where(now != pad(now[..., :-1], (1, 0)), both, END).sort(-1).values
    return edges[..., : max(2, _few((edges < END).sum(-1).max()))]
