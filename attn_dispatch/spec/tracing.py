"""Whether a call is traced, transformed or intercepted: then its timings and routes are not those of plain tensors."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from attn_dispatch import private, process_state
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.private import VMAP, forward_ad, modes, transforms

P = ParamSpec("P")
T = TypeVar("T")
_operator = threading.local()
_unpacked: Any = torch.autograd.forward_ad.unpack_dual  #: without types
is_transformed = private.is_transformed  #: whether a transform of torch.func is active; torch.compile traces this
_SDPA = functional.scaled_dot_product_attention
_jit_traces: Callable[[], bool] = getattr(torch.jit, "is_tracing")  # noqa: B009 - not exported, to type checkers


def graphed(*tensors: object) -> bool:
    """Whether operators are traced into a graph or not computed: torch.export, make_fx, fake tensors."""
    return (
        torch.compiler.is_compiling()
        or private.early_mode_count() > 0
        or any(getattr(mode, "_mode_key", None) is not None for mode in modes())
        or any(_wrapped(x) or (isinstance(x, Tensor) and private.is_fake(x)) for x in tensors)
    )


def is_traced(*tensors: object) -> bool:
    """Whether the call is traced, transformed by torch.func, or intercepted by a dispatch mode.

    Not by a mode inside a checkpoint: it may see one of the two forward passes alone, which must save the same.
    """
    if graphed(*tensors) or is_transformed():
        return True
    return not private.saving_tensors() and any(not isinstance(m, private.REPLAYS) for m in modes())


def as_operator(*tensors: object) -> bool:
    """Whether a call is one operator (operators.py): where it is traced, or a dispatch mode sees it, as in one of
    the forward passes of a checkpoint.

    It is inside torch.func's grad and vmap, but not where tangents pass through it, nor for tensors of other subclasses
    than a tracer's own, whose operators reach the parts inside.
    """
    if getattr(_operator, "runs", False) or forward_ad._current_level >= 0:
        return False
    if is_transformed():
        return transforms() <= {private.GRAD, VMAP}
    if any(_wrapped(x) and not isinstance(x, private.TRACERS) for x in tensors):
        return False
    return graphed(*tensors) or private.mode_count() > 0 or private.saving_tensors()


@contextmanager
def inside_operator() -> Iterator[None]:
    """Inside, no call is an operator: it runs as the implementation of one."""
    before = getattr(_operator, "runs", False)
    _operator.runs = True
    try:
        yield
    finally:
        _operator.runs = before


def check_sizes(**tensors: Any) -> None:
    """Raise InvalidInput for symbolic sizes: a decision holds for one size."""
    for name, x in tensors.items():
        if isinstance(x, Tensor) and not x.is_nested and any(isinstance(size, torch.SymInt) for size in x.shape):
            how = "trace attend with static shapes"
            raise InvalidInput(f"{name} must have sizes that are numbers, got {list(x.shape)}: {how}")


def refuse_jit() -> None:
    """Raise NoBackend inside torch.jit.trace, which sees no operator of Python's and holds a graph to one length."""
    if _jit_traces():
        raise NoBackend("attend() cannot be part of a graph of torch.jit.trace: use torch.export or torch.compile")


def is_dtensor(x: object) -> bool:
    """Whether x is a DTensor, without importing them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, getattr(module, "DTensor", ()))


class ContextParallel(NamedTuple):
    """torch's context_parallel: its mesh, and whether its load balancer gave each rank an early and a late chunk."""

    mesh: Any
    balanced: bool


def context_parallel() -> ContextParallel | None:
    """torch's context_parallel if it is entered, which replaces its attention function; None otherwise."""
    attention: Any = functional.scaled_dot_product_attention
    if attention is _SDPA:
        return None
    names = ("_context_parallel._attention", "_attention")  # of newer and older versions
    loaded = (sys.modules.get(f"torch.distributed.tensor.experimental.{name}") for name in names)
    module: Any = next(filter(None, loaded), None)
    try:
        if module is None or attention not in module._replaced_functions:
            return None
        mesh = inspect.getclosurevars(attention).nonlocals["device_mesh"]
        balanced = bool(module._cp_options.enable_load_balance)
    except (AttributeError, KeyError) as error:  # these names are private
        raise NoBackend(f"the context_parallel of torch {torch.__version__} has changed: {error!r}") from error
    return ContextParallel(mesh, balanced) if mesh.size() > 1 else None


def make_plain(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `make`, whose tensors may be kept: default devices, modes and transforms of the caller do not reach it.

    They are per thread: where there are any, it is called in a new one, which takes a millisecond.
    """
    if graphed() or is_transformed() or modes() or private.function_mode_count():
        return in_new_thread(make, *args, **kwargs)
    with torch.inference_mode(False):
        return make(*args, **kwargs)


def in_new_thread(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `make` returns where nothing of this thread reaches it."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(make(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            found.set_exception(error)

    thread = threading.Thread(target=run, name="attn-dispatch-tables", daemon=True)
    with process_state.starting:
        thread.start()
    return found.result()


def is_mapped() -> bool:
    """Whether torch.vmap is active; jacfwd, jacrev and hessian call it too."""
    return VMAP in transforms()


def differentiates() -> bool:
    """Whether torch.func or forward mode takes derivatives; torch.compile asks this, too, while it traces."""
    return forward_ad._current_level >= 0 or bool(transforms() - {VMAP})


vars(differentiates)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result, which loads SymPy


def has_tangents(*tensors: object) -> bool:
    """Whether forward-mode derivatives may pass through a call: of these tensors, or inside torch.func's jvp."""
    if forward_ad._current_level < 0:
        return False
    given = (x for x in tensors if isinstance(x, Tensor))
    return is_transformed() or any(_unpacked(x).tangent is not None for x in given)


def _wrapped(x: object) -> bool:
    """Whether x is of a subclass of Tensor that overrides `__torch_dispatch__`."""
    return isinstance(x, Tensor) and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
