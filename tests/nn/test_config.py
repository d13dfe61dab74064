"""The config of modules: two spellings, what is wrong is named, a dict holds all of it."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from attn_dispatch import Dilated
from attn_dispatch.errors import InvalidInput
from attn_dispatch.nn import AttentionConfig, DilatedAttention, MultiheadAttention

BRANCHES: dict[str, Any] = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
EVERY: dict[str, Any] = {
    "embed_dim": 32,
    "num_heads": 8,
    "num_kv_heads": 4,
    "bias": False,
    "segment_lengths": [4, 8],
    "dilation_rates": [1, 2],
    "offsets": "block",
    "is_causal": True,
    "attention_dropout": 0.1,
    "rotary_base": 1e4,
    "sub_norm": False,
    "norm_eps": 1e-6,
    "ffn_dim": 48,
    "activation": "relu",
    "num_layers": 6,
    "dropout": 0.2,
    "activation_dropout": 0.3,
    "drop_path_rate": 0.4,
    "like_torchscale": True,
    "cross_attention": True,
}  #: no default


def test_both_spellings_are_one_config() -> None:
    assert AttentionConfig(dim=32, heads=8, kv_heads=2) == AttentionConfig(embed_dim=32, num_heads=8, num_kv_heads=2)
    assert AttentionConfig(dim=32, embed_dim=32, num_heads=8).embed_dim == 32
    assert hash(AttentionConfig(dim=32, heads=8, **BRANCHES)) == hash(AttentionConfig(dim=32, heads=8, **BRANCHES))


def test_every_field_goes_through_a_dict() -> None:
    plain = AttentionConfig(dim=32, heads=2)
    config = AttentionConfig(**EVERY)
    assert EVERY.keys() == {field.name for field in fields(AttentionConfig)}
    assert all(getattr(plain, name) != getattr(config, name) for name in EVERY.keys() - {"embed_dim"})
    assert config.to_dict() == EVERY
    for each in (plain, config):
        assert AttentionConfig.from_dict(json.loads(json.dumps(each.to_dict()))) == each


def test_it_is_frozen_and_heads_of_keys_follow_those_of_queries() -> None:
    """Where a config is changed, and they were not given as other than these."""
    config = AttentionConfig(dim=32, heads=4)
    with pytest.raises(FrozenInstanceError):
        config.embed_dim = 64  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    assert replace(config, embed_dim=64, ffn_dim=None) == AttentionConfig(dim=64, heads=4)
    assert config == AttentionConfig(dim=32, heads=4, kv_heads=4)
    for changed in (replace(config, num_heads=8), MultiheadAttention(config, 8).config):
        assert changed.kv_heads == 8
    assert replace(AttentionConfig(dim=32, heads=4, kv_heads=2), num_heads=8).kv_heads == 2


def test_what_follows_from_fields() -> None:
    config = AttentionConfig(dim=32, heads=8, kv_heads=2, **BRANCHES)
    assert (config.head_dim, config.kv_heads, config.ffn_dim) == (4, 2, 128)
    assert config.dilated(True) == Dilated((8, 16), (1, 2), True)
    assert AttentionConfig(dim=32, heads=8).dilated(False) is None
    assert AttentionConfig(dim=32, heads=8, like_torchscale=True, **BRANCHES).offsets == "block"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"missing: embed_dim \(or dim\) and num_heads \(or heads\)"),
        ({"dim": 32}, r"missing: num_heads \(or heads\)"),
        ({"dim": 32, "embed_dim": 64, "heads": 4}, "dim and embed_dim are one field, got 32 and 64"),
        ({"dim": 32, "heads": 4, "num_head": 4}, "unknown field num_head: did you mean num_heads?"),
        ({"dim": 32, "heads": 4, "moe": 1}, "unknown field moe; known are embed_dim, num_heads"),
        ({"dim": 32, "heads": 5}, "embed_dim must be a multiple of num_heads, got 32 and 5"),
        ({"dim": 32, "heads": 4, "kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"dim": 32.0, "heads": 4}, "embed_dim must be an integer >= 1, got 32.0"),
        ({"dim": 32, "heads": 4, "dropout": 1.0}, "dropout must be a number from 0 up to, but not, 1, got 1.0"),
        ({"dim": 32, "heads": 4, "dropout": "0.1"}, "dropout must be a number .*, got '0.1'"),
        ({"dim": 32, "heads": 4, "norm_eps": 0}, "norm_eps must be a number above 0, got 0"),
        ({"dim": 32, "heads": 4, "bias": 1}, "bias must be True or False, got 1"),
        ({"dim": 32, "heads": 4, "activation": "tanh"}, "activation must be one of .*, got 'tanh'"),
        ({"dim": 12, "heads": 4, "rotary_base": 1e4}, "rotary_base needs an even head_dim, .* is 3"),
        ({"dim": 32, "heads": 4, "segment_lengths": [8]}, "missing: dilation_rates"),
        ({"dim": 32, "heads": 4, "dilation_rates": [8]}, "missing: segment_lengths"),
        ({"dim": 32, "heads": 4, "segment_lengths": [8], "dilation_rates": [1, 2]}, "each branch needs both"),
        ({"dim": 32, "heads": 4, "offsets": "block"}, "offsets needs segment_lengths and dilation_rates"),
        ({"dim": 32, "heads": 4, "like_torchscale": True}, "like_torchscale needs segment_lengths"),
        ({"dim": 32, "heads": 4, **BRANCHES, "offsets": "skew"}, "offsets must be one of 'mod', 'block', got 'skew'"),
        (
            {"dim": 32, "heads": 4, **BRANCHES, "offsets": "mod", "like_torchscale": True},
            "like_torchscale contradicts offsets='mod'",
        ),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        AttentionConfig(**given)


def test_modules_take_a_config_or_its_fields() -> None:
    config = AttentionConfig(dim=32, heads=4, **BRANCHES)
    assert DilatedAttention(config).config == DilatedAttention(32, 4, [8, 16], [1, 2]).config == config
    assert DilatedAttention(dim=32, heads=4, **BRANCHES).config == config
    assert DilatedAttention(config, is_causal=True).config == replace(config, is_causal=True)
    assert MultiheadAttention(32, heads=4, dropout=0.5).config.attention_dropout == 0.5
    assert MultiheadAttention(replace(config, dropout=0.5, ffn_dim=8)).config.dropout == 0.5
    with pytest.raises(InvalidInput, match="dropout has no effect in this module; give attention_dropout"):
        DilatedAttention(config, dropout=0.5)
    with pytest.raises(InvalidInput, match="embed_dim is given twice, as 32"):
        MultiheadAttention(32, 4, dim=64)
    with pytest.raises(InvalidInput, match="heads and num_heads are one field, got 8 and 4"):
        MultiheadAttention(32, 4, heads=8)
