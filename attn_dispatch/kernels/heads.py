"""Heads grouped: by their offset in a branch, by key head."""

from __future__ import annotations

from attn_dispatch.spec.pattern import Dilated, Pattern
from attn_dispatch.spec.problem import Problem


def _heads_by_offset(pattern: Dilated, branch: int, heads: int) -> dict[int, range]:
    found: dict[int, list[int]] = {}
    for head in range(heads):
        offset = pattern.head_offset(branch, head, heads)
        if offset is not None:
            found.setdefault(offset, []).append(head)
    return {offset: progression(members) for offset, members in found.items()}


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


def head_classes(
    pattern: Pattern, heads: int, which: range | None = None
) -> list[tuple[range, tuple[int | None, ...]]]:
    """The heads that share one multiplicity, with their offset in each branch.

    Args:
        which: the heads to deal with, and then to count from 0; all of them by default.
    """
    pattern, which = pattern.natural, range(heads) if which is None else which
    if not isinstance(pattern, Dilated):
        return [(range(len(which)), ())]
    found: dict[tuple[int | None, ...], list[int]] = {}
    for number, head in enumerate(which):
        offsets = tuple(pattern.head_offset(b, head, heads) for b in range(len(pattern.branches)))
        found.setdefault(offsets, []).append(number)
    return [(run, offsets) for offsets, members in found.items() for run in progressions(members)]
