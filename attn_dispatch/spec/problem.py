"""A `Problem`: the properties of a call that a backend's validity or speed can depend on, and nothing else.

Only `Problem.of` checks arguments; backends receive checked inputs.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import tracing
from attn_dispatch.spec.checks import integer
from attn_dispatch.spec.groups import key_of
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.reordered import Reordered
from attn_dispatch.spec.strides import is_stride_class, stride_class

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("bnhd", "bhnd")
PRECISIONS = ("highest", "high", "medium")
PATTERNS: dict[str, type[Pattern]] = {kind.__name__: kind for kind in (Dense, Window, Dilated, Neighborhood, Reordered)}
# torch.get_float32_matmul_precision without its Python wrapper: called on every hit.
_float32_matmul_precision: Callable[[], str] = getattr(
    torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision
)


@dataclass(frozen=True)
class Problem:
    """One attention call without its tensors: frozen, hashable; equal problems have the same decision.

    Lengths are in tokens, `head_dim` in elements. `pattern` is the simplest pattern with this meaning at these
    lengths. `dtype` is the compute dtype: under autocast, the autocast dtype. `strides` are the classes of the memory
    order of q, k and v (see `strides.stride_class`). `ranks` is the number of ranks that share the sequence; lengths
    are those of the whole sequence.
    """

    pattern: Pattern
    batch: int
    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    dropout_p: float = 0.0
    needs_grad: bool = False
    return_lse: bool = False
    has_seq_lens: bool = False
    has_key_mask: bool = False
    strides: tuple[str, str, str] = ("bnhd", "bnhd", "bnhd")
    deterministic: bool = False
    matmul_precision: str = "highest"
    ranks: int = 1
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        values = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Built again from its fields: hashes of strings differ between processes.
        return Problem, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern | None = None,
        *,
        segment_lengths: Any = None,
        dilation_rates: Any = None,
        is_causal: bool = False,
        seq_lens: Tensor | None = None,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        layout: str = "bnhd",
        return_lse: bool = False,
        first_head: int | None = None,
        all_heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> Problem:
        """Check a call and describe it. Arguments as for `attend`.

        Args:
            device: of a call on meta tensors; by default the CUDA device where available, else the CPU.

        Raises:
            InvalidInput: an argument is wrong; the message names it, its value and the allowed values.
        """
        if layout not in LAYOUTS:
            raise InvalidInput(f"layout must be one of {LAYOUTS}, got {layout!r}")
        tensors = {"q": q, "k": k, "v": v}
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        if layout == "bhnd":
            tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
        dtype = _dtype(tensors)
        where = _device(tensors, device)
        batch, q_len, heads, head_dim, k_len, kv_heads = _shapes(tensors)
        chosen = choose_pattern(pattern, segment_lengths, dilation_rates, is_causal)
        chosen.check(q_len, k_len)
        if first_head is not None or all_heads is not None:
            chosen = chosen.of_heads(*_share(first_head, all_heads, heads))
        _check_seq_lens(seq_lens, batch, q_len, k_len, q.device)
        _check_key_mask(key_mask, batch, k_len, q.device)
        default_scale = math.pow(head_dim, -0.5)
        return cls(
            pattern=chosen.simplify(q_len, k_len, heads),
            batch=batch,
            q_len=q_len,
            k_len=k_len,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=where,
            scale=default_scale if scale is None else _scale(scale),
            dropout_p=_dropout(dropout_p),
            needs_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()),
            return_lse=bool(return_lse),
            has_seq_lens=seq_lens is not None,
            has_key_mask=key_mask is not None,
            strides=_strides(tensors, dtype),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            matmul_precision=matmul_precision() if dtype == torch.float32 else "highest",
        )

    @property
    def default_scale(self) -> bool:
        return self.scale == math.pow(self.head_dim, -0.5)

    @property
    def masked(self) -> bool:
        """Whether a tensor hides keys: `seq_lens` or `key_mask`."""
        return self.has_seq_lens or self.has_key_mask

    @property
    def result_bytes(self) -> int:
        """Bytes of out, and of dq, dk and dv if gradients are needed."""
        q, kv = self.q_len * self.heads, self.k_len * self.kv_heads
        rows = (2 * q + 2 * kv) if self.needs_grad else q
        return self.batch * rows * self.head_dim * self.dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The problem in plain JSON values; `from_dict` reads it back."""
        plain: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        plain["pattern"] = self.pattern.to_dict()
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["device"] = self.device.type
        plain["strides"] = list(self.strides)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any], device: torch.device | str | None = None) -> Problem:
        """Read `to_dict` back.

        Raises:
            InvalidInput: a field is missing, unknown or of the wrong kind.
        """
        try:
            values = dict(plain)
            values["pattern"] = _pattern(values["pattern"])
            values["dtype"] = next(d for d in DTYPES if str(d) == f"torch.{values['dtype']}")
            values["device"] = normal_device(values["device"] if device is None else device)
            values["strides"] = tuple(values["strides"])
            problem = cls(**values)
            _check_fields(problem)
            problem.pattern.check(problem.q_len, problem.k_len)
        except InvalidInput:
            raise
        except Exception as error:
            raise InvalidInput(f"not a problem: {reprlib.repr(plain)} ({type(error).__name__}: {error})") from error
        return problem

    def key(self, silicon: str) -> str:
        """20 hexadecimal digits: the name of this problem's decision on this silicon, see `groups.key_of`."""
        return key_of(self.to_dict(), silicon)

    def __str__(self) -> str:
        kv = "" if (self.k_len, self.kv_heads) == (self.q_len, self.heads) else f" k, v [{self.k_len}, {self.kv_heads}]"
        parts = [
            f"[{self.batch}, {self.q_len}, {self.heads}, {self.head_dim}]{kv}",
            str(self.dtype).removeprefix("torch."),
            str(self.pattern),
            "forward + backward" if self.needs_grad else "forward",
        ]
        parts += ["seq_lens"] * self.has_seq_lens + ["key_mask"] * self.has_key_mask
        parts += ["lse"] * self.return_lse + ["deterministic"] * self.deterministic
        parts += [f"dropout {self.dropout_p:g}"] * (self.dropout_p > 0) + [f"ranks {self.ranks}"] * (self.ranks > 1)
        parts += ["scale given"] * (not self.default_scale)
        parts += [f"matmul {self.matmul_precision}"] * (self.matmul_precision != "highest")
        return "   ".join(parts)


