"""A device that torch knows only as an accelerator: `private_device.cpp`, registered in this process as `elsewhere`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch import Blocks, Dense, Dilated, Neighborhood, Ranges, Window, attend, explain
from attn_dispatch.cli import main as cli
from attn_dispatch.errors import NoBackend
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.testing import conformance, oracle, problems

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "elsewhere"


def library(compiler: str) -> Path:
    """The compiled device; made once for a version of torch and of the source."""
    import torch.utils.cpp_extension as extensions

    about = f"{torch.__version__} {os.getuid()} {compiler}".encode() + SOURCE.read_bytes()
    found = Path(tempfile.gettempdir(), f"attn-dispatch-private-device-{hashlib.sha256(about).hexdigest()[:16]}.so")
    if not found.exists():
        folders = extensions.include_paths()
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        new = found.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", abi, *(f"-I{each}" for each in folders)]
        links = [f"-L{Path(torch.__file__).parent}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run([compiler, *options, str(SOURCE), *links, "-o", str(new)], check=True, timeout=900)
        os.replace(new, found)
    return found


def register(path: str) -> ctypes.CDLL:
    """Make this process's torch know the device, which it cannot forget; the library, which counts `waits`."""
    known: Any = torch
    known.ops.load_library(path)
    known.utils.rename_privateuse1_backend(NAME)
    module: Any = ModuleType(NAME)
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, int
    module._is_in_bad_fork, module.manual_seed_all = bool, lambda seed: None
    module.get_device_name = lambda device=None: "Made up (R) 1"
    known._register_device_module(NAME, module)
    return ctypes.CDLL(path)


# --- what a process with this device does ---------------------------------------------------------------------


class Asked(NamedTuple):
    """A call: its pattern, lengths, heads, and other arguments by name, of the CPU."""

    pattern: Pattern
    q_len: int = 40
    k_len: int = 40
    kv_heads: int = 4
    more: dict[str, Any] = {}
    dtype: torch.dtype = torch.float32

    def tensors(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        shapes = (self.q_len, 4), (self.k_len, self.kv_heads), (self.k_len, self.kv_heads), (self.q_len, 4)
        drawn = [torch.randn(2, length, heads, 16, generator=generator) for length, heads in shapes]
        return *(x.to(self.dtype) for x in drawn), torch.randn(2, 4, self.q_len, generator=generator)


FIRST = (torch.arange(40, dtype=torch.int32) - 7).clamp(min=0)[None, None].contiguous()
TABLE = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
SEEN = torch.arange(40).remainder(3)[None] != torch.arange(2)[:, None]
CALLS = {
    "dense": Asked(Dense()),
    "bfloat16": Asked(Dense(), dtype=torch.bfloat16),
    "causal": Asked(Dense(is_causal=True)),
    "few queries": Asked(Dense(is_causal=True), 3),
    "grouped": Asked(Dense(is_causal=True), kv_heads=2),
    "window": Asked(Window(6, 0)),
    "dilated": Asked(Dilated((8, 16), (1, 2), is_causal=True)),
    "neighborhood": Asked(Neighborhood((5, 8), (3, 3))),
    "ranges": Asked(Ranges(FIRST, FIRST + 9)),
    "blocks": Asked(Blocks(TABLE, size=8)),
    "key_mask": Asked(Dense(is_causal=True), more={"key_mask": SEEN}),
    "no keys": Asked(Window(6, 0), more={"key_mask": SEEN & (torch.arange(40) > 20)}),
    "seq_lens": Asked(Dense(), more={"seq_lens": torch.tensor([40, 23])}),
    "alibi": Asked(Dense(is_causal=True), more={"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}),
    "bias": Asked(Window(6, 6), more={"bias": torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(1))}),
    "softcap": Asked(Dense(), more={"softcap": 3.0}),
}


def moved(x: Any) -> Any:
    """A tensor, or a pattern that holds some, on the device."""
    if isinstance(x, Ranges):
        return Ranges(*(each.to(NAME) for each in (FIRST, FIRST + 9)))
    if isinstance(x, Blocks):
        return Blocks(TABLE.to(NAME), size=8)
    return x.to(NAME) if isinstance(x, Tensor) else x


WAYS = {"": (False, False), ", training": (True, False), ", training through lse": (True, True)}
EVERY_WAY = ("dense", "few queries", "window", "grouped", "softcap")  #: others train: all results but lse are there
MEASURED = (("dense", ""), ("window", ", training"), ("dilated", ", training through lse"))
SERVING = ("sdpa", "sdpa_mask", "tiles", "manual")


class Call:
    """attend() on the device, and what the same of CPU tensors is."""

    def __init__(self, asked: Asked, way: str) -> None:
        self.asked, (self.trains, self.lse) = asked, WAYS[way]
        *self.given, self.grad, self.grad_lse = asked.tensors()
        self.qkv: list[Any] = [x.to(NAME).requires_grad_(self.trains) for x in self.given]
        self.more: dict[str, Any] = {name: moved(x) for name, x in asked.more.items()}
        self.more |= {"pattern": moved(asked.pattern), "return_lse": self.lse}

    def wrong(self, **how: Any) -> list[str]:
        """The results that are not right."""
        q, k, v = self.qkv
        found: Any = attend(q, k, v, **self.more, **how)
        results = dict(zip(("out", "lse"), found if self.lse else (found,)))
        more: dict[str, Any] = dict(self.asked.more)
        if self.trains:
            weights = [x.to(NAME) for x in (self.grad, self.grad_lse)[: len(results)]]
            gradients = torch.autograd.grad(tuple(results.values()), self.qkv, weights)
            results |= dict(zip(("dq", "dk", "dv"), gradients))
            more |= {"grad": self.grad, "grad_lse": self.grad_lse if self.lse else None}
        q, k, v = self.given
        expected = oracle(q, k, v, self.asked.pattern, **more)
        errors = {name: _error(x.detach().cpu().double(), expected[name].value) for name, x in results.items()}
        return [f"{name} is off by {off:.2e}" for name, off in errors.items() if not off <= expected[name].tolerance]

    def forced(self) -> dict[str, Any]:
        """By backend what is wrong, or why it refuses."""
        found = dict[str, Any]()
        for name in SERVING:
            try:
                found[name] = self.wrong(backend=name)
            except NoBackend as error:
                found[name] = str(error)
        return found

    def decided(self) -> dict[str, Any]:
        q, k, v = self.qkv
        wrong, why = self.wrong(), explain(q, k, v, **self.more)
        return {"wrong": wrong, "choice": why.choice, "source": why.source, "text": str(why)}


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Under it a call is an operator of a graph."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _error(found: Tensor, exact: Tensor) -> float:
    return float(torch.where(found == exact, 0.0, (found - exact).abs()).max())


def main(path: str, task: str, *arguments: str) -> object:
    """What a task gives, of those that the tests name."""
    here = register(path)
    if task == "forced":
        ways = {name: [*WAYS] if arguments or name in EVERY_WAY else [", training"] for name in CALLS}
        found = {f"{name}{way}": Call(each, way).forced() for name, each in CALLS.items() for way in ways[name]}
        with Seen():  # type: ignore[no-untyped-call]
            return found | {"operator": {"": Call(CALLS["causal"], ", training").wrong()}}
    if task == "conformance":
        few = [each for each in problems(NAME) if each.dtype != torch.float64]  # the device has no float64
        return bool(conformance(arguments[0], few[::5]))
    decided = {f"{name}{way}": Call(CALLS[name], way).decided() for name, way in MEASURED}
    return {"calls": decided, "waits": here.waits(), "exit": cli(arguments)}
