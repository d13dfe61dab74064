"""attend() as an attention backend of Hugging Face diffusers; importing this module registers it.

    import attn_dispatch.integrations.diffusers
    model.set_attention_backend("attn_dispatch")

Masks about keys alone become key masks, others biases; what attend() has not is refused by name. A model none of whose
processors asks diffusers for a backend raises at that line. `neighborhood(grid, window)` restricts the attention of the
image or video tokens of Wan and Flux. diffusers' context parallelism runs over attend()'s `mesh=`.

From 0.37 on, diffusers also makes a model's backend the default of the process: models that were set to none use it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import private
from attn_dispatch.compat.sdpa import mask_arguments
from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations import diffusers_grids as grids
from attn_dispatch.integrations.diffusers_grids import NAME, GridMask, attend, dispatch
from attn_dispatch.integrations.diffusers_grids import neighborhood as neighborhood  # public here
from attn_dispatch.log import say_once
from attn_dispatch.spec.pattern import Dense

# By name: type checkers need not find the library.
modeling: Any = import_module("diffusers.models.modeling_utils")

_AMBIGUOUS = "attn_mask {} may be {}: give it four axes, broadcastable to [batch, heads, q_len, k_len]"
ASKING = "dispatch_attention_fn"  #: the function by which diffusers' processors ask for a backend


class _AnyArgument(set[str]):
    """The names of arguments that a backend takes: diffusers drops others in silence, but attention() refuses them."""

    def __contains__(self, name: object) -> bool:
        return True


def register() -> None:
    """Register the backend `attn_dispatch`; again is harmless."""
    names: Any = dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        _open(names)
    member, registry = names(NAME), dispatch._AttentionBackendRegistry
    registry.register(member, supports_context_parallel=True)(attention)
    registry._supported_arg_names[member] = _AnyArgument(registry._supported_arg_names[member])
    given = modeling.ModelMixin.set_attention_backend
    modeling.ModelMixin.set_attention_backend = _checked(getattr(given, "_of_diffusers", given))


def _open(names: Any) -> None:
    """Add a member to diffusers' Enum of backends, which is closed."""
    member: Any = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    member._sort_order_ = len(names._member_names_)
    type.__setattr__(names, member._name_, member)
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    getattr(names, "_hashable_values_", []).append(NAME)  # what Python 3.13 looks values up in


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    """ModelMixin.set_attention_backend, which says nothing of models that it does not change."""

    @wraps(original)
    def set_attention_backend(self: Any, backend: str) -> None:
        registry = dispatch._AttentionBackendRegistry
        before = registry._active_backend
        original(self, backend)
        if backend.lower() != NAME:
            return
        found = [getattr(module, "processor", None) for module in self.modules()]
        kinds = {type(x): getattr(x, "_attention_backend", registry._active_backend) for x in found if x is not None}
        silent = sorted(kind.__name__ for kind, used in kinds.items() if used != NAME or not _asks(kind))
        if len(silent) == len(kinds):
            registry._active_backend = before
            names = ", ".join(silent) or "no processors"
            what = f"{type(self).__name__} never asks diffusers for an attention backend ({names})"
            raise InvalidInput(f"{what}: attn_dispatch.replacing_sdpa() replaces its calls of PyTorch's function")
        if silent:
            say_once(
                f"{type(self).__name__}: diffusers is not asked for an attention backend by {', '.join(silent)}; "
                "attn_dispatch.replacing_sdpa() replaces their calls of PyTorch's function"
            )

    found: Any = set_attention_backend
    found._of_diffusers = original
    return set_attention_backend


def _asks(kind: type) -> bool:
    """Whether a method of a processor, as this class has it, asks diffusers for a backend."""
    methods = {name: inspect.unwrap(x) for name in dir(kind) if inspect.isfunction(x := getattr(kind, name))}
    names = {name: x.__code__.co_names for name, x in methods.items()}
    return any(ASKING in each for each in names.values()) or "super" in names.get("__call__", ())


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **unknown: Any,
) -> Any:
    """What diffusers' processors call.

    Args:
        query: [batch, q_len, heads, head_dim]. key, value: [batch, k_len, kv_heads, head_dim].
        attn_mask: bool, True for keys that are seen, or floating point, added to the scores: [k_len],
            [batch, k_len], [q_len, k_len], or four axes broadcastable to [batch, heads, q_len, k_len].
        is_causal: aligned with the first key, as PyTorch's function has it.
        enable_gqa: whether kv_heads may be fewer than heads.
        return_lse: return (out, lse), lse [batch, heads, q_len].

    Returns:
        [batch, q_len, heads, head_dim].

    Raises:
        InvalidInput: an argument is wrong, or attend() has not what it asks for.
    """
    for name, x in unknown.items():
        if x is not None:
            raise InvalidInput(f"attn_dispatch has no {name}: use another attention backend for this model")
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise InvalidInput(f"enable_gqa must be True where heads differ, got {query.shape[2]} and {key.shape[2]}")
    near = grids.found_in(attn_mask, query, key)
    if near.pattern is not None and is_causal:
        raise InvalidInput("is_causal cannot be given inside neighborhood(): give it to neighborhood()")
    if near.mask is not None and is_causal:
        raise InvalidInput("give attn_mask or is_causal, not both")
    more: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "return_lse": return_lse}
    context = getattr(_parallel_config, "context_parallel_config", None)
    if context is not None and is_causal:
        raise InvalidInput("is_causal cannot be given with context parallelism: tokens may stand in another order")
    if context is not None:
        return _over_ranks(context, query, key, value, near, more)
    return _alone(query, key, value, near, is_causal, more)


