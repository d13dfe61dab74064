"""A `Call`: what attend() was asked; its `Problem`: what of it a backend's validity or speed can depend on, no more.

Only `Problem.of` checks arguments; backends receive checked inputs.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.settings import asks_invariance
from attn_dispatch.spec.checks import boolean, choice, integer, number
from attn_dispatch.spec.data import Blocks, BlocksForm, DataPattern, Form, Ranges, RangesForm
from attn_dispatch.spec.groups import SCORE_TERMS, key_of
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.tensors import (
    DTYPES,
    LAYOUTS,
    check_alibi_slopes,
    check_bias,
    check_key_mask,
    check_seq_lens,
    check_tensor,
    common_device,
    common_dtype,
    common_shapes,
    is_stride_class,
    normal_device,
    stride_class,
)
from attn_dispatch.spec.torch_settings import current_flash, deterministic, matmul_precision
from attn_dispatch.text import where_true

LARGEST_SOFTCAP = 1e30  #: scores are float32 in most kernels
PRECISIONS = ("highest", "high", "medium")
CONTIGUOUS = ("bnhd", "bnhd", "bnhd")  #: stride classes of q, k and v (see `tensors.stride_class`)
_PLAIN = (Dense, Window, Dilated, Neighborhood, Reordered)
#: What a problem can hold, by name.
PATTERNS: dict[str, type[Pattern]] = {kind.__name__: kind for kind in (*_PLAIN, RangesForm, BlocksForm)}


class Call(NamedTuple):
    """The arguments of `attend`, by their names and with their defaults; not checked. `_replace` makes others of it.

    A tuple is made in a third of a frozen dataclass's time, and torch.compile can hand it on between graphs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern | None = None
    segment_lengths: Any = None
    dilation_rates: Any = None
    is_causal: bool = False
    seq_lens: Tensor | None = None
    key_mask: Tensor | None = None
    dropout_p: float = 0.0
    scale: float | None = None
    layout: str = "bnhd"
    backend: str | None = None
    order: str | None = None
    mesh: Any = None
    return_lse: bool = False
    documents: Tensor | None = None
    cu_seqlens: Tensor | None = None
    sink: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_lens: Tensor | None = None
    alignment: str = "lower_right"
    first_head: int | None = None
    all_heads: int | None = None

    def with_pattern(self, pattern: Pattern | None, **changes: Any) -> Call:
        """This call with another pattern in place of its own, or of its shorthands."""
        return self._replace(pattern=pattern, segment_lengths=None, dilation_rates=None, is_causal=False, **changes)

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def tokens_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as [batch, len, heads, head_dim], whatever the layout."""
        q, k, v = self.qkv
        return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) if self.layout == "bhnd" else (q, k, v)

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors that a backend takes besides q, k and v, by name."""
        found = {name: getattr(self, name) for name in ("seq_lens", "key_mask", "bias", "alibi_slopes")}
        return found | {"pattern_data": self.pattern.data} if isinstance(self.pattern, DataPattern) else found

    @property
    def packs(self) -> bool:
        """Whether rows hold several documents."""
        return self.documents is not None or self.cu_seqlens is not None

    def returned(self, out: Tensor, lse: Tensor | None) -> Any:
        """What `attend` returns: out [batch, len, heads, head_dim] in the call's layout, and lse if it is asked for."""
        out = out.transpose(1, 2) if self.layout == "bhnd" else out
        return (out, lse) if self.return_lse else out


#: Arguments that are no part of a problem: who computes it, and what makes several problems of a call.
BEYOND_A_PROBLEM = {"backend", "order", "mesh", "documents", "cu_seqlens", "sink", "key_lens", "alignment"}


