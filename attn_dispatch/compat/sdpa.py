"""PyTorch's scaled_dot_product_attention by attend(), and in its place."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from attn_dispatch import process_state
from attn_dispatch.compat.names import attend_as, check_axes
from attn_dispatch.errors import InvalidInput, NoBackend, NotDecided
from attn_dispatch.machine.devices import KNOWN
from attn_dispatch.spec import tracing
from attn_dispatch.spec.checks import boolean

_attend = attend_as(q="query", k="key", v="value", bias="attn_mask", key_mask="attn_mask")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention: `is_causal` aligns the first query with the first key.

    Args:
        query: [..., heads, q_len, head_dim]. key, value: [..., kv_heads, k_len, head_dim]; values may be wider or
            narrower.
        attn_mask: bool, True for keys that are seen, or floating point, added to the scores; broadcastable to
            [..., heads, q_len, k_len]. A bool mask about keys alone becomes a key mask, others a bias. Or what
            torch.nn.attention.bias.causal_upper_left and causal_lower_right return.
        enable_gqa: whether kv_heads may be fewer than heads.

    Raises:
        InvalidInput: an argument is wrong, or asks for what attend() has not.
    """
    check_axes(range(2, 65), "[..., heads, len, head_dim]", query=query, key=key, value=value)
    boolean("is_causal", is_causal)
    boolean("enable_gqa", enable_gqa)
    if attn_mask is not None and is_causal:
        raise InvalidInput("give attn_mask or is_causal, not both")
    batch, heads = _leading(query, key, value, enable_gqa)
    q, k, v = (_four_axes(x, batch, n) for x, n in zip((query, key, value), heads))
    more: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "layout": "bhnd"}
    lengths, ends_meet = (q.shape[2], k.shape[2]), False
    if isinstance(attn_mask, CausalBias):
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != lengths:
            made_for = [attn_mask.seq_len_q, attn_mask.seq_len_kv]
            raise InvalidInput(f"attn_mask is for {made_for} queries and keys, there are {list(lengths)}")
        is_causal, ends_meet = True, attn_mask.variant == CausalVariant.LOWER_RIGHT
    elif attn_mask is not None:
        more |= mask_arguments(attn_mask, batch, q, k)
    if is_causal and lengths[0] != lengths[1] and not ends_meet:
        more["alignment"] = "upper_left"
    # Three axes of an empty batch are no heads: attend() knows no such problem, PyTorch's result is empty.
    out = _attend(q, k, v, is_causal=is_causal, **more) if q.shape[1] else q @ k.mT @ v
    axes = max(x.ndim for x in (query, key, value))
    return out if axes == 4 else out.reshape(*batch, *out.shape[1 if axes > 2 else 2 :])


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[torch.Size, tuple[int, int, int]]:
    """The axes before the heads, broadcast; and the heads that q, k and v have then. One head of keys serves all."""
    tensors = query, key, value
    own, *others = [x.shape[-3:-2] if x.ndim > 2 else torch.Size([1]) for x in tensors]
    try:
        batch, (kv,) = _broadcast(*(x.shape[:-3] for x in tensors)), _broadcast(*others)
    except RuntimeError:
        shapes = ", ".join(str(list(x.shape)) for x in tensors)
        raise InvalidInput(f"query, key and value must have axes that can be broadcast, got {shapes}") from None
    heads = kv if own[0] == 1 and not enable_gqa else own[0]
    if not enable_gqa and heads != kv and kv != 1:
        raise InvalidInput(f"enable_gqa must be True where heads differ, got {heads} and {kv}")
    return batch, (heads, kv, kv)


def _broadcast(*shapes: torch.Size) -> torch.Size:
    if all(each == shapes[0] for each in shapes):  # torch's function takes as long as a small attention
        return shapes[0]
    return torch.broadcast_shapes(*shapes)  # type: ignore[no-any-return, no-untyped-call]


def _four_axes(x: Tensor, batch: torch.Size, heads: int) -> Tensor:
    """x as [batch, heads, len, head_dim]."""
    if x.ndim == 4 and x.shape[:2] == (*batch, heads):
        return x
    whole = x.expand(*batch, heads, *x.shape[-2:])
    return whole.reshape(math.prod(batch), *whole.shape[-3:])


