"""The options that describe problems, shared by the commands that take them."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.text import where_true

if TYPE_CHECKING:
    import torch

    from attn_dispatch.spec.problem import Problem

#: Other names of dtypes, by torch and in short.
DTYPES = {
    "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp32": "float32", "f32": "float32", "float": "float32", "fp64": "float64", "f64": "float64", "double": "float64",
}  # fmt: skip
SUFFIXES = {"": 1, "k": 2**10, "m": 2**20}
SWITCH: dict[str, tuple[bool, ...]] = {"yes": (True,), "no": (False,), "both": (False, True)}
PATTERN = ("segments", "dilations", "grid", "window", "edges", "stride", "causal")
OPTIONS = ("shape", "lengths", *PATTERN, "dtype", "backward")


class Shape(NamedTuple):
    """The shape of q, and the number of heads of k and v."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int


DEFAULT = Shape(1, 0, 8, 8, 64)  #: where the options give only lengths


def add_options(parser: argparse.ArgumentParser, about: str = "") -> None:
    """Add the options that describe problems. Numbers may end in k (times 1024) or M (times 1024 * 1024).

    Args:
        about: more for `--help`.
    """
    text = "32k is 32768, 1M is 1048576. Lists give every combination."
    add = parser.add_argument_group("problems", f"{text} {about}".rstrip()).add_argument
    of_q = "batch, length, heads, head_dim of q; H/KV where k and v have fewer heads; may be repeated"
    add("--shape", metavar="B,N,H,D", type=shape, action="append", help=of_q)
    doubling = "lengths from A, doubling, up to B, or a list A,B,..; in place of N of each shape, or of 1,N,8,64"
    scales = "with --grid, it is scaled to about so many tokens"
    add("--lengths", metavar="A:B", type=lengths, help=f"{doubling}; {scales}")
    add_others(add)


def add_others(add: Callable[..., object]) -> None:
    """Add the options that describe all but shapes, by a parser's `add_argument`."""
    add("--segments", metavar="W,..", type=counts, help="dilated attention: tokens per segment of each branch")
    add("--dilations", metavar="R,..", type=counts, help="dilated attention: dilation rate of each branch")
    grid = "neighborhood attention: tokens per axis, 1 to 3 axes; sets the length"
    add("--grid", metavar="H,W", type=counts, help=grid)
    of_grid = "with --grid: width of the neighborhood, one number or one per axis"
    sliding = "LEFT,RIGHT of a sliding window, 'none' for no limit; LEFT alone means LEFT,0"
    sinks = "LEFT,RIGHT,SINKS adds the first keys"
    add("--window", metavar="W,..", type=window, help=f"{of_grid}; without: {sliding}; {sinks}")
    edges = "with --grid: 'clip' cuts windows at the border (default); 'shift' moves them inside, as NATTEN does"
    add("--edges", choices=("clip", "shift"), help=edges)
    stride = "with --edges shift: consecutive queries that share one window, one number or one per axis"
    add("--stride", metavar="S,..", type=counts, help=stride)
    switch: dict[str, Any] = {"nargs": "?", "const": "yes", "choices": tuple(SWITCH)}
    add("--causal", **switch, help="mask the keys after each query; 'both': with and without")
    names = "float16, bfloat16, float32, float64, or f16, bf16, f32, f64"
    usual = "by default float32 on a CPU, else what 'attn-dispatch doctor' advises"
    add("--dtype", metavar="T,..", type=dtypes, help=f"{names}; {usual}")
    add("--device", metavar="D", help="cpu, cuda:1, mps or another; by default a GPU where there is one")
    add("--backward", **switch, help="forward and backward together; 'both': with and without")


def given(args: argparse.Namespace) -> list[str]:
    """The used options that describe a problem; `--device` is not one of them."""
    return [f"--{name}" for name in OPTIONS if getattr(args, name) is not None]


def has_length(args: argparse.Namespace) -> bool:
    """Whether the options give a sequence length."""
    return bool(args.shape or args.lengths or args.grid)


def problems_of(args: argparse.Namespace) -> list[Problem]:
    """Every combination of the listed values, each problem once.

    Raises:
        InvalidInput: the options contradict each other, give no length, or describe no valid problem.
    """
    if not has_length(args):
        raise InvalidInput("give the length of the sequence: --shape B,N,H,D, --lengths A:B or --grid H,W")
    _check(args)
    import torch  # here, so that usage errors do not wait for torch

    from attn_dispatch.machine.hardware import dtype_advice
    from attn_dispatch.spec.shapes import problem_of

    device = device_of(args)
    names = args.dtype or ["float32" if device.type == "cpu" else dtype_advice(device).dtype]
    found: dict[Problem, None] = {}
    switches = [SWITCH[each or "no"] for each in (args.causal, args.backward)]
    for causal, name, size, backward in product(switches[0], names, _shapes(args), switches[1]):
        grid, length = args.grid, size.length
        if grid and args.lengths:
            grid = scaled(grid, length)
            length = math.prod(grid)
        wanted = (size.batch, length, size.heads, size.head_dim)
        pattern, dtype = _pattern(args, causal, grid), getattr(torch, name)
        found[problem_of(wanted, pattern, dtype, device, kv_heads=size.kv_heads, backward=backward)] = None
    return list(found)


