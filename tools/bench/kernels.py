"""The kernels against a mask and FlexAttention, on ragged lengths, and against the plain formula.

    python -m tools.bench.kernels [rivals ragged plain]

Everything in one entry is timed in turns, in one run. Rates against the processor's limits: tools/bench/native.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import Dilated, Problem
from attn_dispatch.backends import sdpa
from attn_dispatch.kernels import registry
from attn_dispatch.tuning.rounds import time_in_rounds
from tools.lib.common import parser, ratio, timing, write

HEADS, HEAD_DIM = 8, 64
HOPELESS = 12.0  #: times the fastest: beyond it, a candidate is timed only once after warm-up
PATTERNS = (
    Dilated((2048, 4096, 8192), (1, 2, 4)),
    Dilated((2048, 4096, 8192), (1, 2, 4), is_causal=True),
)
DTYPES = (torch.float32, torch.bfloat16)
CPU_BACKENDS = ("sdpa", "native")
RAGGED = (
    # The shape, and the nearest one in which rates divide segments and segments the length.
    (PATTERNS[0], 8191, PATTERNS[0], 8192),
    (Dilated((16384,), (6,)), 40_000, Dilated((16380,), (6,)), 32_760),
)
REPORT = [(n, w, r) for n in (256, 512, 4096) for w in (128, 1024, 2048) for r in (1, 2, 4) if w <= n]

Calls = dict[str, Callable[[], Any]]


def tensors(tokens: int, dtype: torch.dtype, *, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, tokens, HEADS, HEAD_DIM).to(dtype) for _ in range(3))
    return q, k, v


def backends(problem: Problem, q: Tensor, k: Tensor, v: Tensor, names: tuple[str, ...]) -> Calls:
    """A call for each of these backends that can run the problem."""
    found = {name: registry.load(name) for name in names}
    able = {name: backend for name, backend in found.items() if not backend.refusals(problem)}
    return {name: partial(backend.run, q, k, v, problem) for name, backend in able.items()}


def turns(calls: Calls, rounds: int, hopeless: float | None = None) -> Mapping[str, Any]:
    return time_in_rounds(calls, budget_s=None, max_rounds=rounds, min_rounds=rounds, hopeless=hopeless).timings


def flops(tokens: int, pattern: Any, dtype: torch.dtype) -> int:
    q, k, v = (torch.empty(1, tokens, HEADS, HEAD_DIM, dtype=dtype, device="meta") for _ in range(3))
    return sdpa.flops(Problem.of(q, k, v, pattern, device="cpu"))


def rivals(pattern: Dilated, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Against a dense mask and compiled FlexAttention at 8,192 tokens."""
    q, k, v = tensors(8192, dtype)
    problem = Problem.of(q, k, v, pattern)
    found = turns(backends(problem, q, k, v, (*CPU_BACKENDS, "sdpa_mask", "flex")), rounds, HOPELESS)
    for name in ("sdpa_mask", "flex"):
        release = getattr(registry.load(name), "release", None)
        if release is not None:
            release()
    best = min(CPU_BACKENDS, key=lambda name: found[name].median_ms)
    return {
        "pattern": str(pattern),
        "tokens": 8192,
        "dtype": name_of(dtype),
        "times": {name: timing(one) for name, one in found.items()},
        "best": best,
        "over_best": {name: one.median_ms / found[best].median_ms for name, one in found.items() if name != best},
    }


def ragged(odd: Dilated, odd_tokens: int, even: Dilated, even_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Time per operation of an uneven shape over that of an even one."""
    calls: Calls = {}
    for kind, pattern, tokens in (("odd", odd, odd_tokens), ("even", even, even_tokens)):
        q, k, v = tensors(tokens, dtype)
        made = backends(Problem.of(q, k, v, pattern), q, k, v, CPU_BACKENDS)
        calls |= {f"{name}_{kind}": call for name, call in made.items()}
    found = turns(calls, 5)
    work = flops(odd_tokens, odd, dtype) / flops(even_tokens, even, dtype)
    return {
        "odd": f"{odd_tokens} tokens, {odd}",
        "even": f"{even_tokens} tokens, {even}",
        "dtype": name_of(dtype),
        "times": {name: timing(one) for name, one in found.items()},
        "per_operation": {
            name: found[f"{name}_odd"].median_ms / found[f"{name}_even"].median_ms / work for name in CPU_BACKENDS
        },
    }


def plain(tokens: int, segment: int, rate: int) -> dict[str, Any]:
    """The plain formula (`manual`) against the kernels, warm, batch 2."""
    q, k, v = tensors(tokens, torch.float32, batch=2)
    pattern = Dilated((segment,), (rate,))
    found = turns(backends(Problem.of(q, k, v, pattern), q, k, v, ("manual", *CPU_BACKENDS)), 3)
    return {
        "tokens": tokens,
        "pattern": str(pattern),
        "times": {name: timing(one) for name, one in found.items()},
        "manual_over": {name: ratio(found["manual"], found[name]) for name in CPU_BACKENDS if name in found},
    }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "rivals": lambda: [rivals(p, t, 3) for t in DTYPES for p in PATTERNS],
        "ragged": lambda: [ragged(*shapes, t) for t in DTYPES for shapes in RAGGED],
        "plain": lambda: [plain(*shape) for shape in REPORT],
    }
    options = parser(__doc__, "kernels.json")
    options.add_argument("parts", nargs="*", default=list(parts), help=f"some of {', '.join(parts)}")
    arguments = options.parse_args()
    found: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM}
    with torch.set_grad_enabled(True):
        for name in arguments.parts:
            found[name] = parts[name]()
            print(name, found[name], flush=True)
    write(arguments.output, found, whole=set(arguments.parts) == set(parts))


if __name__ == "__main__":
    main()
