"""The early reports' experiments over several devices (003), repeated: LongNet, with and without Hilbert order.

    torchrun --standalone --nproc_per_node=2 -m tools.bench.ring_reports --tokens 32768 [--hilbert]
    python -m tools.bench.ring_reports          each of them, to tools/results/ring_reports.json

float32, batch 1, 8 heads of 64, forward; gloo between processes of one CPU, one thread each. In Hilbert order means
that the sequence is kept in that order, and then sharded: the function is the same, and so is the order of results.
The exchange is the static choice, nothing is measured beforehand. Memory is each rank's own peak, q, k and v included;
the result is checked against float64 on rows drawn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch import Reordered, attend, explain
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.ring.link import link_of
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.spec.pattern import Dilated, Pattern
from tools.docs.ring_tables import again
from tools.lib.common import parser, write
from tools.lib.ranks import Tokens, checked, drawn, errors

PATTERN = Dilated((2048, 4096, 8192), (1, 2, 4))
HEADS, HEAD_DIM = 8, 64
LENGTHS, RANKS = (32_768, 65_536, 131_072, 262_144), (2, 4)
DRAWS = 4


def measured(tokens: int, hilbert: bool) -> dict[str, Any]:
    """Calls in sequence, on every rank of this torchrun."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("ATTN_DISPATCH_MODE", "off")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    pattern: Pattern = Reordered(PATTERN, "hilbert") if hilbert else PATTERN
    link = link_of("world")
    sequence = Tokens(Layout(deal(tokens, link.size)), HEADS, HEAD_DIM, torch.float32)
    seconds = list[float]()

    def thrice() -> tuple[Tensor, str]:
        q, k, v = sequence.shard(link.rank)
        out = torch.empty(0)
        for _ in range(3):
            link.barrier()
            link.transport.bytes_sent = 0
            start = time.perf_counter()
            out = attend(q, k, v, pattern, mesh="world")
            seconds.append(time.perf_counter() - start)
        return out, str(explain(q, k, v, pattern, mesh="world").order)

    with torch.no_grad():
        (out, exchange), peak = peak_bytes(thrice, torch.device("cpu"))
    draws = link.all_gather_objects(drawn(pattern, sequence, DRAWS) if link.rank == 0 else None)[0]
    assert draws is not None
    mine: dict[str, Any] = {"seconds": seconds, "peak_bytes": peak, "shipped_bytes": link.transport.bytes_sent}
    by_rank: list[dict[str, Any]] = link.all_gather_objects(
        {**mine, "errors": errors(out, sequence.layout, link.rank, draws)}
    )
    dist.destroy_process_group()
    slowest = [max(each) for each in zip(*(one["seconds"] for one in by_rank))]
    return {
        "tokens": tokens,
        "ranks": len(by_rank),
        "kept_in": "hilbert" if hilbert else "natural",
        "exchange": exchange,
        "first_seconds": slowest[0],
        "seconds": min(slowest[1:]),
        "tokens_per_s": tokens / min(slowest[1:]),
        "peak_bytes": max(one["peak_bytes"] for one in by_rank),
        "qkv_out_bytes": 4 * sequence.layout.lengths[0] * HEADS * HEAD_DIM * 4,
        "shipped_bytes": sum(one["shipped_bytes"] for one in by_rank),
        "check": checked([one["errors"] for one in by_rank], draws),
    }


def all_of_them(lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Each in a separate torchrun."""
    found = []
    for tokens in lengths:
        for ranks in RANKS:
            for more in ((), ("--hilbert",)):
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
                command += ["-m", "tools.bench.ring_reports", "--tokens", str(tokens), *more]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
                print(found[-1], flush=True)
    return found


def main() -> None:
    arguments = parser(__doc__, "ring_reports.json")
    arguments.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="lengths of the whole sequence")
    arguments.add_argument("--hilbert", action="store_true", help="permute the sequence into Hilbert order")
    options = arguments.parse_args()
    rank = os.environ.get("RANK")
    if rank is None:
        if options.hilbert:
            arguments.error("--hilbert is for torchrun; without it, both orders are measured")
        found = {"pattern": str(PATTERN), "runs": all_of_them(tuple(options.tokens))}
        write(options.output, found)
        print(*again(found), sep="\n")
        return
    if len(options.tokens) != 1:
        arguments.error("started by torchrun it takes one length: --tokens 32768")
    one = measured(options.tokens[0], options.hilbert)
    if rank == "0":
        print(json.dumps(one))


if __name__ == "__main__":
    main()
