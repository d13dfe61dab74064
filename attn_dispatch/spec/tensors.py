"""The tensors of a call: checks of their shapes, dtypes and devices; their memory order as a short name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import tracing

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS, MASK, FLOATING = "an int32 or int64 tensor", "a bool tensor (True = may be seen)", "a floating-point tensor"
KINDS: dict[str, Callable[[torch.dtype], bool]] = {
    INTEGERS: lambda dtype: dtype in (torch.int32, torch.int64),
    MASK: lambda dtype: dtype == torch.bool,
    FLOATING: lambda dtype: dtype.is_floating_point,
}  #: of tensors beside q, k and v
LAYOUTS = ("bnhd", "bhnd")
AXES = "bnhd"
NAME = re.compile(r"([bnhd]*)(?:\+gaps)?(?:\+unaligned)?(?:\+expanded:([bnhd]+))?")


def stride_class(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
    """Name the memory order of a [batch, len, heads, head_dim] tensor.

    The name lists the axes from slowest to fastest, without axes of size 1, whose stride has no effect: "bnhd" is
    contiguous, "bhnd" a transposed [batch, heads, len, head_dim]. Suffixes: "+gaps" (not dense, as in a packed qkv),
    "+unaligned" (some row does not start at a multiple of 16 bytes), "+expanded:h" (an axis of stride 0).
    """
    live = [axis for axis in range(4) if shape[axis] > 1]
    expanded = [axis for axis in live if strides[axis] == 0]
    order = sorted((axis for axis in live if strides[axis]), key=lambda axis: -strides[axis])
    name = "".join(AXES[axis] for axis in order)
    dense = 1
    for axis in reversed(order):
        if strides[axis] != dense:
            name += "+gaps"
            break
        dense *= shape[axis]
    if any(strides[axis] * itemsize % 16 for axis in live if axis != 3):
        name += "+unaligned"
    return name + (f"+expanded:{''.join(AXES[axis] for axis in expanded)}" if expanded else "")


def is_stride_class(name: object) -> bool:
    """Whether `stride_class` can return this name."""
    found = NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        return False
    axes = found[1] + (found[2] or "")
    return len(set(axes)) == len(axes)


def randn(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    """Unit-normal [batch, len, heads, head_dim] values in the given stride class, or in the nearest possible one.

    Those of a CPU generator are the same on every device; a generator of the device itself is much faster.
    """
    name, *flags = kind.split("+")
    expanded = next((flag.removeprefix("expanded:") for flag in flags if flag.startswith("expanded:")), "")
    order = [axis for axis in AXES if axis not in name] + list(name)
    sizes = {axis: 1 if axis in expanded else size for axis, size in zip(AXES, shape)}
    padded = [sizes[axis] for axis in order]
    step = 1
    if "gaps" in flags:
        # Pad to a multiple of 16 bytes, or by one entry more.
        per_16_bytes, past = 16 // dtype.itemsize, "unaligned" in flags
        if len(name) == 1 or (name[-1] != "d" and not past):
            # Unused entries after every entry: there is no row, or rows could not be aligned.
            step = per_16_bytes + past
        else:
            padded[-1] = (padded[-1] // per_16_bytes + 1) * per_16_bytes + past  # after every row
    base = torch.empty([*padded, step], dtype=dtype, device=device)[..., 0]
    for position, axis in enumerate(order):
        base = base.narrow(position, 0, sizes[axis])
    tensor = base.permute([order.index(axis) for axis in AXES])
    if generator.device.type == "cpu":
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float32))
    else:
        tensor.normal_(generator=generator)
    return tensor.expand(shape)


# --- checks: each raises InvalidInput with the argument, what it was and what it may be ---


def check_tensor(name: str, tensor: object, may_be_empty: tuple[int, ...] = ()) -> None:
    """Check a tensor on its own. `may_be_empty`: axes that may be empty."""
    if not isinstance(tensor, Tensor):
        raise InvalidInput(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    check_layout(name, tensor)
    if tensor.ndim != 4:
        axes = "[batch, len, heads, head_dim] (or layout='bhnd')"
        raise InvalidInput(f"{name} must have 4 axes, {axes}, got {list(tensor.shape)}")
    if tensor.numel() == 0 and not all(tensor.shape[axis] for axis in range(4) if axis not in may_be_empty):
        raise InvalidInput(f"{name} must have at least one entry on every axis, got {list(tensor.shape)}")


def check_layout(name: str, x: object) -> None:
    if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
        got = "a nested one" if x.is_nested else f"layout {x.layout}"
        raise InvalidInput(f"{name} must be a dense strided tensor, got {got}")


def common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    kind = tensors["q"].device.type
    cast = autocast_dtype(kind)
    seen = {name: tensor.dtype for name, tensor in tensors.items()}
    for name, dtype in seen.items():
        if dtype not in DTYPES:
            raise InvalidInput(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if cast is not None:
        # As in PyTorch's own attention: autocast does not cast float64.
        seen = {name: dtype if dtype == torch.float64 else cast for name, dtype in seen.items()}
    if len(set(seen.values())) > 1:
        raise InvalidInput(f"q, k and v must share one dtype, got {', '.join(str(d) for d in seen.values())}")
    return seen["q"]


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The current autocast dtype on this device type, or None where autocast is off."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast is off inside; nothing where it is so already, since a device may have none to turn off."""
    return nullcontext() if autocast_dtype(device_type) is None else torch.autocast(device_type, enabled=False)