def scaled(grid: Sequence[int], tokens: int) -> tuple[int, ...]:
    """A grid of about `tokens` tokens with about the same proportions."""
    factor = (tokens / math.prod(grid)) ** (1 / len(grid))
    return tuple(max(round(size * factor), 1) for size in grid)


def device_of(args: argparse.Namespace) -> torch.device:
    """The device of `--device`, or the default one. Raises InvalidInput if this machine does not have it."""
    from attn_dispatch.machine.devices import resolve
    from attn_dispatch.spec.tensors import default_device

    return default_device() if args.device is None else resolve(args.device)


def count(text: str) -> int:
    """An integer >= 1; with the suffix k, times 1024, with M, times 1024 * 1024."""
    match = re.fullmatch(r"([0-9]+)([kKmM]?)", text.strip())
    value = int(match[1]) * SUFFIXES[match[2].lower()] if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1 such as 4096 or 4k, got {text!r}")
    return value


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def size(text: str) -> int:
    """A number of bytes with its unit: KB, MB, GB, TB or KiB, MiB, GiB, TiB."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT])(i?)B", text.strip())
    value = int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1)) if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected bytes such as 8GiB (8 * 2**30) or 8GB (8 * 10**9), got {text!r}")
    return value


def shape(text: str) -> Shape:
    parts = text.split(",")
    if len(parts) != 4:
        raise argparse.ArgumentTypeError(f"expected batch,length,heads,head_dim such as 1,4096,8,64, got {text!r}")
    heads, grouped, kv_heads = parts[2].partition("/")
    return Shape(count(parts[0]), count(parts[1]), count(heads), count(kv_heads if grouped else heads), count(parts[3]))


class Lengths(tuple[int, ...]):
    """The lengths of A:B. `last` is B, which need not be one of them."""

    last: int


def lengths(text: str) -> tuple[int, ...]:
    if ":" not in text:
        return counts(text)
    first, last = (count(part) for part in text.split(":", 1))
    if first > last:
        raise argparse.ArgumentTypeError(f"expected A:B with A <= B, got {text!r}")
    found = Lengths(first << step for step in range((last // first).bit_length()))
    found.last = last
    return found


def window(text: str) -> tuple[int | None, ...]:
    sides = [part.strip().lower() for part in text.split(",")]
    return tuple(None if side in {"none", "-"} else 0 if side == "0" else count(side) for side in sides)


def dtypes(text: str) -> list[str]:
    names = [DTYPES.get(name, name) for name in text.lower().split(",")]
    for name in names:
        if name not in DTYPES.values():
            known = ", ".join(dict.fromkeys(DTYPES.values()))
            raise argparse.ArgumentTypeError(f"expected some of {known} (short: f16, bf16, f32, f64), got {name!r}")
    return names


def _shapes(args: argparse.Namespace) -> list[Shape]:
    bases: list[Shape] = args.shape or [DEFAULT]
    tokens = args.lengths or (None if args.shape else (math.prod(args.grid),))
    return bases if tokens is None else [base._replace(length=n) for base in bases for n in tokens]


def _check(args: argparse.Namespace) -> None:
    """Raise InvalidInput where the options of patterns contradict each other."""
    sliding = args.window and not args.grid
    wrong = {
        "--segments and --dilations go together": (args.segments is None) != (args.dilations is None),
        "--segments is one pattern, --grid and --window another: give one of them": (
            args.segments and (args.grid or args.window)
        ),
        "--grid needs --window, the width of the neighborhood": args.grid and not args.window,
        "--edges and --stride are for --grid, which is not given": (args.edges or args.stride) and not args.grid,
        "--window without --grid is LEFT,RIGHT,SINKS": sliding and len(args.window) > 3,
        "--causal is not for --window LEFT,RIGHT: RIGHT = 0 is causal": sliding and args.causal is not None,
    }
    for why in where_true(wrong):
        raise InvalidInput(why)


def _pattern(args: argparse.Namespace, causal: bool, grid: tuple[int, ...] | None) -> Pattern:
    if args.segments:
        return Dilated(args.segments, args.dilations, causal)
    if grid:
        return Neighborhood(grid, args.window, (1,), (causal,), args.edges or "clip", args.stride or (1,))
    return Window(*(*args.window, 0, 0)[:3]) if args.window else Dense(causal)
