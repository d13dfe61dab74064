"""The classes of dilated-attention-pytorch under their names, with their arguments and parameters.

Trained weights load strictly. Source of the interface: fkodom/dilated-attention-pytorch 0.2.0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.nn.attention import draw
from attn_dispatch.spec.pattern import Dilated

Activation = str | Callable[[Tensor], Tensor]


class DilatedAttention(nn.Module):
    """dilated_attention_pytorch.DilatedAttention: each branch has heads of its own, `Dilated(heads="split")`.

    Args:
        segment_lengths, dilation_rates: of the branches.
        softmax_scale: factor of the scores; `head_dim ** -0.5` by default.
        attention_dropout: probability of dropping an attention weight, in training.
        op: None: kernels are measured here.
        like_fkodom: the numbers of that library: results are divided by their sum over the sequence, and by the
            number of branches; where that does not divide heads, some heads are taken twice and the last ones not
            at all; softmax_scale and attention_dropout have no effect. Else the exact pattern.

    Raises:
        InvalidInput: an argument is wrong, or op is given.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        op: None = None,
        *,
        like_fkodom: bool = False,
    ) -> None:
        super().__init__()
        if op is not None:
            raise InvalidInput(f"op must be None, as kernels are measured here, got {op!r}")
        self.branches = Dilated(tuple(segment_lengths), tuple(dilation_rates), heads="split").branches
        self.softmax_scale, self.dropout_p, self.like_fkodom = softmax_scale, attention_dropout, like_fkodom

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        """query, key, value and the result: [batch, len, heads, head_dim]."""
        if self.like_fkodom:
            return self._like_fkodom(query, key, value, is_causal)
        lengths, rates = zip(*self.branches)
        pattern = Dilated(lengths, rates, is_causal, heads="split")
        dropout_p = self.dropout_p if self.training else 0.0
        out: Tensor = attend(query, key, value, pattern, scale=self.softmax_scale, dropout_p=dropout_p)
        return out

    def _like_fkodom(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        length, heads, count = query.shape[1], query.shape[2], len(self.branches)
        if bad := [segment for segment, _ in self.branches if length % segment]:
            raise InvalidInput(f"like_fkodom needs a multiple of each segment length, got {length} tokens and {bad[0]}")
        out = torch.zeros_like(query)
        for branch, (segment, rate) in enumerate(self.branches):
            size, start = heads // count + (branch < heads % count), branch % rate
            own = slice(branch * size, (branch + 1) * size)
            q, k, v = (_segments(x[:, :, own], segment)[:, start::rate] for x in (query, key, value))
            if not q.numel():
                continue
            found = torch.unflatten(attend(q, k, v, is_causal=is_causal), 0, (len(query), -1))
            placed = torch.unflatten(torch.zeros_like(query[:, :, own]), 1, (-1, segment))
            placed[:, :, start::rate] = found / found.sum((1, 2), keepdim=True)
            out[:, :, own] += placed.flatten(1, 2)
        return out / count


class MultiheadDilatedAttention(nn.Module):
    """dilated_attention_pytorch.MultiheadDilatedAttention, with its parameters: q_proj, k_proj, v_proj, norm, out_proj.

    Weights are drawn by xavier_normal, those of v_proj and out_proj with gain gamma_init; biases are 0.

    Args:
        embed_dim, num_heads, dilation_rates, segment_lengths, dropout, bias, layer_norm, layer_norm_eps, gamma_init,
        device, dtype: as there. op, like_fkodom: as for `DilatedAttention`.

    Raises:
        InvalidInput: an argument is wrong, or op is given.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dilation_rates: Sequence[int],
        segment_lengths: Sequence[int],
        dropout: float = 0.0,
        bias: bool = True,
        layer_norm: bool = True,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        op: None = None,
        *,
        like_fkodom: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise InvalidInput(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        self.num_heads = num_heads
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias, **made) for _ in range(4)
        )
        self.attention = DilatedAttention(
            segment_lengths, dilation_rates, attention_dropout=dropout, op=op, like_fkodom=like_fkodom
        )
        self.norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **made) if layer_norm else None
        for each, gain in zip((self.q_proj, self.k_proj, self.v_proj, self.out_proj), (1.0, 1.0, *[gamma_init] * 2)):
            draw(each, gain)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> tuple[Tensor, None]:
        """query, key, value and the result: [batch, len, embed_dim]."""
        projected = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        q, k, v = (torch.unflatten(x, 2, (self.num_heads, -1)) for x in projected)
        x = self.attention(q, k, v, is_causal).flatten(2)
        return self.out_proj(x if self.norm is None else self.norm(x)), None


class _Layer(nn.Module):
    """A layer's settings and parameters: attention, norms, and a feed-forward network, in which the last norm is.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, gamma_init, device, dtype: as there.
        segment_lengths, dilation_rates, like_fkodom: as for `DilatedAttention`.
    """

    attentions: ClassVar[dict[str, bool]]  #: by name, with a norm inside or without
    self_attn: MultiheadDilatedAttention
    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    norm3: nn.LayerNorm

    def __init__(
        self,
        d_model: int,
        nhead: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        like_fkodom: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(activation, str):
            if activation not in ("relu", "gelu"):
                raise InvalidInput(f"activation must be 'relu', 'gelu' or a function, got {activation!r}")
            activation = getattr(functional, activation)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.activation: Any = activation
        self.dropout = nn.Dropout(dropout)
        sizes = d_model, nhead, dilation_rates, segment_lengths, dropout
        same = {"layer_norm_eps": layer_norm_eps, "gamma_init": gamma_init, "like_fkodom": like_fkodom, **made}
        for name, layer_norm in self.attentions.items():
            self.add_module(name, MultiheadDilatedAttention(*sizes, layer_norm=layer_norm, **same))
        for number, size in enumerate([*[d_model] * (len(self.attentions) + 1), dim_feedforward], 1):
            self.add_module(f"norm{number}", nn.LayerNorm(size, eps=layer_norm_eps, **made))
        self.linear1 = nn.Linear(d_model, dim_feedforward, **made)
        self.linear2 = nn.Linear(dim_feedforward, d_model, **made)
        for each in (self.linear1, self.linear2):
            draw(each, gamma_init)

    def _feed_forward(self, x: Tensor, norm: nn.Module) -> Tensor:
        x = norm(self.dropout(self.activation(self.linear1(x))))
        return self.dropout(self.linear2(x))  # type: ignore[no-any-return]


class DilatedTransformerEncoderLayer(_Layer):
    """dilated_attention_pytorch.transformer.DilatedTransformerEncoderLayer; like_fkodom: as for `DilatedAttention`."""

    attentions = {"self_attn": True}

    def forward(self, src: Tensor, is_causal: bool = False) -> Tensor:
        """src and the result: [batch, len, d_model]."""
        x = self.norm1(src)
        src = src + self.dropout(self.self_attn(x, x, x, is_causal)[0])
        return src + self._feed_forward(self.norm2(src), self.norm3)


class DilatedTransformerDecoderLayer(_Layer):
    """dilated_attention_pytorch.transformer.DilatedTransformerDecoderLayer; like_fkodom: as for `DilatedAttention`."""

    attentions = {"self_attn": False, "multihead_attn": True}
    multihead_attn: MultiheadDilatedAttention
    norm4: nn.LayerNorm

    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_is_causal: bool = False, memory_is_causal: bool = False
    ) -> Tensor:
        """tgt, memory and the result: [batch, len, d_model]."""
        x = self.norm1(tgt)
        tgt = tgt + self.dropout(self.self_attn(x, x, x, tgt_is_causal)[0])
        tgt = tgt + self.dropout(self.multihead_attn(self.norm2(tgt), memory, memory, memory_is_causal)[0])
        return tgt + self._feed_forward(self.norm3(tgt), self.norm4)


class LongNet(nn.Module):
    """dilated_attention_pytorch.long_net.LongNet: an encoder and a decoder; like_fkodom: as for `DilatedAttention`.

    Each layer is drawn anew, with the gains of MAGNETO for an encoder and a decoder (Wang et al. 2022, figure 2);
    there all begin as copies of one.
    """

    def __init__(
        self,
        d_model: int = 768,
        nhead: int = 12,
        num_encoder_layers: int = 12,
        num_decoder_layers: int = 12,
        dim_feedforward: int = 3072,
        segment_lengths: Sequence[int] = (2048, 4096, 8192, 16384, 32768),
        dilation_rates: Sequence[int] = (1, 2, 4, 6, 12),
        dropout: float = 0.0,
        activation: Activation = "relu",
        layer_norm_eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        like_fkodom: bool = False,
    ) -> None:
        super().__init__()
        decoder_gain = math.log(3 * num_decoder_layers)
        encoder_gain = decoder_gain * math.log(2 * num_encoder_layers) / 3

        sizes = d_model, nhead, segment_lengths, dilation_rates, dim_feedforward, dropout, activation
        made: dict[str, Any] = {"device": device, "dtype": dtype, "like_fkodom": like_fkodom}

        # Named as torch.nn.TransformerEncoder names them.
        def stack(kind: type[_Layer], count: int, gain: float) -> nn.ModuleDict:
            layers = (kind(*sizes, layer_norm_eps, gain**0.5, **made) for _ in range(count))
            return nn.ModuleDict({"layers": nn.ModuleList(layers)})

        self.encoder = stack(DilatedTransformerEncoderLayer, num_encoder_layers, encoder_gain)
        self.decoder = stack(DilatedTransformerDecoderLayer, num_decoder_layers, decoder_gain)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """x and the result: [batch, len, d_model]."""
        memory = x
        for layer in self.encoder["layers"].children():
            memory = layer(memory, is_causal)
        for layer in self.decoder["layers"].children():
            x = layer(x, memory, is_causal, is_causal)
        return x


class LongNetLM(nn.Module):
    """dilated_attention_pytorch.long_net.LongNetLM: `LongNet` between an embedding of tokens and logits.

    Args:
        num_tokens: size of the vocabulary. Others: as for `LongNet`.
    """

    def __init__(self, num_tokens: int, d_model: int = 768, *sizes: Any, **settings: Any) -> None:
        super().__init__()
        given = inspect.signature(LongNet).bind(d_model, *sizes, **settings)
        given.apply_defaults()
        made = {name: given.arguments[name] for name in ("device", "dtype")}
        self.token_embedding = nn.Embedding(num_tokens, d_model, **made)
        self.pos_embedding = _XPos(d_model, **made)
        self.long_net = LongNet(d_model, *sizes, **settings)
        self.norm = nn.LayerNorm(d_model, eps=given.arguments["layer_norm_eps"], **made)
        self.out = nn.Linear(d_model, num_tokens, **made)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """x: [batch, len], integers. The result: [batch, len, num_tokens]."""
        x = self.token_embedding(x)
        x = x + self.pos_embedding(x)
        return self.out(self.norm(self.long_net(x, is_causal)))  # type: ignore[no-any-return]


class _XPos(nn.Module):
    """xPos embeddings of whole tokens, with the buffer that torchscale stores.

    Features 2i and 2i + 1 are turned as in RoFormer, and scaled by a power of the distance from the middle.

    Source: Sun et al. 2022, A Length-Extrapolatable Transformer, section 3.
    """

    def __init__(self, dim: int, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        scale = (torch.arange(0, dim, 2) + 0.4 * dim) / (1.4 * dim)
        self.scale: Tensor
        self.register_buffer("scale", scale.to(device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch, len, dim]."""
        length, half = x.shape[1], x.shape[2] // 2
        places = torch.arange(length, device=x.device)[:, None]
        # Angles are rounded to the model's dtype, as there.
        angles = (places * (1 / 10000 ** (torch.arange(half, device=x.device) / half))).to(self.scale)
        growth = self.scale ** ((places - (length + 1) // 2).to(self.scale) / 512)
        cos, sin = angles.cos() * growth, angles.sin() * growth
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(2)


def _segments(x: Tensor, length: int) -> Tensor:
    """[batch * segments, length, heads, head_dim]."""
    return torch.unflatten(x, 1, (-1, length)).flatten(0, 1)
