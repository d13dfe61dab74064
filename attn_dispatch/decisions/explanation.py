"""The explanation of a decision: as data, and as a readable table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from attn_dispatch.settings import cache_folder, measures
from attn_dispatch.store import passed
from attn_dispatch.store.decision import CandidateId, Decision, Row
from attn_dispatch.text import WIDTH, align, folded, gib, milliseconds, printable

if TYPE_CHECKING:
    from attn_dispatch.tuning.candidates import Candidate, Request

HEAD = ("backend", "order", "median", "95 % interval", "vs best", "peak memory", "error", "verdict")
LEFT = {0, 1, 7}  #: left-aligned columns
NEEDS_CUDA = "runs on cuda, not "  #: begins the reason of a backend that runs on CUDA alone, among others
SLOW_START = 10  #: ratio of first call to median from which the table mentions the first call


@dataclass(frozen=True, slots=True)
class Explanation:
    """Which backend and order run a call.

    `source` is one of `measured, learned, imported, shipped, heuristic, forced`; `choice` and `order` are None where
    attend() raises instead. `key` names the decision in the store. `problem` and `device` are readable titles. A
    learned choice has a `confidence`, the probability that it is the fastest, and `evidence`, the keys of the decisions
    it is predicted from. `provisional` says why a choice is to be measured again by a later process; empty where it is
    settled. `load` is what took place beside the samples: `cpu_s` and `wall_s` of the process, and its involuntary
    context `switches`. `unchecked` is whether the choice is imported or shipped and was not yet checked on this
    machine. `configurations` says how backends that can run the problem are set for it on this machine, such as the
    blocks of Triton's kernels; only `explain` fills it. `others` are those of the other problems that a call consists
    of: documents, or rows, of several lengths.
    """

    choice: str | None
    order: str | None
    source: str
    key: str
    candidates: tuple[Row, ...]
    problem: str
    device: str
    confidence: float | None = None
    evidence: tuple[str, ...] = ()
    provisional: str = ""
    load: dict[str, float] | None = None
    unchecked: bool = False
    configurations: tuple[str, ...] = ()
    others: tuple[Explanation, ...] = ()

    @classmethod
    def of(cls, decision: Decision, request: Request | None = None) -> Explanation:
        """The explanation of a decision; of that of a `request`, with `configurations`."""
        device = f"{decision.provenance.get('name', decision.silicon)}   torch {decision.provenance.get('torch', '?')}"
        same = ("key", "candidates", "confidence", "evidence", "provisional", "load")
        return cls(
            choice=decision.choice or None,
            order=decision.order or None,
            source=decision.decided_by,
            problem=decision.title,
            device=device,
            **{name: getattr(decision, name) for name in same},
            unchecked=bool(decision.origin) and not passed.is_confirmed(cache_folder(), decision),
            configurations=() if request is None else _configurations(request),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the names of the fields."""
        rows = [msgspec.structs.asdict(row) for row in self.candidates]
        return {**asdict(replace(self, candidates=())), "candidates": rows}

    def __str__(self) -> str:
        choice = f"{self.choice} in {self.order} order" if self.choice else "none"
        source = self.source
        if self.confidence is not None:
            source += f", confidence {self.confidence:.2f} by {len(self.evidence)} measured neighbours"
        if self.unchecked:
            source += ", not yet checked here"
        lines = [f"device    {self.device}", f"problem   {self.problem}"]
        lines.append(f"choice    {choice} ({source}), key {self.key}")
        if self.source == "heuristic" and measures():
            lines.append("guessed   the first call of attend() measures, and may take another backend")
        if self.provisional:
            lines.append(f"provisional: {self.provisional}; a later process measures it again")
        lines += [f"blocks    {each}" for each in self.configurations]
        elsewhere = [c.backend for c in self.candidates if self.choice and f"; {NEEDS_CUDA}" in f"; {c.reason}"]
        shown = [row for row in self.rows() if row[0] not in elsewhere]
        found = "\n".join([*map(folded, map(printable, lines)), "", *table(shown), *_cuda_only(elsewhere)])
        return "\n\n".join([found, *map(str, self.others)])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return f"<pre>{escape(str(self))}</pre>"

    def rows(self) -> list[list[str]]:
        """The candidates as cells under `HEAD`."""
        times = [c.median_ms for c in self.candidates if c.median_ms is not None and c.status != "incorrect"]
        return [_cells(candidate, min(times, default=None)) for candidate in self.candidates]


