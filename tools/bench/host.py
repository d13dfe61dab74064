"""The host's time of calls that run on CUDA, without a GPU: Triton's own launcher on a driver that does nothing,
PyTorch's operators of the CPU in the place of CUDA's, and its allocator.

    python -m tools.bench.host

Run it on a machine that does nothing else. Left out is the driver's launch, 2 to 3 us each.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
LONGNET = Dilated((16, 32, 64), (1, 2, 4), is_causal=True)
SMALL = (1, 4, 2, 16)  #: of q where an operator computes: next to no work
OVER_SDPA_US = 3.0  #: what `sdpa` may take more than F.sdpa
SAMPLES, CALLS = 5, 300  #: passes over all calls, each with three means of `CALLS`: the least counts


class Measured(NamedTuple):
    """A call of attend() by a backend, on q [batch, len, heads, head_dim]; without one, of F.sdpa."""

    backend: str = ""
    training: bool = False
    pattern: Pattern = Dense()
    shape: tuple[int, ...] = (1, 64, 4, 64)
    layout: str = "bnhd"
    target_us: float | None = None


CASES = {
    "flex": Measured("flex", pattern=Dense(is_causal=True), shape=(1, 128, 1, 16), target_us=110.0),  # CPU's kernel too
    "triton": Measured("triton", target_us=12.0),
    "triton, training": Measured("triton", True, target_us=110.0),
    "triton, LongNet": Measured("triton", pattern=LONGNET),
    "triton, LongNet, training": Measured("triton", True, LONGNET),
    "triton, one token": Measured("triton", shape=(1, 1, 4, 64)),
    "triton_tiles, LongNet": Measured("triton_tiles", pattern=LONGNET),
    "F.sdpa": Measured(shape=SMALL),
    "F.sdpa, bhnd": Measured(shape=SMALL, layout="bhnd"),
    "F.sdpa, training": Measured("", True, shape=SMALL),
    "sdpa": Measured("sdpa", shape=SMALL),
    "sdpa, bhnd": Measured("sdpa", shape=SMALL, layout="bhnd"),
    "sdpa, training": Measured("sdpa", True, shape=SMALL),
}


def as_cuda() -> None:
    """Make Triton and attn_dispatch take the CPU for an H100 from now on."""
    folder = tempfile.mkdtemp()
    library = f"{folder}/libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, STUB], check=True)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    os.environ.update(dict.fromkeys(("TRITON_LIBCUDA_PATH", "ATTN_DISPATCH_CACHE_DIR", "TRITON_CACHE_DIR"), folder))
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    made: Any = object.__new__(nvidia.CudaDriver)
    made.utils, made.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
    made.get_current_device, made.get_current_stream = (lambda: 0), lambda device: 0
    made.get_device_capability = lambda device=0: (9, 0)
    driver.set_active(made)
    properties = {"shared_memory_per_block_optin": 227 << 10, "L2_cache_size": 50 << 20, "total_memory": 80 << 30}
    found = SimpleNamespace(**properties, multi_processor_count=132)
    made_up: dict[str, Any] = {"device_count": 1, "is_current_stream_capturing": False, "current_device": 0}
    made_up |= {"get_device_capability": (9, 0), "get_device_properties": found, "device": nullcontext()}
    made_up |= {"current_stream": SimpleNamespace(synchronize=lambda: None), "synchronize": None}
    for name, answer in made_up.items():
        setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
    tensor: Any = torch.Tensor
    moved = tensor.to
    tensor.to = lambda x, *to, **more: x if to[:1] == (CUDA,) else moved(x, *to, **more)
    operators: Any = dense
    flash = "_scaled_dot_product_flash_attention"
    setattr(torch, flash, _flash)
    operators.aten = SimpleNamespace(**{flash: _flash, f"{flash}_backward": _flash_backward})


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, *unused: Any, scale: float, **more: Any
) -> Any:
    return dense._cpu_flash(q, k, v, dropout_p, is_causal, scale=scale)


def _flash_backward(grad: Tensor, *given: Any, scale: float) -> Any:
    q, k, v, out, lse, *_, dropout_p, is_causal, _, _ = given
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operator(grad, q, k, v, out, lse, dropout_p, is_causal, scale=scale)


def call_of(number: int, case: Measured) -> Callable[[], object]:
    """The call; `number` is another one for each, by whose scale their routes differ."""
    heads_first, dtype, on_cpu = case.layout == "bhnd", torch.bfloat16, case.backend == "flex"
    keys = case.shape if case.shape[1] > 1 else (1, 64, 1, 64)
    drawn = [torch.randn(shape, dtype=torch.float32 if on_cpu else dtype) for shape in (case.shape, keys, keys)]
    q, k, v = ((x.transpose(1, 2).contiguous() if heads_first else x).requires_grad_(case.training) for x in drawn)
    grad, scale = torch.ones_like(q), 0.1 + number / 1000

    def by_attend() -> Tensor:
        backend = "flex" if on_cpu else "manual"  # replaced below
        found: Tensor = attend(q, k, v, case.pattern, scale=scale, layout=case.layout, backend=backend)
        return found

    def by_sdpa() -> Tensor:
        if heads_first:
            return scaled_dot_product_attention(q, k, v, scale=scale)
        axes = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return scaled_dot_product_attention(*axes, scale=scale).transpose(1, 2)

    call = by_attend if case.backend else by_sdpa
    if case.backend and not on_cpu:
        before = set(routes)
        call()
        (key,) = routes.keys() - before
        problem, backend = replace(routes[key].problem, device=CUDA), registry.load(case.backend)
        run = specialized(backend, NATURAL, problem, (q, k, v), heads_first=True) if heads_first else None
        run, direct = run or runner(backend, NATURAL, problem, (q, k, v)), run is not None or not heads_first
        routes[key] = replace(routes[key], run=run, problem=problem, backend=case.backend, direct=direct)
    return (lambda: torch.autograd.grad(call(), (q, k, v), grad)) if case.training else call


def python_calls(call: Callable[[], object]) -> int:
    """Functions of Python that a call enters."""
    entered: list[object] = []
    sys.setprofile(lambda frame, event, argument: entered.append(frame.f_code) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(entered) - 1  # of `call` itself


def tables(found: Any) -> Iterator[Table]:
    rows = [
        (name, f"{one['us']:.1f}", f"{one['python_calls']}", f"{most:.1f}" if (most := one["target_us"]) else "-")
        for name, one in found["calls"].items()
    ]
    yield Table(
        ("call", "microseconds", "Python functions entered", "at most"),
        rows,
        "The host's time of one attend(), forward or forward and backward, without a GPU: Triton's own launcher "
        "on a driver that does nothing, operators of the CPU, in F.sdpa too. The launch, 2 to 3 us, is left out.",
    )


def main() -> None:
    given = parser(__doc__, "host.json").parse_args()
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], object]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        if number == 1:  # the first is compiled for the CPU
            as_cuda()
        calls[name] = call_of(number, case)
        for _ in range(3):  # compiles, and finds what later calls need
            calls[name]()
    gc.disable()
    found: dict[str, Any] = {name: {"us": math.inf, "target_us": CASES[name].target_us} for name in calls}
    for _ in range(SAMPLES):
        for name, call in calls.items():
            took_us = [1e6 * each / CALLS for each in timeit.repeat(call, number=CALLS, repeat=3)]
            found[name]["us"] = min(found[name]["us"], *took_us)
    for name, one in found.items():
        one["python_calls"] = python_calls(calls[name])
        if name.startswith("sdpa"):
            one["target_us"] = found[f"F.{name}"]["us"] + OVER_SDPA_US
    write(given, {"calls": found}, tables)


if __name__ == "__main__":
    main()
