"""Multi-head attention and dilated attention as modules: projections around one call of attend()."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.machine.devices import KNOWN
from attn_dispatch.nn.cache import KVCache
from attn_dispatch.nn.config import AttentionConfig
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern

#: Fields of a config that no attention module uses.
NOT_OF_ATTENTION = ("dropout", "ffn_dim", "activation", "activation_dropout", "drop_path_rate", "cross_attention")
#: Arguments of torch.nn.MultiheadAttention that have no counterpart here, with the values that ask for nothing.
NOT_TAKEN = {"add_bias_kv": (False,), "add_zero_attn": (False,), "kdim": (None,), "vdim": (None,)}


class _Attention(nn.Module):
    """What lies between the projections: rotary embeddings, the cache, the pattern and the call."""

    out_proj: nn.Linear
    batch_first = True

    def __init__(
        self, config: AttentionConfig, pattern: Pattern | None, order: str | None, mesh: object, backend: str | None
    ) -> None:
        super().__init__()
        if pattern is not None and (config.segment_lengths is not None or config.is_causal):
            given = "is_causal" if config.segment_lengths is None else "segment_lengths"
            raise InvalidInput(f"give pattern or {given}, not both: pattern is {pattern}")
        if pattern is not None and not isinstance(pattern, Pattern):
            raise InvalidInput(f"pattern must be a pattern of attn_dispatch or None, got {pattern!r}")
        if config.like_torchscale and (mesh is not None or order is not None):
            name, value = ("mesh", mesh) if mesh is not None else ("order", order)
            raise InvalidInput(f"like_torchscale takes no {name}, got {value!r}")
        self.config, self.order, self.mesh, self.backend = config, order, mesh, backend
        self.embed_dim, self.num_heads, self.head_dim = config.embed_dim, config.num_heads, config.head_dim
        self._given = pattern

    def pattern(self, is_causal: bool | None = None) -> Pattern:
        """What is attended to; `is_causal` replaces the config's.

        Raises:
            InvalidInput: is_causal, where the module was made from a pattern.
        """
        if self._given is not None:
            if is_causal:
                raise InvalidInput(f"is_causal needs a module made without pattern, which is {self._given}")
            return self._given
        causal = self.config.is_causal if is_causal is None else is_causal
        return self.config.dilated(causal) or Dense(causal)

    def extra_repr(self) -> str:
        return f"{self.config.embed_dim}, num_heads={self.config.num_heads}, pattern={self.pattern()}"

    def _inputs(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != self.config.embed_dim:
                axes = "[batch, len, embed_dim]" if self.batch_first else "[len, batch, embed_dim]"
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise InvalidInput(f"{name} must be {axes} with embed_dim {self.config.embed_dim}, got {got}")
        if cache is not None and not isinstance(cache, KVCache):
            raise InvalidInput(f"cache must be an attn_dispatch.nn.KVCache or None, got {type(cache).__name__}")
        if cache is not None and (key is not query or value is not query):
            raise InvalidInput("cache is for self-attention: key and value must be query, or None")
        return query, key, value

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, bias: Tensor | None,
        is_causal: bool | None, cache: KVCache | None, positions: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """out [batch, q_len, embed_dim] for q, k, v of whole tokens, [batch, len, features]."""
        config, pattern = self.config, self.pattern(is_causal)
        q, k, v = (torch.unflatten(x, 2, (-1, config.head_dim)) for x in (q, k, v))
        k_len = k.shape[1]
        if cache is not None:
            self._check_cache(pattern)
            k_len += len(cache)
        visible, added = _read(key_padding_mask, k.shape[0], k_len)
        if added is not None:
            bias = added.to(q.dtype)[:, None, None].expand(-1, -1, q.shape[1], -1) + (0.0 if bias is None else bias)
        if config.rotary_base is not None:
            places = self._positions(q, k, cache, positions)
            q, k = (rotated(x, places, config.rotary_base) for x in (q, k))
        elif positions is not None:
            raise InvalidInput("positions need rotary_base, which is None")
        if cache is not None:
            k, v = cache.joined(k, v, self)
        dropout_p = config.attention_dropout if self.training else 0.0
        if config.like_torchscale:
            assert isinstance(pattern, Dilated)
            if bias is not None:
                name = "attn_mask must be None" if added is None else "key_padding_mask must be bool, or 0 and -inf,"
                raise InvalidInput(f"{name} with like_torchscale")
            out = attend_like_torchscale(
                q, k, v, pattern, lengths=_lengths(visible), dropout_p=dropout_p, backend=self.backend
            )
        else:
            out = attend(
                q, k, v, pattern, key_mask=visible, bias=bias, dropout_p=dropout_p, backend=self.backend,
                order=self.order, mesh=self.mesh,
            )  # fmt: skip
        if cache is not None:
            cache.hold(k, v, self)  # not before: a call that raised may be made again
        return out.flatten(2)

    def _check_cache(self, pattern: Pattern) -> None:
        if self.mesh is not None or self.config.like_torchscale:
            raise InvalidInput(f"cache must be None {'over a mesh' if self.mesh is not None else 'like torchscale'}")
        if getattr(pattern, "right", None) != 0 and getattr(pattern, "is_causal", None) is not True:
            raise InvalidInput(f"cache needs causal Dense, Dilated or Window, got {pattern}: tokens see later ones")

    def _positions(self, q: Tensor, k: Tensor, cache: KVCache | None, positions: Tensor | None) -> Tensor:
        if q.shape[1] != k.shape[1]:
            raise InvalidInput(f"rotary_base needs query and key of one length, got {q.shape[1]} and {k.shape[1]}")
        if positions is None:
            if self.mesh is not None:
                raise InvalidInput("rotary_base over a mesh needs positions=shard_positions(length, mesh)")
            return torch.arange(q.shape[1], device=q.device) + (0 if cache is None else len(cache))
        if positions.shape not in ((q.shape[1],), tuple(q.shape[:2])) or positions.is_floating_point():
            what = f"integers [len] or [batch, len], len {q.shape[1]}, batch {q.shape[0]}"
            raise InvalidInput(f"positions must be {what}, got {positions.dtype} {list(positions.shape)}")
        return positions


class MultiheadAttention(_Attention):
    """torch.nn.MultiheadAttention by `attend`, with its parameters by its names: its state dict loads.

    Args:
        embed_dim: features of a token, or an `AttentionConfig`.
        num_heads, dropout, bias, **fields: as `AttentionConfig` describes them; dropout is attention_dropout.
            in_proj_weight has `embed_dim + 2 * num_kv_heads * head_dim` rows.
        batch_first: tensors are [batch, len, embed_dim], else [len, batch, embed_dim].
        pattern: what is attended to, instead of is_causal, segment_lengths and dilation_rates.
        order, mesh, backend: as `attend` takes them.

    in_proj_weight is drawn by xavier_uniform, out_proj.weight as torch.nn.Linear draws its own, and biases are 0:
    as in torch.nn.MultiheadAttention.

    Raises:
        InvalidInput: an argument is wrong, unknown, or asks for what is not supported.
    """

    # torch.nn.TransformerEncoderLayer would else compute attention itself, from the weights, in inference.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: AttentionConfig | int | None = None,
        num_heads: int | None = None,
        dropout: float | None = None,
        bias: bool | None = None,
        *,
        batch_first: bool = True,
        pattern: Pattern | None = None,
        order: str | None = None,
        mesh: object = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        for name in NOT_TAKEN.keys() & fields.keys():
            if fields.pop(name) not in NOT_TAKEN[name]:
                raise InvalidInput(f"{name} is not supported: it must be {NOT_TAKEN[name][0]}")
        given = {**fields, "num_heads": num_heads, "bias": bias}
        if dropout is not None and given.setdefault("attention_dropout", dropout) != dropout:
            got = f"{dropout} and {given['attention_dropout']}"
            raise InvalidInput(f"dropout and attention_dropout are one field here, got {got}")
        config = AttentionConfig.of(embed_dim, given, (*NOT_OF_ATTENTION, "sub_norm", "norm_eps", "num_layers"))
        if config.like_torchscale:
            raise InvalidInput("like_torchscale is for DilatedAttention")
        super().__init__(config, pattern, order, mesh, backend)
        self.batch_first = batch_first
        rows = config.embed_dim + 2 * config.kv_heads * config.head_dim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, config.embed_dim, device=device, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if config.bias else None
        self.out_proj = nn.Linear(config.embed_dim, config.embed_dim, config.bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values anew."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool | None = None,
        *,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attention of query over key and value.

        Args:
            query: [batch, q_len, embed_dim]. key: [batch, k_len, embed_dim], query by default. value: key by default.
            key_padding_mask: [batch, k_len] bool, True for keys to ignore, or floating point, added to the scores
                of all queries; with a cache, k_len counts its tokens too. If floating point, it is read on the
                host, except where it requires a gradient, or in a graph.
            need_weights: False; average_attn_weights has no effect without weights.
            attn_mask: [q_len, k_len] or [batch * heads, q_len, k_len]: bool, True for keys to ignore, or floating
                point, added to the scores.
            is_causal: the last query is aligned with the last key, also without attn_mask, and beside it; the
                config's by default.
            cache: holds the keys and values of earlier tokens; query then has the next ones. Needs a causal pattern.
            positions: [q_len] or [batch, q_len] integers for rotary embeddings; by default tokens are counted from
                0 on, those in the cache first.

        Returns:
            [batch, q_len, embed_dim], 0 before out_proj for a query without keys; and None for the weights.

        Raises:
            InvalidInput: an argument is wrong, or asks for what is not supported.
        """
        if need_weights:
            raise InvalidInput("need_weights must be False: attention weights are never built")
        q, k, v = self._projected(*self._inputs(query, key, value, cache))
        if not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k_len = k.shape[1] + (0 if cache is None else len(cache))
        bias = None if attn_mask is None else self._bias(attn_mask, q, k_len)
        out = self.out_proj(self._attend(q, k, v, key_padding_mask, bias, is_causal, cache, positions))
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        kv = self.config.kv_heads * self.config.head_dim
        sizes = [self.config.embed_dim, kv, kv]
        if key is query and value is query:
            return torch.split(functional.linear(query, self.in_proj_weight, self.in_proj_bias), sizes, -1)
        biases = (None,) * 3 if self.in_proj_bias is None else torch.split(self.in_proj_bias, sizes)
        weights = torch.split(self.in_proj_weight, sizes)
        return tuple(functional.linear(*each) for each in zip((query, key, value), weights, biases))

    def _bias(self, attn_mask: Tensor, q: Tensor, k_len: int) -> Tensor:
        batch, q_len, heads = q.shape[0], q.shape[1], self.config.num_heads
        if attn_mask.shape not in ((q_len, k_len), (batch * heads, q_len, k_len)):
            sizes = [q_len, k_len], [batch * heads, q_len, k_len]
            what = f"[q_len, k_len] {sizes[0]} or [batch * heads, q_len, k_len] {sizes[1]}"
            raise InvalidInput(f"attn_mask must be {what}, got {list(attn_mask.shape)}")
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask, -math.inf)
        return attn_mask.reshape(-1, heads if attn_mask.ndim == 3 else 1, q_len, k_len)


