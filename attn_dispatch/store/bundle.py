"""Many decisions in one file: what `export` writes, `import` reads and the package ships. Sorted, so the same decisions
make the same bytes. What is read was written by somebody else: every decision is checked by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from attn_dispatch.store.decision import MOST_BYTES, SCHEMA, WRONG, Damaged, Decision, decode, encode


class Refused(NamedTuple):
    """A decision that was not taken, and why."""

    what: str
    reason: str


class Outer(msgspec.Struct):
    """A bundle, or a single decision if there are no decisions in it."""

    schema: int
    key: str = "?"
    decisions: list[msgspec.Raw] | None = None


def write_bundle(decisions: Iterable[Decision]) -> bytes:
    """The file for these decisions, by silicon and key; of two under one address the later one given."""
    found = {(each.silicon, each.key, each.group): each for each in decisions}
    rows = b",\n".join(encode(found[address]) for address in sorted(found))
    return b'{"schema":%d,"decisions":[\n%b\n]}\n' % (SCHEMA, rows)


def read_bundle(content: bytes) -> list[Decision | Refused]:
    """The decisions of a bundle, or the single decision of a file of the store.

    Raises:
        Damaged: it is neither.
    """
    try:
        outer = msgspec.json.decode(content, type=Outer)
    except WRONG as error:
        raise Damaged(str(error)) from error
    if outer.schema != SCHEMA:
        raise Damaged(f"schema {outer.schema}, this version reads {SCHEMA}")
    raws = [bytes(raw) for raw in outer.decisions] if outer.decisions is not None else [content]
    return [_read(raw, number) for number, raw in enumerate(raws, 1)]


def _read(raw: bytes, number: int) -> Decision | Refused:
    what = f"decision {number}"
    try:
        if len(raw) > MOST_BYTES:
            raise Damaged(f"{len(raw)} bytes, over {MOST_BYTES}")
        outer = msgspec.json.decode(raw, type=Outer)
        what += f", key {outer.key[:20]!r}"
        found = decode(raw)
    except Damaged as error:
        return Refused(what, str(error))
    except WRONG as error:
        return Refused(what, str(error))
    return found
