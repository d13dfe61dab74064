"""A decision as a struct and as bytes: JSON with sorted keys and a checksum over the rest.

Fields unknown to this version are read into `extra` and written back in place, so that no round trip loses them.
"""

from __future__ import annotations

import hashlib
import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from attn_dispatch.store.address import Address

SCHEMA = 2
CHECKSUM_DIGITS = 32  #: hexadecimal digits
MAX_BYTES = 1 << 24  #: bytes of one encoded decision, far above any real one
TIMED = ("chosen", "slower", "tie")  #: statuses of candidates that were timed against the chosen one
HEAD = b'{"checksum":"'  #: the first bytes of every encoded decision
NEVER = datetime.min.replace(tzinfo=UTC)
# OverflowError and ValueError: an integer too long to convert to a number or back.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError)

CandidateId = tuple[str, str]  #: backend and order


class Damaged(ValueError):
    """The bytes are not a valid decision; the message says why."""


class LaterSchema(Damaged):
    """A later version of the package wrote the bytes: its file must stay as it is."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Status and measurements of one candidate, a backend in one order. Times in milliseconds.

    `status` is one of `chosen, slower, tie, not_installed, unsupported, over_memory, failed, incorrect, quarantined,
    not_measured`; `reason` says why. `error` is the largest absolute error of out against float64 for unit-normal
    inputs. `version` is the backend's, None where it is not installed. `low_ms` and `high_ms` are the 95 % interval of
    the median. `ratio` is this candidate's time over the chosen one's, paired, `ratio_low` and `ratio_high` its 99 %
    interval; `break_even` the number of calls after which its dearer first call is outweighed, against the chosen one.
    `fastest_ms` is the smallest sample, `first_ms` the first call including one-time work, `device_ms` a call's time on
    a CUDA device, `host_ms` the host's to enqueue it, `cold_ms` a call with a cold L2, `need_ms` the estimated cost of
    measuring where the budget did not allow it, `measured` the time of measuring in UTC, `failures` how many trials in
    a row a failed candidate has failed; `open`: it may be much faster than the chosen one, as far as is known.
    `origin` is "imported" or "shipped" where another machine measured it, and empty where this one did.
    """

    backend: str
    order: str
    status: str
    reason: str = ""
    version: str | None = None
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    fastest_ms: float | None = None
    first_ms: float | None = None
    device_ms: float | None = None
    host_ms: float | None = None
    cold_ms: float | None = None
    rounds: int | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    break_even: float | None = None
    peak_bytes: int | None = None
    workspace_bytes: int | None = None
    error: float | None = None
    need_ms: float | None = None
    measured: str | None = None
    open: bool = False
    failures: int | None = None
    origin: str = ""
    extra: dict[str, Any] = {}

    @property
    def id(self) -> CandidateId:
        """The candidate: backend and order."""
        return self.backend, self.order