def table(rows: list[list[str]]) -> list[str]:
    """Rows under `HEAD`; a reason that makes one too long stands below it."""
    rows = [list(HEAD), *rows]
    found = align(rows, LEFT)
    for number, (line, row) in enumerate(zip(found, rows)):
        reason = printable(row[-1].partition(": ")[2]).rstrip()
        if len(line) > WIDTH and reason:
            found[number] = line.removesuffix(f": {reason}") + "\n" + folded(f"    {reason}")
    return found


def _cuda_only(names: list[str]) -> list[str]:
    """A line, if any, about the backends that need CUDA: other reasons, and advice, are no help then."""
    found = list(dict.fromkeys(names))
    what = "1 backend needs" if len(found) == 1 else f"{len(found)} backends need"
    return [folded(f"{what} CUDA: {', '.join(found)}")] if found else []


def _configurations(request: Request) -> tuple[str, ...]:
    """What the built-in backends that can run the problem say of their `configuration` for it."""
    from attn_dispatch.kernels.registry import is_built_in  # with torch

    able = {each.name: each.backend.configuration for each in request.able if is_built_in(each.name)}
    return tuple(f"{name}: {of(request.problem)}" for name, of in able.items() if of is not None)


def _cells(candidate: Row, best_ms: float | None) -> list[str]:
    median_ms, low_ms, high_ms, first_ms = candidate.median_ms, candidate.low_ms, candidate.high_ms, candidate.first_ms
    remarks = [candidate.reason] if candidate.reason else []
    if first_ms is not None and median_ms is not None and first_ms > SLOW_START * median_ms:
        remarks.append(f"first call {milliseconds(first_ms)}")
    if candidate.device_ms is not None and candidate.host_ms is not None:
        remarks.append(f"device {milliseconds(candidate.device_ms)}, host {milliseconds(candidate.host_ms)}")
    verdict = ": ".join(filter(None, (candidate.status.replace("_", " "), "; ".join(remarks))))
    memory = "-" if candidate.peak_bytes is None else gib(candidate.peak_bytes)
    error = "-" if candidate.error is None else f"{candidate.error:.1e}"
    times = ["-", "-", "-"]
    if median_ms is not None and low_ms is not None and high_ms is not None:
        interval = "1 sample" if candidate.rounds == 1 else f"{milliseconds(low_ms)} - {milliseconds(high_ms)}"
        times = [milliseconds(median_ms), interval, f"{median_ms / best_ms:.2f}x" if best_ms else "-"]
    return [candidate.backend, candidate.order, *times, memory, error, verdict]


def with_current_candidates(decision: Decision, found: list[Candidate]) -> Decision:
    """The decision with rows for the current candidates: ruled out since, or new."""
    rows_by_id = {row.id: row for row in decision.candidates}
    rows = [_current_row(each, rows_by_id.pop(each.id, None), decision.chosen) for each in found]
    # A backend that refuses has a single row for all its orders.
    out = {each.name: each.row for each in found if each.row is not None}
    for name, row in rows_by_id.items():
        now = out.get(row.backend) if name != decision.chosen else None
        rows.append(row if now is None else msgspec.structs.replace(now, order=row.order))
    return msgspec.structs.replace(decision, candidates=tuple(rows))


def _current_row(each: Candidate, row: Row | None, choice: CandidateId) -> Row:
    if each.row is not None and each.id != choice:
        # The stored reason, from this very problem, is more specific than that of the quarantine.
        specific = row is not None and row.status in ("incorrect", "quarantined") and each.row.status == "quarantined"
        return row if specific and row is not None else each.row
    reason = "was not available when this was decided"
    if row is not None and row.status in ("over_memory", "quarantined", "unsupported", "not_installed"):
        reason = f"could not run when this was decided: {row.reason}"
        row = None
    return row or Row(backend=each.name, order=each.order, status="not_measured", reason=reason)
