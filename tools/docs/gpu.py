"""What `tools.checks.gpu_check` measured on a GPU: results against float64, rates of kernels, decisions, host times."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tools.checks.gpu import blocks, graphs, smoke
from tools.lib.common import RESULTS
from tools.lib.tables import table

PATTERNS = ("dense", "causal", "longnet")
SHOWN = ("sdpa", "sdpa_cudnn", "sdpa_efficient", "triton", "triton_tiles")
HOSTS = ("F.sdpa", "sdpa", "sdpa_cudnn", "triton", "flex")


def _read(step: str) -> Any:
    return json.loads((RESULTS / "gpu" / f"{step}.json").read_text())


def gpu() -> str:
    """All tables, with the device."""
    device = _read("device")
    about, limits = device["provenance"], device["summary"]
    head = (
        f"{about['name']}, driver {about['driver']}, torch {about['torch']}, by `python -m tools.checks.gpu_check` on "
        f"{device['measured'][:10]}. Limits in the same run: {limits['copy GB/s']:,} GB/s of copies, read and written "
        f"bytes both counted; products of matrices at {limits['bfloat16 TFLOP/s']:.0f} TFLOP/s in bfloat16, "
        f"{limits['tf32 TFLOP/s']:.0f} in tf32 and {limits['float32 TFLOP/s']:.0f} in float32."
    )
    return "\n\n".join(
        (
            head,
            "## Results against float64",
            _smoke(_read("smoke")),
            "## Kernels of `triton`",
            _kernels(_read("blocks"), limits["bfloat16 TFLOP/s"]),
            "## float32",
            _single(_read("blocks")),
            "## Decisions",
            _decisions(_read("decisions")),
            "## Times on the host, and CUDA graphs",
            _graphs(_read("graphs")),
        )
    )


def _smoke(found: Any) -> str:
    text = (
        f"Every backend and dtype in a process of its own: {', '.join(smoke.PATTERNS)}; head_dim "
        f"{', '.join(map(str, smoke.HEAD_DIMS))}; as many key heads as query heads, and fewer; forward and backward. "
        f"Those that compile were asked fewer: {', '.join(f'`{name}`' for name in smoke.COMPILING)}."
    )
    counts = {name: each for name, each in found["summary"].items() if isinstance(each, str)}
    rows: list[tuple[str, ...]] = [("backend", "problems"), ("---",) * 2]
    rows += [(f"`{name}`", text) for name, text in sorted(counts.items())]
    failed = {f"`{each['backend']}`, {each['dtype']}: {each['failed']}" for each in found["rows"] if "failed" in each}
    notes = f"\n\nFailed: {'; '.join(sorted(failed))}." if failed else ""
    left = found["summary"]["left_out"]
    return f"{text} {left} problems were left out for lack of time.\n\n{table(rows)}{notes}"


def _timed(found: Any, **wanted: Any) -> dict[tuple[int, ...], dict[str, Any]]:
    """Rows of timed blocks by block and pattern."""
    found_blocks: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in found["rows"]:
        if row["stage"] == "time" and row.get("median_ms") and all(row[key] == each for key, each in wanted.items()):
            found_blocks.setdefault(tuple(row["block"]), {})[row["pattern"]] = row
    return found_blocks


def _best(timed: dict[tuple[int, ...], dict[str, Any]]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The block with the largest product of rates over all patterns that it was timed on."""
    most = max(len(rows) for rows in timed.values())
    whole = {block: rows for block, rows in timed.items() if len(rows) == most}

    def product(block: tuple[int, ...]) -> float:
        found = 1.0
        for row in whole[block].values():
            found *= row["tflops"]
        return found

    block = max(whole, key=product)
    return block, whole[block]


def _named(block: Iterable[int]) -> str:
    rows, columns, warps, stages = block
    return f"{rows} x {columns}, {warps} warps, {stages} stages"


def _kernels(found: Any, limit: float) -> str:
    text = (
        f"{blocks.HALF}, {blocks.HEADS} heads, {blocks.LENGTH:,} tokens, each kernel alone, in the fastest of the "
        "blocks that were tried: TFLOP/s by the pairs that the pattern has (of dense attention also the share of the "
        f"matrix products' rate). LongNet: `{blocks.PATTERNS['longnet']}`."
    )
    rows: list[tuple[str, ...]] = [
        ("kernel", "head_dim", "block", "dense", "causal", "LongNet", "registers, spills"),
        ("---",) * 7,
    ]
    for kernel in ("forward", "backward_q", "backward_kv"):
        for head_dim in (64, 128, 256):
            timed = _timed(found, backend="triton", kernel=kernel, head_dim=head_dim, dtype="bfloat16")
            if not timed:
                continue
            block, best = _best(timed)
            rates = [f"{best[each]['tflops']:.0f}" if each in best else "-" for each in PATTERNS]
            if "dense" in best:
                rates[0] += f" ({best['dense']['tflops'] / limit:.0%})"
            any_row = next(iter(best.values()))
            used = f"{any_row['registers']}, {any_row['spills']}"
            rows.append((f"`{kernel}`", str(head_dim), _named(block), *rates, used))
    return f"{text}\n\n{table(rows)}"


