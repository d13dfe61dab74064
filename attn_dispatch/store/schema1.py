"""Decisions of earlier schemas, read as today's. Their files stay as they are: the versions that wrote them go on."""

from __future__ import annotations

from typing import Any

import msgspec

from attn_dispatch.spec.groups import group_of
from attn_dispatch.store.decision import SCHEMA, WRONG, Damaged, Decision, Row, check, schema_of


class RowOne(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate in schema 1."""

    backend: str
    order: str
    status: str
    reason: str = ""
    version: str | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    first_ms: float | None = None
    rounds: int | None = None
    peak_bytes: int | None = None
    error: float | None = None


class DecisionOne(msgspec.Struct, frozen=True, kw_only=True):
    """Schema 1: without a group and a checksum, the versions apart from the rows."""

    key: str
    silicon: str
    title: str
    problem: dict[str, Any]
    choice: str
    order: str
    source: str
    candidates: tuple[RowOne, ...]
    versions: dict[str, str | None]
    provenance: dict[str, str]
    created: str
    budget_ms: float | None = None
    elapsed_ms: float = 0.0


def decode_one(content: bytes) -> Decision:
    """Read a decision of schema 1.

    Raises:
        Damaged: it is not that.
    """
    try:
        plain = msgspec.json.decode(content)
        schema = schema_of(plain)
        if schema != 1:
            raise Damaged(f"schema {schema} in the place of schema 1")
        found = _migrated(msgspec.convert(plain, DecisionOne))
        check(found)
    except Damaged:
        raise
    except (*WRONG, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from error
    return found


def _migrated(old: DecisionOne) -> Decision:
    plain = msgspec.structs.asdict(old)
    versions = plain.pop("versions")
    rows = tuple(
        Row(
            **{**msgspec.structs.asdict(row), "version": row.version or versions.get(row.backend)}, measured=old.created
        )
        for row in old.candidates
    )
    return Decision(**{**plain, "schema": SCHEMA, "candidates": rows, "group": group_of(old.problem)})
