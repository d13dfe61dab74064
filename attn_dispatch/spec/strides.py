"""The memory order of a tensor as a short name, and random tensors with a given memory order."""

from __future__ import annotations

import re

import torch
from torch import Tensor

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
            step = (
                per_16_bytes + past
            )  # unused entries after every entry: there is no row, or rows could not be aligned
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
