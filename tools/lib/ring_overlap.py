"""The share of the exchange that overlaps computing, on a rate-limited link.

    unshare -n python -m tools.lib.ring_overlap TOKENS ROUNDS

The link is the loopback device of a network namespace, limited by the kernel's token bucket (`tc ... tbf`), which all
ranks share. Prints one line of JSON. Three kinds of call are interleaved: the whole call; computing alone, on rows that
have arrived before; and the exchange alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch import Problem
from attn_dispatch.kernels.autograd import differentiable
from attn_dispatch.ring.engine.exchange import PendingExchange, Transport
from attn_dispatch.ring.engine.passes import RingCall
from attn_dispatch.ring.engine.steps import steps_of
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.tuning.intervals import Timing
from tools.lib.common import timing
from tools.lib.ranks import Tokens, together

TOKENS, HEADS, HEAD_DIM = 16_384, 2, 64  # the longer, the smaller the processor time of sending
RANKS = (2, 4)
#: Targets for the time of the exchange, as shares of computing.
SHARES = (0.25, 0.5)
KINDS = ("whole", "computing", "exchange")


def overlap(rounds: int, shrink: int = 1) -> dict[str, Any]:
    """Measurements in a new network namespace, or the reason why they were skipped."""
    missing = [name for name in ("unshare", "tc", "ip") if shutil.which(name) is None]
    if missing:
        return {"skipped": f"there is no {', '.join(missing)}"}
    allowed = subprocess.run(["unshare", "-n", "sh", "-c", slowed(1e9)], capture_output=True, text=True)
    if allowed.returncode:
        return {"skipped": allowed.stderr.strip()}
    command = ["unshare", "-n", sys.executable, "-m", "tools.lib.ring_overlap", str(TOKENS // shrink), str(rounds)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    print(found, flush=True)
    return found


def slowed(bytes_per_s: float) -> str:
    """The command that limits the rate of the loopback device."""
    rate = f"rate {int(bytes_per_s * 8)}bit burst 256kb limit 256mb"
    return f"ip link set lo up && tc qdisc replace dev lo root tbf {rate}"


class Silent(Transport):
    """A transport that sends nothing: buffers hold the rows of an earlier exchange."""

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> PendingExchange:
        return PendingExchange([], sends, receives)


def measured(tokens: int, rounds: int, backward: bool) -> dict[str, Any]:
    """Measurements on each rank; times are those of the slowest rank."""
    rank, layout = dist.get_rank(), Layout(deal(tokens, dist.get_world_size()))
    q, k, v = (x.requires_grad_(backward) for x in Tokens(layout, HEADS, HEAD_DIM, torch.float32).shard(rank))
    meta = torch.empty(1, tokens, HEADS, HEAD_DIM, device="meta", requires_grad=backward)
    problem = Problem.of(meta, meta, meta, Dense(), device="cpu")
    steps, transport = steps_of(problem, layout, rank, "ring"), Transport(dist.group.WORLD)
    idle = tuple(replace(step, parts=()) for step in steps)
    calls = {
        "whole": RingCall(problem, steps, transport),
        "computing": RingCall(problem, steps, Silent(transport.group, buffers=transport.buffers)),
        "exchange": RingCall(problem, idle, transport),
    }

    def run(kind: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        if backward:
            out, _ = differentiable(q, k, v, calls[kind])
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        else:
            calls[kind].forward(q, k, v)
        slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest) * 1e3

    run("whole")
    computing = min(run("computing") for _ in range(2))
    transport.bytes_sent = 0
    run("whole")
    total = torch.tensor(transport.bytes_sent)
    dist.all_reduce(total)
    shipped = int(total)
    links = [_link(run, shipped / (share * computing / 1e3), share, rounds) for share in SHARES]
    return {"ranks": layout.ranks, "backward": backward, "shipped_bytes": shipped, "links": links}


def _link(run: Callable[[str], float], bytes_per_s: float, share: float, rounds: int) -> dict[str, Any]:
    if dist.get_rank() == 0:
        subprocess.run(["sh", "-c", slowed(bytes_per_s)], check=True)
    run("whole")
    samples = {kind: [0.0] * rounds for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS:
            samples[kind][number] = run(kind)
    if dist.get_rank() == 0:
        subprocess.run(["sh", "-c", "tc qdisc del dev lo root"], check=True)
    hidden = sorted(1 - (whole - alone) / exchange for whole, alone, exchange in zip(*samples.values()))
    times = {kind: timing(Timing(tuple(each), each[0])) for kind, each in samples.items()}
    return {
        "megabytes_per_s": bytes_per_s / 1e6, "share_aimed_at": share, **times,
        "hidden": {"median": hidden[len(hidden) // 2], "least": hidden[0], "most": hidden[-1]},
    }  # fmt: skip


def both(tokens: int, rounds: int) -> list[dict[str, Any]]:
    return [measured(tokens, rounds, backward) for backward in (False, True)]


def main() -> None:
    tokens, rounds = map(int, sys.argv[1:])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    passes = [one for ranks in RANKS for one in together(both, ranks, tokens, rounds)[0]]
    about = {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    link = "one loopback device for all ranks, held back by the kernel's token bucket filter (tbf)"
    print(json.dumps({**about, "link": link, "passes": passes}))


if __name__ == "__main__":
    main()
