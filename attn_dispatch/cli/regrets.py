"""The output of `inspect --regret`: one line for each group of problems, and one for all."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from attn_dispatch.cli import stored
from attn_dispatch.cli.tables import KEY_DIGITS, Table, print_json
from attn_dispatch.learning.regret import GroupRegret, leave_one_out, total

HEAD = ("problems", "predicted", "not predicted", "mean", "p95", "worst", "worst key", "within 2 %", "mean confidence")
LEFT = {0, 6}
EXPLAINED = (
    "times of learned choices beyond the fastest candidate, each decision predicted from the others of its group;",
    "fewer than 5 predictions are too little evidence: 'attn-dispatch profile' measures more",
)


def run(folder: Path, as_json: bool) -> int:
    """Print the regret of the decisions in a folder; returns the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    decisions = [decision for _, decision in stored.decisions(folder)]
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("predicting", total=len(decisions))
        groups = leave_one_out(decisions, lambda: bar.advance(task))
    whole = total(groups)
    if as_json:
        everything = {name: value for name, value in whole.to_dict().items() if name not in ("silicon", "group")}
        print_json({"folder": str(folder), "groups": [group.to_dict() for group in groups], "total": everything})
        return 0
    for silicon, members in groupby(groups, key=lambda group: group.silicon):
        print(f"silicon   {silicon}", "", *Table(HEAD, list(map(_cells, members)), LEFT).lines(), "", sep="\n")
    if len(groups) > 1:
        print(*Table(HEAD, [_cells(whole)], LEFT).lines(), "", sep="\n")
    print(*EXPLAINED, sep="\n")
    return 0


def _cells(group: GroupRegret) -> list[str]:
    found = group.to_dict()
    start = [found["title"], str(found["count"]), str(found["alone"])]
    if not found["count"]:
        return [*start, *"-" * 6]
    where = found["worst_key"][:KEY_DIGITS] if found["worst"] > 0 else "-"
    shares = [f"{100 * found[name]:.1f} %" for name in ("mean", "p95", "worst")]
    right = [f"{100 * value:.0f} %" for value in (found["hits"] / found["count"], found["confidence"])]
    return [*start, *shares, where, *right]
