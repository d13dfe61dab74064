"""Made-up decisions, as structs and as files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from attn_dispatch.store.decision import Decision, Row, canonical, encode, to_plain
from attn_dispatch.store.folder import Store
from tests.support.fakes import SILICON

KEY = "0123456789abcdef0123"
OTHER = "f" * 20
GROUP = "0123456789ab"


def decision(**changes: Any) -> Decision:
    row = Row(backend="sdpa", order="natural", status="chosen", version="1.2", median_ms=0.1 + 0.2, rounds=7)
    values: dict[str, Any] = {
        "key": KEY,
        "silicon": SILICON,
        "group": GROUP,
        "title": "dense Ω",
        "problem": {"batch": 1, "strides": ["bnhd"]},
        "choice": "sdpa",
        "order": "natural",
        "source": "measured",
        "candidates": (row, Row(backend="other", order="natural", status="not_installed", reason='no "other"')),
        "provenance": {"torch": "2"},
        "created": "2025-01-01T00:00:00+00:00",
    }
    return Decision(**(values | changes))


WHOLE = encode(decision())  #: a file as it is written


def written(**changes: Any) -> dict[str, Any]:
    return to_plain(decision()) | changes


def encoded(without: str = "", **changes: Any) -> bytes:
    """A file with a checksum that fits, whatever it holds."""
    plain = {name: value for name, value in written(**changes).items() if name != without}
    return canonical({**plain, "checksum": hashlib.sha256(canonical(plain)).hexdigest()[:32]})


def chosen(choice: str) -> dict[str, Any]:
    """The changes that make another backend the choice."""
    return {"choice": choice, "candidates": (Row(backend=choice, order="natural", status="chosen", median_ms=1.0),)}


def plant(folder: Path, content: bytes) -> Path:
    path = Store(folder).path(SILICON, GROUP, KEY)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def files_in(folder: Path) -> list[Path]:
    """All but the locks, which stay."""
    return [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
