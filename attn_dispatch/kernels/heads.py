"""Groups of heads: by offset in a branch, by key head."""

from __future__ import annotations

from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Offsets

Kind = tuple[Offsets, ...]  #: offsets of one query head, or of all query heads of one key head


def heads_by_kind(pattern: Pattern, heads: int, group: int = 1, which: range | None = None) -> dict[Kind, list[int]]:
    """Heads grouped by the keys that they see.

    Args:
        group: query heads per key head, to group key heads; 1 groups query heads.
        which: the query heads to group, numbered from 0 in the result; all by default.
    """
    offsets = [pattern.head_offsets(head, heads) for head in (range(heads) if which is None else which)]
    found: dict[Kind, list[int]] = {}
    for number, first in enumerate(range(0, len(offsets), group)):
        found.setdefault(tuple(offsets[first : first + group]), []).append(number)
    return found


def heads_by_offset(pattern: Pattern, branch: int, heads: int) -> dict[int, range]:
    """The heads in a branch, by offset."""
    found: dict[int, list[int]] = {}
    for (offsets,), members in heads_by_kind(pattern, heads).items():
        if (offset := offsets[branch]) is not None:
            found.setdefault(offset, []).extend(members)
    # Heads with the same offset are always an arithmetic progression.
    return {offset: progressions(sorted(members))[0] for offset, members in found.items()}


def progressions(members: list[int]) -> list[range]:
    """Heads as one arithmetic progression, or as single heads if they form none."""
    step = members[1] - members[0] if len(members) > 1 else 1
    run = range(members[0], members[-1] + 1, step)
    return [run] if list(run) == members else [range(member, member + 1) for member in members]


def kv_heads_of(heads: range, problem: Problem, grouped: bool) -> slice | tuple[int, ...]:
    """The key heads of these query heads: a slice if the kernel's grouping maps them, else one per query head."""
    group = problem.heads // problem.kv_heads
    read = [head // group for head in heads]
    distinct = sorted(set(read))
    share = len(read) // len(distinct)
    step = distinct[1] - distinct[0] if len(distinct) > 1 else 1
    regular = read == [kv for kv in range(distinct[0], distinct[-1] + 1, step) for _ in range(share)]
    if regular and (grouped or share == 1):
        return slice(distinct[0], distinct[-1] + 1, step)
    return tuple(read)


def head_classes(pattern: Pattern, heads: int, which: range | None = None) -> list[tuple[range, Offsets]]:
    """The groups of `heads_by_kind` as arithmetic progressions, with the offset in each branch."""
    found = heads_by_kind(pattern, heads, which=which)
    return [(run, offsets) for (offsets,), members in found.items() for run in progressions(members)]
