"""The files in tools/results/: reading them, the machine each was measured on, and the page that shows it."""

from __future__ import annotations

import json
from typing import Any

from tools.lib.common import RESULTS
from tools.lib.tables import table

#: Pages of docs/results/, with title and the files each shows; the module of the same name makes a file.
PAGES = {
    "figures": (
        "LongNet, kernels, decoding, documents, robustness, cost of a call, compiled libraries",
        ("longnet", "native", "kernels", "decode", "documents", "trust", "routes", "dispatch", "prebuilt"),
    ),
    "choices": (
        "choices against every backend and beside running calls, first calls",
        ("choices", "first_call", "online"),
    ),
    "models": ("models from their input to their loss: training, generation, an image", ("end_to_end",)),
    "peers": ("other libraries beside attend(), in the same run", ("peers",)),
    "examples": ("what the examples print", ("examples",)),
    "hilbert": ("token orders", ("hilbert", "cache_misses", "hilbert_curve")),
    "ring": ("a sequence over many ranks", ("ring", "ring_reports")),
    "compiled": ("what Triton's kernels are compiled to for GPUs; bounds, not times", ("kernels_compiled",)),
    "plan": ("an example of `attn-dispatch plan`; counted, not measured", ("plan",)),
    "projections": ("the early reports' projections; counted, not measured", ("projections",)),
    "reports": ("the early reports' experiments, run again", ("reports",)),
}
MODULES = {"plan": "plan_examples"}  #: of tools/bench, where the name differs


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def machine(found: Any) -> str:
    """The processor, its threads and the version of torch."""
    sets = ", ".join(found["hardware"]["cpu"]["instruction_sets"])
    return f"{found['provenance']['name']}, {_threads(found)}, {sets}; torch {found['provenance']['torch']}"


def _threads(found: Any) -> str:
    count = found["hardware"]["cpu"]["threads"]
    return f"{count} thread{'s' * (count != 1)}"


def index() -> str:
    """A row for each file: its page, its command, and the machine and date of the run."""
    head = ("page", "file in tools/results/", "made by", "machine", "date")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for page, (title, names) in PAGES.items():
        for name in names:
            found = load(name)
            command = f"`python -m tools.bench.{MODULES.get(name, name)}`"
            where = f"[{page}]({page}.md): {title}" if name == names[0] else ""
            on = f"{found['provenance']['name']}, {_threads(found)}, torch {found['provenance']['torch']}"
            rows.append((where, f"`{name}.json`", command, on, found["measured"][:10]))
    return table(rows)
