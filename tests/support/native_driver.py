"""The native kernel as a program of its own, which each call runs on a copy of the memory: `native_driver.cpp`."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from attn_dispatch.backends import native
from attn_dispatch.kernels.native import data_tables, library, run
from attn_dispatch.kernels.native.tables import NativeTables
from attn_dispatch.kernels.native.variants import FLAGS, SOURCE

DRIVER = Path(__file__).with_suffix(".cpp")


class Program:
    """Stands for the loaded library."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.command, self.folder = command, folder
        self.now = threading.local()  #: the tensors that the arguments point into, and the floats of states
        self.calls = 0

    @classmethod
    def used(
        cls, monkeypatch: pytest.MonkeyPatch, folder: Path, compiler: Sequence[str], *options: str, emulator: str = ""
    ) -> Program:
        """The program as this compiler builds it, in place of the library."""
        program = folder / "driver"
        command = [*compiler, *FLAGS, *options, f"-I{SOURCE.parent}", str(DRIVER), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=900)
        found = cls([each for each in (emulator, str(program)) if each], folder)
        real = run.NativePasses.args

        def args(self: run.NativePasses, made: library.Args, *first: Tensor, **views: Tensor) -> library.Args:
            own = self.made or run.forward_arguments(self.problem, made.threads)
            both = self.tables, own.tables, *self.later
            tables = [getattr(each, name) for each in both for name in NativeTables.__dataclass_fields__]
            every = [*first, *views.values(), *tables, self.seen, self.seq_lens, self.bias, self.slopes]
            found.now.tensors = [tensor for tensor in every if tensor is not None]
            found.now.states = own.states * run.state_floats(self.problem)
            return real(self, made, *first, **views)

        monkeypatch.setattr(run.NativePasses, "args", args)
        monkeypatch.setattr(library, "load", lambda: found)
        # Their arguments are passed in another way.
        monkeypatch.setattr(native, "specialized", None)
        monkeypatch.setattr(data_tables, "specialized", lambda *_: None)
        return found

    def attention_forward(self, given: Any) -> int:
        return self._call(given._obj, backward=False)

    def attention_backward(self, given: Any) -> int:
        return self._call(given._obj, backward=True)

    def _call(self, args: library.Args, backward: bool) -> int:
        storages = [tensor.untyped_storage() for tensor in self.now.tensors]
        regions = {storage.data_ptr(): storage.nbytes() for storage in storages}
        rows, heads = args.batch * args.heads * args.q_len, min(args.threads, args.batch * args.heads // args.group)
        others = {args.lse: rows, args.grad_lse: rows, args.dbias: rows * args.k_len, args.states: self.now.states}
        others[args.sums] = 2 * heads * args.k_len * run.padded_width(args.head_dim)
        for address, floats in others.items():
            if address:
                regions.setdefault(address, 4 * floats)
        head = struct.pack("=q", backward) + bytes(args) + struct.pack("=q", len(regions))
        table = b"".join(struct.pack("=Qq", *region) for region in regions.items())
        content = b"".join(ctypes.string_at(*region) for region in regions.items())
        file = self.folder / f"memory-{threading.get_ident()}"
        file.write_bytes(head + table + content)
        done = subprocess.run([*self.command, str(file)], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr[:6000]
        content, at = file.read_bytes()[len(head + table) :], 0
        for address, size in regions.items():
            ctypes.memmove(address, content[at : at + size], size)
            at += size
        self.calls += 1
        return 0
