"""LongNet's dilated attention, (2048, 4096, 8192) / (1, 2, 4), 8 heads of 64: against a dense mask, and long.

    python -m tools.bench.longnet          both parts
    python -m tools.bench.longnet long     the long forward alone: --tokens, --dtype, --backend

The mask is built beforehand and not timed. Peak memory is the process's own, from the operating system's mark, reset
before the calls. The long forward's result is checked against float64 on rows drawn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import Dense, Dilated, Problem, attend
from attn_dispatch.backends import native, sdpa, sdpa_mask
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.tuning.example import Example
from attn_dispatch.tuning.oracle import Oracle
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table, direction, interval, ms

PATTERN = Dilated((2048, 4096, 8192), (1, 2, 4))
CAUSAL = Dilated((2048, 4096, 8192), (1, 2, 4), is_causal=True)
HEADS, HEAD_DIM = 8, 64
LONG, LONGEST = 425_984, 2_097_152
QUICK_LONG, QUICK_ROUNDS = 65_536, 6


def against_mask(
    pattern: Dilated, tokens: int, dtype: torch.dtype, rounds: int, backward: bool = False
) -> dict[str, Any]:
    """sdpa's branches, sdpa_mask, PyTorch's attention with the whole mask, and dense attention, interleaved."""
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM).to(dtype).requires_grad_(backward) for _ in range(3))
    problem, dense = Problem.of(q, k, v, pattern), Problem.of(q, k, v, Dense(pattern.is_causal))
    mask = torch.empty(1, HEADS, tokens, tokens, dtype=dtype)
    for start in range(0, tokens, 256):
        counts = pattern.multiplicity(tokens, heads=HEADS, q_pos=torch.arange(start, min(start + 256, tokens)))
        mask[0, :, start : start + 256] = counts.float().log()
    q_first, k_first, v_first = (x.transpose(1, 2) for x in (q, k, v))
    calls: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: sdpa.run(q, k, v, problem),
        "native": lambda: native.run(q, k, v, problem),
        "sdpa_mask": lambda: sdpa_mask.run(q, k, v, problem),
        "torch_with_mask": lambda: scaled_dot_product_attention(q_first, k_first, v_first, attn_mask=mask),
        "dense": lambda: sdpa.run(q, k, v, dense),
    }
    if backward:
        calls = {name: trained(call, (q, k, v)) for name, call in calls.items()}
    found = in_turns(calls, rounds)
    work = {"sdpa": sdpa.flops(problem), "native": sdpa.flops(problem), "dense": sdpa.flops(dense)}
    sdpa_mask.forget(problem)
    return {
        "pattern": str(pattern),
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "backward": backward,
        **{name: timing(one) for name, one in found.items()},
        "torch_with_mask_over_sdpa": ratio(found["torch_with_mask"], found["sdpa"]),
        "torch_with_mask_over_native": ratio(found["torch_with_mask"], found["native"]),
        **{f"{name}_gflops": each / found[name].median_ms / 1e6 for name, each in work.items()},
        "dense_over_sdpa_flops": work["dense"] / work["sdpa"],
    }


def trained(call: Callable[[], Any], inputs: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """A call with its backward pass."""

    def run() -> Any:
        result = call()
        out = result if isinstance(result, torch.Tensor) else result[0]
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    return run


def known_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and its peak bytes beyond what was held before."""
    found, peak = peak_bytes(call, torch.device("cpu"))
    if peak is None:
        raise RuntimeError("peak memory needs Linux's high-water mark: /proc/self/clear_refs cannot be written")
    return found, peak


