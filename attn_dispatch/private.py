"""The private names of PyTorch that the package uses, here alone: a version may lose any of them.

What stands in for a lost one costs time or a feature, never a right result: it takes for there what it cannot see, or
raises NoBackend.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch

from attn_dispatch.errors import InvalidInput, NoBackend

NAMES: set[str] = set()  #: that were looked up, as "module:attribute"


def of_torch(name: str, *instead: Any) -> Any:
    """A name of PyTorch, else `instead`; without it a function that raises NoBackend."""
    NAMES.add(name)
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        return instead[0] if instead else lost(name)


def lost(name: str) -> Callable[..., Any]:
    """A function that raises NoBackend."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise NoBackend(f"this call needs {name.replace(':', '.')}, which torch {torch.__version__} does not have")

    return refuse


NoOverrides: Any = of_torch("torch._C:DisableTorchFunctionSubclass")  #: of functions, by a tensor's class
tree_leaves: Callable[[Any], list[Any]] = of_torch("torch.utils._pytree:tree_leaves")

# --- modes --------------------------------------------------------------------------------------------------------

#: A dispatch mode of an unknown kind: as one that traces.
_UNKNOWN = SimpleNamespace(_mode_key="unknown")
_stack = of_torch("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", None)
mode_count: Callable[[], int] = of_torch("torch._C:_len_torch_dispatch_stack", lambda: len(_stack()) if _stack else 0)
modes: Callable[[], list[Any]] = _stack or (lambda: [_UNKNOWN] * mode_count())
#: Of traces before autograd; torch versions without it make none.
early_mode_count: Callable[[], int] = of_torch("torch._ops:_len_torch_dispatch_stack_pre_dispatch", lambda: 0)
DispatchMode: Any = of_torch("torch.utils._python_dispatch:TorchDispatchMode", object)
#: Of selective checkpointing, which stores and replays results of operators: it traces nothing.
REPLAYS = tuple(
    filter(None, (of_torch(f"torch.utils.checkpoint:_{name}TorchDispatchMode", None) for name in ("Caching", "Cached")))
)
_hooks = of_torch("torch._C._autograd:_top_saved_tensors_default_hooks", None)


def saving_tensors() -> bool:
    """Whether saved-tensor hooks are set, as checkpointing does: the forward pass may be computed again."""
    if _hooks is not None:
        return _hooks(True) is not None
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("no hook is set here"):  # fails where one is
            return False
    except RuntimeError:
        return True


@contextmanager
def _no_modes() -> Iterator[None]:
    if mode_count():
        lost("torch.utils._python_dispatch:_disable_current_modes")()
    yield


without_modes: Callable[[], Any] = of_torch("torch.utils._python_dispatch:_disable_current_modes", _no_modes)
function_mode_count: Callable[[], int] = of_torch("torch._C:_len_torch_function_stack", lambda: 1)
_popped = of_torch("torch.overrides:_pop_mode_temporarily")


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Without the modes that see functions of torch: a default device is one. Raises where they cannot be taken off."""
    with ExitStack() as stack:
        for _ in range(function_mode_count()):
            stack.enter_context(_popped())
        yield


# --- tracers ------------------------------------------------------------------------------------------------------

_TRACERS = "torch._subclasses.fake_tensor:FakeTensor", "torch._subclasses.functional_tensor:FunctionalTensor"
with warnings.catch_warnings():  # torch warns where NumPy is not installed; nothing here needs NumPy
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    TRACERS: tuple[Any, ...] = tuple(filter(None, (of_torch(name, None) for name in _TRACERS)))
#: Also of those that torch 2.14 makes in C++, which are plain `Tensor`s by type.
is_fake: Callable[[Any], bool] = of_torch("torch._C:_is_fake_tensor", lambda x: False)

# --- derivatives and transforms -----------------------------------------------------------------------------------

_interpreters = of_torch("torch._C:_functorch.get_interpreter_stack", None)
_kinds = of_torch("torch._C:_functorch.TransformType", None)
GRAD, VMAP = (_kinds.Grad, _kinds.Vmap) if _kinds else ("grad", "vmap")
is_transformed: Callable[[], bool] = of_torch(
    "torch._C:_are_functorch_transforms_active", lambda: bool(_interpreters and _interpreters())
)
is_wrapped: Callable[[Any], bool] = of_torch(
    "torch._C:_functorch.is_functorch_wrapped_tensor", lambda x: is_transformed()
)
is_batched: Callable[[Any], bool] = of_torch("torch._C:_functorch.is_batchedtensor", lambda x: True)
unwrapped: Callable[[Any], Any] = of_torch("torch._C:_functorch.get_unwrapped")


def transforms() -> set[Any]:
    """The kinds of the active transforms of torch.func; of every kind, and an unknown one, where torch does not say."""
    if _interpreters and _kinds:
        return {each.key() for each in _interpreters() or ()}
    return {GRAD, VMAP, "unknown"} if is_transformed() else set()


#: Has `_current_level`, which is negative outside of forward-mode differentiation.
forward_ad: Any = torch.autograd.forward_ad
if of_torch("torch.autograd.forward_ad:_current_level", None) is None:
    forward_ad = SimpleNamespace(_current_level=0)
#: Negative where this thread runs no backward pass.
graph_task: Callable[[], int] = of_torch("torch._C:_current_graph_task_id", lambda: 0)
#: Raised by torch.utils.checkpoint to end a recomputation early; InvalidInput in versions of torch without it.
CheckpointStop: type[Exception] = of_torch("torch.utils.checkpoint:_StopRecomputationError", InvalidInput)

_AUTOGRAD = [
    of_torch(f"torch._C:DispatchKey.{name}", None)
    for name in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")
]
_excluded, _included = (of_torch(f"torch._C:_dispatch_tls_local_{name}clude_set") for name in ("ex", "in"))
_with_keys = of_torch("torch._C:_ForceDispatchKeyGuard")


def with_autograd() -> Any:
    """A context in which autograd's keys are in use, which an operator excludes. Raises NoBackend."""
    if None in _AUTOGRAD:
        lost("torch._C:DispatchKey.Autograd*")()
    excluded = _excluded()
    for each in _AUTOGRAD:
        excluded = excluded.remove(each)
    return _with_keys(_included(), excluded)


# --- settings, guards, processors ---------------------------------------------------------------------------------

# The functions of C++, without their Python wrappers: they are called on every hit.
deterministic_or_warning: Callable[[], bool] = of_torch(
    "torch._C:_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
only_warning: Callable[[], bool] = of_torch(
    "torch._C:_get_deterministic_algorithms_warn_only", torch.is_deterministic_algorithms_warn_only_enabled
)
float32_matmul_precision: Callable[[], str] = of_torch(
    "torch._C:_get_float32_matmul_precision", torch.get_float32_matmul_precision
)
tensor_guards: Any = of_torch("torch._C:_dynamo.guards.TensorGuards")
negative_view: Callable[[Any], Any] = of_torch("torch:_neg_view")
has_avx2: Callable[[], bool] = of_torch("torch.cpu:_is_avx2_supported", lambda: False)
has_amx: Callable[[], bool] = of_torch("torch.cpu:_is_amx_tile_supported", lambda: True)
