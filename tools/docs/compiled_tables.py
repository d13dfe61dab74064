"""What `tools.bench.kernels_compiled` found: bounds and spills of Triton's kernels by capability, and the bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn_dispatch.kernels.triton.blocks import padded
from tools.docs.results import load
from tools.lib.tables import table

KERNELS = ("forward", "backward_q", "backward_kv")
HEAD_DIMS = (64, 128, 256)
#: Forward and backward_kv: the least share of the peak rate that units should leave, at head_dim 64 and 128.
BARS = {"forward": 0.95, "backward_kv": 0.9}
BAR_CAPABILITIES = (80, 90)
TUTORIAL = 304  #: instructions of the loop of Triton's tutorial's forward kernel, on 9.0 with head_dim 64
TUTORIAL_BLOCK = [128, 64, 8, 3]
UNITS = {"issue": "issue", "special": "exponentials", "shared": "shared memory", "tensor": "products made twice"}

Row = dict[str, Any]


def name(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def chosen(found: Any, version: str) -> list[Row]:
    """The preferred blocks, without those that were only timed."""
    rows: list[Row] = found["versions"][version]["rows"]
    return [row for row in rows if "share" not in row]


def newest(found: Any) -> str:
    """Of the versions of Triton."""
    versions: dict[str, Any] = found["versions"]
    return max(versions, key=lambda version: tuple(map(int, version.split("."))))


def bound(row: Row) -> float:
    return float(min(row["bounds"].values()))


def limit_of(row: Row) -> str:
    """The unit that leaves the least; "" where all leave the peak."""
    unit = min(row["bounds"], key=row["bounds"].get)
    return UNITS[unit] if row["bounds"][unit] < 0.995 else ""


def spilling(rows: Iterable[Row]) -> list[Row]:
    """Those with local-memory instructions in the main loop, of 16-bit dtypes at head_dim 64 and 128."""
    return [
        row for row in rows if row["dtype"] != "float32" and row["head_dim"] in (64, 128) and row["local_instructions"]
    ]


def compiled() -> str:
    found = load("kernels_compiled")
    rows = chosen(found, newest(found))
    capabilities = sorted({row["capability"] for row in rows})
    parts = [_about(found), "## Beside times of an H100", _beside(found)]
    parts += ["## What is aimed at", *_bars(found, rows)]
    parts += ["## 16-bit dtypes", _grid(rows, capabilities, "bfloat16", None)]
    for precision in ("tf32x3", "ieee", "tf32"):
        parts += [f"## float32, `{precision}`", _grid(rows, capabilities, "float32", precision)]
    parts += sums(rows)
    return "\n\n".join(parts)


def _about(found: Any) -> str:
    versions = " and ".join(sorted(found["versions"]))
    return (
        f"By `python -m tools.bench.kernels_compiled` on {found['measured'][:10]}, with Triton {versions}; the tables "
        f"show {newest(found)}. **Bounds are not times.** A bound is the most of the peak rate of products that one "
        "unit of a multiprocessor leaves, were it never to wait: instructions issued, exponentials, bytes of shared "
        "memory, products that warps make twice. Latencies, waiting and the cache are not in it, nor on 10.0 what "
        "tensor cores read. Columns 8.0 to 12.0 are CUDA capabilities. Causal attention, the loop over blocks without "
        "a mask, in the block that a launch takes."
    )


def _grid(rows: list[Row], capabilities: list[int], dtype: str, precision: str | None) -> str:
    mine = [row for row in rows if row["dtype"] == dtype and row["precision"] == precision]
    there = [each for each in capabilities if any(row["capability"] == each for row in mine)]
    head = ("kernel", "head_dim", *(name(each) for each in there))
    lines: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for kernel in KERNELS:
        for head_dim in HEAD_DIMS:
            cells = []
            for capability in there:
                wanted = {"kernel": kernel, "head_dim": head_dim, "capability": capability}
                cells += [_cell(row) for row in mine if wanted.items() <= row.items()] or ["-"]
            lines.append((f"`{kernel}`", str(head_dim), *cells))
    note = (
        "Block (rows x columns, warps, stages), the bound and the unit that sets it, registers; bytes spilled by a "
        "thread, and in bold the local-memory instructions of a pass."
    )
    return f"{note}\n\n{table(lines)}" if dtype == "bfloat16" else table(lines)


def sums(rows: list[Row]) -> list[str]:
    """A section about head_dims between powers of two; none where no row is of one."""
    found = [row for row in rows if row["head_dim"] not in HEAD_DIMS]
    if not found:
        return []
    names = ("kernel", "dtype", "precision", "capability")
    powers = {(*(row[each] for each in names), row["head_dim"]): bound(row) for row in rows}
    there = sorted({row["capability"] for row in found})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in found:
        power = padded(row["head_dim"])
        as_one = powers[*(row[each] for each in names), power] * row["head_dim"] / power
        line = lines.setdefault((f"`{row['kernel']}`", row["dtype"], str(row["head_dim"])), {})
        line[row["capability"]] = f"{as_one:.0%} -> {_cell(row)}"
    head = ("kernel", "dtype", "head_dim", *map(name, there))
    cells = [(*line, *(found.get(each, "-") for each in there)) for line, found in lines.items()]
    about = (
        "Such a head_dim is the sum of two powers of two, and each product two products. Before the arrow what would "
        "be left to it of the peak rate, were it padded to the next power, in that one's block."
    )
    return ["## head_dims between powers of two", f"{about}\n\n{table([head, ('---',) * len(head), *cells])}"]


def _cell(row: Row) -> str:
    rows, columns, warps, stages = row["block"]
    unit = limit_of(row)
    text = f"{rows} x {columns}, {warps}, {stages}: {bound(row):.0%}{f' {unit}' if unit else ''}; {row['registers']}"
    if row["stack_bytes"]:
        text += f"; {row['stack_bytes']} B"
    return f"{text}, **{row['local_instructions']}**" if row["local_instructions"] else text


def _title(row: Row) -> str:
    kind, where = row["precision"] or row["dtype"], name(row["capability"])
    return f"`{row['kernel']}` {kind} head_dim {row['head_dim']} on {where}"


def _listed(rows: list[Row], value: Any) -> str:
    return ", ".join(f"{_title(row)} ({value(row)})" for row in rows) or "none"


def _bars(found: Any, rows: list[Row]) -> list[str]:
    below = [
        row
        for row in rows
        if row["dtype"] == "bfloat16" and row["head_dim"] in (64, 128) and row["capability"] in BAR_CAPABILITIES
        if bound(row) < BARS.get(row["kernel"], 0.0)
    ]
    single = [row for row in rows if row["dtype"] == "float32" and row["head_dim"] == 256 and row["local_instructions"]]
    tutorial = {"capability": 90, "kernel": "forward", "head_dim": 64, "block": TUTORIAL_BLOCK}
    (loop,) = [
        row["instructions"]
        for row in found["versions"][newest(found)]["rows"]
        if "share" in row and tutorial.items() <= row.items()
    ]
    worst = max(found["schedule"], key=lambda each: each["of_least"])
    by_position = max(each["by_position"] for each in found["schedule"])
    lines = (
        (
            "No local-memory instruction in a main loop of 16-bit dtypes at head_dim 64 and 128.",
            *(
                f"With Triton {version} missed by: "
                f"{_listed(spilling(chosen(found, version)), lambda row: row['local_instructions'])}."
                for version in sorted(found["versions"], reverse=True)
            ),
            "Those of 9.0 are the fastest that were timed.",
        ),
        (
            "A bound of 95 % of `forward` and 90 % of `backward_kv` on 8.0 and 9.0, at head_dim 64 and 128.",
            f"Missed by: {_listed(below, lambda row: f'{bound(row):.0%}, {limit_of(row)}')}.",
        ),
        (
            "No local-memory instruction in float32 at head_dim 256.",
            f"Missed by: {_listed(single, lambda row: row['local_instructions'])}.",
        ),
        (
            f"`forward` at head_dim 64 on 9.0, in the block of Triton's tutorial: at most its {TUTORIAL} instructions",
            f"a pass. There are {loop}.",
        ),
        (
            "Causal tiles, longest first, within 1.05 of the least time, in a model of one program on each",
            f"multiprocessor: at most {worst['of_least']:.2f} ({worst['heads']} heads, {worst['tokens']:,} tokens,",
            f"{worst['multiprocessors']} multiprocessors); by position up to {by_position:.2f}.",
        ),
    )
    return ["\n".join(f"- {' '.join(line)}" for line in lines)]


def _beside(found: Any) -> str:
    timed = [row for row in found["versions"][newest(found)]["rows"] if "share" in row]
    head = ("kernel", "head_dim", "blocks", "highest bound", "its rate", "fastest block", "its bound", "its rate")
    lines: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    alike = 0
    for kernel in KERNELS:
        for head_dim in HEAD_DIMS:
            mine = [row for row in timed if (row["kernel"], row["head_dim"]) == (kernel, head_dim)]
            if not mine:
                continue
            # Of equal bounds, the one that spills least.
            best = max(mine, key=lambda row: (round(bound(row), 2), -row["local_instructions"], -row["stack_bytes"]))
            fastest = max(mine, key=lambda row: row["share"])
            alike += best["block"] == fastest["block"]
            lines.append(
                (
                    *(f"`{kernel}`", str(head_dim), str(len(mine))),
                    *(f"{_named(best)}: {bound(best):.0%}", f"{best['share']:.0%}"),
                    *(_named(fastest), f"{bound(fastest):.0%}", f"{fastest['share']:.0%}"),
                )
            )
    return (
        f"{len(timed)} blocks that an H100 timed on causal attention in bfloat16, with Triton 3.6. In {alike} of "
        f"{len(lines) - 2} kernels the block with the highest bound, of equal ones the one that spills least, was the "
        "fastest: a low bound rules a block out, a high one promises nothing. Rates are shares of the rate of a large "
        "product of matrices, which is below the peak itself.\n\n" + table(lines)
    )


def _named(row: Row) -> str:
    rows, columns, warps, stages = row["block"]
    spilled = f", {row['local_instructions']} local" if row["local_instructions"] else ""
    return f"{rows} x {columns}, {warps}, {stages}{spilled}"
