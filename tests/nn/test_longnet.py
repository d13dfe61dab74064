"""LongNet's layers and dilated attention against their definition in float64, and their initial values."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attn_dispatch import Dense, Dilated
from attn_dispatch.errors import InvalidInput
from attn_dispatch.nn import AttentionConfig, DilatedAttention, KVCache, LongNetDecoderLayer, LongNetEncoderLayer
from tests.support import calls
from tests.support.calls import formula
from tests.support.pairwise import crossed

CONFIG = AttentionConfig(dim=32, heads=4, segment_lengths=[4, 16], dilation_rates=[1, 2])


pytestmark = pytest.mark.usefixtures("no_trials")
drawn = partial(calls.drawn, dtype=torch.float64)


def scattered(module: Any) -> Any:
    """With biases and norms that are not 0 and 1."""
    for each in module.parameters():
        if each.ndim == 1:
            torch.nn.init.normal_(each, 0.5)
    return module


def norm(x: Tensor, weights: dict[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_by_hand(
    x: Tensor, weights: dict[str, Tensor], config: AttentionConfig, is_causal: bool, memory: Tensor | None = None
) -> Tensor:
    inside = norm(x, weights, "self_attn_layer_norm", config.norm_eps)
    q, k, v = (
        torch.unflatten(linear(inside, weights, f"self_attn.{name}_proj"), -1, (-1, config.head_dim)) for name in "qkv"
    )
    k, v = (each.repeat_interleave(config.num_heads // config.kv_heads, 2) for each in (k, v))
    assert config.segment_lengths is not None
    assert config.dilation_rates is not None
    attended = formula(q, k, v, Dilated(config.segment_lengths, config.dilation_rates, is_causal))[0].flatten(2)
    if config.sub_norm:
        attended = norm(attended, weights, "self_attn.inner_attn_ln", config.norm_eps)
    x = x + linear(attended, weights, "self_attn.out_proj")
    if memory is not None:
        inside = norm(x, weights, "encoder_attn_layer_norm", config.norm_eps)
        given = {"q": inside, "k": memory, "v": memory}
        q, k, v = (
            torch.unflatten(linear(given[name], weights, f"encoder_attn.{name}_proj"), -1, (-1, config.head_dim))
            for name in "qkv"
        )
        k, v = (each.repeat_interleave(config.num_heads // config.kv_heads, 2) for each in (k, v))
        x = x + linear(formula(q, k, v, Dense())[0].flatten(2), weights, "encoder_attn.out_proj")
    inside = linear(norm(x, weights, "final_layer_norm", config.norm_eps), weights, "ffn.fc1")
    inside = getattr(functional, config.activation)(inside)
    if config.sub_norm:
        inside = norm(inside, weights, "ffn.ffn_layernorm", config.norm_eps)
    return x + linear(inside, weights, "ffn.fc2")


@crossed(
    kind=(LongNetEncoderLayer, LongNetDecoderLayer),
    sub_norm=(True, False),
    activation=("gelu", "relu", "silu"),
    kv_heads=(4, 2),
    length=(16, 21),
)
def test_layers(kind: Any, sub_norm: bool, activation: str, kv_heads: int, length: int) -> None:
    config = replace(CONFIG, sub_norm=sub_norm, activation=activation, num_kv_heads=kv_heads, norm_eps=1e-3)
    layer = scattered(kind(config, dtype=torch.float64))
    x = drawn(2, length, 32)
    expected = layer_by_hand(x, layer.state_dict(), config, kind is LongNetDecoderLayer)
    torch.testing.assert_close(layer(x).detach(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("sub_norm", [True, False])
def test_cross_attention(kv_heads: int, sub_norm: bool) -> None:
    """By its definition; with a padded memory, with a cache, and with torchscale's names."""
    config = replace(CONFIG, cross_attention=True, num_kv_heads=kv_heads, rotary_base=None, sub_norm=sub_norm)
    layer = scattered(LongNetDecoderLayer(config, dtype=torch.float64))
    x, memory = drawn(2, 21, 32), drawn(2, 13, 32).flip(1)
    expected = layer_by_hand(x, layer.state_dict(), replace(config, is_causal=True), True, memory)
    found = layer(x, memory=memory)
    torch.testing.assert_close(found.detach(), expected, rtol=1e-10, atol=1e-10)
    hidden = torch.arange(13) >= torch.tensor([[13], [9]])
    padded = layer(x, memory=memory, memory_key_padding_mask=hidden)
    torch.testing.assert_close(padded[:1], found[:1])
    torch.testing.assert_close(padded[1:], layer(x[1:], memory=memory[1:, :9]))
    cache = KVCache()
    parts = [layer(x[:, start : start + 7], memory=memory, cache=cache) for start in (0, 7, 14)]
    torch.testing.assert_close(torch.cat(parts, 1), found, rtol=1e-10, atol=1e-10)
    added = layer.state_dict().keys() - LongNetDecoderLayer(CONFIG).state_dict().keys()
    names = [f"encoder_attn.{name}_proj" for name in ("q", "k", "v", "out")] + ["encoder_attn_layer_norm"]
    assert added == {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}


