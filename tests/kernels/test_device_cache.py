"""What a first call leaves for later ones: CUDA graphs and other streams may still read it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import BackendFailed, Dense, Neighborhood, NoBackend, Window, attend
from attn_dispatch.backends import triton
from attn_dispatch.calls import packing
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.device_cache import DeviceCache, capturing, kv_head_index
from attn_dispatch.kernels.hidden import _unseen
from attn_dispatch.kernels.tiles.tables import cached_with, tables_of
from attn_dispatch.spec.problem import Problem
from tests.support import calls
from tests.support.interpreted import INTERPRETED


def qkv(length: int, k_len: int = 0, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.ones(batch, tokens, 1, 16) for tokens in (length, k_len or length, k_len or length))
    return q, k, v


def problem(batch: int = 1) -> Problem:
    return Problem.of(*qkv(8, batch=batch))


def left_by(call: Callable[[], None]) -> list[weakref.ref[Tensor]]:
    """The tensors that are there after a call and were not before."""
    before = {id(x): x for x in gc.get_objects() if type(x) is Tensor}
    call()
    gc.collect()
    return [weakref.ref(x) for x in gc.get_objects() if type(x) is Tensor and id(x) not in before]


def alive(tensors: list[weakref.ref[Tensor]]) -> list[bool]:
    gc.collect()
    return [tensor() is not None for tensor in tensors]


@pytest.mark.parametrize(
    "backend",
    ["flex", *(pytest.param(x, marks=pytest.mark.full) for x in ("tiles", "triton", "triton_tiles", "sdpa_mask"))],
)
@pytest.mark.usefixtures("triton_interpreter", "uncompiled_flex", "short_trials")
def test_tables_outlive_trials_of_others_and_graphs_all_else(
    backend: str, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.startswith("triton") and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    patterns = [Dense(True) if backend == "triton" else Neighborhood((rows, 8), (3, 3)) for rows in (8, 4)]
    host: Any = {"triton": triton._listed, "triton_tiles": tables_of}.get(backend, _unseen)

    def call(capturing: bool = False) -> None:
        streams.capturing = capturing
        attend(*qkv(64), patterns[0], backend=backend)
        host.cache_clear()  # kernels read the device's lists, which were made from these

    def trial() -> None:
        calls.forget()
        streams.capturing = False
        attend(*qkv(32), patterns[1])

    monkeypatch.setattr(registry, "BUILT_IN", (backend,))
    loaded: Any = registry.load(backend)
    asked = Problem.of(*qkv(64), patterns[0])
    loaded.forget(asked)
    with pytest.raises(BackendFailed, match=rf"^{backend}.* call it once before the capture"):
        call(capturing=True)
    tables = left_by(call)
    trial()
    assert set(alive(tables)) == {True}
    loaded.forget(asked)
    assert set(alive(tables)) == {False}
    tables = left_by(call)
    call(capturing=True)
    loaded.forget(asked)
    trial()
    assert set(alive(tables)) == {True}


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.usefixtures("triton_interpreter")
def test_hidden_keys_and_few_queries_are_not_captured_first(streams: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads no `key_lens`, which a graph's replay may find changed, but for other backends."""
    q, k, v = qkv(1, 64)
    streams.capturing = True
    with pytest.raises(NoBackend, match="key_lens must be read by the host, which no CUDA graph captures"):
        attend(q, k, v, key_lens=torch.tensor([40]), backend="sdpa")
    monkeypatch.setattr(packing, "read_on_host", None)
    _unseen.cache_clear()
    lengths = torch.tensor([40])
    for backend, pattern, (q, k, v), more in (
        ("manual", Window(2, 0), qkv(4, 64), {}),
        ("triton", Dense(), qkv(1, 64), {}),
        ("triton", Dense(), qkv(1, 64), {"key_lens": lengths}),
    ):
        given: Any = {"pattern": pattern, **more}
        streams.capturing = True
        with pytest.raises(BackendFailed, match=f"^{backend} failed on .* call it once before the capture"):
            attend(q, k, v, backend=backend, **given)
        for streams.capturing in (False, True):
            out = attend(q, k, v, backend=None if more else backend, **given)
        v[:, 40:] = 2.0
        assert torch.equal(out, attend(q, k, v, backend=None if more else backend, **given)) == bool(more)


def test_tables_are_made_in_no_graphs_memory(streams: Any) -> None:
    """Which the calling thread may allocate from, as in torch.compile's warm-up; and are complete for every stream."""

    def make(*args: Any) -> tuple[int, Tensor]:
        return threading.get_ident(), torch.zeros(2)

    index = partial(kv_head_index, range(0, 1234, 2), 4, problem().device)
    with torch.inference_mode():
        made = [DeviceCache(make)(problem()), cached_with(tables_of(problem(), "natural", 8)[0], "key", make)]
    assert not any(thread == threading.get_ident() or found.is_inference() for thread, found in made)
    assert index() is index()
    assert streams.waits.count("stream") >= 3
    streams.capturing = True
    assert index() is not index()  # the graph fills it at each replay, in its own memory


def test_what_is_kept_is_bounded(streams: Any) -> None:
    """Oldest first, after the work of the device; not what a graph was captured with."""
    kept = DeviceCache(lambda problem: (torch.zeros(problem.batch),), most=3, most_bytes=40)
    found = [weakref.ref(kept(problem(n))[0]) for n in (1, 2)]
    for streams.capturing in (True, False):
        kept(problem(1))
    assert "device" not in streams.waits
    found += [weakref.ref(kept(problem(n))[0]) for n in (3, 4)]
    assert alive(found) == [True, False, True, True]
    assert streams.waits.count("device") == 1
    found.append(weakref.ref(kept(problem(8))[0]))  # 48 bytes with the one before
    assert alive(found) == [True, False, False, False, True]


def test_a_table_whose_making_hangs_blocks_no_other() -> None:
    """Its thread is abandoned: a lock that it held would be held for ever."""
    released, begun = threading.Event(), threading.Event()

    def make(_: Problem) -> Tensor:
        begun.set()
        assert released.wait(60)
        return torch.zeros(1)

    kept, asked = DeviceCache(make), problem()
    thread = threading.Thread(target=kept, args=(asked,), daemon=True)
    thread.start()
    assert begun.wait(60)
    other = threading.Thread(target=kept.forget, args=(asked,), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()
    released.set()
    thread.join(60)
    assert torch.equal(kept(asked), torch.zeros(1))


def test_a_capture_on_another_device_than_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        before, current[0] = current[0], where.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    for captured in (0, 1):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captured=captured: current[0] == captured)
        assert capturing(torch.device("cuda", 1))
    assert not capturing(torch.device("cuda", 2))
    assert not capturing(torch.device("cpu"))
