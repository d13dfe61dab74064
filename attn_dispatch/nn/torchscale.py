"""torchscale's DilatedAttention and LongNetEncoder under their names, with their arguments and parameters.

Trained weights load strictly. Source of the interface: microsoft/torchscale at 4d1e0e8,
component/dilated_attention.py and model/LongNet.py; prov-gigapath carries a copy.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_dispatch.errors import InvalidInput
from attn_dispatch.nn import attention
from attn_dispatch.nn.config import AttentionConfig
from attn_dispatch.nn.longnet import LongNetEncoderLayer

#: Settings of torchscale's that are not supported here, where they are true.
NOT_IN_ATTENTION = {
    "multiway": "two sets of weights",
    "xpos_rel_pos": "xPos position embeddings",
    "seq_parallel": "give a module of attn_dispatch.nn mesh= instead",
}
NOT_IN_ENCODER = {
    "moe_freq": "experts",
    "deepnorm": "DeepNorm",
    "rel_pos_buckets": "relative position biases",
    "layernorm_embedding": "LayerNorm of embeddings",
    "share_encoder_input_output_embed": "shared embeddings",
    "checkpoint_activations": "activation checkpointing",
    "fsdp": "fairscale's FSDP",
}
ACTIVATIONS = {"swish": "silu"}


class DilatedAttention(attention.DilatedAttention):
    """torchscale.component.dilated_attention.DilatedAttention.

    Args:
        args: has segment_length, dilated_ratio and layernorm_eps, as torchscale's configs do.
        embed_dim, num_heads: as there. dropout: of attention weights.
        self_attention, encoder_decoder_attention: exactly one of them.
        subln: LayerNorm before the output projection, for self-attention.
        like_torchscale: the numbers that torchscale computes, else the exact pattern.

    Raises:
        InvalidInput: a setting is wrong or not supported.
    """

    def __init__(
        self,
        args: Any,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        subln: bool = False,
        *,
        like_torchscale: bool = False,
    ) -> None:
        if self_attention == encoder_decoder_attention:
            raise InvalidInput("give one of self_attention and encoder_decoder_attention")
        fields = {**_of_attention(args, like_torchscale), "sub_norm": subln and self_attention}
        super().__init__(embed_dim, num_heads, attention_dropout=dropout, **fields)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: object = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: object = None,
        rel_pos: object = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As there, but that key_padding_mask, [batch, k_len], true for padding, hides keys: torchscale ignores it.

        The mask is read on the host, and left out where it hides nothing.

        Raises:
            InvalidInput: incremental_state, attn_mask or rel_pos is not None.
        """
        _refuse_given(incremental_state=incremental_state, attn_mask=attn_mask, rel_pos=rel_pos)
        return super().forward(query, key, value, _padding(key_padding_mask), is_causal=is_causal)


