"""Step `blocks`: the time of every listed block of Triton's kernels, by pattern, head_dim and precision.

All are compiled first, in as many processes as there are cores, each with one launch: Triton's cache on disk then has
them. Then one process launches each alone, with the tensors that its pass launches it with.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.backends import native
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import problem_of
from tools.checks.gpu.machine import Machine
from tools.checks.gpu.workers import Item, Phase, Row, Setup
from tools.lib.kernels import InPlace
from tools.lib.tables import Table

Block = tuple[int, ...]  #: rows, columns, warps, stages
FIELDS = ("backend", "pattern", "kernel", "head_dim", "dtype", "precision", "block")

FORWARD, BACKWARD_Q, BACKWARD_KV = KERNELS = ("forward", "backward_q", "backward_kv")
PATTERNS: dict[str, Pattern] = {
    "causal": Dense(is_causal=True),
    "dense": Dense(),
    "longnet": Dilated((2048, 4096, 8192), (1, 2, 4), is_causal=True),
    "neighborhood-2d": Neighborhood((64, 64), (13, 13)),
    "neighborhood-3d": Neighborhood((16, 16, 16), (5, 5, 5)),
}
GRIDS = ("neighborhood-2d", "neighborhood-3d")
DRY_PATTERNS: dict[str, Pattern] = {"causal": Dense(is_causal=True), "neighborhood-2d": Neighborhood((4, 8), (3, 3))}


def _blocks(text: str) -> tuple[Block, ...]:
    return tuple(tuple(map(int, each.split())) for each in text.split(","))


BLOCKS: dict[str, dict[int, tuple[Block, ...]]] = {
    FORWARD: {
        64: _blocks("128 64 8 3, 128 64 4 3, 64 128 4 3, 128 128 8 3, 128 128 4 3, 64 64 4 3, 128 128 8 2, 64 64 4 4"),
        128: _blocks("128 64 8 3, 128 128 8 3, 128 128 8 2, 64 64 4 3, 64 64 4 2, 128 32 8 3, 128 64 8 2"),
        256: _blocks("64 64 8 2, 128 32 8 3, 128 64 8 2, 64 32 4 3, 128 32 8 2, 64 64 4 2"),
    },
    BACKWARD_Q: {
        64: _blocks("128 64 8 3, 64 64 4 3, 64 128 4 2, 128 64 4 3, 64 64 4 2, 128 32 4 3"),
        128: _blocks("128 64 8 2, 64 64 4 3, 64 64 4 2, 128 128 8 2, 128 64 8 3, 64 32 4 3"),
        256: _blocks("64 64 8 2, 64 32 4 3, 64 32 4 2, 64 64 4 2, 128 32 8 2, 64 16 4 3"),
    },
    BACKWARD_KV: {
        64: _blocks("64 64 8 2, 64 64 4 2, 64 64 4 3, 128 64 8 2, 64 128 4 2, 128 64 8 3, 128 32 4 2, 64 32 4 3"),
        128: _blocks("64 64 8 2, 64 64 4 2, 64 32 4 2, 128 64 8 2, 64 32 8 2, 128 32 8 2, 64 32 4 3"),
        256: _blocks("32 64 8 2, 64 32 8 2, 64 64 8 2, 64 32 4 2, 64 16 4 2, 128 32 8 2, 64 16 8 2"),
    },
}
#: Of the tile kernels: with the tile size of their largest side.
TILE_BLOCKS = _blocks(
    "64 64 4 3, 64 64 8 3, 64 64 4 2, 64 64 8 2, 64 32 4 3, 64 32 8 2, 128 64 8 3, "
    "128 64 4 3, 128 64 8 2, 128 128 8 2, 128 32 8 2"
)
SINGLE: dict[str, tuple[Block, ...]] = {
    "tf32": _blocks("32 32 4 2, 64 32 4 2, 64 64 8 2, 64 64 4 2, 128 32 8 2, 128 64 8 2, 128 32 4 2"),
    "tf32x3": _blocks("32 32 4 2, 64 32 4 2, 64 64 8 2, 64 64 4 2, 128 32 8 2, 128 64 8 2"),
    "ieee": _blocks("32 32 4 2, 32 32 8 2, 64 32 4 2, 64 64 8 2"),
}
DRY_BLOCKS: tuple[Block, ...] = ((16, 16, 4, 1), (32, 16, 4, 1))
HALF, LENGTH, HEADS = "bfloat16", 8192, 16
SINGLE_LENGTH, SINGLE_HEADS = 4096, 8
GRID_LENGTH = 4096
COMPILING = 0.5  #: the part of the step's time in which everything is compiled
WRONG = 0.05  #: a larger difference from another block's results than rounding makes
REPEAT_MS = {HALF: 40.0, "float32": 20.0}

_first: dict[tuple[Any, ...], list[Tensor]] = {}  # the results of the first block of one kernel and problem


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    if number == 0:
        items = [{**item, "stage": "compile"} for item in (dry_items() if setup.dry_run else items_of())]
        # A block's patterns often share their kernels: they stay in one process.
        blocks = list(dict.fromkeys(_block_key(item) for item in items))
        place = {key: index % (1 if setup.dry_run else setup.cores) for index, key in enumerate(blocks)}
        groups: dict[int, list[Item]] = {}
        for item in items:
            groups.setdefault(place[_block_key(item)], []).append(item)
        return Phase(list(groups.values()), len(groups), COMPILING)
    if number == 1:
        return Phase([timed_items(rows)], item_s=30.0)
    return None


def _block_key(item: Item) -> tuple[Any, ...]:
    return item["backend"], item["kernel"], item["head_dim"], item["precision"], tuple(item["block"])


def items_of() -> list[Item]:
    """In the order in which they are wanted, should time run out; those of one kernel and problem in a row."""
    found = [
        _item("triton", pattern, kernel, head_dim, HALF, None, block)
        for pattern in ("causal", "dense", "longnet")
        for kernel, table in BLOCKS.items()
        for head_dim, blocks in table.items()
        for block in blocks
    ]
    grids = product(((GRIDS[0], 64), (GRIDS[1], 64), (GRIDS[0], 128)), KERNELS, TILE_BLOCKS)
    found += [_item("triton_tiles", pattern, kernel, dim, HALF, None, block) for (pattern, dim), kernel, block in grids]
    for precision, blocks in SINGLE.items():
        single = product((64, 128), KERNELS, blocks)
        found += [_item("triton", "causal", kernel, dim, "float32", precision, block) for dim, kernel, block in single]
    return found


def dry_items() -> list[Item]:
    kinds = (("triton", "causal", KERNELS), ("triton_tiles", "neighborhood-2d", (FORWARD,)))
    return [
        _item(backend, pattern, kernel, 16, "float32", "ieee", block)
        for backend, pattern, kernels in kinds
        for kernel, block in product(kernels, DRY_BLOCKS)
    ]


def _item(*given: Any) -> Item:
    return dict(zip(FIELDS, given))


def timed_items(rows: list[Row]) -> list[Item]:
    """The items that were compiled, and for each the blocks of the kernels that run before it."""
    done = [row for row in rows if row["stage"] == "compile" and not {"failed", "too_large"} & row.keys()]
    first: dict[tuple[Any, ...], Any] = {}
    for row in done:
        first.setdefault((*_pass_key(row), row["kernel"]), row["block"])
    order = {key: index for index, key in enumerate(_key(item) for item in (*items_of(), *dry_items()))}
    items = []
    for row in sorted(done, key=lambda row: order[_key(row)]):
        earlier = KERNELS[: KERNELS.index(row["kernel"])]
        before = {kernel: first.get((*_pass_key(row), kernel)) for kernel in earlier}
        if None not in before.values():
            items.append({**{name: row[name] for name in FIELDS}, "stage": "time", "before": before})
    return items


def _pass_key(row: Row) -> tuple[Any, ...]:
    tile = max(row["block"][:2]) if row["backend"] == "triton_tiles" else 0
    return row["backend"], row["pattern"], row["head_dim"], row["dtype"], row["precision"], tile


def _key(row: Row) -> tuple[Any, ...]:
    return (*_pass_key(row), row["kernel"], tuple(row["block"]))


class Watched(InPlace):
    """Keeps its last launch, to repeat it, and what Triton compiled for it."""

    launch: Any = None

    def start(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        self.launch = partial(self.kernel.load()[grid], *arguments, **constants)
        if self.wanted:
            self.made = self.launch()


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    backend: Any = importlib.import_module(f"attn_dispatch.backends.{item['backend']}")
    target, compiling = item["kernel"], item["stage"] == "compile"
    problem = _problem(item, machine, setup)
    blocks: dict[str, Any] = dict.fromkeys(KERNELS, item["block"]) | item.get("before", {})
    launched = {target, *item.get("before", ())}  # it, and when it is timed those whose results it reads
    watched = {name: Watched(_kernel(backend, name), name in launched) for name in KERNELS}
    vars(backend).update({name.upper(): each for name, each in watched.items()}, KERNELS=tuple(watched.values()))
    configs = {name: (backend.BlockConfig(*blocks[name]),) for name in KERNELS}
    backend.block_configs = lambda each, *_: configs[next(n for n, w in watched.items() if w is each)]
    if item["precision"] is not None:
        support: Any = importlib.import_module("attn_dispatch.kernels.triton.support")
        support.precision = lambda _: item["precision"]
    errors: Any = importlib.import_module("triton.runtime.errors")
    try:
        results = _results(item, backend, problem)
    except errors.OutOfResources as error:
        return {"too_large": str(error)}
    machine.synchronize()
    return {} if compiling else _timed(item, machine, problem, watched[target], results)


def _timed(item: Item, machine: Machine, problem: Problem, each: Watched, results: list[Tensor]) -> Row:
    median_ms = machine.median_ms(each.launch, REPEAT_MS[item["dtype"]])
    work = native.flops(replace(problem, needs_grad=False)) * each.products / 2
    difference = _difference(item, results)
    wrong = {} if difference < WRONG else {"failed": f"differs by {difference:.1e} from the kernel's first block"}
    return {
        "median_ms": median_ms,
        "tflops": work / median_ms / 1e9,
        "registers": getattr(each.made, "n_regs", None),
        "spills": getattr(each.made, "n_spills", None),
        "shared_bytes": getattr(getattr(each.made, "metadata", None), "shared", None),
        "difference": difference,
        **wrong,
    }


def _kernel(backend: Any, name: str) -> Any:
    found = getattr(backend, name.upper())
    return found.kernel if isinstance(found, Watched) else found


def _problem(item: Item, machine: Machine, setup: Setup) -> Problem:
    pattern = (DRY_PATTERNS if setup.dry_run else PATTERNS)[item["pattern"]]
    length, heads = GRID_LENGTH if item["pattern"] in GRIDS else LENGTH, HEADS
    if setup.dry_run:
        length, heads = 32, 1
    elif item["dtype"] == "float32":
        length, heads = SINGLE_LENGTH, SINGLE_HEADS
    shape, dtype = (1, length, heads, item["head_dim"]), getattr(torch, item["dtype"])
    return problem_of(shape, pattern, dtype, machine.device, backward=item["kernel"] != FORWARD)


@lru_cache(maxsize=1)
def _tensors(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(4))


def _results(item: Item, backend: Any, problem: Problem) -> list[Tensor]:
    """What the kernel computes in its pass: out, dq, or dk and dv."""
    shape = (problem.batch, problem.q_len, problem.heads, problem.head_dim)
    drawn = _tensors(shape, problem.dtype, problem.device)
    tiled = item["backend"] == "triton_tiles"
    chosen: dict[str, Any] = {"tile": max(item["block"][:2]), "order": "hilbert"} if tiled else {}
    q, k, v = (x.detach().requires_grad_(problem.needs_grad) for x in drawn[:3])
    with torch.set_grad_enabled(problem.needs_grad):
        out = backend.run(q, k, v, problem, **chosen)[0]
    if not problem.needs_grad:
        return [out]
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), drawn[3])
    return [dq] if item["kernel"] == BACKWARD_Q else [dk, dv]


def _difference(item: Item, results: list[Tensor]) -> float:
    """The largest difference from the results of the kernel's first block, over their largest value."""
    key = (*_pass_key(item)[:-1], item["kernel"])
    if key not in _first:
        _first.clear()
        _first[key] = results
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, _first[key]))


