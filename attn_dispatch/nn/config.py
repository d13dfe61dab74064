"""The settings of all modules here, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from functools import partial
from typing import Any

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.checks import boolean, choice, integer, number
from attn_dispatch.spec.pattern import Dilated

SPELLINGS = {"dim": "embed_dim", "heads": "num_heads", "kv_heads": "num_kv_heads"}
ACTIVATIONS = ("gelu", "relu", "silu")


@dataclass(frozen=True, slots=True, init=False)
class AttentionConfig:
    """What an attention module or a LongNet layer is made from. Give fields by keyword, in either spelling.

    Args:
        embed_dim (or dim): features of a token; num_heads divides it.
        num_heads (or heads): heads of the queries.
        num_kv_heads (or kv_heads): heads of keys and values, which divide num_heads; None: as many, and
            `kv_heads` gives the number.
        bias: the projections have biases.
        segment_lengths, dilation_rates, offsets: of `Dilated`; without them attention is dense.
        is_causal: a query sees no later key.
        attention_dropout: probability of dropping an attention weight, in training.
        rotary_base: base of rotary position embeddings of queries and keys, such as 10000.0; None for none.
        sub_norm: LayerNorm before the output projection of `DilatedAttention`, and before that of a feed-forward
            network.
        norm_eps: epsilon of every LayerNorm.
        ffn_dim: hidden features of a feed-forward network; `4 * embed_dim` by default.
        activation: of a feed-forward network: "gelu", "relu" or "silu".
        num_layers: layers of the model, for the initial values and for drop_path_rate.
        dropout: of what a layer adds to its input. activation_dropout: after the activation.
        drop_path_rate: probability with which the last layer adds nothing for a sample, in training; it grows from 0 at
            the first layer in equal steps.
        cross_attention: `LongNetDecoderLayer` also attends to the results of an encoder.
        like_torchscale: compute what torchscale computes, which differs from `Dilated` where a segment length is not a
            multiple of its rate, or tokens not of the segment length; offsets are "block" then.

    Raises:
        InvalidInput: a field is missing, unknown, out of range, or contradicts another.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    bias: bool = True
    segment_lengths: tuple[int, ...] | None = None
    dilation_rates: tuple[int, ...] | None = None
    offsets: str | None = None
    is_causal: bool = False
    attention_dropout: float = 0.0
    rotary_base: float | None = None
    sub_norm: bool = True
    norm_eps: float = 1e-5
    ffn_dim: int | None = None
    activation: str = "gelu"
    num_layers: int = 1
    dropout: float = 0.0
    activation_dropout: float = 0.0
    drop_path_rate: float = 0.0
    like_torchscale: bool = False
    cross_attention: bool = False

    def __init__(self, **given: Any) -> None:
        values = _one_spelling(given)
        known = {field.name: field.default for field in fields(AttentionConfig)}
        for name in values.keys() - known.keys():
            near = get_close_matches(name, [*known, *SPELLINGS], 1)
            hint = f": did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise InvalidInput(f"unknown field {name}{hint}")
        spelled = {field: f"{field} (or {other})" for other, field in SPELLINGS.items()}
        missing = [spelled[name] for name, default in known.items() if default is MISSING and values.get(name) is None]
        if missing:
            raise InvalidInput(f"missing: {' and '.join(missing)}")
        for name, value in {**known, **values}.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        put = partial(object.__setattr__, self)
        if self.ffn_dim is None:
            put("ffn_dim", 4 * integer("embed_dim", self.embed_dim, 1))
        for name in ("embed_dim", "num_heads", "ffn_dim", "num_layers"):
            put(name, integer(name, getattr(self, name), 1))
        if self.num_kv_heads is not None:
            kv_heads = integer("num_kv_heads", self.num_kv_heads, 1)
            # None, so that these follow where num_heads is replaced.
            put("num_kv_heads", None if kv_heads == self.num_heads else kv_heads)
        for name in ("bias", "is_causal", "sub_norm", "like_torchscale", "cross_attention"):
            boolean(name, getattr(self, name))
        for name in ("attention_dropout", "dropout", "activation_dropout", "drop_path_rate"):
            put(name, number(name, getattr(self, name), lambda p: 0 <= p < 1, "a number from 0 up to, but not, 1"))
        put("norm_eps", number("norm_eps", self.norm_eps, lambda eps: eps > 0, "a number above 0"))
        if (base := self.rotary_base) is not None:
            put("rotary_base", number("rotary_base", base, lambda base: base > 1, "a number above 1, or None"))
        choice("activation", self.activation, ACTIVATIONS)
        if self.embed_dim % self.num_heads:
            raise InvalidInput(f"embed_dim must be a multiple of num_heads, got {self.embed_dim} and {self.num_heads}")
        if self.num_heads % self.kv_heads:
            got = f"{self.num_heads} and {self.kv_heads}"
            raise InvalidInput(f"num_heads must be a multiple of num_kv_heads, got {got}")
        if self.rotary_base is not None and self.head_dim % 2:
            raise InvalidInput(f"rotary_base needs an even head_dim, embed_dim / num_heads is {self.head_dim}")
        if (self.segment_lengths is None) != (self.dilation_rates is None):
            lacks = "segment_lengths" if self.segment_lengths is None else "dilation_rates"
            raise InvalidInput(f"missing: {lacks}: segment_lengths and dilation_rates are given together")
        if self.segment_lengths is None:
            for name in ("offsets", "like_torchscale"):
                if getattr(self, name):
                    raise InvalidInput(f"{name} needs segment_lengths and dilation_rates, which are missing")
            return
        if self.like_torchscale and self.offsets == "mod":
            raise InvalidInput("like_torchscale contradicts offsets='mod': torchscale's are 'block'")
        if self.offsets is None:
            put("offsets", "block" if self.like_torchscale else "mod")
        pattern = self.dilated(self.is_causal)  # checks them
        assert pattern is not None
        put("segment_lengths", pattern.segment_lengths)
        put("dilation_rates", pattern.dilation_rates)

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.embed_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def gain(self) -> float:
        """Gain of the initial value and output projections and of the feed-forward network's.

        Source: Wang et al. 2022, Foundation Transformers (MAGNETO), figure 2: sqrt(log(2 layers)) with sub-LayerNorm,
        sqrt(log(3 layers)) in a decoder with cross-attention.
        """
        parts = 3 if self.cross_attention else 2
        return math.sqrt(math.log(parts * self.num_layers)) if self.sub_norm else 1.0

    def dilated(self, is_causal: bool) -> Dilated | None:
        """The dilated pattern, or None where attention is dense."""
        if self.segment_lengths is None or self.dilation_rates is None:
            return None
        offsets: Any = self.offsets
        return Dilated(self.segment_lengths, self.dilation_rates, is_causal, offsets)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` reads them."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionConfig:
        """The config of a dict such as `to_dict` gives, in either spelling."""
        return cls(**values)

    @classmethod
    def of(
        cls, first: AttentionConfig | int | None, given: Mapping[str, Any], unused: Collection[str] = ()
    ) -> AttentionConfig:
        """A module's first argument, a config or embed_dim, with the fields given by keyword, which go first.

        Args:
            unused: fields for other modules, which a config may have, but nobody gives to this one.
        """
        values = {name: value for name, value in given.items() if value is not None}
        for name in values:
            if name in unused:
                near = "; give attention_dropout" if name == "dropout" else ""
                raise InvalidInput(f"{name} has no effect in this module{near}")
        values = _one_spelling(values)
        if isinstance(first, AttentionConfig):
            return cls(**{**first.to_dict(), **values})
        if first is not None and values.setdefault("embed_dim", first) != first:
            raise InvalidInput(f"embed_dim is given twice, as {first!r} and by keyword")
        return cls(**values)


def _one_spelling(given: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(given)
    for other, field in SPELLINGS.items():
        if other not in values:
            continue
        value = values.pop(other)
        if values.setdefault(field, value) != value:
            raise InvalidInput(f"{other} and {field} are one field, got {value!r} and {values[field]!r}")
    return values
