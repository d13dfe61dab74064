"""A decision as a struct and as bytes: JSON with sorted keys and a checksum over the rest.

Unknown fields are dropped: a version of the package that adds one has another `SCHEMA`, and so another folder.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from attn_dispatch.store.address import Address

SCHEMA = 2
CHECKSUM_DIGITS = 32  #: hexadecimal digits
MAX_BYTES = 1 << 24  #: bytes of one encoded decision, far above any real one
TIMED = ("chosen", "slower", "tie")  #: statuses of candidates that were timed against the chosen one
NEVER = datetime.min.replace(tzinfo=UTC)
# OverflowError and ValueError: an integer too long to convert to a number or back.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError)

CandidateId = tuple[str, str]  #: backend and order
Amount = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Damaged(ValueError):
    """The bytes are not a valid decision; the message says why."""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Status and measurements of one candidate, a backend in one order. Times in milliseconds.

    `status` is one of `chosen, slower, tie, not_installed, unsupported, over_memory, failed, incorrect, quarantined,
    not_measured`; `reason` says why. `error` is the largest absolute error of out against float64 for unit-normal
    inputs. `version` is the backend's, None where it is not installed. `low_ms` and `high_ms` are the 95 % interval of
    the median. `ratio` is this candidate's time over the chosen one's, paired, `ratio_low` and `ratio_high` its 99 %
    interval. `fastest_ms` is the smallest sample, `first_ms` the first call with one-time work, `device_ms` a
    call's time on a CUDA device, `host_ms` the host's to enqueue it, `need_ms` the estimated cost of measuring
    where the budget did not allow it, `measured` the time of measuring in UTC, `failures` how many trials in a row
    a failed candidate has failed; `open`: it may be much faster than the chosen one, as far as is known. `origin` is
    "imported" or "shipped" where another machine measured it, and empty where this one did.
    """

    backend: str
    order: str
    status: str
    reason: str = ""
    version: str | None = None
    median_ms: Amount | None = None
    low_ms: Amount | None = None
    high_ms: Amount | None = None
    fastest_ms: Amount | None = None
    first_ms: Amount | None = None
    device_ms: Amount | None = None
    host_ms: Amount | None = None
    rounds: Count | None = None
    ratio: Amount | None = None
    ratio_low: Amount | None = None
    ratio_high: Amount | None = None
    peak_bytes: Count | None = None
    workspace_bytes: Count | None = None
    error: Amount | None = None
    need_ms: Amount | None = None
    measured: str | None = None
    open: bool = False
    failures: Count | None = None
    origin: str = ""

    @property
    def id(self) -> CandidateId:
        """The candidate: backend and order."""
        return self.backend, self.order


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The chosen candidate of a problem, with a row for every candidate.

    `provisional` says why the choice is to be measured again, `attempts` how many trials in a row ended so.
    `load` is what took place beside the samples: CPU and wall seconds, and involuntary context switches.
    `preferred` is the originally chosen backend and order, set where a merge added a later row that rules them out.
    `origin` is as in a row: what another machine decided.
    """

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
    preferred: tuple[str, str] | None = None
    provisional: str = ""
    attempts: int = 0
    load: dict[str, float] | None = None
    origin: str = ""

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
        json.dumps(plain, allow_nan=False)  # canonical bytes hold null where a number is not finite
        _checked(plain)
    except (*DECODE_ERRORS, TypeError) as error:
        raise Damaged(str(error)) from error
    if len(body) > MAX_BYTES // 2:
        raise Damaged(f"{len(body)} bytes, over {MAX_BYTES // 2}")
    return b'{"checksum":"%b",%b' % (_digest(body), body[1:])


def decode(content: bytes) -> Decision:
    """Decode the bytes of `encode`, or equal JSON with other whitespace or order of keys.

    Raises:
        Damaged: the bytes are not a valid decision of this schema.
    """
    try:
        plain = _plain_decoder.decode(content)
        check_schema(plain.get("schema") if isinstance(plain, dict) else None)
        checksum = plain.pop("checksum", None)
        if not isinstance(checksum, str) or not _fits(checksum, content, plain):
            raise Damaged("its content does not match its checksum")
        return _checked(plain)
    except DECODE_ERRORS as error:
        raise Damaged(str(error)) from error


def check_schema(schema: object) -> None:
    """Raise Damaged where the schema number of a JSON object, None for none, is not this version's."""
    if type(schema) is not int:
        raise Damaged("it is not a decision")
    if schema != SCHEMA:
        raise Damaged(f"schema {schema}, this version reads {SCHEMA}")


def to_plain(decision: Decision) -> dict[str, Any]:
    """Convert a decision to plain values, without a checksum."""
    return {**msgspec.to_builtins(decision), "schema": SCHEMA}


def _checked(plain: dict[str, Any]) -> Decision:
    """The decision, if it is consistent in itself. Raises msgspec's errors and ValueError (Damaged is one)."""
    decision = msgspec.convert(plain, Decision)
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
        known = [value for value in (row.low_ms, row.median_ms, row.high_ms) if value is not None]
        if known != sorted(known):
            raise Damaged(f"its times of {row.backend} contradict each other")
    return decision


def time_of(text: str | None) -> datetime:
    """Parse an ISO time, in UTC where it has no zone; None gives the earliest time. Raises ValueError."""
    if text is None:
        return NEVER
    found = datetime.fromisoformat(text)
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def _fits(checksum: str, content: bytes, plain: dict[str, Any]) -> bool:
    head = b'{"checksum":"%b",' % checksum.encode()
    if content.startswith(head) and _digest(b"{" + content[len(head) :]) == checksum.encode():
        return True  # byte for byte as written: no need to sort
    return _digest(canonical(plain)) == checksum.encode()


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:CHECKSUM_DIGITS].encode()
