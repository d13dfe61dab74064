"""A call as arguments of an operator: its pattern as a text and integers, which may be symbolic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from attn_dispatch.spec.checks import integer, integers
from attn_dispatch.spec.data import Blocks, BlocksForm, Ranges, RangesForm
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import PATTERNS, Call, choose_pattern


class Encoded(NamedTuple):
    """What the operators take of a call besides q, k and v: as `Call`, but for the pattern's text and numbers.

    In the order that exported programs have them in; tensors come first.
    """

    seq_lens: Tensor | None
    key_mask: Tensor | None
    documents: Tensor | None
    cu_seqlens: Tensor | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    key_lens: Tensor | None
    pattern_data: Tensor | None
    seed: Tensor | None
    pattern: str
    numbers: list[int]
    scale: float | None
    softcap: float | None
    backend: str | None
    order: str | None
    ranks: str | None
    first_head: int | None
    all_heads: int | None
    dropout_p: float
    bias_needs_grad: bool

    @classmethod
    def first_of(cls, arguments: Sequence[Any]) -> Encoded:
        """These among an operator's arguments after q, k and v (and out and lse)."""
        return cls(*arguments[: len(SCHEMA)])

    @property
    def tensors(self) -> tuple[Any, ...]:
        return self[: len(TENSORS)]

    @property
    def settings(self) -> tuple[Any, ...]:
        return self[len(TENSORS) :]


_TYPES = {
    Tensor | None: "Tensor?", str: "str", list[int]: "SymInt[]", float | None: "float?", str | None: "str?",
    int | None: "SymInt?", bool: "bool", float: "float",
}  # fmt: skip
#: The fields of `Encoded` with their types in a graph.
SCHEMA = {name: _TYPES[kind] for name, kind in get_type_hints(Encoded).items()}
SAME = [name for name in SCHEMA if name in Call._fields]  #: those that a call has, too; but `pattern` is a text
TENSORS = [name for name, kind in SCHEMA.items() if kind == "Tensor?"]
#: The fields of each pattern, in the order in which they are encoded.
FIELDS = {name: [each.name for each in fields(kind)] for name, kind in PATTERNS.items()}  # type: ignore[arg-type]


def encoded(call: Call, bias_needs_grad: bool, seed: Tensor | None, ranks: str | None) -> Encoded:
    """What an operator takes of a call, of dropout its seed, and of a mesh its number; `decoded` reads it."""
    given = {name: getattr(call, name) for name in SAME} | {"seed": seed, "ranks": ranks}
    given["pattern_data"] = call.tensors.get("pattern_data")
    given["pattern"], given["numbers"] = encoded_pattern(call)
    for name, least in (("first_head", 0), ("all_heads", 1)):
        given[name] = None if given[name] is None else integer(name, given[name], least)
    return Encoded(**given, bias_needs_grad=bias_needs_grad)


def decoded(qkv: Iterable[Tensor], given: Encoded, return_lse: bool) -> Call:
    """The call that an operator computes, with tokens first. Raises InvalidInput."""
    asked = {name: getattr(given, name) for name in SAME}
    asked["pattern"] = decoded_pattern(given.pattern, tuple(given.numbers)).bound(given.pattern_data)
    q, k, v = qkv
    return Call(q, k, v, **asked, return_lse=return_lse)


def encoded_pattern(call: Call) -> tuple[str, list[int]]:
    """A text and numbers for a call's pattern; `decoded_pattern` reads them.

    No constructor is called: its comparisons would make symbolic numbers part of the graph.
    """
    alone = call.segment_lengths is None and call.dilation_rates is None
    if call.pattern is not None:
        if not (isinstance(call.pattern, Pattern) and alone and call.is_causal is False):
            choose_pattern(call)  # raises
        return _encoded(call.pattern)
    if not isinstance(call.is_causal, bool) or (call.segment_lengths is None) != (call.dilation_rates is None):
        choose_pattern(call)  # raises
    if alone:
        return f"Dense {call.is_causal}", []
    lengths, rates = (integers(name, getattr(call, name)) for name in ("segment_lengths", "dilation_rates"))
    return f"Dilated #{len(lengths)} #{len(rates)} {call.is_causal} mod all # None", [*lengths, *rates, 0]


def _encoded(pattern: Pattern) -> tuple[str, list[int]]:
    """The pattern's kind and a word for each field: `#` for a number, `#3` for three, `*` before several flags."""
    if isinstance(pattern, Ranges):
        return RangesForm.__name__, []
    if isinstance(pattern, Blocks):
        code, inner = _encoded(pattern.within)
        return f"{BlocksForm.__name__} {code}", [*pattern.size, *inner]
    if isinstance(pattern, Reordered):
        code, inner = _encoded(pattern.pattern)
        return f"Reordered {pattern.order} {code}", inner
    words = [type(pattern).__name__]
    numbers: list[int] = []
    for name in FIELDS[words[0]]:
        value = getattr(pattern, name)
        if value is None or isinstance(value, (bool, str)):
            words.append(f"{value}")
        elif not isinstance(value, tuple):
            words.append("#")
            numbers.append(value)
        elif isinstance(value[0], bool):
            words.append("*" + ",".join([f"{flag}" for flag in value]))
        else:
            words.append(f"#{len(value)}")
            numbers.extend(value)
    return " ".join(words), numbers


@lru_cache(4096)
def decoded_pattern(code: str, numbers: tuple[int, ...]) -> Pattern:
    """The pattern of a text and its numbers, or its form. Raises InvalidInput."""
    kind, *words = code.split()
    if kind == RangesForm.__name__:  # of forms, what `bound` takes
        return RangesForm(1, by_row=False)
    if kind == BlocksForm.__name__:
        within = decoded_pattern(" ".join(words), numbers[2:])
        return BlocksForm((numbers[0], numbers[1]), "all", by_row=False, is_list=False, within=within)
    if kind == Reordered.__name__:
        return Reordered(decoded_pattern(" ".join(words[1:]), numbers), words[0])
    left = iter(numbers)
    return PATTERNS[kind](*[_value(word, left) for word in words])


def _value(word: str, left: Iterator[int]) -> Any:
    if word.startswith("*"):
        return tuple(each == "True" for each in word[1:].split(","))
    if word.startswith("#"):
        return next(left) if word == "#" else tuple(islice(left, int(word[1:])))
    return {"True": True, "False": False, "None": None}.get(word, word)
