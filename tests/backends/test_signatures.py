"""The calls of adapters fit the functions of the real libraries: parameters by name, schemas of PyTorch's ops.

Installed libraries are read, not imported, since most import only beside a GPU. Those not installed are skipped.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import Signature
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch.backends import sdpa_cudnn, xformers
from attn_dispatch.kernels import dense
from attn_dispatch.kernels.branches import flash4 as flash4_package
from attn_dispatch.spec.pattern import Dense, Pattern, Window
from attn_dispatch.testing import optional
from attn_dispatch.testing.cases import Case
from tests.backends.test_libraries import ADAPTERS, newest, on_cpu
from tests.support import libraries, signatures
from tests.support.cases import gate

__all__ = ["newest"]  # for every test here, too


@dataclass
class Recorder:
    """Records the calls of a library's functions, which run as before."""

    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = field(default_factory=dict)
    made_up: dict[str, Signature] = field(default_factory=dict)

    def around(self, library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, real in list(vars(library).items()):
            if callable(real) and not isinstance(real, type):
                self.made_up[name] = signatures.of_function(real)
                monkeypatch.setattr(library, name, self._noted(name, real))

    def _noted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.setdefault(name, []).append((args, kwargs))
            return real(*args, **kwargs)

        return call

    def check(self, real: Callable[[str], Signature]) -> None:
        """Hold the calls to the real signatures: what each parameter gets is what the made-up function read from it."""
        assert len(self.calls) >= 2  # forward and backward
        for name, calls in self.calls.items():
            signature = real(name)
            for args, kwargs in calls:
                meant = signatures.names(self.made_up[name], args, kwargs)
                given = signatures.names(signature, args, kwargs)
                assert list(given) == list(meant)
                assert all(given[each] is meant[each] for each in given)


def record(adapter: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Every way in which an adapter calls its library."""
    recorder = Recorder()
    recorder.around(library, monkeypatch)
    patterns: tuple[Pattern, ...] = (Dense(), Dense(True), Window(5, None), Window(3, 2))
    for pattern in patterns:
        problem = Case("", pattern, (1, 40, 4, 20), kv_heads=2).problem(torch.float16, needs_grad=True)
        for each in (problem, replace(problem, return_lse=False), replace(problem, deterministic=True)):
            backend = on_cpu(ADAPTERS[adapter])
            if not backend.refusals(each):
                gate(each).run(backend)
                if (packed := optional.problem_of_documents(backend, each)) is not None:
                    optional.documents_failures(backend, packed)
    return recorder


def source_of(distribution: str, path: str) -> str:
    """The text of an installed library's file; skips the test where it is not installed."""
    try:
        return signatures.installed_source(distribution, path)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")


def test_flash_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its made-up ops have the real schemas: torch itself holds the calls to them."""
    calls: list[dict[str, Any]] = []
    with libraries.flash_attn_3(monkeypatch, calls):
        problem = Case("", Window(5, None), (1, 40, 4, 16), kv_heads=2).problem(torch.float16, needs_grad=True)
        gate(problem).run(on_cpu(ADAPTERS["flash3"]))
    assert calls


def test_flash_4(monkeypatch: pytest.MonkeyPatch) -> None:
    text = source_of("flash-attn-4", "flash_attn/cute/interface.py")
    libraries.flash_attn_4(monkeypatch, [])
    found = record("flash4", sys.modules[flash4_package.PACKAGE.module], monkeypatch)
    assert any("dlse" in kwargs for _, kwargs in found.calls["_flash_attn_bwd"])
    found.check(lambda name: signatures.of_source(text, name))


def test_blocks_of_flash_4() -> None:
    """Their class, which the module that is called has by its name."""
    name, path = "BlockSparseTensorsTorch", "flash_attn/cute"
    text, interface = (source_of("flash-attn-4", f"{path}/{each}.py") for each in ("block_sparsity", "interface"))
    assert signatures.fields_of(text, name) == list(libraries.BlockSparseTensorsTorch._fields)
    assert signatures.is_imported(interface, name)
    given = {"block_sparse_tensors", "pack_gqa"}
    assert given <= signatures.of_source(interface, "_flash_attn_fwd").parameters.keys()


def test_the_cache_of_flash_4_has_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = source_of("flash-attn-4", "flash_attn/cute/cache_utils.py")
    monkeypatch.delenv(flash4_package.CACHE_ENABLED, raising=False)
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *args, **kwargs: tmp_path)
    assert len(flash4_package.compile_cache()) == 2
    assert set(flash4_package.compile_cache()) <= {
        name for name in text.replace('"', " ").split() if name.startswith("FLASH_")
    }


@pytest.mark.parametrize("distribution", ["xformers", "mslk", "mslk-cuda"])
def test_xformers(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = "xformers/ops" if distribution == "xformers" else "mslk/attention"
    text = source_of(distribution, f"{folder}/fmha/__init__.py")
    libraries.xformers(monkeypatch, [])
    found = record("xformers", sys.modules[xformers.PACKAGE.module], monkeypatch)
    found.check(lambda name: signatures.of_source(text, name))


@pytest.mark.parametrize("adapter", ["torch-flash", "efficient", "cudnn"])
def test_ops_of_pytorch(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sdpa_cudnn if adapter == "cudnn" else dense
    made = {"torch-flash": libraries.flash_ops, "efficient": libraries.efficient_ops}
    ops = libraries.cudnn_ops(4) if adapter == "cudnn" else made[adapter]()
    monkeypatch.setattr(module, "aten", ops)
    monkeypatch.setattr(module, "binding", lambda name: getattr(ops, name))
    record(adapter, ops, monkeypatch).check(lambda name: signatures.of_schema(getattr(torch.ops.aten, name).default))
