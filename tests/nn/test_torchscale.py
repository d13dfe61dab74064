"""torchscale's classes: strict state dicts, and its numbers by its definition in float64."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_dispatch.errors import InvalidInput
from attn_dispatch.nn import DilatedAttention
from attn_dispatch.nn import torchscale as ours
from attn_dispatch.nn.attention import attend_like_torchscale
from attn_dispatch.spec.pattern import Dilated
from tests.support import calls
from tests.support.pairwise import crossed

DEFAULTS: dict[str, Any] = {
    "encoder_embed_dim": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_embed_dim": 48,
    "encoder_layers": 3,
    "encoder_normalize_before": True,
    "normalize_output": True,
    "activation_fn": "gelu",
    "dropout": 0.25,
    "drop_path_rate": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "no_scale_embedding": True,
    "subln": True,
    "no_output_layer": False,
    "layernorm_eps": 1e-5,
    "vocab_size": -1,
    "segment_length": [8, 13, 21],
    "dilated_ratio": [1, 2, 4],
}  #: of torchscale's EncoderConfig, but for sizes, and for what is off
LINEAR = ("k_proj", "v_proj", "q_proj", "out_proj")


pytestmark = pytest.mark.usefixtures("no_trials")
drawn = partial(calls.drawn, dtype=torch.float64)


def arguments(**changed: Any) -> Any:
    return SimpleNamespace(**{**DEFAULTS, **changed})


def softmax_of(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of one head, [len, head_dim] and [len]."""
    scores = q @ k.T / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def by_definition(q: Tensor, k: Tensor, v: Tensor, segments: Any, rates: Any, is_causal: bool) -> Tensor:
    """torchscale's dilated attention of one row, [len, heads, head_dim], a head and a segment at a time."""
    length, heads, head_dim = q.shape
    merged = []
    for head in range(heads):
        outs, lses = [], []
        for segment, rate in zip(segments, rates):
            segment = min(segment, length)
            offset = head // math.ceil(heads / rate)
            padded = math.ceil(segment / rate) * rate
            out, lse = [], []
            for start in range(0, length, segment):
                cut = []
                for x in (q, k, v):
                    rows = torch.zeros(padded, head_dim, dtype=x.dtype)
                    there = x[start : start + segment, head]
                    cut.append(torch.cat((there, rows[len(there) :]))[offset::rate])
                selected = softmax_of(cut[0], cut[1], cut[2], is_causal)
                places = torch.arange(offset, padded, rate)
                out.append(torch.zeros(padded, head_dim, dtype=q.dtype).index_copy(0, places, selected[0]))
                lse.append(torch.full((padded,), -1e8, dtype=q.dtype).index_copy(0, places, selected[1].detach()))
            # Not `start` but the number of padded rows before says where a segment's rows go.
            outs.append(torch.cat(out)[:length])
            lses.append(torch.cat(lse)[:length])
        weights = torch.stack(lses).softmax(0)
        merged.append((torch.stack(outs) * weights[..., None]).sum(0))
    return torch.stack(merged, 1)


BRANCHES = {
    "r divides w": ((8, 16), (1, 2)),
    "three": ((8, 16, 32), (1, 2, 4)),
    "r does not divide w": ((8, 13), (3, 2)),
    "as GigaPath's": ((5, 11, 23), (1, 4, 8)),
}


@crossed(branches=tuple(BRANCHES), length=(1, 7, 16, 30, 37), heads=(3, 4, 8), is_causal=(False, True))
def test_its_numbers(branches: str, length: int, heads: int, is_causal: bool) -> None:
    """Results, and gradients of q, k and v: weights of the merge have none."""
    segments, rates = BRANCHES[branches]
    q, k, v = (drawn(2, length, heads, 4, seed=seed).requires_grad_() for seed in range(3))
    grad = drawn(2, length, heads, 4, seed=3)
    found = attend_like_torchscale(q, k, v, Dilated(segments, rates, is_causal, "block"))
    expected = torch.stack([by_definition(*each, segments, rates, is_causal) for each in zip(q, k, v)])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    for a, b in zip(*(torch.autograd.grad((out * grad).sum(), (q, k, v)) for out in (found, expected))):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@crossed(length=(16, 37), is_causal=(False, True), like=(False, True))
def test_where_the_exact_pattern_differs(length: int, is_causal: bool, like: bool) -> None:
    """Rates divide segments: then only in a last segment that is shorter, and not if causal."""
    module = ours.DilatedAttention(
        arguments(segment_length=[8, 16], dilated_ratio=[1, 2]), 32, 4, self_attention=True, like_torchscale=like
    ).double()
    x = drawn(2, length, 32)
    found = module(x, x, x, is_causal=is_causal)[0]
    q, k, v = (torch.unflatten(each(x), -1, (4, 8)) for each in (module.q_proj, module.k_proj, module.v_proj))
    rows = [by_definition(*each, [8, 16], [1, 2], is_causal) for each in zip(q, k, v)]
    expected = module.out_proj(torch.stack(rows).flatten(2))
    apart = (found - expected).abs().amax((0, 2))
    if like or length == 16 or is_causal:
        assert apart.max().item() < 1e-12
    else:
        assert (apart > 1e-3).sum().item() == length - 32  # the rows of the last segments


