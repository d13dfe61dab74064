"""Step `graphs`: attend() in a CUDA graph, and what a call takes on the host and replayed, by backend.

A capture that fails leaves the process unusable: each backend has a process of its own, and a new one after a failure.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import attend
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup, cuda_backends
from tools.lib.tables import Table

ENDS_AFTER_FAILURE = True
#: The pattern and key heads of each case, at 512 tokens and 4 heads.
CASES: dict[str, tuple[Pattern, int]] = {
    "dense": (Dense(is_causal=True), 4),
    "grouped": (Dense(is_causal=True), 2),
    "longnet": (Dilated((256, 512), (1, 2), is_causal=True), 4),
    "window": (Window(64, 0), 4),
    "neighborhood": (Neighborhood((16, 32), (5, 5)), 4),
}
DRY_CASES: dict[str, tuple[Pattern, int]] = {"dense": (Dense(is_causal=True), 2), "window": (Window(4, 0), 2)}


class HostCase(NamedTuple):
    """A call that is timed: q [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim]."""

    q: tuple[int, int, int, int]
    keys: int
    kv_heads: int
    pattern: Pattern = Dense()
    trains: bool = False


LLAMA = (1, 1, 32, 128)
LONGNET = Dilated((2048, 4096, 8192), (1, 2, 4), is_causal=True)
HOST_CASES = {
    "512 tokens": HostCase((4, 512, 16, 64), 512, 16),
    "4,096 tokens": HostCase((1, 4096, 16, 64), 4096, 16),
    "512 tokens, training": HostCase((4, 512, 16, 64), 512, 16, trains=True),
    "4,096 tokens, causal, training": HostCase((1, 4096, 16, 128), 4096, 16, Dense(is_causal=True), True),
    "LongNet, 16,384 tokens": HostCase((1, 16384, 16, 64), 16384, 16, LONGNET),
    "decoding, 1 key": HostCase(LLAMA, 1, 32),
    "decoding, 4,096 keys": HostCase(LLAMA, 4096, 8),
    "decoding, 32,768 keys": HostCase(LLAMA, 32768, 8),
    "decoding, 131,072 keys": HostCase(LLAMA, 131072, 8),
    "4 tokens, 32,768 keys": HostCase((1, 4, 32, 128), 32768, 8, Dense(is_causal=True)),
    "16 tokens, 32,768 keys": HostCase((1, 16, 32, 128), 32768, 8, Dense(is_causal=True)),
}
DRY_HOST_CASES = {
    "forward": HostCase((1, 32, 2, 16), 32, 2),
    "training": HostCase((1, 32, 2, 16), 32, 2, trains=True),
    "decoding": HostCase((1, 1, 2, 16), 32, 1),
}
TORCH = "F.sdpa"  #: a name beside those of backends: PyTorch's own call
#: Whose times on the host are taken, the first wanted most.
HOSTS = (TORCH, "triton", "sdpa", "sdpa_cudnn", "flash", "flex")
BATCHES, CALLS = 5, 100  #: of calls timed on the host
BATCH_S = 0.05  #: seconds of a batch: slow backends get fewer calls
CAPTURING = 0.6  #: the part of the step's time for captures


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    names = ["sdpa"] if setup.dry_run else cuda_backends()
    if number == 0:
        cases = DRY_CASES if setup.dry_run else CASES
        return Phase([[_item("capture", name, case) for case in cases] for name in names], setup.cores, CAPTURING)
    if number == 1:
        able = {TORCH, *(row["backend"] for row in rows if "refused" not in row)}
        names = [name for name in HOSTS if name in able]
        timed = DRY_HOST_CASES if setup.dry_run else HOST_CASES
        return Phase([[_item("host", name, case) for name, case in product(names, timed)]], item_s=40.0)
    return None


def _item(kind: str, backend: str, case: str) -> Item:
    return {"kind": kind, "backend": backend, "case": case}


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    return (_capture if item["kind"] == "capture" else _host)(item, machine, setup)


def _inputs(machine: Machine, q: tuple[int, int, int, int], keys: int, kv_heads: int) -> list[Tensor]:
    sizes = ((q[1], q[2]), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(q[0], *size, q[3], device=machine.device, dtype=machine.half) for size in sizes]


def _capture(item: Item, machine: Machine, setup: Setup) -> Row:
    """Replays with the captured inputs, and with others in the same memory, against eager calls."""
    pattern, kv_heads = (DRY_CASES if setup.dry_run else CASES)[item["case"]]
    shape = (1, 32, 2, 16) if setup.dry_run else (1, 512, 4, 64)
    q, k, v = _inputs(machine, shape, shape[1], kv_heads)
    call: Any = partial(attend, q, k, v, pattern, backend=item["backend"])
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
        for old, new in zip((q, k, v), _inputs(machine, shape, shape[1], kv_heads)):
            old.copy_(new)
    wrong = {} if not any(differences) else {"failed": f"a replay differs from eager calls by {max(differences):.1e}"}
    return {"equal": not wrong, "differences": differences, **wrong}


def _host(item: Item, machine: Machine, setup: Setup) -> Row:
    case = (DRY_HOST_CASES if setup.dry_run else HOST_CASES)[item["case"]]
    q, k, v = (x.requires_grad_(case.trains) for x in _inputs(machine, case.q, case.keys, case.kv_heads))
    causal = isinstance(case.pattern, Dense) and case.pattern.is_causal and case.keys == case.q[1]
    if item["backend"] == TORCH and not isinstance(case.pattern, Dense):
        return {"refused": "a dense call"}

    def by_torch() -> Tensor:  # of layers whose projections are [batch, len, heads, head_dim], as attend's
        a, b, c = (x.transpose(1, 2) for x in (q, k, v))
        grouped = case.kv_heads != case.q[2]
        return scaled_dot_product_attention(a, b, c, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    by_attend = partial(attend, q, k, v, case.pattern, backend=item["backend"])
    forward: Callable[[], Any] = by_torch if item["backend"] == TORCH else by_attend
    grad = torch.randn(case.q, device=machine.device, dtype=machine.half)

    def call() -> Any:
        return torch.autograd.grad(forward(), (q, k, v), grad) if case.trains else forward()

    found: Row = {"host_us": host_us(call, machine)}
    if case.trains:
        return {**found, "device_ms": machine.median_ms(call, 20.0)}
    try:
        _, replay = machine.captured(call)
    except Exception as error:  # noqa: BLE001 - the time on the host is a result without it
        return {**found, "failed": f"capture: {' '.join(str(error).split())[:300]}"}
    found["replay_us"] = machine.replay_us(replay, 50)
    return {**found, "gb_s": (k.nbytes + v.nbytes) / found["replay_us"] / 1e3} if case.q[1] < case.keys else found


def host_us(call: Callable[[], Any], machine: Machine) -> float:
    """Microseconds until a call returns, the device not awaited: of the fastest of some batches of calls."""
    for _ in range(3):
        call()
    machine.synchronize()
    start = time.perf_counter()
    call()
    machine.synchronize()
    calls = max(3, min(CALLS, int(BATCH_S / max(time.perf_counter() - start, 1e-9))))
    batches = timeit.repeat(call, machine.synchronize, repeat=BATCHES, number=calls)
    return min(batches) / calls * 1e6


def label(item: Item) -> str:
    return f"{item['kind']} {item['backend']} {item['case']}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """By backend: cases equal, cases failed, and us on the host / replayed by tokens."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        mine = found.setdefault(row["backend"], {})
        if row["kind"] == "capture" and "refused" not in row:
            mine.setdefault("failed" if "failed" in row else "equal", []).append(row["case"])
        elif "host_us" in row:
            mine[row["case"]] = _cell(row)
    return {name: mine for name, mine in found.items() if mine}


