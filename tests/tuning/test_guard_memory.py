"""No limit of the process ever changes; shortages, lost devices and other errors are distinguished."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_dispatch.tuning.guard import DeviceLost, capped, is_limit_error, is_memory_error, is_shortage, memory_excess
from tests.support import fakes
from tests.support.fakes import GIB, MIB


@pytest.mark.usefixtures("fresh_machine")
@pytest.mark.parametrize(("before", "free", "expected"), [(1.0, 20, 0.75), (0.5, 20, 0.5), (1.0, 100, 1.0)])
def test_the_cap_on_cuda(before: float, free: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB, 30 are used by this process's tensors, 10 more are cached."""
    fakes.fake_cuda(monkeypatch, fakes.props("made up", (9, 0), 132, 0, 80 * GIB))
    fakes.cuda_memory(monkeypatch, free=free * GIB, reserved=40 * GIB, allocated=30 * GIB, fraction=before)
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", lambda *given: set_to.append(given))
    with capped(torch.device("cuda")):
        assert set_to == [(expected, 0)]
    assert set_to[1:] == [(before, 0)]


@pytest.mark.parametrize(
    ("peak", "declared", "kind", "expected"),
    [
        (1288490189, 10 * MIB, "cpu", "allocated 1.2 GiB, its workspace_bytes declared 10.0 MiB"),
        (74 * MIB, 8 * MIB, "cpu", None),
        (74 * MIB + 1, 8 * MIB, "cpu", "allocated 74.0 MiB, its workspace_bytes declared 8.0 MiB"),
        (10 * MIB, 8 * MIB, "cuda", None),
        (10 * MIB + 1, 8 * MIB, "cuda", "allocated 10.0 MiB, its workspace_bytes declared 8.0 MiB"),
        (0, 0, "cuda", None),
        (None, 0, "cpu", None),
    ],
)
def test_memory_over_the_declared_workspace_is_an_excess(
    peak: int | None, declared: int, kind: str, expected: str | None
) -> None:
    assert memory_excess(peak, declared, kind) == expected


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any
        call()
    return caught.value


def chained(outer: Exception, inner: Exception, hidden: bool = False) -> Exception:
    outer.__context__ = inner
    outer.__suppress_context__ = hidden
    return outer


MEMORY_ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "python": MemoryError(),
    "torch-cpu": raised(lambda: torch.empty(1 << 60, dtype=torch.uint8)),
    "numpy": raised(lambda: bytearray(1 << 60)),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "system": OSError(12, "Cannot allocate memory"),
    "wrapped": chained(RuntimeError("the kernel failed"), MemoryError()),
}
LIMIT_ERRORS = {
    "thread": RuntimeError("can't start new thread"),
    "fork": BlockingIOError(11, "Resource temporarily unavailable"),
    "openmp": RuntimeError("libgomp: Thread creation failed: Resource temporarily unavailable"),
    "files": OSError(24, "Too many open files"),
    "files of the machine": OSError(23, "Too many open files in system"),
    "wrapped": chained(RuntimeError("the kernel failed"), OSError(24, "Too many open files")),
}
OTHER_ERRORS = {
    "wrong": RuntimeError("expected scalar type Float but found Half"),
    "illegal": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "registers": RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 101376"),
    "hidden": chained(RuntimeError("the kernel failed"), MemoryError(), hidden=True),
    "itself": chained(one := RuntimeError("x"), chained(RuntimeError("y"), one)),
}


@pytest.mark.parametrize("error", MEMORY_ERRORS.values(), ids=MEMORY_ERRORS)
def test_out_of_memory_errors(error: BaseException) -> None:
    assert (is_memory_error(error), is_limit_error(error), is_shortage(error)) == (True, False, True)


@pytest.mark.parametrize("error", LIMIT_ERRORS.values(), ids=LIMIT_ERRORS)
def test_limits_of_the_machine(error: BaseException) -> None:
    assert (is_memory_error(error), is_limit_error(error), is_shortage(error)) == (False, True, True)


@pytest.mark.parametrize("error", OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_other_errors(error: BaseException) -> None:
    assert not is_shortage(error)


def test_a_lost_device_lacks_no_memory() -> None:
    """After it nothing may be freed, and no other candidate tried."""
    lost = DeviceLost("left cuda:0 unusable")
    lost.__cause__ = MEMORY_ERRORS["torch"]
    assert not is_shortage(lost)
