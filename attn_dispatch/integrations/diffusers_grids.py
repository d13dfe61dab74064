"""neighborhood(): the image or video tokens of diffusers' Wan and Flux as a grid, each seeing its neighbours.

Their processors hand `attention_mask` on to the attention backend as it is: inside neighborhood() they are given a
GridMask in its place, which says what the tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attn_dispatch import private
from attn_dispatch.compat.names import attend_as
from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations.libraries import library
from attn_dispatch.kernels.numerics import merge
from attn_dispatch.spec.pattern import Dense, Neighborhood, Pattern

library("diffusers", "0.36")
# By name: type checkers need not find the library.
dispatch: Any = import_module("diffusers.models.attention_dispatch")

NAME = "attn_dispatch"
MODELS = "diffusers.models.transformers"


class GridMask(NamedTuple):
    """What a call's tokens are.

    Args:
        pattern: of the tokens that follow the text; None: all tokens see each other.
        text: number of text tokens, which stand first and see all.
        mask: the call's own attn_mask.
    """

    pattern: Neighborhood | None
    text: int
    mask: Any


class _Setting(NamedTuple):
    """A neighborhood() that is entered. `lengths`: of sequences known to be text and then the grid."""

    pattern: Neighborhood
    lengths: set[int]


_entered: _Setting | None = None
_last: WeakKeyDictionary[Any, Neighborhood | None] = WeakKeyDictionary()  #: what a processor's last forward pass used


attend = attend_as(q="query", k="key", v="value", bias="attn_mask", key_mask="attn_mask")


@contextmanager
def neighborhood(grid: Any, window: Any, **more: Any) -> Iterator[None]:
    """Inside, image or video tokens of Wan and Flux see their neighbours among themselves.

    with neighborhood((frames, rows, columns), (3, 7, 7)):
        wan(latents, timestep, text)

    Text tokens of Flux are seen by all and see all; cross-attention is as it was. Of all threads. Where activations are
    recomputed (gradient checkpointing), the backward pass belongs inside, too.

    Args:
        grid: tokens per axis: of Wan frames, rows and columns, as its patches divide the latents; of Flux rows and
            columns.
        window: tokens per axis, or one number for all axes.
        more: `dilation`, `is_causal`, `edges` and `stride` of `Neighborhood`.

    Raises:
        InvalidInput: an argument is wrong; in a model's forward pass, its tokens are not the grid's, its processors are
            not known, or it does not use the backend `attn_dispatch`.
    """
    global _entered
    setting = _Setting(Neighborhood(grid, window, **more), set())
    for name, (module, described) in PROCESSORS.items():
        kind = getattr(import_module(f"{MODELS}.{module}"), name)
        if not hasattr(kind.__call__, "_of_diffusers"):
            kind.__call__ = _told(kind.__call__, described)
    before, _entered = _entered, setting
    try:
        yield
    finally:
        _entered = before


def found_in(mask: Any, q: Tensor, k: Tensor) -> GridMask:
    """What a call's tokens are, by its attn_mask.

    Raises:
        InvalidInput: inside neighborhood(), of a processor that is not known.
    """
    if isinstance(mask, GridMask):
        return mask
    if _entered is not None and q.shape[1] == k.shape[1]:
        raise InvalidInput(f"neighborhood() knows the tokens of {', '.join(PROCESSORS)} only")
    return GridMask(None, 0, mask)


def attend_with_text(q: Tensor, k: Tensor, v: Tensor, near: GridMask, more: dict[str, Any]) -> Any:
    """Text tokens, then those of a grid: text sees all; the others see the text and their neighbours.

    Args:
        q, k, v: [batch, text + grid, heads, head_dim].
        more: arguments of `attend`.

    Raises:
        InvalidInput: a mask that is not about keys alone.
    """
    if "bias" in more:
        raise InvalidInput("inside neighborhood(), attn_mask beside text must be about keys alone")
    with_lse = more.pop("return_lse")
    mask = more.pop("key_mask", None)
    text, grid, every = slice(near.text), slice(near.text, None), slice(None)

    def seen(queries: slice, keys: slice, pattern: Pattern) -> Any:
        key_mask = None if mask is None else mask[:, keys]
        return attend(q[:, queries], k[:, keys], v[:, keys], pattern, key_mask=key_mask, return_lse=True, **more)

    of_text = seen(text, every, Dense())
    rest = merge(*seen(grid, grid, near.pattern or Dense()), *seen(grid, text, Dense()))
    out = torch.cat([of_text[0], rest[0]], 1)
    return (out, torch.cat([of_text[1], rest[1]], 2)) if with_lse else out


def _of_wan(setting: _Setting, processor: Any, tokens: int, text: int | None, mask: Any) -> GridMask:
    return GridMask(setting.pattern if text is None else None, 0, mask)  # with text it is cross-attention


def _of_flux(setting: _Setting, processor: Any, tokens: int, text: int | None, mask: Any) -> GridMask:
    if getattr(processor._parallel_config, "context_parallel_config", None) is not None:
        raise InvalidInput("neighborhood() of Flux, with its text, cannot run with context parallelism")
    held = math.prod(setting.pattern.grid)
    if text is not None:
        if tokens != held:
            raise InvalidInput(f"the grid {setting.pattern.grid} holds {held} tokens, Flux has {tokens}")
        setting.lengths.add(text + tokens)
    elif tokens in setting.lengths:
        text = tokens - held
    else:
        what = "and no double block before it said how many are text"
        raise InvalidInput(f"a single block of Flux has {tokens} tokens, {what}")
    return GridMask(setting.pattern, text, mask)


#: Processors with their module, and what their tokens are, by their number and that of the text, where it is given.
PROCESSORS: dict[str, tuple[str, Callable[..., GridMask]]] = {
    "WanAttnProcessor": ("transformer_wan", _of_wan),
    "FluxAttnProcessor": ("transformer_flux", _of_flux),
}


def _told(original: Any, described: Callable[..., GridMask]) -> Any:
    """A processor's __call__ that hands on a GridMask inside neighborhood()."""

    @wraps(original)
    def call(
        self: Any,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        setting = _entered
        if not torch.compiler.is_compiling():
            _check_recomputed(self, None if setting is None else setting.pattern)
        if setting is not None:
            _check_backend(self)
            text = None if encoder_hidden_states is None else encoder_hidden_states.shape[1]
            attention_mask = described(setting, self, hidden_states.shape[1], text, attention_mask)
        return original(self, attn, hidden_states, encoder_hidden_states, attention_mask, *args, **more)

    found: Any = call
    found._of_diffusers = original
    return found


def _check_backend(processor: Any) -> None:
    used = processor._attention_backend or dispatch._AttentionBackendRegistry._active_backend
    if used != NAME:
        needs = f'neighborhood() needs model.set_attention_backend("{NAME}")'
        raise InvalidInput(f"{needs}, but {type(processor).__name__} uses {used!s}")


def _check_recomputed(processor: Any, pattern: Neighborhood | None) -> None:
    """A forward pass that is repeated in the backward pass must be what it was."""
    if private.graph_task() < 0 or not torch.is_grad_enabled():
        _last[processor] = pattern
    elif _last.get(processor) != pattern:
        both = f"a forward pass with {_last.get(processor)} is recomputed in the backward pass with {pattern}"
        raise InvalidInput(f"{both}: run backward() inside the same neighborhood()")