class SeparateProjections(_Attention):
    """Four projections around `attend`, and, with sub_norm, LayerNorm before the last; with torchscale's names."""

    def __init__(
        self, config: AttentionConfig, order: str | None, mesh: object, backend: str | None,
        device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__(config, None, order, mesh, backend)
        kv = config.kv_heads * config.head_dim
        made: dict[str, Any] = {"bias": config.bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(config.embed_dim, config.embed_dim, **made)
        self.k_proj = nn.Linear(config.embed_dim, kv, **made)
        self.v_proj = nn.Linear(config.embed_dim, kv, **made)
        self.out_proj = nn.Linear(config.embed_dim, config.embed_dim, **made)
        self.inner_attn_ln: nn.LayerNorm | None = None
        if config.sub_norm:
            self.inner_attn_ln = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial values anew."""
        for each in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            draw(each, self.config.gain if each in (self.v_proj, self.out_proj) else 1.0)
        if self.inner_attn_ln is not None:
            self.inner_attn_ln.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        is_causal: bool | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attention of query over key and value, with arguments as `MultiheadAttention.forward` has them.

        With like_torchscale, key_padding_mask must hide the ends of rows only; it is read on the host, and each
        row is computed as if it stood alone.

        Returns:
            [batch, q_len, embed_dim]; and None for the weights.
        """
        query, key, value = self._inputs(query, key, value, cache)
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        out = self._attend(q, k, v, key_padding_mask, None, is_causal, cache, positions)
        return self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out)), None