def long_forward(tokens: int, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """One attend() on a fresh process, then another that is timed and checked; bytes from the operating system."""
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM, dtype=dtype) for _ in range(3))
    held, seconds = 3 * q.numel() * q.itemsize, list[float]()

    def timed() -> torch.Tensor:
        start = time.perf_counter()
        out: torch.Tensor = attend(q, k, v, PATTERN, backend=backend)
        seconds.append(time.perf_counter() - start)
        return out

    def twice() -> torch.Tensor:
        timed()  # memory is measured in the second call
        return timed()

    with torch.no_grad():
        out, above = known_peak(twice)
    return {
        "pattern": str(PATTERN),
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
        "seconds": seconds[-1],
        "first_seconds": seconds[0],
        "tokens_per_s": tokens / seconds[-1],
        "qkv_out_bytes": held // 3 * 4,
        "peak_bytes": held + above,
        "peak_above_qkv_out": (held + above) / (held // 3 * 4) - 1,
        "check": checked(q, k, v, PATTERN, out),
    }


def checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: Dilated, out: torch.Tensor) -> dict[str, Any]:
    """Rows and heads of out that were compared with float64, the largest error and the tolerance.

    Raises:
        RuntimeError: it is larger.
    """
    gate = Oracle.of(Example(Problem.of(q, k, v, pattern), q, k, v, None, {}))
    verdict = gate.check({"out": out})
    if verdict.failures:
        raise RuntimeError("; ".join(verdict.failures))
    tolerance = gate.expected["out"].tolerance
    return {"rows": len(gate.rows), "heads": len(gate.heads), "error": verdict.error, "tolerance": tolerance}


def long_alone(tokens: int, dtype: str, backend: str) -> Any:
    """`long_forward` in a new process."""
    command = [sys.executable, "-m", "tools.bench.longnet", "long", "--tokens", str(tokens)]
    command += ["--dtype", dtype, "--backend", backend]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def tables(found: Any) -> Iterator[Table]:
    head = ("8,192 tokens", "mask", "`sdpa`", "`native`", "mask / `sdpa`", "mask / `native`", "rates / dense's")
    rows: list[tuple[str, ...]] = []
    for one in found["masked"]:
        causal = ", causal" if "causal" in one["pattern"] else ""
        times = (ms(one[name]) for name in ("torch_with_mask", "sdpa", "native"))
        ratios = (interval(one[f"torch_with_mask_over_{name}"], 1) for name in ("sdpa", "native"))
        rates = ", ".join(f"{one[f'{name}_gflops'] / one['dense_gflops']:.2f}" for name in ("sdpa", "native"))
        rows.append((f"{one['dtype']}{causal}, {direction(one)}", *times, *ratios, rates))
    yield Table(
        *(head, rows),
        f"{found['pattern']}, batch 1, {found['heads']} heads of {found['head_dim']}. Intervals are 95 %; with "
        "backward they are ranges. The mask is made before. The last column: operations per second of `sdpa` "
        "and `native`, over those of dense attention.",
    )
    rows = [
        (f"{one['tokens']:,}", one["dtype"], f"`{one['backend']}`", f"{one['tokens_per_s']:,.0f}", excess)
        for one in found["long"]
        if (excess := f"{one['peak_above_qkv_out']:.1%}")
    ]
    yield Table(("tokens, forward", "dtype", "backend", "tokens/s", "peak memory above q, k, v and out"), rows)


def main() -> None:
    options = parser(__doc__, "longnet.json")
    options.add_argument("part", nargs="?", choices=["long"])
    options.add_argument("--tokens", type=int, default=LONG)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--backend", default="sdpa")
    options.add_argument("--quick", action="store_true", help="short sequences, and the causal pattern forward alone")
    given = options.parse_args()
    if given.part == "long":
        print(json.dumps(long_forward(given.tokens, getattr(torch, given.dtype), given.backend)))
        return
    # First, each in a new process: freed memory that earlier calls retain would be counted.
    tokens, longest = (QUICK_LONG, QUICK_LONG) if given.quick else (given.tokens, LONGEST)
    long = [long_alone(tokens, "float32", name) for name in ("sdpa", "native")]
    long.append(long_alone(longest, "bfloat16", "native"))
    patterns, rounds = ((CAUSAL,), QUICK_ROUNDS) if given.quick else ((PATTERN, CAUSAL), given.rounds)
    masked = [
        against_mask(pattern, 8192, dtype, rounds) for pattern in patterns for dtype in (torch.float32, torch.bfloat16)
    ]
    if not given.quick:
        masked += [against_mask(pattern, 8192, torch.float32, min(3, rounds), backward=True) for pattern in patterns]
    figures = {"pattern": str(PATTERN), "heads": HEADS, "head_dim": HEAD_DIM, "long": long, "masked": masked}
    write(given.output, figures, tables)


if __name__ == "__main__":
    main()
