"""What the ranks of a mesh say to one another before each call: one small message, so that nobody waits in vain.

A collective in which the ranks do not take part alike hangs, or mixes up rows. So each call begins with a digest of
what was asked; ranks that differ, or that cannot go on, make all of them raise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.errors import GroupMismatch
from attn_dispatch.ring.link import Link
from attn_dispatch.text import one_line

WORDS = 4  #: int64 numbers of a digest
LENGTH, FINE, KNOWN = range(WORDS, WORDS + 3)  #: what follows it


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks have said: the tokens of each, and whether they know one and the same decision."""

    lengths: tuple[int, ...]
    decided: bool


def agree(link: Link, asked: Mapping[str, Any], length: int, known: int, error: Exception | None = None) -> Agreed:
    """Compare a call with the other ranks'; a collective.

    Args:
        asked: what must be the same everywhere, by name, in plain values.
        length: this rank's tokens.
        known: a number for the decision that this rank would go by; 0 for none.
        error: why this rank cannot go on; it is raised after the others were told.

    Raises:
        GroupMismatch: on every rank, naming who asked for what. RankLost: a rank is gone, or did not take part in time.
    """
    digest = digest_of(asked) if error is None else (0,) * WORDS
    table = link.numbers(torch.tensor([*digest, length, error is None, known], dtype=torch.int64, device="cpu"))
    same = bool((table[:, :WORDS] == table[0, :WORDS]).all()) and bool(table[:, FINE].all())
    if not same:
        said = link.objects(dict(asked) if error is None else one_line(error))
        if error is not None:
            raise error
        raise GroupMismatch(_told(said))
    column = table[:, KNOWN]
    return Agreed(tuple(table[:, LENGTH].tolist()), bool(known and (column == known).all()))


def digest_of(value: Any) -> tuple[int, ...]:
    """256 bits of plain values, as int64 numbers."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little", signed=True) for at in range(0, 8 * WORDS, 8))


def _told(said: list[Any]) -> str:
    """Who said what, of what they do not agree on."""
    failed = [f"rank {rank}: {what}" for rank, what in enumerate(said) if isinstance(what, str)]
    if failed:
        return "\n  ".join(["a rank of the mesh cannot take part in this call:", *failed])
    lines = ["the ranks of the mesh do not ask for the same:"]
    for name in sorted({name for each in said for name in each}):
        by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(said):
            by_value.setdefault(str(each.get(name)), []).append(rank)
        if len(by_value) > 1:
            parts = (f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            lines.append(f"{name}: {', '.join(parts)}")
    return "\n  ".join(lines)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
