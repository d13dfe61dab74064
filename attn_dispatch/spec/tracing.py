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
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn import functional
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attn_dispatch import process_state
from attn_dispatch.errors import InvalidInput, NoBackend

# Selective checkpointing stores and replays results of operators; the call is otherwise unchanged.
P = ParamSpec("P")
T = TypeVar("T")
_REPLAYS = "_CachingTorchDispatchMode", "_CachedTorchDispatchMode"
_HARMLESS = tuple(getattr(checkpoint, name) for name in _REPLAYS if hasattr(checkpoint, name))
_TRACERS = (FakeTensor, FunctionalTensor)
_operator = threading.local()
forward_ad: Any = torch.autograd.forward_ad  #: without types; the level is private
_SDPA = functional.scaled_dot_product_attention
_jit_traces: Callable[[], bool] = getattr(torch.jit, "is_tracing")  # noqa: B009 - not exported, to type checkers
functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
# Private; torch versions without it trace nothing before autograd.
_early: Callable[[], int] = getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", lambda: 0)
# Private: the fake tensors that torch 2.14 makes in C++ are plain `Tensor`s by type.
_is_fake: Callable[[Any], bool] = getattr(torch._C, "_is_fake_tensor", lambda x: False)


def graphed(*tensors: object) -> bool:
    """Whether operators are traced into a graph or not computed: torch.export, make_fx, fake tensors."""
    return (
        torch.compiler.is_compiling()
        or _early() > 0
        or any(getattr(mode, "_mode_key", None) is not None for mode in _modes())
        or any(_wrapped(x) or (isinstance(x, Tensor) and _is_fake(x)) for x in tensors)
    )


def is_traced(*tensors: object) -> bool:
    """Whether the call is traced, transformed by torch.func, or intercepted by a dispatch mode."""
    return graphed(*tensors) or is_transformed() or any(not isinstance(m, _HARMLESS) for m in _modes())


def as_operator(*tensors: object) -> bool:
    """Whether a call is one operator (operators.py): where it is traced, or a dispatch mode sees it.

    It is inside torch.func's grad and vmap, but not where tangents pass through it, nor for tensors of other subclasses
    than a tracer's own, whose operators reach the parts inside.
    """
    if getattr(_operator, "runs", False) or forward_ad._current_level >= 0:
        return False
    if is_transformed():
        return _transforms() <= {functorch.TransformType.Grad, functorch.TransformType.Vmap}
    if any(_wrapped(x) and not isinstance(x, _TRACERS) for x in tensors):
        return False
    return graphed(*tensors) or any(not isinstance(mode, _HARMLESS) for mode in _modes())


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
        if isinstance(x, Tensor) and any(isinstance(size, torch.SymInt) for size in x.shape):
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
    for name in ("_context_parallel._attention", "_attention"):  # of newer and older versions
        module = sys.modules.get(f"torch.distributed.tensor.experimental.{name}")
        if module is not None and attention in getattr(module, "_replaced_functions", ()):
            mesh = inspect.getclosurevars(attention).nonlocals["device_mesh"]
            balanced = bool(module._cp_options.enable_load_balance)
            return ContextParallel(mesh, balanced) if mesh.size() > 1 else None
    return None


def make_plain(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `make`, whose tensors may be kept: default devices, modes and transforms of the caller do not reach it.

    They are per thread: where there are any, it is called in a new one, which takes a millisecond.
    """
    if graphed() or is_transformed() or _modes() or torch._C._len_torch_function_stack():
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


def _modes() -> list[Any]:
    return _get_current_dispatch_mode_stack()


def is_transformed() -> bool:
    """Whether a transform of torch.func is active; torch.compile traces this."""
    return torch._C._are_functorch_transforms_active()


def is_mapped() -> bool:
    """Whether torch.vmap is active; jacfwd, jacrev and hessian call it too."""
    return functorch.TransformType.Vmap in _transforms()


def differentiates() -> bool:
    """Whether torch.func or forward mode takes derivatives; torch.compile asks this, too, while it traces."""
    return forward_ad._current_level >= 0 or bool(_transforms() - {functorch.TransformType.Vmap})


vars(differentiates)["_dynamo_marked_constant"] = True  # as torch.compiler.assume_constant_result, which loads SymPy


def has_tangents(*tensors: object) -> bool:
    """Whether forward-mode derivatives may pass through a call: of these tensors, or inside torch.func's jvp."""
    if forward_ad._current_level < 0:
        return False
    given = (x for x in tensors if isinstance(x, Tensor))
    return is_transformed() or any(forward_ad.unpack_dual(x).tangent is not None for x in given)


def _transforms() -> set[Any]:
    """The kinds of the active transforms of torch.func."""
    return {each.key() for each in functorch.get_interpreter_stack() or ()}


def _wrapped(x: object) -> bool:
    """Whether x is of a subclass of Tensor that overrides `__torch_dispatch__`."""
    return isinstance(x, Tensor) and type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]