class LongNetEncoder(nn.Module):
    """torchscale.model.LongNet.LongNetEncoder, which is also prov-gigapath's `model.encoder`.

    Args:
        args: has the attributes of torchscale's EncoderConfig. Mixtures of experts, DeepNorm, norms after the
            residual and other settings outside of LongNet are refused by name.
        embed_tokens, embed_positions, output_projection: modules, as there.
        like_torchscale: the numbers that torchscale computes, else the exact pattern.

    Initial values are those of `attn_dispatch.nn.LongNetEncoderLayer`.

    Raises:
        InvalidInput: a setting is wrong or not supported.
    """

    def __init__(
        self,
        args: Any,
        embed_tokens: nn.Module | None = None,
        embed_positions: nn.Module | None = None,
        output_projection: nn.Module | None = None,
        is_encoder_decoder: bool = False,
        *,
        like_torchscale: bool = False,
    ) -> None:
        super().__init__()
        _refuse(args, NOT_IN_ENCODER)
        if not args.encoder_normalize_before:
            raise InvalidInput("args.encoder_normalize_before must be True: norms after the residual are not supported")
        config = AttentionConfig(
            embed_dim=args.encoder_embed_dim,
            num_heads=args.encoder_attention_heads,
            ffn_dim=args.encoder_ffn_embed_dim,
            num_layers=args.encoder_layers,
            activation=ACTIVATIONS.get(args.activation_fn, args.activation_fn),
            sub_norm=args.subln,
            dropout=args.dropout,
            attention_dropout=args.attention_dropout,
            activation_dropout=args.activation_dropout,
            drop_path_rate=args.drop_path_rate,
            **_of_attention(args, like_torchscale),
        )
        width, eps = config.embed_dim, config.norm_eps
        self.args, self.config = args, config
        self.embed_scale = 1.0 if args.no_scale_embedding else math.sqrt(width)
        self.embed_tokens, self.embed_positions = embed_tokens, embed_positions
        if output_projection is None and not (is_encoder_decoder or args.no_output_layer) and args.vocab_size > 0:
            output_projection = nn.Linear(width, args.vocab_size, bias=False)
            nn.init.normal_(output_projection.weight, std=width**-0.5)
        self.output_projection = output_projection
        self.layers = nn.ModuleList(LongNetEncoderLayer(config, depth=depth) for depth in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(width, eps=eps) if args.normalize_output else None

    def forward(
        self,
        src_tokens: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        attn_mask: object = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
        multiway_split_position: object = None,
        features_only: bool = False,
        incremental_state: object = None,
        positions: Tensor | None = None,
    ) -> dict[str, Any]:
        """As there, but that no token sees those that encoder_padding_mask hides: torchscale sets them to 0.

        Args:
            src_tokens: [batch, len], for embed_tokens; or token_embeddings: [batch, len, embed_dim].
            encoder_padding_mask: [batch, len], true for padding. It is read on the host.
            return_all_hiddens: list the input and the result of each layer in "encoder_states".
            features_only: leave the output projection out.
            positions: for embed_positions.

        Returns:
            "encoder_out" [batch, len, embed_dim], and "encoder_embedding", "encoder_padding_mask", "encoder_states".

        Raises:
            InvalidInput: attn_mask, multiway_split_position or incremental_state is not None; no tokens are given.
        """
        _refuse_given(attn_mask=attn_mask, incremental_state=incremental_state)
        _refuse_given(multiway_split_position=multiway_split_position)
        if token_embeddings is None:
            if src_tokens is None or self.embed_tokens is None:
                raise InvalidInput("give token_embeddings, or src_tokens and embed_tokens")
            token_embeddings = cast("Tensor", self.embed_tokens(src_tokens))
        x = embedding = token_embeddings * self.embed_scale
        if self.embed_positions is not None:
            x = embedding + self.embed_positions(x if src_tokens is None else src_tokens, positions=positions)
        x = functional.dropout(x, self.config.dropout, self.training)
        padding = _padding(encoder_padding_mask)
        if padding is None:
            encoder_padding_mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        else:
            x = x.masked_fill(padding[..., None], 0.0)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], padding))
        x = states[-1] if self.layer_norm is None else self.layer_norm(states[-1])
        if self.output_projection is not None and not features_only:
            x = self.output_projection(x)
        return {
            "encoder_out": x,
            "encoder_embedding": embedding,
            "encoder_padding_mask": encoder_padding_mask,
            "encoder_states": states if return_all_hiddens else [],
            "l_aux": [None] * len(self.layers),
        }


def replace_attention(model: nn.Module, *, like_torchscale: bool = False) -> int:
    """Put this module's DilatedAttention, with their weights, in the places of torchscale's in a model.

    Needs no flash-attn then, on any device. The weights are shared with the replaced modules, and names in the
    state dict stay.

    Returns:
        The number of modules replaced.

    Raises:
        InvalidInput: there is none, or one has a setting that is not supported.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == "DilatedAttention"
        and "torchscale" in type(child).__module__.split(".")
        and not isinstance(child, DilatedAttention)
    ]
    if not found:
        raise InvalidInput(f"{type(model).__name__} has no DilatedAttention of torchscale")
    for parent, name, child in found:
        theirs: Any = child
        sizes = theirs.args, theirs.embed_dim, theirs.num_heads, theirs.dropout
        kind = theirs.self_attention, theirs.encoder_decoder_attention, theirs.inner_attn_ln is not None
        with torch.device("meta"):
            ours = DilatedAttention(*sizes, *kind, like_torchscale=like_torchscale)
        for part, _ in list(ours.named_children()):
            setattr(ours, part, getattr(theirs, part))
        setattr(parent, name, ours.train(theirs.training))
    return len(found)


def _of_attention(args: Any, like_torchscale: bool) -> dict[str, Any]:
    _refuse(args, NOT_IN_ATTENTION)
    return {
        "segment_lengths": args.segment_length,
        "dilation_rates": args.dilated_ratio,
        "offsets": "block",
        "norm_eps": args.layernorm_eps,
        "like_torchscale": like_torchscale,
    }


def _refuse(args: Any, settings: dict[str, str]) -> None:
    for name, what in settings.items():
        if (value := getattr(args, name, False)) and (name != "rel_pos_buckets" or args.max_rel_pos > 0):
            raise InvalidInput(f"args.{name} is not supported ({what}), got {value!r}")


def _refuse_given(**given: object) -> None:
    for name, x in given.items():
        if x is not None:
            raise InvalidInput(f"{name} must be None, as it is not supported, got {type(x).__name__}")


def _padding(mask: Tensor | None) -> Tensor | None:
    """A mask of any dtype as bool, or None where it hides nothing."""
    return None if mask is None or not bool(mask.any()) else mask.bool()
