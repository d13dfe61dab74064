"""Results of two runs, row by row: same, faster, slower or undecided, from the intervals of both.

A row is any part of a results file that has a median with both ends of its interval: milliseconds (or another unit of
time), or a ratio of two times that were interleaved in one run. Rows are named by where they stand: the keys on the
way there, and of an item of a list its texts and whole numbers, such as pattern, tokens and dtype.

Two runs are not interleaved, so their samples are not paired: a row's quotient lies between new low / old high and
new high / old low. Times of different hardware are not compared, ratios are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attn_dispatch.text import align
from attn_dispatch.tuning.intervals import MARGIN, ONE_LOOK, Interval, fewest

SAME = 0.10  #: share by which times of the same code may differ from one process to the next
UNITS = ("_ms", "_us", "_ns", "_s")  #: of times; a row without one is a ratio
CENTRES = ("median", "added")
#: Of an item of a list: what was measured, not which item it is.
MEASURED = frozenset({"best", "choice", "limit", "provisional", "reason", "rounds", "source", "status", "version"})
MEASURED_UNITS = (*UNITS, "_bytes")
ORDER = ("slower", "higher", "faster", "lower", "undecided", "same")  #: of verdicts, the most telling first


class NotResults(Exception):
    """A path holds no results of benchmarks."""


class Row(NamedTuple):
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
    """Bounds of new / old; without any where a low end is not positive."""
    if min(old.low, new.low) <= 0:
        return Interval(0.0, float("inf"))
    return Interval(new.low / old.high, new.high / old.low)


def verdict(old: Row, new: Row) -> str:
    """What became of a row.

    "same": the quotient and its inverse are 1 - `SAME` or more, by six rounds or more on both sides. "faster",
    "slower": one of them is less ("lower", "higher" of a ratio); with fewer rounds, whose interval covers less than
    95 %, less than 1 - 0.02, doubled for each round short of six, if that is more. Else "undecided".
    """
    found = quotient(old, new)
    short = max(0, fewest(ONE_LOOK) - min(each.rounds or fewest(ONE_LOOK) for each in (old, new)))
    margin = max(SAME, MARGIN * 2**short) if short else SAME
    if found.high < 1 - margin:
        return "faster" if old.unit else "lower"
    if found.low > 1 / (1 - margin):  # as far as the bound above, so that OLD and NEW may be exchanged
        return "slower" if old.unit else "higher"
    return "same" if not short and found.low >= 1 - SAME and found.high <= 1 / (1 - SAME) else "undecided"


def compare(old: Any, new: Any) -> tuple[list[tuple[str, Row, Row]], str]:
    """Two results files: the verdict on each row of both, and how many rows were not compared, and why."""
    before, after = ({(each.path, each.unit): each for each in rows(found)} for found in (old, new))
    both, silicon = before.keys() & after.keys(), old.get("silicon")
    same = silicon is not None and silicon == new.get("silicon")
    found = [(verdict(one, after[key]), one, after[key]) for key, one in before.items() if key in both]
    kept = [each for each in found if same or not each[1].unit]
    counts = {
        "only in the old results": len(before) - len(both),
        "only in the new results": len(after) - len(both),
        "times of other hardware": len(found) - len(kept),
    }
    return kept, ", ".join(f"{count} rows {why}" for why, count in counts.items() if count)


# --- files and text ---------------------------------------------------------------------------------------------------


def report(old: Path, new: Path) -> list[str]:
    """The comparison of two folders or files as lines: verdicts by file, then what only one of them has.

    Raises:
        NotResults: a path has none.
    """
    before, after = _files(old), _files(new)
    if old.is_file() and new.is_file():
        before = {new.name: old}
    lines: list[str] = []
    total: Counter[str] = Counter()
    for name in sorted(before.keys() & after.keys()):
        one, other = _read(before[name]), _read(after[name])
        found, left = compare(one, other)
        total.update(each for each, _, _ in found)
        if found or left:
            lines += [f"{name}: {_where(one)} -> {_where(other)}", *_text(found), *filter(None, [left]), ""]
    for side, mine, others in (("old", before, after), ("new", after, before)):
        if missing := sorted(mine.keys() - others.keys()):
            lines.append(f"only in the {side} results: {', '.join(missing)}")
    counts = ", ".join(f"{count} {each}" for each, count in total.most_common())
    return [*lines, f"rows in both: {counts or 'none'}"]


def _files(path: Path) -> dict[str, Path]:
    """The results in a folder by their paths in it, or one file by its name."""
    if path.is_file():
        return {path.name: path}
    found = {each.relative_to(path).as_posix(): each for each in sorted(path.rglob("*.json"))}
    if not found:
        raise NotResults(f"no results: {path} is neither a JSON file nor a folder with one")
    return found


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


def _text(found: list[tuple[str, Row, Row]]) -> list[str]:
    ordered = sorted(found, key=lambda each: ORDER.index(each[0]))
    head = ("verdict", "old", "new", "new / old", "row")
    return align([head, *(_cells(*each) for each in ordered)], {0, 4}) if found else []


def _cells(what: str, old: Row, new: Row) -> tuple[str, ...]:
    unit, bounds = f" {old.unit.removeprefix('_')}" if old.unit else "", quotient(old, new)
    values = (f"{each.median:.4g}{unit}" for each in (old, new))
    return (what, *values, f"{bounds.low:.2f} - {bounds.high:.2f}", old.name)