@dataclass(frozen=True)
class Problem:
    """One attention call without its tensors: frozen, hashable; equal problems have the same decision.

    Lengths are in tokens, `head_dim` in elements. `pattern` is the simplest pattern with this meaning at these
    lengths. `dtype` is the compute dtype: under autocast, the autocast dtype. `strides` are the classes of the memory
    order of q, k and v (see `tensors.stride_class`). `ranks` is the number of ranks that share the sequence; lengths
    are those of the whole sequence. `softcap` is 0 for none; `bias` is (1 or batch, 1 or heads), the sizes of the
    bias's first axes, and () for none; `alibi_axes` is 1 for slopes [heads], 2 for [batch, heads], 0 for none.
    `flash_kernel` is what takes the place of PyTorch's flash kernel on CUDA, "" for nothing (`torch_settings`).
    `batch_invariant`: the bits of a row depend on nothing else that is computed (`settings.batch_invariant`).
    `is_document`: the rows are documents of packed rows; decisions are of classes of these (`shapes.measured_for`).
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
    strides: tuple[str, str, str] = CONTIGUOUS
    deterministic: bool = False
    matmul_precision: str = "highest"
    ranks: int = 1
    softcap: float = 0.0
    bias: tuple[int, ...] = ()
    bias_needs_grad: bool = False
    alibi_axes: int = 0
    flash_kernel: str = ""
    batch_invariant: bool = False
    is_document: bool = False
    given: Pattern | None = field(default=None, repr=False, compare=False)  #: the caller's pattern, for messages
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
        cls, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern | None = None, *,
        device: torch.device | str | None = None, **arguments: Any,
    ) -> Problem:  # fmt: skip
        """Check a call and describe it. Arguments as for `attend`, of which `BEYOND_A_PROBLEM` are not taken.

        Args:
            device: of a call on meta tensors; by default the CUDA device where available, else the CPU.

        Raises:
            InvalidInput: an argument is wrong; the message names it, its value and the allowed values.
        """
        if unknown := arguments.keys() - (set(Call._fields) - BEYOND_A_PROBLEM):
            raise TypeError(f"of() got an unexpected keyword argument {min(unknown)!r}")
        return cls.of_call(Call(q, k, v, pattern, **arguments), device)

    @classmethod
    def of_call(cls, call: Call, device: torch.device | str | None = None, *, may_be_empty: bool = False) -> Problem:
        """Check a call and describe it, whatever it says of `BEYOND_A_PROBLEM`; as `of`.

        Args:
            may_be_empty: whether there may be no rows or tokens: then the problem is only for its checks.
        """
        layout, bias, slopes = call.layout, call.bias, call.alibi_slopes
        if layout not in LAYOUTS:
            raise InvalidInput(f"layout must be one of {LAYOUTS}, got {layout!r}")
        tensors = {"q": call.q, "k": call.k, "v": call.v}
        for name, tensor in tensors.items():
            check_tensor(name, tensor, (0, layout.index("n")) if may_be_empty else ())
        if layout == "bhnd":
            tensors = {name: tensor.transpose(1, 2) for name, tensor in tensors.items()}
        dtype = common_dtype(tensors)
        where = common_device(tensors, device)
        batch, q_len, heads, head_dim, k_len, kv_heads = common_shapes(tensors)
        chosen = given = choose_pattern(call)
        if isinstance(chosen, DataPattern):
            chosen.check_call(call.q.device, batch, q_len, k_len, heads, kv_heads)
            chosen = given = chosen.form(k_len, heads, kv_heads)
        else:
            chosen.check(q_len, k_len)
        if call.first_head is not None or call.all_heads is not None:
            chosen = chosen.of_heads(*_share(call.first_head, call.all_heads, heads))
        check_seq_lens(call.seq_lens, batch, q_len, k_len, call.q.device)
        check_key_mask(call.key_mask, batch, k_len, call.q.device)
        check_bias(bias, (batch, heads, q_len, k_len), call.q.device)
        check_alibi_slopes(slopes, batch, heads, call.q.device)
        if slopes is not None and isinstance(chosen, Reordered):
            raise InvalidInput("alibi_slopes count places in the sequence: give tokens in natural order, not Reordered")
        boolean("return_lse", call.return_lse)
        default_scale = math.pow(head_dim, -0.5)
        strides = {name: stride_class(tuple(x.shape), x.stride(), dtype.itemsize) for name, x in tensors.items()}
        sizes = batch, q_len, k_len, heads, kv_heads, head_dim
        # Without its sinks a window is one run of keys, which are added in another order.
        whole = asks_invariance() and getattr(chosen, "sinks", 0) > 0
        simplest = chosen if whole else chosen.simplify(max(1, q_len), max(1, k_len), heads)
        return cls(
            simplest,
            *sizes,
            dtype,
            where,
            default_scale if call.scale is None else _scale(call.scale),
            given=given,
            dropout_p=dropout(call.dropout_p),
            needs_grad=torch.is_grad_enabled()
            and (any(t.requires_grad for t in tensors.values()) or (bias is not None and bias.requires_grad)),
            return_lse=call.return_lse,
            has_seq_lens=call.seq_lens is not None,
            has_key_mask=call.key_mask is not None,
            strides=(strides["q"], strides["k"], strides["v"]),
            deterministic=deterministic(),
            matmul_precision=matmul_precision() if dtype == torch.float32 else "highest",
            softcap=_softcap(call.softcap),
            bias=() if bias is None else (bias.shape[0], bias.shape[1]),
            bias_needs_grad=bias is not None and torch.is_grad_enabled() and bias.requires_grad,
            alibi_axes=0 if slopes is None else slopes.ndim,
            flash_kernel=(current_flash() or "") if where.type == "cuda" and dtype.itemsize == 2 else "",
            batch_invariant=asks_invariance(),
        )

    @property
    def default_scale(self) -> bool:
        return self.scale == math.pow(self.head_dim, -0.5)

    @property
    def as_given(self) -> str:
        """For messages: the caller's pattern, where it is not the simplest; else empty."""
        return "" if self.given in (None, self.pattern) else f", given as {self.given}"

    @property
    def masked(self) -> bool:
        """Whether a tensor hides keys: `seq_lens` or `key_mask`."""
        return self.has_seq_lens or self.has_key_mask

    @property
    def score_terms(self) -> tuple[str, ...]:
        """What the call does to the scores besides scaling, as `groups.SCORE_TERMS` names it."""
        return tuple(name for name, field in SCORE_TERMS.items() if getattr(self, field))

    @property
    def result_bytes(self) -> int:
        """Bytes of out, and of dq, dk and dv if gradients are needed."""
        q, kv = self.q_len * self.heads, self.k_len * self.kv_heads
        rows = (2 * q + 2 * kv) if self.needs_grad else q
        return self.batch * rows * self.head_dim * self.dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The problem in plain JSON values; `from_dict` reads it back."""
        plain: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        for name in (*SCORE_TERMS.values(), "flash_kernel", "batch_invariant"):
            if not plain[name]:
                del plain[name]  # so that the keys of other problems stay what they were
        del plain["is_document"]  # it is decided as others are
        plain["pattern"] = self.pattern.to_dict()
        plain["dtype"] = str(self.dtype).removeprefix("torch.")
        plain["device"] = self.device.type
        plain["strides"] = list(self.strides)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

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
            values["strides"], values["bias"] = tuple(values["strides"]), tuple(values.get("bias", ()))
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
        options = {"seq_lens": self.has_seq_lens, "key_mask": self.has_key_mask, "lse": self.return_lse}
        options |= {"deterministic": self.deterministic, "batch-invariant": self.batch_invariant}
        options |= {f"dropout {self.dropout_p:g}": self.dropout_p > 0}
        options |= {f"ranks {self.ranks}": self.ranks > 1, "scale given": not self.default_scale}
        options |= dict.fromkeys(self.score_terms, True)
        options |= {f"matmul {self.matmul_precision}": self.matmul_precision != "highest"}
        options |= {f"PyTorch's flash kernel {self.flash_kernel}": self.flash_kernel != ""}
        return "   ".join([*parts, *where_true(options)])


def choose_pattern(call: Call) -> Pattern:
    """The pattern given by a call's arguments: an object or the shorthands, not both."""
    boolean("is_causal", call.is_causal)
    shorthands = {name: getattr(call, name) for name in ("segment_lengths", "dilation_rates")}
    if call.pattern is not None:
        if not isinstance(call.pattern, Pattern) or isinstance(call.pattern, Form):
            names = ", ".join(kind.__name__ for kind in (*_PLAIN, Ranges, Blocks))
            raise InvalidInput(f"pattern must be one of {names} or None, got {call.pattern!r}")
        if call.is_causal or any(each is not None for each in shorthands.values()):
            raise InvalidInput("give pattern or the shorthands segment_lengths, dilation_rates, is_causal, not both")
        return call.pattern
    missing = [name for name, each in shorthands.items() if each is None]
    if len(missing) == 1:
        raise InvalidInput(f"segment_lengths and dilation_rates go together, but {missing[0]} is None")
    return Dense(call.is_causal) if missing else Dilated(call.segment_lengths, call.dilation_rates, call.is_causal)