def _single(found: Any) -> str:
    text = (
        f"Causal, {blocks.SINGLE_HEADS} heads, {blocks.SINGLE_LENGTH:,} tokens. `tf32x3` adds three products of tf32 "
        "numbers, to about the error of float32: `triton` uses it where `torch.set_float32_matmul_precision` asks for "
        "the highest precision, `tf32` otherwise. `ieee` multiplies exactly, without tensor cores."
    )
    rows: list[tuple[str, ...]] = [("kernel", "head_dim", "`ieee`", "`tf32x3`", "`tf32`"), ("---",) * 5]
    for kernel in ("forward", "backward_q", "backward_kv"):
        for head_dim in (64, 128):
            cells = []
            for precision in ("ieee", "tf32x3", "tf32"):
                of = {"dtype": "float32", "precision": precision}
                timed = _timed(found, backend="triton", kernel=kernel, head_dim=head_dim, **of)
                cells.append(f"{_best(timed)[1]['causal']['tflops']:.0f} TFLOP/s" if timed else "-")
            rows.append((f"`{kernel}`", str(head_dim), *cells))
    return f"{text}\n\n{table(rows)}"


def _decisions(found: Any) -> str:
    text = (
        "By `profile`, a few seconds for each problem: milliseconds of a call, the longer of the device's and the "
        "host's time. What was chosen stands in bold. The processor of this machine enqueues slowly, so that calls of "
        f"many small kernels wait for it. {found['summary']['left_out']} more problems had no time left."
    )
    rows: list[tuple[str, ...]] = [
        ("problem", "direction", *(f"`{name}`" for name in SHOWN)),
        ("---",) * (2 + len(SHOWN)),
    ]
    for each in found["rows"]:
        decision = each["decision"]
        cells = []
        for name in SHOWN:
            timed = [row for row in decision["candidates"] if row["backend"] == name and row.get("median_ms")]
            least = min(timed, key=lambda row: row["median_ms"], default=None)
            cell = "-" if least is None else f"{least['median_ms']:.2f}"
            cells.append(f"**{cell}**" if least is not None and decision["choice"] == name else cell)
        rows.append((each["problem"], "forward + backward" if each["backward"] else "forward", *cells))
    return f"{text}\n\n{table(rows)}"


def _graphs(found: Any) -> str:
    text = (
        "Microseconds that a call takes the host, in a row of calls, and those of a replay of its CUDA graph. Dense, "
        f"bfloat16, [batch, len, heads, head_dim] of {', '.join(str(list(each)) for each in graphs.SHAPES.values())}. "
        "`F.sdpa` is PyTorch's function, called directly"
    )
    counts = sorted({row["tokens"] for row in found["rows"] if row["kind"] == "host"})
    head = ("call", *(f"{count} token{'s' * (count != 1)}: host, replay" for count in counts))
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    hosts = {(row["backend"], row["tokens"]): row for row in found["rows"] if row["kind"] == "host"}
    for name in HOSTS:
        cells = []
        for count in counts:
            row = hosts.get((name, count), {})
            cells.append(f"{row['host_us']:.0f}, {row['replay_us']:.0f}" if "replay_us" in row else "-")
        rows.append((f"`{name}`", *cells))
    added = [
        hosts["sdpa", count]["host_us"] - hosts["F.sdpa", count]["host_us"]
        for count in counts
        if {("sdpa", count), ("F.sdpa", count)} <= hosts.keys()
    ]
    text += f"; `attend()` by `sdpa` takes the host {min(added):.0f} to {max(added):.0f} us more." if added else "."
    captured = [row for row in found["rows"] if row["kind"] == "capture"]
    equal = sum(bool(row.get("equal")) for row in captured)
    failed = [f"`{row['backend']}` ({row['case']})" for row in captured if "failed" in row]
    refused = len(captured) - equal - len(failed)
    notes = (
        f"Of {len(captured)} calls of all backends under capture, {equal} were replayed with the same results, also "
        f"after their inputs had changed; {refused} are refused without a graph too"
    )
    return f"{text}\n\n{table(rows)}\n\n{notes}{f'; failed: {chr(44).join(failed)}' if failed else ''}."