def _alone(q: Tensor, k: Tensor, v: Tensor, near: GridMask, is_causal: bool, more: dict[str, Any]) -> Any:
    more = more | _masks(near.mask, q, k)
    if near.text:
        return grids.attend_with_text(q, k, v, near, more)
    if is_causal and q.shape[1] != k.shape[1]:
        more["alignment"] = "upper_left"
    return attend(q, k, v, near.pattern or Dense(is_causal), **more)


def _over_ranks(context: Any, q: Tensor, k: Tensor, v: Tensor, near: GridMask, more: dict[str, Any]) -> Any:
    """The tokens of this rank among those of all: diffusers' hooks split sequences into contiguous shards."""
    mesh, mask, k_len = context._flattened_mesh, near.mask, k.shape[1]
    if q.shape[1] == k_len:
        if isinstance(mask, Tensor) and mask.shape[-1] not in (1, k_len):
            whose = "with context parallelism it must be of the rank's own"
            raise InvalidInput(f"attn_mask is for {mask.shape[-1]} keys, this rank has {k_len}: {whose}")
        return attend(q, k, v, near.pattern or Dense(), mesh=mesh, **more, **_masks(mask, q, k))
    if getattr(context, "ulysses_anything", False) or getattr(context, "ring_anything", False):
        what = f"cross-attention of {q.shape[1]} queries to {k_len} keys on a rank"
        raise InvalidInput(f"{what} cannot run with ulysses_anything or ring_anything")
    # The keys of a cross-attention are few: every rank takes all of them.
    if isinstance(mask, Tensor) and mask.shape[-1] == k_len:
        mask = _gathered(mask, mask.ndim - 1, mesh)
    return _alone(q, _gathered(k, 1, mesh), _gathered(v, 1, mesh), GridMask(None, 0, mask), False, more)


def _gathered(x: Tensor, dim: int, mesh: Any) -> Tensor:
    """All ranks' shards; the gradient of a shard is the sum of all ranks' gradients of it."""
    gather = private.of_torch("torch.distributed._functional_collectives:all_gather_tensor_autograd")
    plain = x.to(torch.uint8) if x.dtype == torch.bool else x
    found: Tensor = gather(plain.contiguous(), dim, mesh.get_group())
    return found.to(x.dtype)


def _masks(mask: Any, q: Tensor, k: Tensor) -> dict[str, Any]:
    """`key_mask` or `bias` of attend(). Raises InvalidInput."""
    if mask is None:
        return {}
    if not isinstance(mask, Tensor):
        raise InvalidInput(f"attn_mask must be a tensor, got {type(mask).__name__}: use another attention backend")
    batch, q_len, k_len = q.shape[0], q.shape[1], k.shape[1]
    if mask.ndim == 2 and mask.shape == (batch, k_len) and batch > 1:
        if batch == q_len:
            raise InvalidInput(_AMBIGUOUS.format(list(mask.shape), "[batch, k_len] or [q_len, k_len]"))
        mask = mask[:, None, None]
    if mask.ndim == 3 and mask.shape[0] > 1:
        raise InvalidInput(_AMBIGUOUS.format(list(mask.shape), "of rows or of heads"))
    if mask.is_floating_point() and math.prod(mask.shape[-3:-1]) == 1:  # about keys alone
        captured = mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not (captured or mask.requires_grad or torch.compiler.is_compiling()):  # its values may be looked at
            hidden = mask == -torch.inf
            if bool((hidden | (mask == 0)).all()):
                mask = ~hidden
    return mask_arguments(mask, torch.Size([batch]), q.transpose(1, 2), k.transpose(1, 2))


register()
