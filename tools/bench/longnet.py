"""LongNet's dilated attention, (2048, 4096, 8192) / (1, 2, 4), 8 heads of 64: against a dense mask, and long.

    python -m tools.bench.longnet [--quick]

The mask is built beforehand and not timed. Peak memory is the process's own, from the operating system's mark, reset
before the calls. The long forward's result is checked against float64 on rows drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attn_dispatch import Dense, Dilated, Problem, attend
from attn_dispatch.backends import sdpa, sdpa_mask
from attn_dispatch.kernels import registry
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.spec.shapes import problem_of
from attn_dispatch.tuning.example import Example, make
from attn_dispatch.tuning.oracle import Oracle
from tools.lib.common import alone, in_turns, parser, ratio, timing, write
from tools.lib.peer_calls import as_backend, masked
from tools.lib.tables import Table, direction, interval, ms

PATTERN = Dilated((2048, 4096, 8192), (1, 2, 4))
CAUSAL = Dilated((2048, 4096, 8192), (1, 2, 4), is_causal=True)
HEADS, HEAD_DIM, TOKENS = 8, 64, 8192
LONG, LONGEST, QUICK_LONG = 425_984, 2_097_152, 65_536
ROUNDS, QUICK_ROUNDS, ROUNDS_TRAINED = 7, 6, 3


def against_mask(pattern: Dilated, dtype: torch.dtype, rounds: int, backward: bool = False) -> dict[str, Any]:
    """sdpa's branches, sdpa_mask, PyTorch's attention with the whole mask, and dense attention, interleaved."""
    problem = problem_of((1, TOKENS, HEADS, HEAD_DIM), pattern, dtype, torch.device("cpu"), backward=backward)
    example, dense = make(problem), replace(problem, pattern=Dense(pattern.is_causal))
    calls = {name: example.call(registry.load(name)) for name in ("sdpa", "native", "sdpa_mask")}
    calls["torch_with_mask"] = example.call(as_backend("torch_with_mask", masked(problem)))
    calls["dense"] = replace(example, problem=dense).call(registry.load("sdpa"))
    found = in_turns(calls, rounds)
    sdpa_mask.forget(problem)
    work = {"sdpa": sdpa.flops(problem), "native": sdpa.flops(problem), "dense": sdpa.flops(dense)}
    return {
        "pattern": str(pattern),
        "tokens": TOKENS,
        "dtype": str(dtype).removeprefix("torch."),
        "backward": backward,
        **{name: timing(one) for name, one in found.items()},
        "torch_with_mask_over_sdpa": ratio(found["torch_with_mask"], found["sdpa"]),
        "torch_with_mask_over_native": ratio(found["torch_with_mask"], found["native"]),
        **{f"{name}_gflops": each / found[name].median_ms / 1e6 for name, each in work.items()},
        "dense_over_sdpa_flops": work["dense"] / work["sdpa"],
    }


def known_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and its peak bytes beyond what was held before."""
    found, peak = peak_bytes(call, torch.device("cpu"))
    if peak is None:
        raise RuntimeError("peak memory needs Linux's high-water mark: /proc/self/clear_refs cannot be written")
    return found, peak


def long_forward(tokens: int, dtype: torch.dtype, backend: str) -> dict[str, Any]:
    """One attend() on a fresh process, then another that is timed and checked; bytes from the operating system.

    Raises:
        RuntimeError: a result that was compared with float64 is wrong.
    """
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
    gate = Oracle.of(Example(Problem.of(q, k, v, PATTERN), q, k, v, None, {}))
    verdict = gate.check({"out": out})
    if verdict.failures:
        raise RuntimeError("; ".join(verdict.failures))
    compared = {"rows": len(gate.rows), "heads": len(gate.heads), "error": verdict.error}
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
        "check": {**compared, "tolerance": gate.expected["out"].tolerance},
    }


def tables(found: Any) -> Iterator[Table]:
    head = (f"{TOKENS:,} tokens", "mask", "`sdpa`", "`native`", "mask / `sdpa`", "mask / `native`", "rates / dense's")
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
    quick = "short sequences, and the causal pattern forward alone"
    given = parser(__doc__, "longnet.json", quick=quick).parse_args()
    # First, each in a new process: freed memory that earlier calls retain would be counted.
    tokens, longest = (QUICK_LONG, QUICK_LONG) if given.quick else (LONG, LONGEST)
    long = [alone(long_forward, tokens, torch.float32, name) for name in ("sdpa", "native")]
    long.append(alone(long_forward, longest, torch.bfloat16, "native"))
    patterns, rounds = ((CAUSAL,), QUICK_ROUNDS) if given.quick else ((PATTERN, CAUSAL), ROUNDS)
    found = [against_mask(pattern, dtype, rounds) for pattern in patterns for dtype in (torch.float32, torch.bfloat16)]
    if not given.quick:
        found += [against_mask(pattern, torch.float32, ROUNDS_TRAINED, backward=True) for pattern in patterns]
    figures = {"pattern": str(PATTERN), "heads": HEADS, "head_dim": HEAD_DIM, "long": long, "masked": found}
    write(given, figures, tables)


if __name__ == "__main__":
    main()
