"""attend()'s choices for 50 masks made of data, of 1 to 100 % of the pairs: blocks of 32 to 256 tokens, and intervals;
tuned and judged as by `choices`.

python -m tools.bench.choices_of_blocks

Run it on a machine that does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tools.bench.choices import IDLE, QUICK, measure, summary
from tools.lib.common import parser
from tools.lib.models import DENSITIES, planned
from tools.lib.tables import Table

TAKES = "6 min"
SECONDS = 0.5  #: of rounds for a problem


def tables(found: Any) -> Iterator[Table]:
    density = {one.of.model: one.of.pattern.density for one in planned()["blocks"]}  # type: ignore[attr-defined]
    near, worst = ["within 5% of the fastest"], ["worst"]
    for each in DENSITIES:
        pairs = zip(found["problems"], found["runs"][IDLE]["ratios"])
        some = summary([ratio for problem, ratio in pairs if density[problem["model"]] == each])
        near.append(f"{some['within']['1.05']}/{some['problems']}")
        worst.append(f"{some['worst']:.2f}")
    shares = (f"{100 * 2 ** (each / 2):.0f}%" for each in DENSITIES)
    yield Table(("masks made of data that see", *shares), [tuple(near), tuple(worst)])


def main() -> None:
    measure(parser(__doc__, "choices_of_blocks.json", quick=QUICK), "blocks", SECONDS, tables)


if __name__ == "__main__":
    main()