def tables(found: Any) -> Iterator[Table]:
    hosts = {(row["backend"], row["case"]): row for row in found["rows"] if row["kind"] == "host"}
    captured = [row for row in found["rows"] if row["kind"] == "capture"]
    equal, failed = (sum(bool(row.get(kind)) for row in captured) for kind in ("equal", "failed"))
    names = [name for name in HOSTS if any(name == known for known, _ in hosts)]
    yield Table(
        ("call", *(f"`{name}`" for name in names)),
        [(case, *(_cell(hosts.get((name, case), {})) for name in names)) for case in HOST_CASES],
        "Microseconds of a call on the host, and of a replay of its CUDA graph (of training, on the device), in "
        "bfloat16. Decoding: 32 heads share 8 key heads of head_dim 128; in brackets TB/s of keys and values. "
        "`F.sdpa` gets transposed views, and is not causal for several tokens. "
        f"Of {len(captured)} calls under capture {equal} were replayed with the same results, also after their inputs "
        f"had changed; {failed} failed; the others are refused without a graph too.",
    )


def _cell(row: Row) -> str:
    device = row["device_ms"] * 1e3 if "device_ms" in row else row.get("replay_us")
    if device is None:
        return "-"
    rate = f" ({row['gb_s'] / 1e3:.1f})" if "gb_s" in row else ""
    return f"{row['host_us']:.0f}, {device:.0f}{rate}"
