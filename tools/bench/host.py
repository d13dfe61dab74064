"""The host's time of calls that run on CUDA, without a GPU: Triton's own launcher on a driver that does nothing, and
PyTorch's operators of the CPU in the place of CUDA's. Tensors are on the CPU.

    python -m tools.bench.host

Left out are the driver's launch (2 to 3 us) and CUDA's allocator, whose part the CPU's takes.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import tempfile
import timeit
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_dispatch import Dense, Dilated, attend
from attn_dispatch.calls.routes import routes
from attn_dispatch.kernels import dense, registry
from attn_dispatch.kernels.contract import runner, specialized
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Pattern
from tools.lib.common import parser, write
from tools.lib.tables import Table

STUB = Path(__file__).with_name("host_stub.cpp")
CUDA = torch.device("cuda", 0)
SHAPE, SMALL = (1, 64, 4, 64), (1, 4, 2, 16)  #: of q: small memory, which the CPU's allocator keeps as CUDA's would
LONGNET = Dilated((16, 32, 64), (1, 2, 4), is_causal=True)
#: {row: (backend, pattern, shape, key heads, key length, layout, training)}
CASES: dict[str, tuple[str, Pattern, tuple[int, ...], int, int, str, bool]] = {
    "triton": ("triton", Dense(), SHAPE, 4, 64, "bnhd", False),
    "triton, training": ("triton", Dense(), SHAPE, 4, 64, "bnhd", True),
    "triton, LongNet": ("triton", LONGNET, SHAPE, 4, 64, "bnhd", False),
    "triton, LongNet, training": ("triton", LONGNET, SHAPE, 4, 64, "bnhd", True),
    "triton, one token": ("triton", Dense(), (1, 1, 8, 64), 2, 64, "bnhd", False),
    "triton_tiles, LongNet": ("triton_tiles", LONGNET, SHAPE, 4, 64, "bnhd", False),
    "sdpa": ("sdpa", Dense(), SMALL, 2, 4, "bnhd", False),
    "sdpa, bhnd": ("sdpa", Dense(), SMALL, 2, 4, "bhnd", False),
    "sdpa, training": ("sdpa", Dense(), SMALL, 2, 4, "bnhd", True),
    "sdpa_cudnn": ("sdpa_cudnn", Dense(), SMALL, 2, 4, "bnhd", False),
    "F.sdpa": ("", Dense(), SMALL, 2, 4, "bnhd", False),
    "F.sdpa, bhnd": ("", Dense(), SMALL, 2, 4, "bhnd", False),
    "F.sdpa, training": ("", Dense(), SMALL, 2, 4, "bnhd", True),
    "flex": ("flex", Dense(is_causal=True), (1, 128, 1, 16), 1, 128, "bnhd", False),
}
TARGETS_US = {"triton": 12.0, "triton, training": 110.0, "flex": 110.0}
OVER_SDPA_US = 3.0  #: of `sdpa` over F.sdpa
SAMPLES, CALLS = 5, 300  #: passes over all calls, each with three means of so many: the least is what the host needs


def as_cuda() -> None:
    """Make Triton and attn_dispatch take this process's device for an H100."""
    folder = tempfile.mkdtemp()
    library = Path(folder) / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, STUB], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ.update(TRITON_LIBCUDA_PATH=folder, ATTN_DISPATCH_CACHE_DIR=folder, TRITON_CACHE_DIR=folder)
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    made: Any = object.__new__(nvidia.CudaDriver)
    made.utils, made.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
    made.get_device_capability, made.get_current_device = (lambda device=0: (9, 0)), lambda: 0
    made.get_current_stream, made.set_current_device = (lambda device: 0), lambda device: None
    driver.set_active(made)
    properties = SimpleNamespace(
        shared_memory_per_block_optin=227 << 10,
        L2_cache_size=50 << 20,
        multi_processor_count=132,
        total_memory=80 << 30,
    )
    cuda: Any = torch.cuda
    cuda.get_device_capability, cuda.get_device_properties = (
        (lambda device=None: (9, 0)),
        lambda device=None: properties,
    )
    cuda.device_count, cuda.is_current_stream_capturing, cuda.current_device = (lambda: 1), (lambda: False), lambda: 0
    cuda.device, cuda.synchronize = (lambda device: warnings.catch_warnings()), lambda device=None: None
    cuda.current_stream = lambda device=None: SimpleNamespace(synchronize=lambda: None)
    tensor, moved = torch.Tensor, torch.Tensor.to
    tensor.to = lambda x, *to, **more: x if to[:1] == (CUDA,) else moved(x, *to, **more)  # type: ignore[method-assign]
    for name in ("flash", "cudnn"):
        setattr(torch, f"_scaled_dot_product_{name}_attention", _operator)
    names = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
    operators: Any = dense
    operators.aten = SimpleNamespace(**dict(zip(names, (_operator, _backward))))


