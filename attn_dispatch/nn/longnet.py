"""The layers of LongNet: dilated attention and a feed-forward network, each between a LayerNorm and a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_dispatch.errors import InvalidInput
from attn_dispatch.nn.attention import DilatedAttention, SeparateProjections, draw
from attn_dispatch.nn.cache import KVCache
from attn_dispatch.nn.config import AttentionConfig
from attn_dispatch.spec.checks import integer


class FeedForward(nn.Module):
    """Two linear layers around an activation, and, with sub_norm, LayerNorm before the second.

    Weights are drawn by xavier_normal with gain `config.gain`; biases are 0.
    """

    def __init__(self, config: AttentionConfig, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config = config
        self.fc1 = nn.Linear(config.embed_dim, config.ffn_dim or 0, device=device, dtype=dtype)
        self.fc2 = nn.Linear(config.ffn_dim or 0, config.embed_dim, device=device, dtype=dtype)
        self.ffn_layernorm: nn.LayerNorm | None = None
        if config.sub_norm:
            self.ffn_layernorm = nn.LayerNorm(config.ffn_dim or 0, eps=config.norm_eps, device=device, dtype=dtype)
        for each in (self.fc1, self.fc2):
            draw(each, config.gain)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: [batch, len, embed_dim]."""
        x = getattr(functional, self.config.activation)(self.fc1(x))
        x = functional.dropout(x, self.config.activation_dropout, self.training)
        return self.fc2(x if self.ffn_layernorm is None else self.ffn_layernorm(x))  # type: ignore[no-any-return]


class _LongNetLayer(nn.Module):
    def __init__(
        self,
        config: AttentionConfig | None = None,
        *,
        depth: int = 0,
        order: str | None = None,
        mesh: object = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        config = self._checked(config, fields)
        if integer("depth", depth, 0) >= config.num_layers:
            raise InvalidInput(f"depth must be below num_layers, got {depth} and {config.num_layers}")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.drop_path_rate = config.drop_path_rate * depth / max(config.num_layers - 1, 1)
        self.self_attn = DilatedAttention(config, order=order, mesh=mesh, backend=backend, **made)
        self.self_attn_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **made)
        self.encoder_attn: SeparateProjections | None = None
        if config.cross_attention:
            if mesh is not None:
                raise InvalidInput(f"cross_attention cannot run over a mesh, got {mesh!r}")
            none: dict[str, Any] = dict.fromkeys(("segment_lengths", "dilation_rates", "offsets", "rotary_base"))
            dense = replace(config, **none, is_causal=False, sub_norm=False, like_torchscale=False)
            self.encoder_attn = SeparateProjections(dense, None, None, backend, device, dtype)
            self.encoder_attn_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **made)
        self.ffn = FeedForward(config, **made)
        self.final_layer_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps, **made)

    def _checked(self, config: AttentionConfig | None, fields: dict[str, Any]) -> AttentionConfig:
        """The config of a layer's arguments. Raises InvalidInput."""
        raise NotImplementedError

    def _forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        cache: KVCache | None,
        positions: Tensor | None,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        self._check_memory(memory, memory_key_padding_mask)
        attended, _ = self.self_attn(
            self.self_attn_layer_norm(x), key_padding_mask=key_padding_mask, cache=cache, positions=positions
        )
        x = x + self._dropped(attended)
        if self.encoder_attn is not None:
            inside = self.encoder_attn_layer_norm(x)
            x = x + self._dropped(self.encoder_attn(inside, memory, key_padding_mask=memory_key_padding_mask)[0])
        return x + self._dropped(self.ffn(self.final_layer_norm(x)))

    def _check_memory(self, memory: object, mask: object) -> None:
        if self.encoder_attn is None:
            if memory is not None or mask is not None:
                name = "memory_key_padding_mask" if memory is None else "memory"
                raise InvalidInput(f"{name} needs a layer made with cross_attention=True")
        elif not isinstance(memory, Tensor) or memory.ndim != 3 or memory.shape[2] != self.config.embed_dim:
            got = list(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
            what = f"[batch, memory_len, embed_dim] with embed_dim {self.config.embed_dim}"
            raise InvalidInput(f"memory must be {what}, as the layer has cross_attention, got {got}")

    def _dropped(self, added: Tensor) -> Tensor:
        added = functional.dropout(added, self.config.dropout, self.training)
        if not self.training or not self.drop_path_rate:
            return added
        stays = 1 - self.drop_path_rate
        return added * added.new_empty(len(added), 1, 1).bernoulli_(stays) / stays


class LongNetEncoderLayer(_LongNetLayer):
    """A layer of LongNet whose tokens see later ones, with torchscale's names of parameters.

    `x + attention(norm(x))`, then `x + feed_forward(norm(x))`, with the initial values of `DilatedAttention` and
    `FeedForward`.

    Args:
        config: with segment_lengths and dilation_rates, not causal; or give its fields by keyword.
        depth: number of this layer from 0 on, for drop_path_rate.
        order, mesh, backend: as `attend` takes them.

    Source: Ding et al. 2023, LongNet; Wang et al. 2022, Foundation Transformers (MAGNETO).

    Raises:
        InvalidInput: an argument is wrong, unknown or missing.
    """

    def _checked(self, config: AttentionConfig | None, fields: dict[str, Any]) -> AttentionConfig:
        found = AttentionConfig.of(config, fields)
        if found.is_causal:
            raise InvalidInput("is_causal must be False for LongNetEncoderLayer: LongNetDecoderLayer is causal")
        if found.cross_attention:
            raise InvalidInput("cross_attention must be False for LongNetEncoderLayer: LongNetDecoderLayer has it")
        return found

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, *, positions: Tensor | None = None) -> Tensor:
        """The layer's result, [batch, len, embed_dim], for x of the same shape.

        Args:
            key_padding_mask: [batch, len] bool, True for tokens that no token sees.
            positions: of the tokens, for rotary embeddings; counted from 0 by default.
        """
        return self._forward(x, key_padding_mask, None, positions)


class LongNetDecoderLayer(_LongNetLayer):
    """A causal layer of LongNet; other points as for `LongNetEncoderLayer`.

    With `cross_attention=True`, `x + attention(norm(x), memory)` comes between the two: dense, of all results of
    an encoder, without rotary embeddings; its parameters are encoder_attn and encoder_attn_layer_norm, as torchscale's.

    Raises:
        InvalidInput: an argument is wrong, unknown or missing.
    """

    def _checked(self, config: AttentionConfig | None, fields: dict[str, Any]) -> AttentionConfig:
        if fields.get("is_causal") is False:
            raise InvalidInput("is_causal must be True, or left out, for LongNetDecoderLayer")
        return replace(AttentionConfig.of(config, fields), is_causal=True)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        memory: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """The layer's result, [batch, len, embed_dim], for x of the same shape.

        Args:
            key_padding_mask: [batch, k_len] bool, True for tokens that no token sees; k_len counts the cache's tokens.
            cache: this layer's own, for decoding: x has the tokens after those it holds.
            positions: of the tokens, for rotary embeddings; counted from 0, the cache's first, by default.
            memory: [batch, memory_len, embed_dim], an encoder's results, with cross_attention; all of them at each
                call, also with a cache.
            memory_key_padding_mask: [batch, memory_len] bool, True for results that no token sees.

        Raises:
            InvalidInput: an argument is wrong; memory is missing, or given without cross_attention.
        """
        return self._forward(x, key_padding_mask, cache, positions, memory, memory_key_padding_mask)
