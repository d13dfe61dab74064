"""Bundles: many decisions in one file, which `export` writes, `import` reads and the package ships.

Decisions are sorted, so that equal decisions give equal bytes. Each decision read is checked by itself, as the file may
come from anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from attn_dispatch.store.address import PROBLEM_ERRORS, Address
from attn_dispatch.store.decision import (
    DECODE_ERRORS,
    MAX_BYTES,
    SCHEMA,
    TIMED,
    Damaged,
    Decision,
    Row,
    check_schema,
    decode,
    encode,
)

SHARED_PROVENANCE = ("name", "driver", "torch", "cuda", "python")  #: all but the platform, which names a kernel's build


class Refused(NamedTuple):
    """A decision that cannot be read, and the reason."""

    what: str
    reason: str


def shareable(decisions: Iterable[Decision], backends: Collection[str]) -> tuple[list[Decision], dict[str, int]]:
    """Select settled decisions that were measured here, and remove what concerns this machine alone.

    No path, host or user remains: texts of errors, the platform, and rows of other backends than `backends` are
    removed.

    Returns:
        The decisions, and how many were left out, by reason.
    """
    found, left_out = [], Counter[str]()
    for each in decisions:
        why = _why_not_shared(each, backends)
        if why:
            left_out[why] += 1
            continue
        provenance = {name: each.provenance[name] for name in SHARED_PROVENANCE if name in each.provenance}
        rows = tuple(_shared_row(row) for row in each.candidates if row.backend in backends and not row.origin)
        found.append(msgspec.structs.replace(each, provenance=provenance, candidates=rows))
    return found, dict(left_out)


def _why_not_shared(decision: Decision, backends: Collection[str]) -> str:
    if decision.origin or decision.source != "measured":
        return "measured on another machine"
    if decision.provisional:
        return "provisional: the machine was not calm, or time was short"
    return "" if decision.choice in backends else "decided for a plug-in"


def _shared_row(row: Row) -> Row:
    """The row without texts that may hold paths: those of errors, and any with a separator of paths."""
    is_public = row.status in (*TIMED, "not_measured", "unsupported", "over_memory", "not_installed")
    reason = row.reason if is_public and not {"/", "\\"} & set(row.reason) else ""
    return msgspec.structs.replace(row, reason=reason)


def is_of_another_problem(decision: Decision) -> bool:
    """Whether a decision lies at another problem's address; False where its problem is of an unknown kind."""
    with suppress(*PROBLEM_ERRORS):
        return Address.of(decision.problem, decision.silicon) != decision.address
    return False


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
    check_schema(envelope.schema)
    raws = [bytes(raw) for raw in envelope.decisions] if envelope.decisions is not None else [content]
    return [_read(raw, number) for number, raw in enumerate(raws, 1)]


def _read(raw: bytes, number: int) -> Decision | Refused:
    try:
        if len(raw) > MAX_BYTES:
            raise Damaged(f"{len(raw)} bytes, over {MAX_BYTES}")
        return decode(raw)
    except Damaged as error:
        what = f"decision {number}"
        with suppress(*DECODE_ERRORS):
            what += f", key {msgspec.json.decode(raw, type=_Envelope).key[:20]!r}"
        return Refused(what, str(error))