def _kind(item: Item) -> str:
    return f"{item['backend']} {item['kernel']} {item['precision'] or item['dtype']} hd{item['head_dim']}"


def label(item: Item) -> str:
    return f"{item['stage']} {_kind(item)} {item['pattern']} {tuple(item['block'])}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """For each kernel, head_dim and precision: blocks by the geometric mean, over patterns, of rate / best rate."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "tflops" in row and "failed" not in row:
            found.setdefault(_kind(row), []).append(row)
    return {kind: list(_ranked(mine)) for kind, mine in found.items()}


def _ranked(rows: list[Row]) -> Iterator[dict[str, Any]]:
    best: dict[str, float] = {}
    shares: dict[Block, list[float]] = {}
    for row in rows:
        best[row["pattern"]] = max(best.get(row["pattern"], 0.0), row["tflops"])
    for row in rows:
        shares.setdefault(tuple(row["block"]), []).append(row["tflops"] / best[row["pattern"]])
    means = {block: math.exp(sum(map(math.log, each)) / len(each)) for block, each in shares.items()}
    # Those that lack a pattern, since it failed or time ran out, come last.
    for block in sorted(means, key=lambda block: (-len(shares[block]), -means[block])):
        yield {"block": block, "of_best": round(means[block], 3), "patterns": len(shares[block])}


