"""Declared limits of dense kernels: a refusal prints the number that was checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from attn_dispatch.kernels.contract import Refusal, refuse_device, refuse_dropout, refuse_dtype, refuse_ranks
from attn_dispatch.machine.devices import KNOWN
from attn_dispatch.private import of_torch
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.torch_settings import current_flash

Capability = tuple[int, int]

ANY: Capability = (0, 0)  #: any device, or devices without a compute capability
HALF = (torch.float16, torch.bfloat16)
LARGEST_GRID = 65535  #: CUDA blocks along the second and third axis of a grid


def lacking(name: str) -> str:
    """The name of one of PyTorch's ops where this PyTorch does not have it."""
    return "" if of_torch(f"torch:ops.aten.{name}", None) else name


class Gap(NamedTuple):
    """Head_dims above `above`, up to `upto`, that have no backward pass on some compute capabilities.

    Args:
        on: the lowest and the highest compute capability of each range.
    """

    above: int
    upto: int
    on: tuple[tuple[Capability, Capability], ...]


class Limits(NamedTuple):
    """The limits of one kernel on one type of device.

    Args:
        device: the device type; "": any that is not `KNOWN`.
        dtypes: supported dtypes, each with its lowest compute capability.
        highest: the newest supported compute capability.
        head_dim: the largest, in elements.
        least_head_dim: the smallest.
        gap: head_dims without a backward pass on some devices.
        backward_multiple: of which head_dims of a backward pass are multiples.
        grad_lse: whether its backward pass takes a gradient of lse; others need one more column of head_dim.
        repeatable_head_dim: the largest with a bitwise deterministic backward pass; 0: none.
        lse: whether it returns lse.
        masks: whether it supports `seq_lens` and `key_mask`.
        softcap: whether it caps scores, of a backend that does.
        dropout: whether it drops weights.
        fewest_keys: the fewest keys of one call.
        most_rows: the most batch rows of one call; each segment counts as a row.
        platforms: supported values of `sys.platform`; empty: all.
        rocm: whether PyTorch builds for ROCm are supported.
        instead: of PyTorch's flash kernel, the limits of what may take its place, by `Problem.flash_kernel`; None: of
            another kernel.
        lacks: what it calls and this PyTorch does not have.
    """

    device: str
    dtypes: Mapping[torch.dtype, Capability]
    highest: Capability | None = None
    head_dim: int | None = None
    least_head_dim: int = 1
    gap: Gap | None = None
    backward_multiple: int = 1
    grad_lse: bool = False
    repeatable_head_dim: int | None = None
    lse: bool = True
    masks: bool = False
    softcap: bool = True
    dropout: bool = False
    fewest_keys: int = 1
    most_rows: int | None = None
    platforms: tuple[str, ...] = ()
    rocm: bool = False
    instead: Mapping[str, Limits] | None = None
    lacks: str = ""

    def refusals(self, problem: Problem) -> list[Refusal]:
        """Every limit that a problem exceeds, except those on pieces of its pattern (see `piece_refusals`)."""
        if self.instead is not None and problem.device.type == "cuda" and problem.dtype in self.dtypes:
            active, asked = current_flash() or "", problem.flash_kernel
            if active or asked:
                return self._replaced(problem, active, asked)
        found = refuse_ranks(problem) + ([] if self.dropout else refuse_dropout(problem))
        found += self._platform() + self._device(problem)
        found += refuse_dtype(problem, self.dtypes) + self._head_dim(problem) + self._determinism(problem)
        if problem.masked and not self.masks:
            found.append(Refusal("mask", "takes no mask, which seq_lens and key_mask need"))
        if problem.return_lse and not self.lse:
            found.append(Refusal("lse", f"returns no lse on {problem.device.type}"))
        if problem.dropout_p and self.dropout and self._column(problem):
            found.append(Refusal("dropout", "has no gradient of lse with dropout"))
        if problem.softcap and not self.softcap:
            found.append(Refusal("scores", "does not compute softcap"))
        return found

    def piece_refusals(self, keys: int, rows: int) -> list[Refusal]:
        """Exceeded limits on one kernel call, for the fewest keys and the most batch rows of any call in a plan."""
        found = []
        if keys < self.fewest_keys:
            found.append(Refusal("keys", f"takes {self.fewest_keys} keys or more, a part of the pattern has {keys}"))
        if self.most_rows is not None and rows > self.most_rows:
            text = f"takes {self.most_rows} batch rows at once, the pattern's segments make {rows}"
            found.append(Refusal("batch", text))
        return found

    def _replaced(self, problem: Problem, active: str, asked: str) -> list[Refusal]:
        other = (self.instead or {}).get(active)
        if active != asked:
            own = "PyTorch's own"
            return [Refusal("flash_kernel", f"is {active or own} in this process, not {asked or own}")]
        if other is None:
            return [Refusal("flash_kernel", f"is replaced by {active} in PyTorch, which the backend flash may run")]
        return [refusal._replace(text=f"{active} {refusal.text}") for refusal in other.refusals(problem)]

    def _platform(self) -> list[Refusal]:
        if self.lacks:
            return [Refusal("release", f"calls {self.lacks}, which torch {torch.__version__} does not have")]
        if not self.platforms or sys.platform in self.platforms:
            return []
        return [Refusal("platform", f"runs on {', '.join(self.platforms)}, not {sys.platform}")]

    def _device(self, problem: Problem) -> list[Refusal]:
        if not self.device and problem.device.type not in KNOWN:
            return []
        found = refuse_device(problem, (self.device or "other devices",))
        if found or self.device != "cuda":
            return found
        if torch.version.hip is not None:
            text = f"is not measured on ROCm, and this PyTorch has ROCm {torch.version.hip}"
            return [] if self.rocm else [Refusal("platform", text)]
        return self._capability(problem)

    def _capability(self, problem: Problem) -> list[Refusal]:
        has = capability(problem.device)
        if has is None:
            return [Refusal("device", f"{problem.device} is not there")]
        lowest = min(self.dtypes.values())
        needed = max(lowest, self.dtypes.get(problem.dtype, ANY))
        what = "" if needed == lowest else f" for {str(problem.dtype).removeprefix('torch.')}"
        if has < needed:
            text = f"needs compute capability {dotted(needed)} or higher{what}, {problem.device} has {dotted(has)}"
            return [Refusal("capability", text)]
        if self.highest is not None and has > self.highest:
            text = f"needs compute capability {dotted(self.highest)} or lower, {problem.device} has {dotted(has)}"
            return [Refusal("capability", text)]
        return []

    def _head_dim(self, problem: Problem) -> list[Refusal]:
        if problem.head_dim < self.least_head_dim:
            return [Refusal("head_dim", f"takes a head_dim of {self.least_head_dim} or more, not {problem.head_dim}")]
        more = ", and one more for the gradient of lse" if self._column(problem) else ""
        if self.head_dim is not None and problem.head_dim + self._column(problem) > self.head_dim:
            return [Refusal("head_dim", f"takes a head_dim up to {self.head_dim}, not {problem.head_dim}{more}")]
        if problem.needs_grad and (problem.head_dim + self._column(problem)) % self.backward_multiple:
            text = f"has a backward pass for multiples of {self.backward_multiple}, not a head_dim of"
            return [Refusal("head_dim", f"{text} {problem.head_dim}{more}")]
        return self._in_gap(problem, more)

    def _column(self, problem: Problem) -> int:
        """1 where a gradient through lse needs one more column (see dense.with_lse_column)."""
        return int(problem.needs_grad and problem.return_lse and not self.grad_lse)

    def _in_gap(self, problem: Problem, more: str) -> list[Refusal]:
        has = capability(problem.device) if self.gap is not None and problem.needs_grad else None
        if self.gap is None or has is None or not any(low <= has <= high for low, high in self.gap.on):
            return []
        if not self.gap.above < problem.head_dim + self._column(problem) <= self.gap.upto:
            return []
        text = f"has no backward pass for a head_dim of {self.gap.above + 1} to {self.gap.upto} on compute capability"
        return [Refusal("head_dim", f"{text} {dotted(has)}, asked for {problem.head_dim}{more}")]

    def _determinism(self, problem: Problem) -> list[Refusal]:
        largest = self.repeatable_head_dim
        if not (problem.needs_grad and problem.deterministic) or largest is None:
            return []
        if problem.head_dim + self._column(problem) <= largest:
            return []
        where = f" past a head_dim of {largest}" if largest else ""
        return [Refusal("deterministic", f"has no deterministic backward pass{where}")]


def capability(device: torch.device) -> Capability | None:
    """The compute capability of a CUDA device, or None if it does not exist. AMD's numbers are none."""
    try:
        return None if torch.version.hip is not None else torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError):  # PyTorch's own checks raise either
        return None


def dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