def test_cross_attention_that_cannot_be() -> None:
    layer, x = LongNetDecoderLayer(CONFIG, cross_attention=True), torch.zeros(1, 4, 32)
    with pytest.raises(InvalidInput, match=r"memory must be .* as the layer has cross_attention, got NoneType"):
        layer(x)
    with pytest.raises(InvalidInput, match=r"memory must be .* embed_dim 32, .* got \[1, 4, 16\]"):
        layer(x, memory=torch.zeros(1, 4, 16))
    with pytest.raises(InvalidInput, match="memory needs a layer made with cross_attention=True"):
        LongNetDecoderLayer(CONFIG)(x, memory=x)
    with pytest.raises(InvalidInput, match="memory_key_padding_mask needs a layer made with cross_attention=True"):
        LongNetDecoderLayer(CONFIG)(x, memory_key_padding_mask=torch.zeros(1, 4).bool())
    with pytest.raises(InvalidInput, match="cross_attention must be False for LongNetEncoderLayer"):
        LongNetEncoderLayer(CONFIG, cross_attention=True)
    with pytest.raises(InvalidInput, match="cross_attention cannot run over a mesh, got 'world'"):
        LongNetDecoderLayer(CONFIG, cross_attention=True, mesh="world")


def test_padding_is_not_seen() -> None:
    layer = scattered(LongNetEncoderLayer(CONFIG, dtype=torch.float64))
    x = drawn(2, 21, 32)
    mask = torch.arange(21) >= torch.tensor([[21], [13]])
    found = layer(x, mask)
    torch.testing.assert_close(found[:1], layer(x[:1]))
    torch.testing.assert_close(found[1:, :13], layer(x[1:, :13]))


@pytest.mark.parametrize("cross_attention", [False, True])
@pytest.mark.parametrize("sub_norm", [True, False])
def test_initial_values(sub_norm: bool, cross_attention: bool) -> None:
    """The documented deviations: xavier_normal's, with a gain of sqrt(log(2 layers)) with sub_norm, 3 with an encoder,
    in whose attention the gain is 1.
    """
    torch.manual_seed(0)
    config = replace(CONFIG, embed_dim=256, ffn_dim=1024, num_layers=12, sub_norm=sub_norm)
    layer_of = LongNetDecoderLayer if cross_attention else LongNetEncoderLayer
    layer = layer_of(config, depth=3, cross_attention=cross_attention)
    gain = math.sqrt(math.log(36 if cross_attention else 24)) if sub_norm else 1.0
    gains = {"q_proj": 1.0, "k_proj": 1.0, "v_proj": gain, "out_proj": gain, "fc1": gain, "fc2": gain}
    for name, each in layer.named_parameters():
        part, kind = name.split(".")[-2:]
        if kind == "weight" and part in gains:
            expected = (1.0 if "encoder_attn" in name else gains[part]) * math.sqrt(2 / sum(each.shape))
            assert each.std().item() == pytest.approx(expected, rel=0.02), name
            assert abs(each.mean().item()) < expected / 50, name
        else:
            assert torch.equal(each, torch.full_like(each, float(kind == "weight"))), name


def test_dropout_in_training_only() -> None:
    """All that a layer adds is dropped at rate p: then its input comes out; scaled, it stays at the same mean."""
    config = replace(CONFIG, drop_path_rate=0.5, num_layers=2)
    first, last = (LongNetEncoderLayer(config, depth=depth, dtype=torch.float64) for depth in (0, 1))
    x = drawn(1, 16, 32).expand(256, 16, 32)
    torch.testing.assert_close(first.train()(x), first.eval()(x))
    torch.manual_seed(0)
    unchanged = (last.train()(x) == x).all(-1).all(-1)
    assert 32 < unchanged.sum().item() < 96  # 1 of 4: attention and the feed-forward network both
    assert not (last.eval()(x) == x).all(-1).all(-1).any()
    torch.manual_seed(0)
    inner = last.train()._dropped(torch.ones(4096, 1, 1))
    assert set(inner.flatten().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("name", ["dropout", "activation_dropout", "attention_dropout"])
def test_each_dropout_is_applied(name: str) -> None:
    fields: dict[str, Any] = {name: 0.5}
    layer = LongNetEncoderLayer(replace(CONFIG, **fields), dtype=torch.float64)
    x = drawn(2, 16, 32)
    assert torch.equal(layer.eval()(x), layer(x))
    assert not torch.allclose(layer.train()(x), layer(x))


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(InvalidInput, match="is_causal must be False for LongNetEncoderLayer"):
        LongNetEncoderLayer(CONFIG, is_causal=True)
    with pytest.raises(InvalidInput, match="is_causal must be True, or left out"):
        LongNetDecoderLayer(CONFIG, is_causal=False)
    with pytest.raises(InvalidInput, match="depth must be below num_layers, got 1 and 1"):
        LongNetEncoderLayer(CONFIG, depth=1)
    with pytest.raises(InvalidInput, match="missing: segment_lengths and dilation_rates"):
        LongNetEncoderLayer(dim=32, heads=4)
    with pytest.raises(InvalidInput, match="like_torchscale takes no order, got 'hilbert'"):
        DilatedAttention(CONFIG, offsets="block", like_torchscale=True, order="hilbert")
    like = DilatedAttention(CONFIG, offsets="block", like_torchscale=True)
    with pytest.raises(InvalidInput, match="cache must be None like torchscale"):
        like(torch.zeros(1, 4, 32), cache=KVCache(), is_causal=True)
    with pytest.raises(InvalidInput, match="must hide the ends of rows only with like_torchscale"):
        like(torch.zeros(1, 2, 32), key_padding_mask=torch.tensor([[True, False]]))
    with pytest.raises(InvalidInput, match="key_padding_mask must be bool, or 0 and -inf, with like_torchscale"):
        like(torch.zeros(1, 2, 32), key_padding_mask=torch.ones(1, 2))
    with pytest.raises(InvalidInput, match="as many queries as keys, got 4 and 8"):
        like(torch.zeros(1, 4, 32), torch.zeros(1, 8, 32))