def common_device(tensors: Mapping[str, Tensor], device: torch.device | str | None) -> torch.device:
    seen = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(seen.values())) > 1:
        raise InvalidInput(f"q, k and v must be on one device, got {', '.join(str(d) for d in seen.values())}")
    if seen["q"].type == "meta":
        return default_device() if device is None else normal_device(device)
    if device is not None and normal_device(device) != normal_device(seen["q"]):
        raise InvalidInput(f"device {device} is only for meta tensors; q, k and v are on {seen['q']}")
    return normal_device(seen["q"])


def normal_device(device: torch.device | str) -> torch.device:
    """The device with its index, which is that of the current one of its type where none is given."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type in ("cpu", "meta") or device.index is not None:
        return torch.device("cpu") if device.type == "cpu" else device
    return torch.empty(0, device=device).device


def default_device() -> torch.device:
    """torch's accelerator, where there is one, else the CPU."""
    other = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return normal_device("cuda" if torch.cuda.is_available() else other or "cpu")


def common_shapes(tensors: Mapping[str, Tensor]) -> tuple[int, int, int, int, int, int]:
    q, k, v = (list(tensors[name].shape) for name in "qkv")
    if q[3] != k[3]:
        raise InvalidInput(f"q and k must have one head_dim, got {q[3]} and {k[3]}")
    if k != v:
        raise InvalidInput(f"k and v must have one shape, got {k} and {v} (as [batch, len, heads, head_dim])")
    if q[0] != k[0]:
        raise InvalidInput(f"q and k must have one batch size, got {q[0]} and {k[0]}")
    if q[2] % k[2]:
        raise InvalidInput(f"the heads of k and v must divide those of q, got {k[2]} and {q[2]}")
    return q[0], q[1], q[2], q[3], k[1], k[2]


def _check(
    name: str, x: object, kind: str, shapes: Collection[tuple[int, ...]], shape: str, device: torch.device
) -> Tensor:
    """Check a tensor that goes with q; `kind` is one of `KINDS`, `shape` says what its shape may be."""
    if not isinstance(x, Tensor) or not KINDS[kind](x.dtype):
        raise InvalidInput(f"{name} must be {kind}, got {_kind(x)}")
    if tuple(x.shape) not in shapes:
        raise InvalidInput(f"{name} must have shape {shape}, got {list(x.shape)}")
    if x.device != device:
        raise InvalidInput(f"{name} must be on q's device {device}, got {x.device}")
    return x


def check_seq_lens(seq_lens: object, batch: int, q_len: int, k_len: int, device: torch.device) -> None:
    if seq_lens is None:
        return
    lens = _check("seq_lens", seq_lens, INTEGERS, [(batch,)], f"[batch] = [{batch}]", device)
    if q_len != k_len:
        raise InvalidInput(f"seq_lens needs q_len == k_len, got {q_len} and {k_len}; key_mask has no such limit")
    if not tracing.graphed(lens):
        check_seq_lens_values(lens, q_len)


def check_seq_lens_values(seq_lens: Tensor, q_len: int) -> None:
    """Check the values on every call, on the CPU only: reading them from a GPU would synchronize it.

    Those of examples that are mapped cannot be read.
    """
    if seq_lens.device.type != "cpu" or not seq_lens.numel() or tracing.is_mapped():
        return
    if not 0 <= int(seq_lens.min()) <= int(seq_lens.max()) <= q_len:
        raise InvalidInput(f"seq_lens must lie in 0..{q_len}, got {[int(n) for n in seq_lens]}")


def check_key_mask(key_mask: object, batch: int, k_len: int, device: torch.device) -> None:
    if key_mask is not None:
        allowed = f"[batch, k_len] = [{batch}, {k_len}]"
        _check("key_mask", key_mask, MASK, [(batch, k_len)], allowed, device)


def check_sink(sink: object, q: Tensor, layout: str) -> None:
    """Raise InvalidInput unless a sink has one floating-point entry for each of q's heads, on its device."""
    if not isinstance(q, Tensor) or q.ndim != 4 or layout not in LAYOUTS:
        return  # what `of` raises for
    heads = q.shape[layout.index("h")]
    _check("sink", sink, FLOATING, [(heads,)], f"[heads] = [{heads}]", q.device)


def check_bias(bias: object, shape: tuple[int, int, int, int], device: torch.device) -> None:
    """Check a bias against the shape [batch, heads, q_len, k_len] of the scores."""
    if bias is not None:
        batch, heads, *rest = shape
        allowed = f"[1 or batch, 1 or heads, q_len, k_len] = [1 or {batch}, 1 or {heads}, {rest[0]}, {rest[1]}]"
        shapes = [(rows, each, *rest) for rows in (1, batch) for each in (1, heads)]
        _check("bias", bias, FLOATING, shapes, allowed, device)


def check_alibi_slopes(slopes: object, batch: int, heads: int, device: torch.device) -> None:
    if slopes is None:
        return
    allowed, shapes = f"[heads] = [{heads}] or [batch, heads] = [{batch}, {heads}]", [(heads,), (batch, heads)]
    found = _check("alibi_slopes", slopes, FLOATING, shapes, allowed, device)
    if found.requires_grad and torch.is_grad_enabled():
        how = "detach them, or give -slope * distance as bias, which gets one"
        raise InvalidInput(f"alibi_slopes get no gradient: {how}")


def _kind(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
