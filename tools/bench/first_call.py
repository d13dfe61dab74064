"""CPU seconds of first calls: of every third problem of `tools/lib/models.py` in a process with an empty cache folder,
in the next process, which tries provisional decisions again, and in a third; `native` is compiled before.

python -m tools.bench.first_call

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from attn_dispatch.kernels import registry
from tools.lib import choices
from tools.lib.common import parser, write
from tools.lib.models import planned
from tools.lib.tables import Table

EVERY = 3  #: problems: one of them is timed
OWN_CALLS = 20  #: calls of the problem itself that its trial may take
LATER_S, FIRST_S = 0.3, 1.0  #: further CPU seconds: of later problems of a process, and of its first
PROCESSES = ("empty cache", "second process", "third process")


def beyond_own_calls(found: dict[str, Any]) -> float:
    """CPU seconds of a first call less those of `OWN_CALLS` later ones."""
    return float(found["first"]["cpu_s"] - OWN_CALLS * found["later"]["cpu_s"])


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The first problem of a process, and the median and the largest of the later ones."""
    first, *later = map(beyond_own_calls, found)
    return {
        "first_s": first,
        "median_s": statistics.median(later),
        "largest_s": max(later),
        "provisional": sum(bool(each["provisional"]) for each in found),
        "problems": [
            {name: each[name] for name in ("title", "first", "later", "choice", "provisional")} for each in found
        ],
    }


def tables(found: Any) -> Iterator[Table]:
    rows = []
    for name, one in found["processes"].items():
        seconds = (f"{one[key]:.2f} s" for key in ("first_s", "median_s", "largest_s"))
        rows.append((name, *seconds, f"{one['provisional']} of {len(one['problems'])}"))
    missed = ", missed here" * (found["processes"]["empty cache"]["median_s"] > found["later_s"])
    yield Table(
        ("process", "first problem", "later ones, median", "largest", "provisional"),
        rows,
        f"CPU seconds of a problem's first call, less those of {found['own_calls']} later calls of it. The "
        f"design asks for at most {found['first_s']:g} s for a process's first problem and {found['later_s']:g} "
        f"s for later ones (median){missed}.",
    )


def main() -> None:
    given = parser(__doc__, "first_call.json").parse_args()
    native: Any = registry.load("native")
    if not native.refusals(planned()[0].problem()):
        native.prepare()
    which = list(range(0, len(planned()), EVERY))
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PROCESSES:
            choices.wait_until_calm()
            figures[name] = summary(choices.tuned(folder, which))
    found = {"own_calls": OWN_CALLS, "later_s": LATER_S, "first_s": FIRST_S, "processes": figures}
    write(given.output, found, tables)


if __name__ == "__main__":
    main()
