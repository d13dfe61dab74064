"""The block of docs/results/examples.md."""

from __future__ import annotations

from tools.docs.results import load, machine


def examples() -> str:
    """Each example's command and what it printed."""
    found = load("examples")
    about = f"By `python -m tools.bench.examples`, with an empty cache folder. {machine(found)}."
    parts = [about]
    for name, one in found["examples"].items():
        shown = "\n".join(("```text", f"$ {one['command']}", *one["lines"], "```"))
        parts.append(f"## {name}\n\n{one['seconds']:.0f} s in all.\n\n{shown}")
    return "\n\n".join(parts)
