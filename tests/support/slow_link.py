"""Two ranks over a rate-limited loopback device, in this process's network namespace.

unshare -n python -m tests.support.slow_link BYTES_PER_S
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch
import torch.distributed as dist

from attn_dispatch import attend
from attn_dispatch.ring.link import link_of
from attn_dispatch.ring.rows.layout import Layout, deal
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Problem
from tests.support.cases import gate
from tests.support.ring_calls import shards, whole
from tools.lib.ranks import together


def slowed(bytes_per_s: float) -> str:
    """The command that limits the rate of the loopback device."""
    rate = f"rate {int(bytes_per_s * 8)}bit burst 256kb limit 256mb"
    return f"ip link set lo up && tc qdisc replace dev lo root tbf {rate}"


LAYOUT = Layout(deal(512, 2))


def problem() -> Problem:
    q = torch.empty(1, LAYOUT.tokens, 4, 64, device="meta", requires_grad=True)
    return Problem.of(q, q, q, Dense(is_causal=True), return_lse=True, device="cpu")


def work() -> tuple[float, int, dict[str, torch.Tensor]]:
    """Seconds of a call with its gradients, bytes sent, and results."""
    local = shards(gate(problem()), LAYOUT)[dist.get_rank()]
    q, k, v = (local[name].requires_grad_() for name in "qkv")
    dist.barrier()
    start = time.perf_counter()
    out, lse = attend(q, k, v, is_causal=True, return_lse=True, mesh="world", order="ring")
    grads = torch.autograd.grad([out, lse], (q, k, v), [local["grad"], local["grad_lse"]])
    took = time.perf_counter() - start
    return took, link_of("world").transport.bytes_sent, dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))


def main(bytes_per_s: float) -> None:
    subprocess.run(["sh", "-c", slowed(bytes_per_s)], check=True)
    times, bytes_sent, found = zip(*together(work, LAYOUT.ranks))
    verdict = gate(problem()).check(whole([{name: x.detach() for name, x in each.items()} for each in found], LAYOUT))
    print(max(times), sum(bytes_sent), *verdict.failures)


if __name__ == "__main__":
    main(float(sys.argv[1]))
