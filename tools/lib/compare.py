"""Results of two runs, row by row: same, faster, slower or undecided, from the intervals of both.

A row is any part of a results file that has a median with both ends of its interval: milliseconds (or another unit of
time), or a ratio of two times that were interleaved in one run. Rows are named by where they stand: the keys on the way
there, and of an item of a list its texts and whole numbers, such as pattern, tokens and dtype.

Two runs are not interleaved, so their samples are not paired: a row's quotient lies between new low / old high and
new high / old low. Times on different hardware are not compared; there each time is taken relative to one that was
interleaved with it, and those quotients are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attn_dispatch.text import align
from attn_dispatch.tuning.intervals import MARGIN, ONE_LOOK, Interval, fewest

Verdict = Literal["slower", "higher", "faster", "lower", "undecided", "same"]
SAME = 0.10  #: share by which times of the same code may differ from one process to the next
UNITS = ("_ms", "_us", "_ns", "_s")  #: of times; a row without one is a ratio
CENTRES = ("median", "added")
#: Of an item of a list: what was measured, not which item it is.
MEASURED = frozenset({"best", "choice", "limit", "provisional", "reason", "rounds", "source", "status", "version"})
MEASURED_UNITS = (*UNITS, "_bytes")


@dataclass(frozen=True)
class Row:
    """A measured value with its interval. `unit` is "" for a ratio; `rounds` is None where the file does not say."""

    path: tuple[str, ...]
    unit: str
    median: float
    low: float
    high: float
    rounds: int | None

    @property
    def name(self) -> str:
        return " / ".join(self.path)

    def over(self, reference: Row) -> Row:
        """This time relative to another one of the same run."""
        bounds = quotient(reference, self)
        path = (*self.path[:-1], f"{self.path[-1]} over {reference.path[-1]}")
        rounds = min((each.rounds for each in (self, reference) if each.rounds is not None), default=None)
        median = self.median / reference.median
        return Row(path, self.unit, median, bounds.low, bounds.high, rounds)


@dataclass(frozen=True)
class Comparison:
    """A row of both runs; `quotient` is new / old."""

    old: Row
    new: Row
    verdict: Verdict
    quotient: Interval


# --- rows of a file ---------------------------------------------------------------------------------------------------


def rows(found: Any, path: tuple[str, ...] = ()) -> Iterator[Row]:
    """Every row of a results file."""
    if isinstance(found, Mapping):
        yield from _own(found, path)
        for key, value in found.items():
            yield from rows(value, (*path, str(key)))
    elif isinstance(found, Sequence) and not isinstance(found, str):
        names = [_identity(each) for each in found]
        seen: Counter[str] = Counter()
        for name, each in zip(names, found):
            seen[name] += 1
            numbered = name if name and names.count(name) == 1 else f"{name} #{seen[name]}".strip()
            yield from rows(each, (*path, numbered))


def _own(found: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[Row]:
    """The row that this part of a file is, if any."""
    for unit in ("", *UNITS):
        for centre in CENTRES:
            values = [found.get(f"{name}{unit}") for name in (centre, "low", "high")]
            numbers = [float(each) for each in values if isinstance(each, int | float)]
            if len(numbers) == len(values):
                median, low, high = numbers
                rounds = found.get("rounds")
                yield Row(path, unit, median, low, high, rounds if isinstance(rounds, int) else None)


def _identity(item: Any) -> str:
    """What names an item of a list: its texts, whole numbers and truth values that were not measured."""
    if not isinstance(item, Mapping):
        return ""
    return ", ".join(
        f"{key} {value}"
        for key, value in item.items()
        if isinstance(value, str | int) and key not in MEASURED and not key.endswith(MEASURED_UNITS)
    )


# --- verdicts ---------------------------------------------------------------------------------------------------------


def quotient(old: Row, new: Row) -> Interval:
    """Bounds of new / old; both must be positive."""
    return Interval(new.low / old.high, new.high / old.low)


def compared(old: Row, new: Row) -> Comparison:
    """The verdict on a row.

    "same": the quotient and its inverse are 1 - `SAME` or more, by six rounds or more on both sides. "faster",
    "slower": one of them is less ("lower", "higher" of a ratio); with fewer rounds, whose interval covers less than
    95 %, less than 1 - 0.02, doubled for each round short of six, if that is more. Else "undecided", as where a low end
    is not positive.
    """
    if min(old.low, new.low) <= 0:
        return Comparison(old, new, "undecided", Interval(0.0, float("inf")))
    found = quotient(old, new)
    short = max(0, fewest(ONE_LOOK) - min(each.rounds or fewest(ONE_LOOK) for each in (old, new)))
    margin = max(SAME, MARGIN * 2**short) if short else SAME
    verdict: Verdict = "undecided"
    if found.high < 1 - margin:
        verdict = "faster" if old.unit else "lower"
    elif found.low > 1 / (1 - margin):  # as far as the bound above, so that OLD and NEW may be exchanged
        verdict = "slower" if old.unit else "higher"
    elif not short and found.low >= 1 - SAME and found.high <= 1 / (1 - SAME):
        verdict = "same"
    return Comparison(old, new, verdict, found)


@dataclass(frozen=True)
class Compared:
    """Two results files: rows of both, names of rows of one, and those that are not comparable on other hardware."""

    comparisons: list[Comparison]
    only_old: list[str]
    only_new: list[str]
    not_compared: list[str]


def compare(old: Any, new: Any) -> Compared:
    """Two results files as `tools.lib.common.write` makes them."""
    before, after = ({(each.path, each.unit): each for each in rows(found)} for found in (old, new))
    both = [key for key in before if key in after]
    only_old, only_new = ([a[key].name for key in a if key not in b] for a, b in ((before, after), (after, before)))
    if same_hardware(old, new):
        return Compared([compared(before[key], after[key]) for key in both], only_old, only_new, [])
    comparisons, alone = [], []
    groups: dict[tuple[tuple[str, ...], str], list[tuple[tuple[str, ...], str]]] = {}
    for key in both:
        if key[1]:
            groups.setdefault((key[0][:-1], key[1]), []).append(key)
        else:
            comparisons.append(compared(before[key], after[key]))
    for keys in groups.values():
        positive = [key for key in keys if min(before[key].low, after[key].low) > 0]
        alone += [before[key].name for key in keys if key not in positive or len(positive) == 1]
        for key in positive[1:]:
            first = positive[0]
            comparisons.append(compared(before[key].over(before[first]), after[key].over(after[first])))
    return Compared(comparisons, only_old, only_new, alone)


def same_hardware(old: Any, new: Any) -> bool:
    """Whether both name the same silicon, and neither none."""
    return old.get("silicon") is not None and old.get("silicon") == new.get("silicon")


class NotResults(Exception):
    """A path holds no results of benchmarks."""


# --- files and text ---------------------------------------------------------------------------------------------------


def files(path: Path) -> dict[str, Path]:
    """The results in a folder by their paths in it, or one file by its name.

    Raises:
        NotResults: there is none.
    """
    if path.is_file():
        return {path.name: path}
    found = {each.relative_to(path).as_posix(): each for each in sorted(path.rglob("*.json"))}
    if not found:
        raise NotResults(f"no results: {path} is neither a JSON file nor a folder with one")
    return found


def report(old: Path, new: Path) -> list[str]:
    """The comparison of two folders or files as lines: verdicts by file, then what only one of them has."""
    before, after = files(old), files(new)
    if old.is_file() and new.is_file():
        before = {new.name: old}
    lines: list[str] = []
    total: Counter[str] = Counter()
    for name in sorted(before.keys() & after.keys()):
        one, other = (_read(each[name]) for each in (before, after))
        found = compare(one, other)
        total.update(each.verdict for each in found.comparisons)
        if any((found.comparisons, found.not_compared, found.only_old, found.only_new)):
            lines += [f"{name}: {_where(one)} -> {_where(other)}", *_text(found, same_hardware(one, other)), ""]
    for side, mine, others in (("old", before, after), ("new", after, before)):
        missing = sorted(mine.keys() - others.keys())
        if missing:
            lines.append(f"only in the {side} results: {', '.join(missing)}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in total.most_common())
    return [*lines, f"rows in both: {counts or 'none'}"]


def _read(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotResults(f"{path} is no JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise NotResults(f"{path} holds no results: a benchmark writes an object")
    return found


def _where(found: Any) -> str:
    about = found.get("provenance") or {}
    commit = found.get("commit", "commit not recorded")
    return f"{about.get('name', 'unknown machine')}, torch {about.get('torch', 'unknown')}, {commit}"


def _text(found: Compared, same: bool) -> list[str]:
    lines = []
    if not same:
        lines.append(
            "other hardware: times are not compared, but each relative to the first of those interleaved with it"
        )
    order = ("slower", "higher", "faster", "lower", "undecided", "same")
    ordered = sorted(found.comparisons, key=lambda each: order.index(each.verdict))
    if ordered:
        head = ("verdict", "old", "new", "new / old", "row")
        lines += align([head, *(_cells(each, same) for each in ordered)], {0, 4})
    for about, names in (
        ("only in the old results", found.only_old),
        ("only in the new results", found.only_new),
        ("not compared, a time alone", found.not_compared),
    ):
        lines += [f"{about}: {name}" for name in names]
    return lines


def _cells(one: Comparison, same: bool) -> tuple[str, ...]:
    unit = f" {one.old.unit.removeprefix('_')}" if one.old.unit and same else ""
    values = (f"{each.median:.4g}{unit}" for each in (one.old, one.new))
    return (one.verdict, *values, f"{one.quotient.low:.2f} - {one.quotient.high:.2f}", one.old.name)
