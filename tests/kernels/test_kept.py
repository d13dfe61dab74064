"""What a first call leaves for later ones: CUDA graphs and other streams may still read it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_dispatch import BackendFailed, Dense, Neighborhood, Window, attend
from attn_dispatch.backends import triton
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.hidden import _unseen
from attn_dispatch.kernels.kept import Kept
from attn_dispatch.kernels.tiles.tables import cached_with, tables_of
from attn_dispatch.spec.orders import SAWTOOTH
from attn_dispatch.spec.problem import Problem
from tests.support import calls
from tests.support.fixtures import INTERPRETED

#: Of backends whose kernels read lists that are made from tables on the host.
ON_HOST: dict[str, Kept[Any, Any]] = {"triton": triton._listed, "triton_tiles": tables_of}
GRID = Neighborhood((8, 8), (3, 3))
INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
CALLS: list[Any] = [
    pytest.param("triton", Dense(True), {}, marks=INTERPRETER),
    pytest.param("triton", Dense(True), {"order": SAWTOOTH}, marks=INTERPRETER),
    pytest.param("triton_tiles", GRID, {}, marks=INTERPRETER),
    ("sdpa_mask", GRID, {}),
    ("tiles", GRID, {}),
    ("flex", GRID, {}),
]


def qkv(length: int, k_len: int = 0, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.ones(batch, tokens, 1, 16) for tokens in (length, k_len or length, k_len or length))
    return q, k, v


def left_by(call: Callable[[], None]) -> list[weakref.ref[torch.Tensor]]:
    """The tensors that are there after a call and were not before."""
    before = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    call()
    gc.collect()
    known = set(map(id, before))
    return [weakref.ref(x) for x in gc.get_objects() if type(x) is torch.Tensor and id(x) not in known]


def alive(tensors: list[weakref.ref[torch.Tensor]]) -> list[bool]:
    gc.collect()
    return [tensor() is not None for tensor in tensors]


@pytest.mark.parametrize(("backend", "pattern", "more"), CALLS)
@pytest.mark.usefixtures("triton_interpreter", "uncompiled_flex", "short_trials")
def test_tables_outlive_trials_of_others_and_graphs_all_else(
    backend: str, pattern: Any, more: Any, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        attend(*qkv(64), pattern, backend=backend, **more)
        if backend in ON_HOST:
            ON_HOST[backend].cache_clear()

    def trial() -> None:
        calls.forget()
        attend(*qkv(32), Neighborhood((4, 8), (3, 3)) if pattern is GRID else pattern)

    problem = Problem.of(*qkv(64), pattern)
    monkeypatch.setattr(registry, "BUILT_IN", (backend,))
    forget: Any = registry.load(backend).forget  # type: ignore[attr-defined]
    forget(problem)
    streams.capturing = True
    with pytest.raises(BackendFailed, match=rf"^{backend}.* call it once before the capture"):
        call()
    streams.capturing = False
    tables = left_by(call)
    trial()
    assert set(alive(tables)) == {True}
    forget(problem)
    assert set(alive(tables)) == {False}
    tables = left_by(call)
    streams.capturing = True
    call()
    streams.capturing = False
    forget(problem)
    trial()
    assert set(alive(tables)) == {True}


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: attend(*qkv(4, 64), Window(2, 0), backend="manual"), "manual"),  # keys that no query sees
        pytest.param(lambda: attend(*qkv(1, 64), Dense(True), backend="triton"), "triton", marks=INTERPRETER),
    ],
    ids=["hidden keys", "few queries"],
)
@pytest.mark.usefixtures("triton_interpreter")
def test_a_first_call_is_not_captured(call: Callable[[], object], where: str, streams: Any) -> None:
    _unseen.cache_clear()
    streams.capturing = True
    for _ in range(2):
        with pytest.raises(BackendFailed, match=f"^{where} failed on .* call it once before the capture"):
            call()
    streams.capturing = False
    call()
    streams.capturing = True
    call()


def problem_of(batch: int = 1) -> Problem:
    return Problem.of(*qkv(8, batch=batch))


def test_tables_are_made_in_no_graphs_memory(streams: Any) -> None:
    """Which the calling thread may allocate from, as in torch.compile's warm-up."""
    threads = list[int]()

    def make(*args: Any) -> tuple[torch.Tensor, ...]:
        threads.append(threading.get_ident())
        return (torch.zeros(2),)

    with torch.inference_mode():
        (found,) = Kept(make)(problem_of())
    assert not found.is_inference()
    (table,) = tables_of(problem_of(), "natural", 8)
    cached_with(table, "key", make)
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert streams.waits.count("stream") >= 2  # another stream may read it next


def test_what_is_kept_is_bounded(streams: Any) -> None:
    """Oldest first, after the work of the device; not what a graph was captured with."""
    kept_tables = Kept(lambda problem: (torch.zeros(problem.batch),), most=3, most_bytes=40)
    refs = [weakref.ref(kept_tables(problem_of(n))[0]) for n in (1, 2)]
    streams.capturing = True
    kept_tables(problem_of(1))
    streams.capturing = False
    assert "device" not in streams.waits
    refs += [weakref.ref(kept_tables(problem_of(n))[0]) for n in (3, 4)]
    assert alive(refs) == [True, False, True, True]
    assert streams.waits.count("device") == 1
    refs += [weakref.ref(kept_tables(problem_of(8))[0])]  # 48 bytes with the one before
    assert alive(refs) == [True, False, False, False, True]
    kept_tables.cache_clear()
    assert alive(refs) == [True, *[False] * 4]