def choose_pattern(pattern: object, segment_lengths: Any, dilation_rates: Any, is_causal: object) -> Pattern:
    """The pattern given by `attend`'s arguments: an object or the shorthands, not both."""
    if not isinstance(is_causal, bool):
        raise InvalidInput(f"is_causal must be True or False, got {is_causal!r}")
    if pattern is not None:
        if not isinstance(pattern, Pattern):
            raise InvalidInput(f"pattern must be one of {', '.join(PATTERNS)} or None, got {pattern!r}")
        if segment_lengths is not None or dilation_rates is not None or is_causal:
            raise InvalidInput("give pattern or the shorthands segment_lengths, dilation_rates, is_causal, not both")
        return pattern
    if (segment_lengths is None) != (dilation_rates is None):
        missing = "dilation_rates" if dilation_rates is None else "segment_lengths"
        raise InvalidInput(f"segment_lengths and dilation_rates go together, but {missing} is None")
    if segment_lengths is None:
        return Dense(is_causal)
    return Dilated(segment_lengths, dilation_rates, is_causal)


def _share(first_head: object, all_heads: object, heads: int) -> tuple[int, int]:
    """The first of q's heads among all, and their number."""
    if first_head is None or all_heads is None:
        missing = "all_heads" if all_heads is None else "first_head"
        raise InvalidInput(f"first_head and all_heads go together, but {missing} is None")
    first, total = integer("first_head", first_head, 0), integer("all_heads", all_heads, 1)
    if first + heads > total:
        raise InvalidInput(f"q holds heads {first} to {first + heads - 1}, but all_heads is {total}")
    return first, total


def normal_device(device: torch.device | str) -> torch.device:
    """The device with its index; `cuda` is the current CUDA device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def matmul_precision() -> str:
    """torch's float32 matmul precision, set by either of its two interfaces."""
    try:
        return _float32_matmul_precision()
    except RuntimeError:
        # Set by the newer interface, after which the older one raises.
        places: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
        kinds = {getattr(place, "fp32_precision", "ieee") for place in places}
        return "high" if kinds & {"tf32", "bf16"} else "highest"


def default_device() -> torch.device:
    return normal_device("cuda" if torch.cuda.is_available() else "cpu")


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidInput(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise InvalidInput(f"{name} must be a dense strided tensor, got layout {tensor.layout}")
    if tensor.ndim != 4:
        raise InvalidInput(
            f"{name} must have 4 axes, [batch, len, heads, head_dim] (or layout='bhnd'), got {list(tensor.shape)}"
        )
    if tensor.numel() == 0:
        raise InvalidInput(f"{name} must have at least one entry on every axis, got {list(tensor.shape)}")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The current autocast dtype on this device type, or None where autocast is off."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
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


def _device(tensors: Mapping[str, Tensor], device: torch.device | str | None) -> torch.device:
    seen = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(seen.values())) > 1:
        raise InvalidInput(f"q, k and v must be on one device, got {', '.join(str(d) for d in seen.values())}")
    if seen["q"].type == "meta":
        return default_device() if device is None else normal_device(device)
    if device is not None and normal_device(device) != normal_device(seen["q"]):
        raise InvalidInput(f"device {device} is only for meta tensors; q, k and v are on {seen['q']}")
    return normal_device(seen["q"])


def _shapes(tensors: Mapping[str, Tensor]) -> tuple[int, int, int, int, int, int]:
    q, k, v = (list(tensors[name].shape) for name in "qkv")
    if k != v:
        raise InvalidInput(f"k and v must have one shape, got {k} and {v} (as [batch, len, heads, head_dim])")
    if q[0] != k[0]:
        raise InvalidInput(f"q and k must have one batch size, got {q[0]} and {k[0]}")
    if q[3] != k[3]:
        raise InvalidInput(f"q and k must have one head_dim, got {q[3]} and {k[3]}")
    if q[2] % k[2]:
        raise InvalidInput(f"the heads of k and v must divide those of q, got {k[2]} and {q[2]}")
    return q[0], q[1], q[2], q[3], k[1], k[2]