class DilatedAttention(SeparateProjections):
    """LongNet's dilated attention: four projections around `attend` with `Dilated`, and LayerNorm before the last.

    The parameters have torchscale's names: q_proj, k_proj, v_proj, inner_attn_ln (with sub_norm) and out_proj.

    Args:
        embed_dim: features of a token, or an `AttentionConfig`.
        num_heads, segment_lengths, dilation_rates, **fields: as `AttentionConfig` describes them.
        order, mesh, backend: as `attend` takes them.

    Weights are drawn by xavier_normal, with gain `config.gain` for v_proj and out_proj; biases are 0.

    Source: Ding et al. 2023, LongNet, section 2.2; Wang et al. 2022, Foundation Transformers (MAGNETO), figure 2.

    Raises:
        InvalidInput: an argument is wrong, unknown or missing.
    """

    def __init__(
        self,
        embed_dim: AttentionConfig | int | None = None,
        num_heads: int | None = None,
        segment_lengths: tuple[int, ...] | list[int] | None = None,
        dilation_rates: tuple[int, ...] | list[int] | None = None,
        *,
        order: str | None = None,
        mesh: object = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        own = {"num_heads": num_heads, "segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        config = AttentionConfig.of(embed_dim, {**fields, **own}, NOT_OF_ATTENTION)
        if config.segment_lengths is None:
            raise InvalidInput("missing: segment_lengths and dilation_rates")
        super().__init__(config, order, mesh, backend, device, dtype)


def draw(layer: nn.Linear, gain: float) -> None:
    """Draw initial weights by xavier_normal; the bias is 0."""
    nn.init.xavier_normal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def rotated(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn features i and i + head_dim / 2 of each head by the angle `position * base ** (-2 i / head_dim)`.

    Args:
        x: [batch, len, heads, head_dim], head_dim even.
        positions: [len] or [batch, len], integers.

    Source: Su et al. 2021, RoFormer, section 3.4.2; features are paired as in Llama.
    """
    half = x.shape[-1] // 2
    # Angles in float64: at position 2**24 a float32 angle is off by a radian.
    at = x.device if x.device.type in KNOWN else "cpu"  # others need not have it
    rates = base ** (-torch.arange(half, dtype=torch.float64, device=at) / half)
    angles = positions.to(at)[..., None, None] * rates
    wide = x.double() if x.dtype == torch.float64 else x.float()
    cos, sin = angles.cos().to(wide.dtype).to(x.device), angles.sin().to(wide.dtype).to(x.device)
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _read(key_padding_mask: Tensor | None, batch: int, k_len: int) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are visible, or what a floating-point mask adds to their scores."""
    if key_padding_mask is None:
        return None, None
    is_added = key_padding_mask.is_floating_point()
    if not (is_added or key_padding_mask.dtype == torch.bool) or key_padding_mask.shape != (batch, k_len):
        what = f"bool or floating point [batch, k_len] {[batch, k_len]}, True or -inf for keys to ignore"
        got = f"{key_padding_mask.dtype} {list(key_padding_mask.shape)}"
        raise InvalidInput(f"key_padding_mask must be {what}, got {got}")
    if not is_added:
        return ~key_padding_mask, None
    # As torch.nn.TransformerEncoderLayer hands bool masks on; a graph cannot depend on what they hold.
    if not (torch.compiler.is_compiling() or key_padding_mask.requires_grad):
        ignored = key_padding_mask == -torch.inf
        if bool((ignored | (key_padding_mask == 0)).all()):
            return ~ignored, None
    return None, key_padding_mask


def _lengths(visible: Tensor | None) -> list[int] | None:
    if visible is None:
        return None
    lengths = visible.sum(1)
    if not torch.equal(torch.arange(visible.shape[1], device=visible.device) < lengths[:, None], visible):
        raise InvalidInput("key_padding_mask must hide the ends of rows only with like_torchscale")
    return lengths.tolist()


# --- torchscale's numbers ---------------------------------------------------------------------------------------------

NOT_COVERED = -1e8  #: lse of a query that a branch does not select


def attend_like_torchscale(
    q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, *, lengths: list[int] | None = None, **arguments: Any
) -> Tensor:
    """What torchscale's DilatedAttention computes, whose weights were trained with it: out [batch, len, heads,
    head_dim] for q, k, v as `attend` takes them.

    It is `Dilated` with offsets="block" where every rate divides its segment length and every segment length the
    sequence, in the forward pass. Elsewhere zeros are appended to segments and to the sequence, which

    * are attended to as keys where attention is not causal: their score is 0, and they weigh in the softmax;
    * stay in the results of a segment that is not a multiple of the rate: those of later segments move to the
      right, and the last ones are cut off.

    Branches are merged with weights that have no gradient. `docs/nn.md` shows how far both are apart.

    Args:
        lengths: tokens of each row that are not padding: a row is computed as if it stood alone, with zeros after
            it. (torchscale itself attends to padding.)
        arguments: `dropout_p` and `backend` of `attend`.
    """
    if q.shape[1] != k.shape[1]:
        raise InvalidInput(f"like_torchscale needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}")
    if not q.numel():
        return torch.zeros_like(q)
    if lengths is not None and set(lengths) != {q.shape[1]}:
        rows = []
        for row, length in enumerate(lengths):
            q_row, k_row, v_row = (x[row : row + 1, :length] for x in (q, k, v))
            rows.append(_padded(attend_like_torchscale(q_row, k_row, v_row, pattern, **arguments), q.shape[1]))
        return torch.cat(rows)
    outs, lses = zip(*(_branch(q, k, v, w, r, pattern.is_causal, arguments) for w, r in pattern.branches))
    weights = torch.stack(lses).softmax(0).transpose(2, 3)[..., None]
    return sum((out * weight.to(out.dtype) for out, weight in zip(outs, weights)), torch.zeros_like(q))


def _branch(
    q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int, is_causal: bool, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out, and lse without a gradient, at the places where torchscale has them."""
    length = q.shape[1]
    segment = min(segment, length)
    padded = segment + -segment % rate

    def appended(x: Tensor) -> Tensor:
        whole = torch.unflatten(_padded(x, length + -length % segment), 1, (-1, segment)).flatten(0, 1)
        return torch.unflatten(_padded(whole, padded), 0, (len(x), -1)).flatten(1, 2)

    alone = Dilated((padded,), (rate,), is_causal, "block")
    out, lse = attend(appended(q), appended(k), appended(v), alone, return_lse=True, **arguments)
    lse = lse[:, :, :length].detach()
    return out[:, :length], lse.masked_fill((lse == -torch.inf) | (lse == 0), NOT_COVERED)


def _padded(x: Tensor, length: int) -> Tensor:
    """x [rows, len, heads, head_dim] with zeros after it."""
    return functional.pad(x, (0, 0, 0, 0, 0, length - x.shape[1]))
