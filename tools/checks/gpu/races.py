"""Step `races`: the race of block sizes that `attn-dispatch profile --blocks` runs. Later steps take the winners.

Triton's cache on disk has most of the blocks from the step `blocks`.
"""

from __future__ import annotations

from typing import Any

from attn_dispatch.decisions import block_race
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.shapes import problem_of
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup

HEAD_DIMS = (128, 64)
DRY_SHAPE = 64, 1  #: tokens and heads
MOST_S = 60.0  #: of one item


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    if number:
        return None
    head_dims, directions = ((16,), (False,)) if setup.dry_run else (HEAD_DIMS, (False, True))
    return Phase([[{"head_dim": n, "backward": b} for n in head_dims for b in directions]], item_s=MOST_S)


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    """With `backward`, the kernels of a backward pass: that of a forward pass was raced before."""
    if setup.dry_run:
        block_race.LENGTH, block_race.HEADS = DRY_SHAPE
    shape = (1, *DRY_SHAPE, item["head_dim"])
    problem = problem_of(shape, Dense(), machine.half, machine.device, backward=item["backward"])
    races = [{"use": one.use, "changed": one.changed, "text": str(one)} for one in block_race.race_blocks([problem])]
    return {"races": races, "failed": "nothing was raced"} if not races else {"races": races}


def label(item: Item) -> str:
    return f"head_dim {item['head_dim']} {'backward' if item['backward'] else 'forward'}"


def summary(rows: list[Row]) -> dict[str, Any]:
    return {one["use"]: one["text"] for row in rows for one in row.get("races", ())}