def _check_fields(problem: Problem) -> None:
    """Check the fields of a problem from a file, as `of` checks arguments."""
    for name in ("batch", "q_len", "k_len", "heads", "kv_heads", "head_dim", "ranks"):
        value = getattr(problem, name)
        if type(value) is not int or value < 1:
            raise InvalidInput(f"{name} must be an integer >= 1, got {value!r}")
    if problem.heads % problem.kv_heads:
        raise InvalidInput(f"kv_heads must divide heads, got {problem.kv_heads} and {problem.heads}")
    for name in ("needs_grad", "return_lse", "has_seq_lens", "has_key_mask", "deterministic"):
        if type(getattr(problem, name)) is not bool:
            raise InvalidInput(f"{name} must be True or False, got {getattr(problem, name)!r}")
    if problem.has_seq_lens and problem.q_len != problem.k_len:
        raise InvalidInput(f"seq_lens needs q_len == k_len, got {problem.q_len} and {problem.k_len}")
    if len(problem.strides) != 3 or not all(map(is_stride_class, problem.strides)):
        raise InvalidInput(f"strides must be the stride classes of q, k and v, got {problem.strides!r}")
    if problem.matmul_precision not in PRECISIONS:
        raise InvalidInput(f"matmul_precision must be one of {PRECISIONS}, got {problem.matmul_precision!r}")
    _scale(problem.scale)
    _dropout(problem.dropout_p)


def _check_seq_lens(seq_lens: object, batch: int, q_len: int, k_len: int, device: torch.device) -> None:
    if seq_lens is None:
        return
    if not isinstance(seq_lens, Tensor) or seq_lens.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(f"seq_lens must be an int32 or int64 tensor, got {_kind(seq_lens)}")
    if list(seq_lens.shape) != [batch]:
        raise InvalidInput(f"seq_lens must have shape [batch] = [{batch}], got {list(seq_lens.shape)}")
    if seq_lens.device != device:
        raise InvalidInput(f"seq_lens must be on q's device {device}, got {seq_lens.device}")
    if q_len != k_len:
        raise InvalidInput(f"seq_lens needs q_len == k_len, got {q_len} and {k_len}; key_mask has no such limit")
    if not tracing.graphed(seq_lens):
        check_seq_lens_values(seq_lens, q_len)


def check_seq_lens_values(seq_lens: Tensor, q_len: int) -> None:
    """Check the values on every call, on the CPU only: reading them from a GPU would synchronize it."""
    if seq_lens.device.type == "cpu" and not 0 <= int(seq_lens.min()) <= int(seq_lens.max()) <= q_len:
        raise InvalidInput(f"seq_lens must lie in 0..{q_len}, got {seq_lens.tolist()}")


def check_sink(sink: object, q: Tensor, layout: str) -> None:
    """Raise InvalidInput unless a sink has one floating-point entry for each of q's heads, on its device."""
    if not isinstance(q, Tensor) or q.ndim != 4 or layout not in LAYOUTS:
        return  # what `of` raises for
    heads = q.shape[2 if layout == "bnhd" else 1]
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        raise InvalidInput(f"sink must be a floating-point tensor, got {_kind(sink)}")
    if list(sink.shape) != [heads] or sink.device != q.device:
        where = f"{list(sink.shape)} on {sink.device}"
        raise InvalidInput(f"sink must have shape [heads] = [{heads}] on {q.device}, got {where}")


def _check_key_mask(key_mask: object, batch: int, k_len: int, device: torch.device) -> None:
    if key_mask is None:
        return
    if not isinstance(key_mask, Tensor) or key_mask.dtype != torch.bool:
        raise InvalidInput(f"key_mask must be a bool tensor (True = may be seen), got {_kind(key_mask)}")
    if list(key_mask.shape) != [batch, k_len]:
        raise InvalidInput(f"key_mask must have shape [batch, k_len] = [{batch}, {k_len}], got {list(key_mask.shape)}")
    if key_mask.device != device:
        raise InvalidInput(f"key_mask must be on q's device {device}, got {key_mask.device}")


def _kind(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__


def _scale(scale: object) -> float:
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= sys.float_info.max:
        raise InvalidInput(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


def _dropout(dropout_p: object) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float) or not 0 <= dropout_p < 1:
        raise InvalidInput(f"dropout_p must be a number with 0 <= dropout_p < 1, got {dropout_p!r}")
    return float(dropout_p)


def _strides(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[str, str, str]:
    q, k, v = (stride_class(tuple(t.shape), t.stride(), dtype.itemsize) for t in tensors.values())
    return q, k, v


def _pattern(plain: Mapping[str, Any]) -> Pattern:
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in plain.items()}
    if "pattern" in values:  # inside Reordered
        values["pattern"] = _pattern(values["pattern"])
    return PATTERNS[values.pop("kind")](**values)
