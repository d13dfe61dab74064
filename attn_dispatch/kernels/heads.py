"""Heads grouped: by their offset in a branch, by key head."""

from __future__ import annotations

from attn_dispatch.spec.pattern import Dilated, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.reach import Offsets

Kind = tuple[Offsets, ...]  #: of the query heads that share a row: one, or all that read one key head


def heads_by_kind(pattern: Pattern, heads: int, share: int = 1, which: range | None = None) -> dict[Kind, list[int]]:
    """The heads that see the same keys; those that read one key head together, where each is read by `share`.

    Args:
        which: the heads to deal with, and then to count from 0; all of them by default.
    """
    offsets = [pattern.head_offsets(head, heads) for head in (range(heads) if which is None else which)]
    found: dict[Kind, list[int]] = {}
    for number, first in enumerate(range(0, len(offsets), share)):
        found.setdefault(tuple(offsets[first : first + share]), []).append(number)
    return found


def heads_by_offset(pattern: Dilated, branch: int, heads: int) -> dict[int, range]:
    """The heads that take part in a branch."""
    found: dict[int, list[int]] = {}
    for (offsets,), members in heads_by_kind(pattern, heads).items():
        if (offset := offsets[branch]) is not None:
            found.setdefault(offset, []).extend(members)
    return {offset: progression(sorted(members)) for offset, members in found.items()}


def progression(members: list[int]) -> range:
    (run,) = progressions(members)  # every way of dealing out offsets gives an arithmetic progression
    return run


def progressions(members: list[int]) -> list[range]:
    """Heads as one arithmetic progression, or one by one where they are none."""
    step = members[1] - members[0] if len(members) > 1 else 1
    run = range(members[0], members[-1] + 1, step)
    return [run] if list(run) == members else [range(member, member + 1) for member in members]


def kv_heads_of(heads: range, problem: Problem, grouped: bool) -> slice | tuple[int, ...]:
    """The key heads that these query heads read: a slice if the kernel can find them by grouping, else a list."""
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
    """The heads of `heads_by_kind`, in arithmetic progressions, with their offset in each branch."""
    found = heads_by_kind(pattern, heads, which=which)
    return [(run, offsets) for (offsets,), members in found.items() for run in progressions(members)]
