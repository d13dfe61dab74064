"""The backends and their order of preference, each loaded on first use.

The import of another package's backend is foreign code: whatever it raises becomes an InvalidInput that names the entry
point and its distribution, and is not tried again in the process. `guard_imports` has its time limited, and a crash
recorded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from attn_dispatch import process_state
from attn_dispatch.errors import InvalidInput
from attn_dispatch.kernels.contract import Backend, adapted, missing_members
from attn_dispatch.log import say_once
from attn_dispatch.text import one_line, printable

GROUP = "attn_dispatch.backends"
LIBRARIES = ("sdpa", "flash", "xformers", "sdpa_cudnn", "sdpa_efficient")
FUSED = ("triton", "triton_tiles")  #: on CUDA they read the pairs that are seen, in one pass
#: In the order in which the static heuristic, which measures nothing, tries them on a CPU; PyTorch's own choice first.
BUILT_IN = (*LIBRARIES, "sdpa_float32", "sdpa_mask", "tiles", *FUSED, "native", "flex", "flex_flash")
LAST_RESORT = "manual"
#: In most shipped decisions of CPUs (profiles/): tried second, for there may be no time for a third; ties go to it.
OFTEN_FASTEST = "native"
MASKED = "sdpa_mask"  #: computes all pairs; `OFTEN_FASTEST` takes less time in nearly all shipped decisions of CPUs
IN_PIECES = ("Dilated", "Neighborhood")  #: patterns for which libraries take many calls, or a mask of all pairs
#: Where PyTorch prefers cuDNN too. Source: check_prefer_cudnn_attention in its transformers/cuda/sdp_utils.cpp.
CUDNN_FIRST = ("cuda-sm90-", "cuda-sm100-")

_added: dict[str, Backend] = {}
_broken: dict[str, str] = {}  # names of backends that could not be imported, with the message
process_state.register(process_state.FACTS, _added.clear, _broken.clear)

Import = Callable[[], object]


_guards: list[Callable[[EntryPoint, Import], object]] = []


def guard_imports(guard: Callable[[EntryPoint, Import], object]) -> None:
    """Have other packages' backends imported by `guard`: this room knows neither time limits nor the store."""
    _guards[:] = [guard]


def register(backend: Any) -> None:
    """Add a backend: an object or module with the required members of `contract.Backend`.

    Raises:
        InvalidInput: a member is missing, or another backend has the name.
    """
    if missing := missing_members(backend):
        raise InvalidInput(f"backend {backend!r} {missing}")
    name = backend.name
    if not isinstance(name, str) or not name.isidentifier():
        raise InvalidInput(f"backend.name must be an identifier, got {name!r}")
    if name in names():
        raise InvalidInput(f"a backend named {name!r} is there already: {', '.join(names())}")
    _added[name] = adapted(backend)


def registered() -> list[Backend]:
    """The backends that this process has added."""
    return list(_added.values())


def names() -> tuple[str, ...]:
    """Every backend's name, in order of preference."""
    plugged = [name for name in _entry_points() if name not in _added]
    return (*BUILT_IN, *plugged, *_added, LAST_RESORT)


def preference(silicon: str, problem: Mapping[str, Any]) -> tuple[str, ...]:
    """The built-in backends in the order in which the static choice tries them, for a problem as `to_dict` gives it.

    On an H100, LongNet of 16k tokens takes `triton` 0.46 ms and `sdpa` 4.97, and `sdpa_cudnn` trains causally in 0.56
    of `sdpa`'s time (tools/results/gpu/decisions.json). It plans each new length for tens of ms: not in decoding.
    """
    if not silicon.startswith("cuda-"):
        return BUILT_IN
    pattern = problem["pattern"]
    in_pieces = pattern.get("pattern", pattern)["kind"] in IN_PIECES
    cudnn = silicon.startswith(CUDNN_FIRST) and problem["q_len"] == problem["k_len"]
    first = FUSED if in_pieces else (*(["sdpa_cudnn"] if cudnn else []), *LIBRARIES, *FUSED)
    return tuple(dict.fromkeys((*first, *BUILT_IN)))


def load(name: str) -> Backend:
    """The backend with this name.

    Raises:
        InvalidInput: no backend has this name, or it cannot be loaded.
    """
    if name in _added:
        return _added[name]
    if name in _broken:
        raise InvalidInput(_broken[name])
    return _load(name)


def is_built_in(name: str) -> bool:
    """Whether a backend is this package's own."""
    return name in (*BUILT_IN, LAST_RESORT)


def backends() -> list[Backend]:
    """Every backend that can be loaded; for the others the error is logged once."""
    found = []
    for name in names():
        try:
            found.append(load(name))
        except InvalidInput as error:
            say_once(str(error))
    return found


def version_of(backend: Backend) -> str | None:
    """The backend's version, or None if its package is missing or `version()` raises."""
    try:
        version: object = backend.version()
        # Plain text: some versions are subclasses of str, such as torch's.
        return None if version is None else printable(str.__str__(str(version)))
    except ImportError:  # includes PackageNotFoundError
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may raise anything, and must not end the call
        say_once(f"{backend.name} has no version: {one_line(error)}")
        return None


@cache
def _load(name: str) -> Backend:
    if is_built_in(name):
        return adapted(importlib.import_module(f"attn_dispatch.backends.{name}"))
    point = _entry_points().get(name)
    if point is None:
        raise InvalidInput(f"backend must be one of {', '.join(names())}, got {name!r}")
    try:
        load = partial(_imported, point)
        backend = _guards[0](point, load) if _guards else load()
    except Exception as error:
        _broken[name] = f"backend {described(point)} cannot be loaded: {one_line(error)}"
        raise InvalidInput(_broken[name]) from error
    if missing := missing_members(backend):
        _broken[name] = f"backend {described(point)} {missing}"
        raise InvalidInput(_broken[name])
    return adapted(backend)


def _imported(point: EntryPoint) -> object:
    try:
        return point.load()
    except (SystemExit, KeyboardInterrupt) as error:  # by its own code: a user's Ctrl-C is raised in the main thread
        raise ImportError(f"raised {one_line(error)}") from error


def described(point: EntryPoint) -> str:
    """An entry point's name, its value and its distribution, for messages."""
    return f"{point.name!r} (entry point {point.value} of {distribution(point)})"


def distribution(point: EntryPoint) -> str:
    """The name and version of an entry point's distribution."""
    return "an unknown distribution" if point.dist is None else f"{point.dist.name} {point.dist.version}"


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if not is_built_in(point.name)}
