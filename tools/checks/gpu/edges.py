"""Step `edges`: what calls of `smoke` do not show: ranks, graphs that outlive trials, streams, strides, documents.

Ranks are two processes on one device, whose messages go through the CPU: NCCL refuses that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import attn_dispatch
from attn_dispatch.ring import link
from attn_dispatch.ring.engine.exchange import PendingExchange, Transport
from attn_dispatch.ring.shards import Sharded, shard
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.oracle import Expected, expected_of
from tools.checks.gpu.machine import Machine, machine_of
from tools.checks.gpu.workers import Item, Phase, Row, Setup, cuda_backends
from tools.lib.ranks import together
from tools.lib.tables import Table

attend: Any = attn_dispatch.attend

ENDS_AFTER_FAILURE = True
RANKS = 2
NAMES: tuple[str, ...] = ("out", "lse", "dq", "dk", "dv")
CAUSAL = Dense(is_causal=True)
PATTERNS: dict[str, Pattern] = {
    "causal": CAUSAL,
    "window": Window(60, 0),
    "longnet": Dilated((64, 128, 256), (1, 2, 4), is_causal=True),
}
SHAPE, KV_HEADS = (2, 512, 4, 64), 2
DRY_SHAPE = (1, 64, 2, 16)
DOCUMENTS = (1, 100, 7, 250, 128, 26)  #: tokens of each
DRY_DOCUMENTS = (1, 40, 23)


def phase(number: int, rows: list[Row], setup: Setup) -> Phase | None:
    if number:
        return None
    dtypes = ("float32",) if setup.dry_run else ("bfloat16", "float32")
    names = ["sdpa"] if setup.dry_run else cuda_backends()
    groups = [[_item("ranks", pattern, dtype, None)] for pattern, dtype in product(PATTERNS, dtypes)]
    kinds = ("graph", "stream", "strides", "documents")
    for name in names:
        items = [_item(kind, pattern, dtypes[0], name) for kind in kinds for pattern in PATTERNS]
        # One that compiles for a minute: each in a process of its own.
        groups += [[item] for item in items] if name.startswith("flex") else [items]
    groups += [[_item("documents", pattern, dtypes[0], None)] for pattern in PATTERNS]
    groups += [[_item("compiled", "causal", dtypes[0], None)]]
    return Phase(groups, setup.cores, item_s=90.0)


def _item(kind: str, pattern: str, dtype: str, backend: str | None) -> Item:
    return {"kind": kind, "pattern": pattern, "dtype": dtype, "backend": backend}


def measure(item: Item, machine: Machine, setup: Setup) -> Row:
    check: dict[str, Callable[[Item, Machine, bool], dict[str, Any]]] = {
        "ranks": _ranks, "graph": _graph, "stream": _stream, "strides": _strides, "documents": _documents,
        "compiled": _compiled,
    }  # fmt: skip
    return check[item["kind"]](item, machine, setup.dry_run)


def _example(item: Item, machine: Machine, dry: bool, *, lse: bool = False) -> Example:
    shape, dtype = DRY_SHAPE if dry else SHAPE, getattr(torch, item["dtype"])
    kv_heads = 1 if dry else KV_HEADS
    problem = problem_of(shape, PATTERNS[item["pattern"]], dtype, machine.device, kv_heads=kv_heads, backward=True)
    return make(replace(problem, return_lse=lse))


def _judged(found: dict[str, Tensor], expected: dict[str, Expected]) -> Row:
    """The largest error over its tolerance, and what is wrong."""
    off = {name: (found[name].double() - each.value).abs().nan_to_num(9e9) for name, each in expected.items()}
    shares = {name: float(each.max()) / expected[name].tolerance for name, each in off.items()}
    wrong = [f"{name} is off by {share:.1f} tolerances" for name, share in shares.items() if not share <= 1]
    return {"of_tolerance": max(shares.values()), **({"failed": "; ".join(wrong)} if wrong else {})}


def _worst(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: ("failed" in row, row["of_tolerance"]))


def _same(found: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> Row:
    off = max(float((a.double() - b.double()).abs().nan_to_num(9e9).max()) for a, b in zip(found, expected))
    return {"equal": off == 0} | ({"failed": f"{what} differs by {off:.1e}"} if off else {})


# --- ranks ------------------------------------------------------------------------------------------------------------


def _ranks(item: Item, machine: Machine, dry: bool) -> Row:
    try:
        return _worst(together(_rank, RANKS, item, dry))
    except Exception as error:  # noqa: BLE001 - its text ends with what was raised
        return {"failed": f"a rank failed: {' '.join(str(error).split())[-400:]}"}


def _rank(item: Item, dry: bool) -> Row:
    _send_through_the_cpu()
    machine = machine_of(dry)
    example = _example(item, machine, dry, lse=True)
    assert example.grad is not None
    generator = torch.Generator().manual_seed(1)
    grad_lse = torch.randn(example.problem.batch, example.problem.heads, example.problem.q_len, generator=generator)
    grad_lse = grad_lse.to(machine.device)
    expected, spread = expected_of(example, grad_lse), Sharded(dist.group.WORLD, "zigzag")
    mine = [shard(x.detach(), spread).requires_grad_() for x in (example.q, example.k, example.v)]
    out, lse = attend(*mine, PATTERNS[item["pattern"]], mesh=spread, order="ring", return_lse=True)
    grads = torch.autograd.grad([out, lse], mine, [shard(example.grad, spread), shard(grad_lse, spread, 2)])
    found = dict(zip(NAMES, (out.detach(), lse.detach(), *grads)))
    whole = {name: expected[name] for name in NAMES}
    parts = {name: shard(each.value, spread, 2 if name == "lse" else 1) for name, each in whole.items()}
    return _judged(found, {name: Expected(each, whole[name].tolerance) for name, each in parts.items()})


def _send_through_the_cpu() -> None:
    whole: Any = link.Link
    exchange, gather, reduce = Transport.exchange, whole.all_gather_ragged, whole.all_reduce

    def staged(self: Transport, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> PendingExchange:
        near = {peer: x.cpu() for peer, x in sends.items()}
        there = {peer: torch.empty_like(x, device="cpu") for peer, x in receives.items()}
        pending: Any = exchange(self, near, there)
        waited = pending.wait

        def wait() -> None:
            waited()
            for peer, x in receives.items():
                x.copy_(there[peer])

        pending.wait, pending.receives = wait, receives
        found: PendingExchange = pending
        return found

    Transport.exchange = staged  # type: ignore[method-assign,assignment]
    whole.devices, whole.connect = ("cpu", "cuda"), lambda self, device: None
    whole.all_gather_ragged = lambda self, x, lengths: [each.to(x.device) for each in gather(self, x.cpu(), lengths)]
    whole.all_reduce = lambda self, x: reduce(self, x.cpu()).to(x.device)


# --- graphs, streams, torch.compile -----------------------------------------------------------------------------------


def _inputs(item: Item, machine: Machine, dry: bool) -> tuple[Tensor, Tensor, Tensor]:
    example = _example(item, machine, dry)
    return example.q.detach(), example.k.detach(), example.v.detach()


def _graph(item: Item, machine: Machine, dry: bool) -> Row:
    """A replay after trials of other problems, whose ends free what is cached, and after the memory was written to."""
    q, k, v = _inputs(item, machine, dry)
    pattern = PATTERNS[item["pattern"]]
    call = partial(attend, q, k, v, pattern, backend=item["backend"])
    expected = [call() for _ in range(3)][-1]
    machine.synchronize()
    out, replay = machine.captured(call)
    for length in (q.shape[1] // 2, q.shape[1] // 4):
        attend(q[:, :length], k[:, :length], v[:, :length], pattern)
    if machine.device.type == "cuda":
        torch.cuda.empty_cache()
    kept = [torch.full((1 << size,), -1, dtype=torch.int32, device=machine.device) for size in range(4, 20)]
    out.zero_()
    replay()
    machine.synchronize()
    del kept
    return _same([out], [expected], "a replay after trials")


def _stream(item: Item, machine: Machine, dry: bool) -> Row:
    """Calls on a stream that is behind: on another one they would read inputs before these are written."""
    q, k, v = _inputs(item, machine, dry)
    pattern, cuda = PATTERNS[item["pattern"]], machine.device.type == "cuda"
    expected = [attend(q, k, v, pattern, backend=item["backend"]) for _ in range(3)][-1]
    late = [torch.zeros_like(x) for x in (q, k, v)]
    machine.synchronize()
    stream: Any = torch.cuda.Stream() if cuda else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        if cuda:
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        for to, x in zip(late, (q, k, v)):
            to.copy_(x)
        found = attend(*late, pattern, backend=item["backend"])
    machine.synchronize()
    return _same([found], [expected], "a call on another stream")


def _compiled(item: Item, machine: Machine, dry: bool) -> Row:
    """torch.compile with CUDA graphs, forward and backward, with new values, against float64."""

    def layer(*qkv: Tensor) -> Any:
        return attend(*qkv, is_causal=True, return_lse=True)

    compiled = torch.compile(layer, mode="default" if dry else "reduce-overhead")
    found: list[Row] = []
    for factor in (1.0, 1.0, 0.5, -1.0):
        example = _example(item, machine, dry, lse=True)
        for x in (example.q, example.k, example.v):
            x.detach().mul_(factor)
        qkv = example.q, example.k, example.v
        out, lse = compiled(*qkv)
        results = (out, lse, *torch.autograd.grad([out], qkv, [example.grad]))
        found.append(_judged(dict(zip(NAMES, [x.detach().clone() for x in results])), expected_of(example)))
    return _worst(found)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _strides(item: Item, machine: Machine, dry: bool) -> Row:
    """seq_lens and key_mask with strides, or expanded, against contiguous ones."""
    q, k, v = _inputs(item, machine, dry)
    pattern, (batch, length) = PATTERNS[item["pattern"]], q.shape[:2]
    lens = torch.randint(1, length, (batch, 3), generator=torch.Generator().manual_seed(0)).to(machine.device)
    mask = lens[:, :1] > torch.arange(2 * length, device=machine.device)
    given = [("seq_lens", lens[:, 1]), ("seq_lens", lens[0, 2].expand(batch)), ("key_mask", mask[:, ::2])]
    found, expected = (
        [attend(q, k, v, pattern, backend=item["backend"], **{name: change(x)}) for name, x in given]
        for change in (lambda x: x, Tensor.contiguous)
    )
    return _same(found, expected, "a mask with strides")


def _documents(item: Item, machine: Machine, dry: bool) -> Row:
    """Packed rows, gradients too, against the expected results of each document."""
    example, lengths = _example(item, machine, dry), DRY_DOCUMENTS if dry else DOCUMENTS
    starts = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    qkv = [x.detach()[:1].requires_grad_() for x in (example.q, example.k, example.v)]
    assert example.grad is not None
    grad, pattern = example.grad[:1], PATTERNS[item["pattern"]]
    ends = torch.tensor(starts, dtype=torch.int32, device=machine.device)
    out, lse = attend(*qkv, pattern, cu_seqlens=ends, backend=item["backend"], return_lse=True)
    found = dict(zip(NAMES, (out, lse, *torch.autograd.grad(out, qkv, grad))))
    each: list[dict[str, Expected]] = []
    for start, end in pairwise(starts):
        q, k, v = (x.detach()[:, start:end].requires_grad_() for x in qkv)
        simple = pattern.simplify(end - start, end - start, example.problem.heads)
        problem = replace(example.problem, batch=1, q_len=end - start, k_len=end - start, pattern=simple)
        each.append(expected_of(Example(problem, q, k, v, grad[:, start:end], {})))
    values = {name: torch.cat([x[name].value for x in each], 2 if name == "lse" else 1) for name in found}
    most = {name: max(x[name].tolerance for x in each) for name in found}
    return _judged(found, {name: Expected(value, most[name]) for name, value in values.items()})


def label(item: Item) -> str:
    return f"{item['kind']} {item['backend'] or ''} {item['pattern']} {item['dtype']}"


def summary(rows: list[Row]) -> dict[str, Any]:
    """By kind: how many items are right, and how many are refused."""
    found: dict[str, str] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = [row for row in rows if row["kind"] == kind]
        refused, failed = (sum(how in row for row in mine) for how in ("refused", "failed"))
        found[kind] = f"{len(mine) - refused - failed} right, {failed} wrong, {refused} refused"
    return found


ABOUT = {
    "ranks": f"{RANKS} ranks, out, lse and gradients against float64",
    "graph": "a CUDA graph replayed after trials of other problems",
    "stream": "a call on a stream that is behind",
    "strides": "seq_lens and key_mask with strides",
    "documents": "packed rows, out, lse and gradients against float64",
    "compiled": 'torch.compile(mode="reduce-overhead"), gradients too',
}


def tables(found: Any) -> Iterator[Table]:
    yield Table(("what", "calls"), [(ABOUT[kind], text) for kind, text in found["summary"].items() if kind in ABOUT])
