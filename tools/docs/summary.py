"""The README's excerpt of an explanation."""

from __future__ import annotations

from dataclasses import fields

from attn_dispatch.decisions.explanation import CandidateReport, Explanation
from tools.docs.results import load

SHOWN = ("sdpa", "sdpa_mask", "native", "flex")  #: backends of the excerpt


def explained() -> str:
    """The first lines of `explain`, and the rows of a few backends without long reasons."""
    found = load("explain")
    values = {field.name: found[field.name] for field in fields(Explanation) if field.name in found}
    values["candidates"] = tuple(CandidateReport(**each) for each in found["candidates"])
    lines = str(Explanation(**values)).splitlines()
    table_at = next(number for number, line in enumerate(lines) if line.startswith("backend "))
    rows = [line for line in lines[table_at + 1 :] if line.split()[0] in SHOWN or "need CUDA" in line]
    return "\n".join(("```text", *lines[: table_at + 1], *rows, "```"))
