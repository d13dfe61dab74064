"""Step `graphs`: attend() in a CUDA graph, and what a call takes on the host and replayed, by backend.

A capture that fails leaves the process unusable: each backend has a process of its own, and a new one after a failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import attend
from attn_dispatch.errors import NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup
from tools.lib.tables import Table

ENDS_AFTER_FAILURE = True
NOT_HERE = ("native",)  #: refuses every CUDA device
#: The pattern and key heads of each case, at 512 tokens and 4 heads.
CASES: dict[str, tuple[Pattern, int]] = {
    "dense": (Dense(is_causal=True), 4),
    "grouped": (Dense(is_causal=True), 2),
    "longnet": (Dilated((256, 512), (1, 2), is_causal=True), 4),
    "window": (Window(64, 0), 4),
    "neighborhood": (Neighborhood((16, 32), (5, 5)), 4),
}
DRY_CASES: dict[str, tuple[Pattern, int]] = {"dense": (Dense(is_causal=True), 2), "window": (Window(4, 0), 2)}
SHAPES = {1: (1, 1, 32, 128), 512: (4, 512, 16, 64), 4096: (1, 4096, 16, 64)}
TORCH = "F.sdpa"  #: a name beside those of backends: PyTorch's own call
BATCHES, CALLS = 5, 100  #: of calls timed on the host
BATCH_S = 0.05  #: seconds of a batch: slow backends get fewer calls
CAPTURING = 0.6  #: the part of the step's time for captures


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    names = ["sdpa"] if setup.dry_run else [name for name in registry.names() if name not in NOT_HERE]
    if number == 0:
        cases = DRY_CASES if setup.dry_run else CASES
        return Phase([[_item("capture", name, case) for case in cases] for name in names], setup.cores, CAPTURING)
    if number == 1:
        # flex compiles, and manual takes long: last. Refused by every case: not asked again.
        last = ("manual", "flex")
        able = {row["backend"] for row in rows if "refused" not in row}
        names = sorted((name for name in names if name in able), key=lambda name: name in last)
        sizes = [1, 32] if setup.dry_run else list(SHAPES)
        items = [_item("host", name, size) for name, size in product((TORCH, *names), sizes)]
        return Phase([items], item_s=40.0)
    return None


def _item(kind: str, backend: str, case: str | int) -> Item:
    return {"kind": kind, "backend": backend, "case" if kind == "capture" else "tokens": case}


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    try:
        return (_capture if item["kind"] == "capture" else _host)(item, machine, setup)
    except NoBackend as error:
        return {"refused": " ".join(str(error).split())}


def _inputs(machine: Machine, shape: tuple[int, int, int, int], kv_heads: int) -> list[Tensor]:
    batch, length, heads, head_dim = shape
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(batch, length, n, head_dim, device=machine.device, dtype=machine.half) for n in sizes]


def _capture(item: Item, machine: Machine, setup: Setup) -> Row:
    """Replays with the captured inputs, and with others in the same memory, against eager calls."""
    pattern, kv_heads = (DRY_CASES if setup.dry_run else CASES)[item["case"]]
    shape = (1, 32, 2, 16) if setup.dry_run else (1, 512, 4, 64)
    q, k, v = _inputs(machine, shape, kv_heads)

    def call() -> Tensor:
        found: Tensor = attend(q, k, v, pattern, backend=item["backend"])
        return found

    for _ in range(3):
        call()
    machine.synchronize()
    out, replay = machine.captured(call)
    differences = []
    for _ in range(2):
        replay()
        machine.synchronize()
        found = out.clone()
        differences.append(float((found.float() - call().float()).abs().max()))
        for old, new in zip((q, k, v), _inputs(machine, shape, kv_heads)):
            old.copy_(new)
    wrong = {} if not any(differences) else {"failed": f"a replay differs from eager calls by {max(differences):.1e}"}
    return {"equal": not wrong, "differences": differences, **wrong}


def _host(item: Item, machine: Machine, setup: Setup) -> Row:
    tokens = item["tokens"]
    shape = (1, tokens, 2, 16) if setup.dry_run else SHAPES[tokens]
    q, k, v = _inputs(machine, shape, shape[2])
    q_turned, k_turned, v_turned = (x.transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        found: Tensor
        if item["backend"] == TORCH:
            found = scaled_dot_product_attention(q_turned, k_turned, v_turned)
        else:
            found = attend(q, k, v, Dense(), backend=item["backend"])
        return found

    found = {"host_us": host_us(call, machine)}
    try:
        _, replay = machine.captured(call)
        return {**found, "replay_us": machine.replay_us(replay, 50)}
    except Exception as error:  # noqa: BLE001 - the time on the host is a result without it
        return {**found, "failed": f"capture: {' '.join(str(error).split())[:300]}"}


def host_us(call: Callable[[], Any], machine: Machine, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds until a call returns, the device not awaited: of the fastest of some batches of calls."""
    for _ in range(3):
        call()
    machine.synchronize()
    start = clock()
    call()
    machine.synchronize()
    calls = max(3, min(CALLS, int(BATCH_S / max(clock() - start, 1e-9))))
    best = math.inf
    for _ in range(BATCHES):
        start = clock()
        for _ in range(calls):
            call()
        best = min(best, (clock() - start) / calls)
        machine.synchronize()
    return best * 1e6


def label(item: Item) -> str:
    return f"{item['kind']} {item['backend']} {item.get('case', item.get('tokens'))}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """By backend: cases equal, cases failed, and us on the host / replayed by tokens."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        mine = found.setdefault(row["backend"], {})
        if row["kind"] == "capture" and "refused" not in row:
            mine.setdefault("failed" if "failed" in row else "equal", []).append(row["case"])
        elif "host_us" in row:
            replayed = f"{row['replay_us']:.1f}" if "replay_us" in row else "-"
            mine[f"{row['tokens']} tokens, host / replay us"] = f"{row['host_us']:.1f} / {replayed}"
    return {name: mine for name, mine in found.items() if mine}


HOSTS = (TORCH, "sdpa", "sdpa_cudnn", "triton", "flex")


def tables(found: Any) -> Iterator[Table]:
    hosts = {(row["backend"], row["tokens"]): row for row in found["rows"] if row["kind"] == "host"}
    counts = sorted({tokens for _, tokens in hosts})
    rows = [(f"`{name}`", *(_cell(hosts.get((name, count), {})) for count in counts)) for name in HOSTS]
    captured = [row for row in found["rows"] if row["kind"] == "capture"]
    equal, failed = (sum(bool(row.get(kind)) for row in captured) for kind in ("equal", "failed"))
    yield Table(
        ("call", *(f"{count} token{'s' * (count != 1)}: host, replay" for count in counts)),
        rows,
        "Microseconds that a call takes the host, and those of a replay of its CUDA graph: dense, bfloat16, "
        f"{', '.join(str(list(each)) for each in SHAPES.values())}. Of {len(captured)} calls under capture "
        f"{equal} were replayed with the same results, also after their inputs had changed; {failed} failed; the "
        "others are refused without a graph too.",
    )


def _cell(row: Row) -> str:
    return f"{row['host_us']:.0f}, {row['replay_us']:.0f}" if "replay_us" in row else "-"