class Drift(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Times of live calls outside the stored interval, and when they were observed (UTC)."""

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    seen: str


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The chosen candidate of a problem, with a row for every candidate.

    `provisional` says why the choice is to be measured again, `attempts` how many trials in a row ended so.
    `load` is what took place beside the samples: CPU and wall seconds, and involuntary context switches.
    `preferred` is the originally chosen backend and order, set where a merge added a later row that rules them out.
    `origin` is as in a row: what another machine decided.
    """

    schema: int = SCHEMA
    key: str
    silicon: str
    group: str
    title: str
    problem: dict[str, Any]
    choice: str
    order: str
    source: str
    candidates: tuple[Row, ...]
    provenance: dict[str, str]
    created: str
    budget_ms: float | None = None
    elapsed_ms: float = 0.0
    environment: str = ""
    confidence: float | None = None
    evidence: tuple[str, ...] = ()
    drift: Drift | None = None
    preferred: tuple[str, str] | None = None
    provisional: str = ""
    attempts: int = 0
    load: dict[str, float] | None = None
    origin: str = ""
    extra: dict[str, Any] = {}

    @property
    def chosen(self) -> CandidateId:
        """The chosen candidate: backend and order."""
        return self.choice, self.order

    @property
    def decided_by(self) -> str:
        """The word in explanations, counters and logs: its origin if another machine decided, else its source."""
        return self.origin or self.source

    @property
    def address(self) -> Address:
        """The address in the store."""
        return Address(self.silicon, self.group, self.key)


def from_elsewhere(decision: Decision, origin: str) -> Decision:
    """The decision marked, in all rows, as that of another machine: `origin` is "imported" or "shipped"."""
    rows = tuple(msgspec.structs.replace(row, origin=origin) for row in decision.candidates)
    return msgspec.structs.replace(decision, origin=origin, candidates=rows)


MEASURED = tuple(name for name in Row.__struct_fields__ if name.endswith(("_ms", "_bytes")) or name.startswith("ratio"))
NOT_NEGATIVE = (*MEASURED, "break_even", "rounds", "error", "failures")
FIELDS = frozenset(Decision.__struct_fields__) - {"extra"}
ROW_FIELDS = frozenset(Row.__struct_fields__) - {"extra"}

_plain_decoder = msgspec.json.Decoder()
msgspec.json.Decoder(Decision)  # resolves the annotations at import: in a look-up that would double its time
_encoder = msgspec.json.Encoder(order="sorted")
canonical = _encoder.encode  #: the canonical bytes of plain values, for checksums and for ties in a merge


def encode(decision: Decision) -> bytes:
    """Encode a decision for the store: canonical JSON with the checksum first.

    Raises:
        Damaged: `decode` would refuse the bytes: a number is not finite, no row is chosen, a time is invalid.
    """
    plain = to_plain(decision)
    try:
        body = canonical(plain)
        if not _is_finite(plain):
            raise Damaged("it holds a number that is not finite")
        check(decision)
    except Damaged:
        raise
    except (*DECODE_ERRORS, TypeError) as error:
        raise Damaged(str(error)) from error
    if len(body) > MAX_BYTES // 2:
        raise Damaged(f"{len(body)} bytes, over {MAX_BYTES // 2}")
    return b'%b%b",%b' % (HEAD, _digest(body), body[1:])


def decode(content: bytes) -> Decision:
    """Decode the bytes of `encode`, or equal JSON with other whitespace or order of keys.

    Raises:
        Damaged: the bytes are not a valid decision of this schema. LaterSchema: they are of a later one.
    """
    try:
        plain = _plain_decoder.decode(content)
        schema = schema_of(plain)
        if schema != SCHEMA:
            kind = LaterSchema if schema > SCHEMA else Damaged
            left = ", and leaves the file as it is" if kind is LaterSchema else ""
            raise kind(f"schema {schema}, this version reads {SCHEMA}{left}")
        checksum = plain.pop("checksum", None)
        if not isinstance(checksum, str) or not _fits(checksum, content, plain):
            raise Damaged("its content does not match its checksum")
        found = from_plain(plain)
        check(found)
    except Damaged:
        raise
    except DECODE_ERRORS as error:
        raise Damaged(str(error)) from error
    return found


def schema_of(plain: Any) -> int:
    """The schema number of a JSON object. Raises Damaged where it has none."""
    schema = plain.get("schema") if isinstance(plain, dict) else None
    if type(schema) is not int:
        raise Damaged("it is not a decision")
    return schema


class _Header(msgspec.Struct):
    schema: int
    silicon: str
    group: str
    key: str


def names_address(content: bytes, address: Address) -> bool:
    """Whether the bytes say that they are a decision of this schema and address; the rest is not checked."""
    try:
        found = msgspec.json.decode(content, type=_Header)
    except DECODE_ERRORS:
        return False
    return found.schema == SCHEMA and (found.silicon, found.group, found.key) == address


def to_plain(decision: Decision) -> dict[str, Any]:
    """Convert a decision to plain values, with unknown fields in place and without a checksum."""
    plain: dict[str, Any] = msgspec.to_builtins(decision)
    plain["schema"] = decision.schema
    plain["candidates"] = [_inline_extra(row, ROW_FIELDS) for row in plain["candidates"]]
    return _inline_extra(plain, FIELDS | {"checksum"})


def from_plain(plain: dict[str, Any]) -> Decision:
    """Convert plain values to a decision. Raises msgspec's errors."""
    rows = plain.get("candidates")
    if isinstance(rows, list) and not all(isinstance(row, dict) and row.keys() <= ROW_FIELDS for row in rows):
        plain = {
            **plain,
            "candidates": [_collect_extra(row, ROW_FIELDS) if isinstance(row, dict) else row for row in rows],
        }
    return msgspec.convert(_collect_extra(plain, FIELDS), Decision)


def check(decision: Decision) -> None:
    """Check that a decision is consistent in itself. Raises ValueError (Damaged is one)."""
    if not decision.address.is_valid:
        raise Damaged("its address is not valid")
    chosen = [row.id for row in decision.candidates if row.status == "chosen"]
    if chosen != [decision.chosen]:
        raise Damaged("its choice is not its one chosen row")
    if len({row.id for row in decision.candidates}) < len(decision.candidates):
        raise Damaged("it has two rows of one candidate")
    time_of(decision.created)
    for row in decision.candidates:
        time_of(row.measured)
        _check_numbers(row)


def _check_numbers(row: Row) -> None:
    for name in NOT_NEGATIVE:
        value = getattr(row, name)
        if value is not None and value < 0:
            raise Damaged(f"its {name} of {row.backend} is negative")
    known = [value for value in (row.low_ms, row.median_ms, row.high_ms) if value is not None]
    if known != sorted(known):
        raise Damaged(f"its times of {row.backend} contradict each other")


def time_of(text: str | None) -> datetime:
    """Parse an ISO time, in UTC where it has no zone; None gives the earliest time. Raises ValueError."""
    if text is None:
        return NEVER
    found = datetime.fromisoformat(text)
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def _inline_extra(plain: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    extra = plain.pop("extra", {})
    return {**{name: value for name, value in extra.items() if name not in known}, **plain}


def _collect_extra(plain: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    if plain.keys() <= known:
        return plain
    extra = {name: value for name, value in plain.items() if name not in known}
    return {**{name: value for name, value in plain.items() if name in known}, "extra": extra}


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _fits(checksum: str, content: bytes, plain: dict[str, Any]) -> bool:
    head = b'{"checksum":"%b",' % checksum.encode()
    if content.startswith(head) and _digest(b"{" + content[len(head) :]) == checksum.encode():
        return True  # byte for byte as written: no need to sort
    return _digest(canonical(plain)) == checksum.encode()


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:CHECKSUM_DIGITS].encode()