def test_attention_of_a_model_is_replaced() -> None:
    """By a class of torchscale's name; torchscale on PyPI has no dilated attention."""
    theirs = type("DilatedAttention", (DilatedAttention,), {"__module__": "torchscale.component.dilated"})
    model: Any = nn.Sequential(theirs(32, 4, [8, 16], [1, 2], offsets="block", dtype=torch.float64))
    reference = model[0]
    reference.args, reference.dropout = arguments(segment_length=[8, 16], dilated_ratio=[1, 2]), 0.0
    reference.self_attention, reference.encoder_decoder_attention = True, False
    x, weights = drawn(2, 37, 32), model.state_dict()
    assert ours.replace_attention(model) == 1
    assert type(model[0]) is ours.DilatedAttention
    assert all(mine is weights[name] or torch.equal(mine, weights[name]) for name, mine in model.state_dict().items())
    torch.testing.assert_close(model[0](x, x, x)[0], reference(x)[0])


def test_names_of_parameters() -> None:
    """Those of trained weights, which load strictly."""
    names = {f"{each}.{kind}" for each in (*LINEAR, "inner_attn_ln") for kind in ("weight", "bias")}
    parts = ("self_attn_layer_norm", "final_layer_norm", "ffn.fc1", "ffn.fc2", "ffn.ffn_layernorm")
    layer = {f"self_attn.{name}" for name in names} | {
        f"{each}.{kind}" for each in parts for kind in ("weight", "bias")
    }
    expected = {f"layers.{number}.{name}" for number in range(3) for name in layer}
    assert ours.LongNetEncoder(arguments()).state_dict().keys() == expected | {"layer_norm.weight", "layer_norm.bias"}
    plain = ours.LongNetEncoder(arguments(subln=False, normalize_output=False, vocab_size=50))
    without = {name for name in expected if "inner_attn_ln" not in name and "ffn_layernorm" not in name}
    assert plain.state_dict().keys() == without | {"output_projection.weight"}
    cross = ours.DilatedAttention(arguments(), 32, 4, encoder_decoder_attention=True, subln=True)
    assert cross.state_dict().keys() == {name for name in names if "inner_attn_ln" not in name}


def test_rows_with_padding_are_as_alone() -> None:
    """Where torchscale would attend to the padding."""
    encoder = ours.LongNetEncoder(arguments(), like_torchscale=True).eval().double()
    x, lengths = drawn(4, 30, 32), (30, 17, 1, 0)
    mask = torch.arange(30) >= torch.tensor(lengths)[:, None]
    found = encoder(None, mask, token_embeddings=x, return_all_hiddens=True)
    assert found["encoder_padding_mask"] is mask
    assert torch.equal(found["encoder_states"][0], x.masked_fill(mask[..., None], 0.0))
    for row, length in enumerate(lengths[:3]):
        alone = encoder(token_embeddings=x[row : row + 1, :length])["encoder_out"]
        torch.testing.assert_close(found["encoder_out"][row : row + 1, :length], alone)


def test_what_an_encoder_returns() -> None:
    table = nn.Embedding(50, 32)
    encoder = ours.LongNetEncoder(arguments(no_scale_embedding=False, vocab_size=50), table, ADDED).eval()
    tokens = torch.arange(20).reshape(2, 10)
    found = encoder(tokens, return_all_hiddens=True)
    assert found["encoder_out"].shape == (2, 10, 50)
    torch.testing.assert_close(found["encoder_embedding"], table(tokens) * 32**0.5)
    torch.testing.assert_close(found["encoder_states"][0], table(tokens) * 32**0.5 + 1)
    states = found["encoder_states"]
    torch.testing.assert_close(encoder.layers[0](states[0]), states[1])
    assert len(states) == 4
    features = encoder(token_embeddings=table(tokens), features_only=True)
    assert encoder.layer_norm is not None
    torch.testing.assert_close(features["encoder_out"], encoder.layer_norm(states[3]))
    assert features["encoder_states"] == []
    assert not features["encoder_padding_mask"].any()


class Added(nn.Module):
    def forward(self, given: Tensor, positions: object = None) -> Tensor:
        return torch.ones(*given.shape[:2], 1)


ADDED = Added()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"multiway": True}, r"args.multiway is not supported \(two sets of weights\), got True"),
        ({"xpos_rel_pos": True}, "args.xpos_rel_pos is not supported"),
        ({"seq_parallel": True}, "args.seq_parallel is not supported .*mesh="),
        ({"moe_freq": 2}, "args.moe_freq is not supported .*got 2"),
        ({"deepnorm": True}, "args.deepnorm is not supported"),
        ({"rel_pos_buckets": 8, "max_rel_pos": 8}, "args.rel_pos_buckets is not supported"),
        ({"encoder_normalize_before": False}, "args.encoder_normalize_before must be True"),
        ({"activation_fn": "tanh"}, "activation must be one of"),
        ({"segment_length": None}, "missing: segment_lengths"),
    ],
)
def test_settings_that_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ours.LongNetEncoder(arguments(**changed))


def test_calls_that_are_refused() -> None:
    with pytest.raises(InvalidInput, match="one of self_attention and encoder_decoder_attention"):
        ours.DilatedAttention(arguments(), 32, 4)
    module, x = ours.DilatedAttention(arguments(), 32, 4, self_attention=True), torch.zeros(1, 4, 32)
    for name in ("incremental_state", "attn_mask", "rel_pos"):
        with pytest.raises(InvalidInput, match=f"{name} must be None"):
            module(x, x, x, **{name: {}})
    encoder = ours.LongNetEncoder(arguments())
    with pytest.raises(InvalidInput, match="attn_mask must be None"):
        encoder(token_embeddings=x, attn_mask=x)
    with pytest.raises(InvalidInput, match="give token_embeddings, or src_tokens and embed_tokens"):
        encoder(torch.zeros(1, 4).long())
    with pytest.raises(InvalidInput, match="LongNetEncoder has no DilatedAttention of torchscale"):
        ours.replace_attention(encoder)