def _operator(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, *unused: Any, scale: float, **named: Any
) -> Any:
    return dense._cpu_flash(q, k, v, dropout_p, is_causal, scale=scale)


def _backward(grad: Tensor, *given: Any, scale: float) -> Any:
    q, k, v, out, lse, *_, dropout_p, is_causal, _, _ = given
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operator(grad, q, k, v, out, lse, dropout_p, is_causal, scale=scale)


def call_of(
    scale: float,
    backend: str,
    pattern: Pattern,
    shape: tuple[int, ...],
    kv_heads: int,
    k_len: int,
    layout: str,
    training: bool,
) -> Callable[[], object]:
    """A call of attend() by this backend on tensors that stand for CUDA's; without a backend, of F.sdpa.

    Args:
        scale: another one for each call, by which their routes differ.
    """
    keys, dtype = (shape[0], k_len, kv_heads, shape[3]), torch.float32 if backend == "flex" else torch.bfloat16
    first = [torch.randn(sizes, dtype=dtype) for sizes in (shape, keys, keys)]  # tokens first
    heads_first = layout == "bhnd"
    q, k, v = ((x.transpose(1, 2).contiguous() if heads_first else x).requires_grad_(training) for x in first)
    grad, options = (
        torch.ones_like(q),
        {"scale": scale, "layout": layout, "backend": "flex" if backend == "flex" else "manual"},
    )

    def forward() -> Tensor:
        found: Tensor = attend(q, k, v, pattern, **options)
        return found

    def by_sdpa() -> Tensor:
        if heads_first:
            return scaled_dot_product_attention(q, k, v, scale=scale)
        axes = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return scaled_dot_product_attention(*axes, scale=scale).transpose(1, 2)

    if backend not in ("", "flex"):
        before = set(routes)
        forward()
        (key,) = routes.keys() - before
        problem = replace(routes[key].problem, device=CUDA)
        loaded, run = registry.load(backend), None
        if heads_first:
            run = specialized(loaded, NATURAL, problem, (q, k, v), heads_first=True)
        direct = run is not None or not heads_first
        given = tuple(x.transpose(1, 2) for x in (q, k, v)) if heads_first else (q, k, v)
        run = run or runner(loaded, NATURAL, problem, given)
        routes[key] = replace(routes[key], run=run, problem=problem, backend=backend, direct=direct)
    call = forward if backend else by_sdpa
    return (lambda: torch.autograd.grad(call(), (q, k, v), grad)) if training else call


def python_calls(call: Callable[[], object]) -> int:
    """Functions of Python that a call enters."""
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found - 1  # of `call` itself


def tables(found: Any) -> Iterator[Table]:
    rows = [
        (
            name,
            f"{one['us']:.1f}",
            f"{one['python_calls']}",
            "" if one["target_us"] is None else f"{one['target_us']:.1f}",
        )
        for name, one in found["calls"].items()
    ]
    yield Table(
        ("call", "microseconds", "Python functions entered", "target"),
        rows,
        "The host's time of one attend() on a driver that does nothing, with Triton's own launcher; PyTorch's "
        "operators are those of the CPU, in F.sdpa too. The driver's launch, 2 to 3 us each, is left out.",
    )


def main() -> None:
    arguments = parser(__doc__, "host.json")
    arguments.add_argument("--only", nargs="+", choices=CASES, help="some of the calls")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], object]] = {}
    for number, name in enumerate(sorted(given.only or CASES, key=lambda name: name != "flex")):  # compiled for a CPU
        if name != "flex" and not isinstance(dense.aten, SimpleNamespace):
            as_cuda()
        calls[name] = call_of(0.1 + 0.001 * number, *CASES[name])
        for _ in range(3):  # compiles, and finds what later calls need
            calls[name]()
    found: dict[str, Any] = {name: {"us": math.inf} for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            found[name]["us"] = min(found[name]["us"], 1e6 * min(timeit.repeat(call, number=CALLS, repeat=3)) / CALLS)
    for name, one in found.items():
        base = found.get(name.replace("sdpa", "F.sdpa", 1)) if name.startswith("sdpa") else None
        one["target_us"] = TARGETS_US.get(name) if base is None else base["us"] + OVER_SDPA_US
        one["python_calls"] = python_calls(calls[name])
    write(given.output, {"calls": found}, tables, whole=given.only is None)


if __name__ == "__main__":
    main()
