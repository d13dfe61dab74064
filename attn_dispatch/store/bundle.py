"""Bundles: many decisions in one file, which `export` writes, `import` reads and the package ships.

Decisions are sorted, so that equal decisions give equal bytes. Each decision read is checked by itself, because the
file may come from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from attn_dispatch.store.decision import DECODE_ERRORS, MAX_BYTES, SCHEMA, Damaged, Decision, decode, encode


class Refused(NamedTuple):
    """A decision that cannot be read, and the reason."""

    what: str
    reason: str


class _Envelope(msgspec.Struct):
    """The outer fields of a bundle, or of a single decision where `decisions` is None."""

    schema: int
    key: str = "?"
    decisions: list[msgspec.Raw] | None = None


def write_bundle(decisions: Iterable[Decision]) -> bytes:
    """Encode decisions, sorted by silicon and key; of two with the same address the last one given is written."""
    found = {(each.silicon, each.key, each.group): each for each in decisions}
    rows = b",\n".join(encode(found[address]) for address in sorted(found))
    return b'{"schema":%d,"decisions":[\n%b\n]}\n' % (SCHEMA, rows)


def read_bundle(content: bytes) -> list[Decision | Refused]:
    """Decode a bundle, or a file of the store as a bundle of one.

    Raises:
        Damaged: the content is neither.
    """
    try:
        envelope = msgspec.json.decode(content, type=_Envelope)
    except DECODE_ERRORS as error:
        raise Damaged(str(error)) from error
    if envelope.schema != SCHEMA:
        raise Damaged(f"schema {envelope.schema}, this version reads {SCHEMA}")
    raws = [bytes(raw) for raw in envelope.decisions] if envelope.decisions is not None else [content]
    return [_read(raw, number) for number, raw in enumerate(raws, 1)]


def _read(raw: bytes, number: int) -> Decision | Refused:
    what = f"decision {number}"
    try:
        if len(raw) > MAX_BYTES:
            raise Damaged(f"{len(raw)} bytes, over {MAX_BYTES}")
        envelope = msgspec.json.decode(raw, type=_Envelope)
        what += f", key {envelope.key[:20]!r}"
        found = decode(raw)
    except Damaged as error:
        return Refused(what, str(error))
    except DECODE_ERRORS as error:
        return Refused(what, str(error))
    return found