def mask_arguments(mask: object, batch: torch.Size, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """`key_mask` or `bias`. Raises InvalidInput."""
    if isinstance(mask, CausalBias):
        raise InvalidInput("attn_mask must be a plain tensor, got a CausalBias: give is_causal")
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(f"attn_mask must be a bool or floating-point tensor, got {got}")
    whole = (*batch, q.shape[1], q.shape[2], k.shape[2])
    missing = len(whole) - mask.ndim
    if missing < 0 or any(size not in (1, most) for size, most in zip(mask.shape, whole[missing:])):
        raise InvalidInput(f"attn_mask must be broadcastable to {list(whole)}, got {list(mask.shape)}")
    wide = mask.reshape((1,) * missing + mask.shape)
    rows = 1 if all(size == 1 for size in wide.shape[:-3]) else math.prod(batch)
    if rows > 1:
        wide = wide.expand(*batch, *wide.shape[-3:])
    wide = wide.reshape(rows, *wide.shape[-3:])
    if mask.dtype == torch.bool and wide.shape[1:3] == (1, 1):
        return {"key_mask": wide[:, 0, 0].expand(len(q), k.shape[2])}
    if mask.dtype == torch.bool:
        wide = torch.zeros_like(wide, dtype=q.dtype).masked_fill(~wide, -math.inf)
    return {"bias": wide.expand(-1, -1, q.shape[2], k.shape[2])}


@dataclass
class Replaced:
    """What became of calls: how many went to attend(), and how many of the others for which reason."""

    routed: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        rest = "".join(f"\n{count} left to PyTorch: {reason}" for reason, count in self.left.most_common())
        return f"{self.routed} call{'s' * (self.routed != 1)} by attend(){rest}"


@contextmanager
def replacing_sdpa() -> Iterator[Replaced]:
    """Inside, calls of torch.nn.functional.scaled_dot_product_attention go to attend() where it takes them.

    with attn_dispatch.replacing_sdpa() as replaced:
        model(x)
    print(replaced)  # how many calls, and why others were left to PyTorch

    Of all threads; the context that was entered last counts. With gradient checkpointing backward() belongs inside, for
    it computes such calls anew. A name that a module imported before (`from torch.nn.functional import ...`) is not
    replaced. Compiled functions, nested tensors, DTensors, and calls inside torch's context_parallel keep PyTorch's;
    so do those with dropout, but on CPUs and CUDA.
    """
    global _original
    entered = Replaced(), tracing.context_parallel() is not None
    with _changing:
        if not _entered:
            _original = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = _replacement
        _entered.append(entered)
    try:
        yield entered[0]
    finally:
        with _changing:
            # By identity, and maybe not the last: another thread may have entered after this one.
            _entered[:] = [each for each in _entered if each is not entered]
            if not _entered:
                functional.scaled_dot_product_attention = _original


DROPOUT = "dropout_p > 0, for which attend() has the plain formula alone on this device"
_entered: list[tuple[Replaced, bool]] = []  #: contexts, and whether each was entered inside torch's context_parallel
_original: Any = functional.scaled_dot_product_attention  #: what `_replacement` stands for
_changing = process_state.lock()
_running = threading.local()


def _replacement(*args: Any, **more: Any) -> Any:
    # Empty in a call that began before another thread left the context.
    entered = [] if torch.compiler.is_compiling() or getattr(_running, "inside", False) else _entered[-1:]
    if not entered or entered[0][1] or any(map(tracing.is_dtensor, (*args, *more.values()))):
        return _by_torch(*args, **more)
    found, why = entered[0][0], DROPOUT
    drops = (more.get("dropout_p", args[4] if len(args) > 4 else 0) or 0) > 0
    query = more.get("query", *args[:1])
    if not drops or (isinstance(query, Tensor) and query.device.type in KNOWN):
        _running.inside = True
        try:
            result = scaled_dot_product_attention(*args, **more)
            with _changing:
                found.routed += 1
            return result
        except (InvalidInput, NoBackend, NotDecided) as error:
            why = str(error)
        finally:
            _running.inside = False
    with _changing:
        found.left[why] += 1
    return _by_torch(*args, **more)


def _by_torch(*args: Any, **more: Any) -> Any:
    """PyTorch's function, which knows a CausalBias by its own name alone: under another one it is a plain mask."""

    def plain(x: Any) -> Any:
        if not isinstance(x, CausalBias):
            return x
        first = 0 if x.variant == CausalVariant.UPPER_LEFT else x.seq_len_kv - x.seq_len_q
        query = args[0] if args else more["query"]
        return torch.ones(x.seq_len_q, x.seq_len_kv, dtype=torch.bool, device=query.device).tril(first)

    return _original(*map(plain, args), **{name: plain(x) for name, x in more.items()})