SHOWN = ("dense", "causal", "longnet")


def tables(found: Any) -> Iterator[Table]:
    timed: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found["rows"]:
        if row.get("median_ms"):
            timed.setdefault((_kind(row), tuple(row["block"])), {})[row["pattern"]] = row
    rows: list[tuple[str, ...]] = []
    for kernel, head_dim in ((kernel, head_dim) for kernel, table in BLOCKS.items() for head_dim in table):
        kind = f"triton {kernel} {HALF} hd{head_dim}"
        if ranked := found["summary"].get(kind):
            block = ranked[0]["block"]
            best = timed[kind, tuple(block)]
            rates = (f"{best[each]['tflops']:.0f}" if each in best else "-" for each in SHOWN)
            used = next(iter(best.values()))
            what = f"`{kernel}`", str(head_dim), "{} x {}, {} warps, {} stages".format(*block)
            rows.append((*what, *rates, f"{used['registers']}, {used['spills']}"))
    yield Table(
        ("kernel", "head_dim", "fastest block", *SHOWN, "registers, spills"),
        rows,
        f"TFLOP/s by the pairs that the pattern has: {HALF}, {HEADS} heads, {LENGTH:,} tokens, each kernel alone. "
        f"LongNet: `{PATTERNS['longnet']}`. The file has float32 too.",
    )
