"""A sequence over many devices: bytes sent, balance of work, memory, time and faults. gloo, CPU.

    python -m tools.bench.ring [PART ...] [--rounds N] [--shrink N] [--faults N]

Parts: traffic, shipped, balance (counted), faults (injected), memory (measured, not timed), and the timed ones: speed,
overlap, long. Parts that are not asked for stay in the file as they were. --shrink: sequences so many times shorter,
for a quick look, which is written nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tools.checks import ring_faults
from tools.docs.ring_tables import markdown
from tools.lib import ring_counts, ring_overlap, ring_runs
from tools.lib.common import parser, write

COUNTED: dict[str, Callable[[], Any]] = {
    "traffic": ring_counts.traffic,
    "shipped": ring_counts.all_shipped,
    "balance": ring_counts.balance,
    "faults": ring_faults.run,  # by number of faults
}
#: By rounds and shrink.
MEASURED: dict[str, Callable[[int, int], Any]] = {
    "memory": lambda rounds, shrink: ring_runs.memory(shrink),
    "speed": ring_runs.speed,
    "overlap": ring_overlap.overlap,
    "long": lambda rounds, shrink: ring_runs.million(shrink),
}
PARTS = (*COUNTED, *MEASURED)


def main() -> None:
    arguments = parser(__doc__, "ring.json")
    arguments.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--shrink", type=int, default=1)
    arguments.add_argument("--faults", type=int, default=200, help="number of injected faults")
    options = arguments.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        arguments.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if options.rounds < 1 or options.shrink < 1:
        arguments.error("--rounds and --shrink must be at least 1")
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    found = {name: before[name] for name in PARTS if name in before}
    for name in PARTS:
        if name in options.parts:
            print(name, flush=True)
            if name == "faults":
                figures = ring_faults.run(options.faults)
            else:
                figures = COUNTED[name]() if name in COUNTED else MEASURED[name](options.rounds, options.shrink)
            found[name] = {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "found": figures}
    if options.shrink > 1:
        print(json.dumps({name: found[name]["found"] for name in options.parts}, indent=1))
    else:
        write(options.output, found)
        print(markdown(found))


if __name__ == "__main__":
    main()