def _share(first_head: object, all_heads: object, heads: int) -> tuple[int, int]:
    """The first of q's heads among all, and their number."""
    if first_head is None or all_heads is None:
        missing = "all_heads" if all_heads is None else "first_head"
        raise InvalidInput(f"first_head and all_heads go together, but {missing} is None")
    first, total = integer("first_head", first_head, 0), integer("all_heads", all_heads, 1)
    if first + heads > total:
        raise InvalidInput(f"q holds heads {first} to {first + heads - 1}, but all_heads is {total}")
    return first, total


def _check_fields(problem: Problem) -> None:
    """Check the fields of a problem from a file, as `of` checks arguments."""
    for name in ("batch", "q_len", "k_len", "heads", "kv_heads", "head_dim", "ranks"):
        integer(name, getattr(problem, name), 1)
    if problem.heads % problem.kv_heads:
        raise InvalidInput(f"kv_heads must divide heads, got {problem.kv_heads} and {problem.heads}")
    flags = "needs_grad", "return_lse", "has_seq_lens", "has_key_mask", "deterministic", "bias_needs_grad"
    for name in (*flags, "batch_invariant"):
        boolean(name, getattr(problem, name))
    if problem.has_seq_lens and problem.q_len != problem.k_len:
        raise InvalidInput(f"seq_lens needs q_len == k_len, got {problem.q_len} and {problem.k_len}")
    if len(problem.strides) != 3 or not all(map(is_stride_class, problem.strides)):
        raise InvalidInput(f"strides must be the stride classes of q, k and v, got {problem.strides!r}")
    choice("matmul_precision", problem.matmul_precision, PRECISIONS)
    if not isinstance(problem.flash_kernel, str):
        raise InvalidInput(f"flash_kernel must be a name or empty, got {problem.flash_kernel!r}")
    _scale(problem.scale)
    dropout(problem.dropout_p)
    if problem.ranks > 1 and problem.score_terms:
        raise InvalidInput(f"over {problem.ranks} ranks scores are only scaled, got {', '.join(problem.score_terms)}")
    _softcap(problem.softcap or None)
    sizes = ((1, problem.batch), (1, problem.heads))
    if problem.bias and not (len(problem.bias) == 2 and all(x in allowed for x, allowed in zip(problem.bias, sizes))):
        raise InvalidInput(f"bias must be the sizes (1 or batch, 1 or heads) or empty, got {problem.bias!r}")
    if problem.alibi_axes not in (0, 1, 2) or (problem.bias_needs_grad and not (problem.bias and problem.needs_grad)):
        raise InvalidInput(f"alibi_axes must be 0, 1 or 2, and bias_needs_grad go with bias, got {problem}")


def _scale(scale: object) -> float:
    return number("scale", scale, lambda x: abs(x) <= sys.float_info.max, "a finite number or None")


def _softcap(softcap: object) -> float:
    kind = f"a number > 0, {LARGEST_SOFTCAP:g} at most, or None"
    return 0.0 if softcap is None else number("softcap", softcap, lambda x: 0 < x <= LARGEST_SOFTCAP, kind)


def dropout(dropout_p: object) -> float:
    """`dropout_p`, checked."""
    return number("dropout_p", dropout_p, lambda p: 0 <= p < 1, "a number with 0 <= dropout_p < 1")


def _pattern(plain: Mapping[str, Any]) -> Pattern:
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in plain.items()}
    for name in values.keys() & {"pattern", "within"}:  # inside Reordered and Blocks
        values[name] = _pattern(values[name])
    return PATTERNS[values.pop("kind")](**values)
