"""MultiheadAttention against torch's, and against its definition in float64; the cache against all tokens at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_dispatch import Dense, Dilated, Neighborhood, Window, dispatch, shard, shard_positions
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.nn import KVCache, MultiheadAttention
from attn_dispatch.spec.pattern import Pattern
from tests.support.calls import drawn
from tests.support.pairwise import crossed
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("no_trials")


DIM, HEADS = 32, 4


def of_torch(**arguments: Any) -> Any:
    """torch's module, with biases that are not 0."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(DIM, HEADS, **arguments)
    for name, each in theirs.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(each)
    return theirs


def by_hand(
    module: MultiheadAttention, x: Tensor, pattern: Pattern, angles: Tensor | None = None, seen: Tensor | None = None
) -> Tensor:
    """The module's definition; angles [len, head_dim / 2] turn pairs of features as complex numbers."""
    config, length = module.config, x.shape[1]
    kv = config.kv_heads * config.head_dim
    rows = torch.split(
        nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias), [config.embed_dim, kv, kv], -1
    )
    q, k, v = (torch.unflatten(each, -1, (-1, config.head_dim)) for each in rows)
    if angles is not None:
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        turned = [torch.complex(*each.chunk(2, -1)) * turn for each in (q, k)]
        q, k = (torch.cat((each.real, each.imag), -1) for each in turned)
    k, v = (each.repeat_interleave(config.num_heads // config.kv_heads, 2) for each in (k, v))
    counts = pattern.multiplicity(length, heads=config.num_heads, key_mask=seen).to(x.dtype)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * config.head_dim**-0.5 + counts.log()
    return module.out_proj(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))  # type: ignore[no-any-return]


# --- torch's ----------------------------------------------------------------------------------------------------------


@crossed(
    bias=(True, False),
    batch_first=(True, False),
    padded=(False, True),
    mask=(None, "bool", "float", "by head"),
    kind=("self", "cross", "three"),
    dtype=(torch.float32, torch.float64),
)
def test_equal_to_torch(
    bias: bool, batch_first: bool, padded: bool, mask: str | None, kind: str, dtype: torch.dtype
) -> None:
    """With its weights: results, and in float64 the gradients of every parameter and input."""
    theirs = of_torch(bias=bias, batch_first=batch_first, dtype=dtype)
    ours = MultiheadAttention(DIM, HEADS, bias=bias, batch_first=batch_first, dtype=dtype)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    lengths = {"self": (9, 9), "cross": (6, 9), "three": (6, 9)}[kind]
    hidden = torch.arange(lengths[1]) >= torch.tensor([[lengths[1]], [5]]) if padded else None
    given: dict[str, Any] = {}
    if mask == "bool":
        given["attn_mask"] = drawn(*lengths, seed=5) > 1
    elif mask is not None:
        given["attn_mask"] = drawn(*([2 * HEADS] if mask == "by head" else []), *lengths, seed=5, dtype=dtype)
    masks = {ours: hidden, theirs: hidden}
    if hidden is not None and mask in ("float", "by head"):  # torch warns of masks of two dtypes
        masks[theirs] = torch.zeros(2, lengths[1], dtype=dtype).masked_fill_(hidden, -math.inf)
    found = []
    for module in (theirs, ours):
        sizes = (*lengths, lengths[1])
        inputs = [drawn(2, each, DIM, seed=seed, dtype=dtype).requires_grad_() for seed, each in enumerate(sizes)]
        inputs = {"self": inputs[:1] * 3, "cross": [inputs[0], inputs[1], inputs[1]], "three": inputs}[kind]
        given["key_padding_mask"] = masks[module]
        out, weights = module(*(x if batch_first else x.transpose(0, 1) for x in inputs), need_weights=False, **given)
        assert weights is None
        out.square().sum().backward()
        found.append([out, *(x.grad for x in inputs), *(each.grad for _, each in sorted(module.named_parameters()))])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-6)
    if dtype == torch.float64:
        for a, b in zip(*found):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_initial_values_are_distributed_as_torchs() -> None:
    torch.manual_seed(0)
    theirs, ours = nn.MultiheadAttention(256, 4), MultiheadAttention(256, 4)
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters()):
        assert b.std().item() == pytest.approx(a.std().item(), rel=0.02), name
        assert b.abs().max().item() == pytest.approx(a.abs().max().item(), rel=0.02), name


# --- what torch's has not ---------------------------------------------------------------------------------------------


@crossed(
    kv_heads=(1, 2, 4),
    rotary_base=(None, 100.0),
    pattern=(Dense(), Dense(True), Window(3, 0), Dilated((4, 12), (1, 2), True), Neighborhood((3, 4), (3,))),
    hidden=(False, True),
)
def test_equal_to_the_definition(kv_heads: int, rotary_base: float | None, pattern: Pattern, hidden: bool) -> None:
    torch.manual_seed(0)
    module = MultiheadAttention(
        DIM, HEADS, kv_heads=kv_heads, rotary_base=rotary_base, pattern=pattern, dtype=torch.float64
    )
    assert module.in_proj_weight.shape == (DIM + 2 * kv_heads * 8, DIM)
    x = drawn(2, 12, DIM, dtype=torch.float64)
    angles = torch.arange(12.0).double()[:, None] * 100.0 ** (-torch.arange(4).double() / 4)
    seen = torch.ones(2, 12, dtype=torch.bool)
    seen[1, [3, 7]] = not hidden
    found = []
    for by in ("module", "hand"):
        given = x.clone().requires_grad_()
        if by == "module":
            out = module(given, key_padding_mask=~seen if hidden else None)[0]
        else:
            out = by_hand(module, given, pattern, None if rotary_base is None else angles, seen)
        module.zero_grad()
        reached = pattern.multiplicity(12, key_mask=seen, heads=HEADS).sum(-1).amin(1) > 0
        out[reached].square().sum().backward()
        found.append([out[reached], given.grad, *(each.grad for each in module.parameters())])
    assert found[0][0].shape[0] > 12
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_given_positions_are_used() -> None:
    """Only distances matter, and each row has its own."""
    module = MultiheadAttention(DIM, HEADS, rotary_base=1e4, dtype=torch.float64)
    x = drawn(2, 6, DIM, dtype=torch.float64)
    plain = module(x)[0]
    torch.testing.assert_close(module(x, positions=torch.arange(6) + 2**26)[0], plain, rtol=1e-6, atol=1e-6)
    rows = torch.stack((torch.arange(6), 2 * torch.arange(6)))
    found = module(x, positions=rows)[0]
    torch.testing.assert_close(found[0], plain[0])
    assert not torch.allclose(found[1], plain[1])
    torch.testing.assert_close(found[1], module(x[1:], positions=rows[1])[0][0])


def test_arguments_reach_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def listening(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **arguments: Any) -> Any:
        given.update(arguments, pattern=pattern)
        return dispatch.attend(q, k, v, pattern, **arguments)

    monkeypatch.setattr("attn_dispatch.nn.attention.attend", listening)
    grid = Neighborhood((4, 4), (3,))
    module = MultiheadAttention(DIM, HEADS, 0.5, pattern=grid, order="hilbert", backend="tiles")
    module.eval()(drawn(2, 16, DIM))
    assert (given["pattern"], given["order"], given["backend"]) == (grid, "hilbert", "tiles")
    assert given["dropout_p"] == 0
    with pytest.raises(NoBackend, match="dropout"):
        module.train()(drawn(2, 16, DIM))
    assert given["dropout_p"] == 0.5


def over_ranks() -> Tensor:
    """In a job: this rank's part of what `test_over_a_mesh` computes as a whole."""
    torch.manual_seed(0)
    module = MultiheadAttention(DIM, HEADS, rotary_base=1e4, mesh="world", order="ring", is_causal=True)
    x, positions = drawn(2, 16, DIM), shard_positions(16, "world")
    with pytest.raises(InvalidInput, match=r"needs positions=shard_positions\(length, mesh\)"):
        module(shard(x, "world"))
    return module(shard(x, "world"), positions=positions)[0].detach()  # type: ignore[no-any-return]


@pytest.mark.full
def test_over_a_mesh(ranks: Ranks) -> None:
    found = torch.cat(ranks.everywhere(over_ranks), 1)
    torch.manual_seed(0)
    module = MultiheadAttention(DIM, HEADS, rotary_base=1e4, is_causal=True)
    torch.testing.assert_close(found, module(drawn(2, 16, DIM))[0].detach(), rtol=0, atol=1e-6)


def test_a_query_without_keys_is_zero() -> None:
    """Where torch's gives NaN."""
    module = MultiheadAttention(DIM, HEADS)
    hidden = torch.tensor([[False] * 5, [True] * 5])
    out = module(drawn(2, 5, DIM), key_padding_mask=hidden)[0]
    assert torch.equal(out[1], module.out_proj.bias.expand(5, DIM))
    assert out.isfinite().all()


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kdim": 16}, "kdim is not supported: it must be None"),
        ({"add_bias_kv": True}, "add_bias_kv is not supported: it must be False"),
        ({"pattern": Dense(), "is_causal": True}, r"give pattern or is_causal, not both: pattern is Dense\(\)"),
        ({"pattern": Dense(), "segment_lengths": [4], "dilation_rates": [1]}, "pattern or segment_lengths, not both"),
        ({"pattern": "dense"}, "pattern must be a pattern of attn_dispatch or None, got 'dense'"),
        ({"dropout": 0.1, "attention_dropout": 0.2}, "are one field here, got 0.1 and 0.2"),
        ({"segment_lengths": [4], "dilation_rates": [1], "like_torchscale": True}, "is for DilatedAttention"),
        ({"sub_norm": True}, "sub_norm has no effect in this module"),
    ],
)
def test_modules_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        MultiheadAttention(DIM, HEADS, **arguments)


def test_what_asks_for_nothing_is_taken() -> None:
    theirs, module = of_torch(), MultiheadAttention(DIM, HEADS, kdim=None, add_zero_attn=False)
    assert "32, num_heads=4, pattern=Dense()" in str(module)
    assert all(getattr(module, name) == getattr(theirs, name) for name in ("embed_dim", "num_heads", "head_dim"))


ROTARY: dict[str, Any] = {"rotary_base": 1e4}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"need_weights": True}, "need_weights must be False"),
    ({}, {"key_padding_mask": torch.zeros(2, 8, dtype=torch.int64)}, r"\[2, 8\], .* got torch.int64 \[2, 8\]"),
    ({}, {"key_padding_mask": torch.zeros(2, 7).bool()}, r"must be bool or floating .* got torch.bool \[2, 7\]"),
    ({}, {"attn_mask": torch.zeros(2, 8, 8)}, r"attn_mask must be .*\[8, 8, 8\], got \[2, 8, 8\]"),
    ({}, {"key": torch.zeros(2, 8, 16)}, r"key must be \[batch, len, embed_dim\] with embed_dim 32, got \[2, 8, 16\]"),
    ({}, {"positions": torch.arange(8)}, "positions need rotary_base"),
    ({}, {"cache": KVCache()}, r"cache needs causal Dense, Dilated or Window, got Dense\(\)"),
    ({}, {"cache": KVCache(), "is_causal": True, "key": torch.zeros(2, 8, DIM)}, "cache is for self-attention"),
    (ROTARY, {"key": torch.zeros(2, 6, DIM)}, "query and key of one length, got 8 and 6"),
    (ROTARY, {"positions": torch.arange(8.0)}, r"positions must be integers .* got torch.float32 \[8\]"),
    ({"pattern": Window(3, 3)}, {"is_causal": True}, "is_causal needs a module made without pattern, which is Window"),
    ({"batch_first": False}, {"query": torch.zeros(8, DIM)}, r"query must be \[len, batch, embed_dim\]"),
]


@pytest.mark.parametrize(("fields", "arguments", "message"), REFUSED)
def test_calls_that_cannot_be(fields: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        MultiheadAttention(DIM, HEADS, **fields)(**{"query": drawn(2, 8, DIM), **arguments})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "padded encoder", "decoder"])
def test_it_takes_its_places_in_torchs_layers(training: bool, kind: str) -> None:
    """In inference too, where torch's layer may compute attention itself; with the mask that it hands on."""
    torch.manual_seed(0)
    made = torch.nn.TransformerDecoderLayer if kind == "decoder" else torch.nn.TransformerEncoderLayer
    layer: Any = made(DIM, HEADS, dropout=0.0, batch_first=True).train(training)
    given: list[Any] = [drawn(2, 12, DIM)]
    padding, masks, kept = torch.arange(12) >= torch.tensor([[12], [7]]), dict[str, Any](), torch.ones(2, 12).bool()
    if kind == "decoder":
        given.append(drawn(2, 12, DIM, seed=1))
        causal = torch.nn.Transformer.generate_square_subsequent_mask(12)
        masks = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
    elif kind == "padded encoder":
        masks, kept = {"src_key_padding_mask": padding}, ~padding
    theirs, calls = layer(*given, **masks)[kept], list[int]()
    places = ["self_attn", *(["multihead_attn"] if kind == "decoder" else [])]
    for name in places:
        module = MultiheadAttention(DIM, HEADS).train(training)
        module.load_state_dict(getattr(layer, name).state_dict())
        module.register_forward_hook(lambda *_: calls.append(1))
        setattr(layer, name, module)
    torch.testing.assert_close(layer(*given, **masks)[kept], theirs, rtol=0, atol=1e-5)
    assert len(calls) == len(places)


@pytest.mark.parametrize("low", [-math.inf, -1.0, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("beside", [False, True])
def test_a_floating_point_padding_mask_is_added(low: float, beside: bool) -> None:
    """As torch's module has it, also beside an attn_mask; gradients of a mask included."""
    theirs = of_torch(batch_first=True)
    module = MultiheadAttention(DIM, HEADS)
    module.load_state_dict(theirs.state_dict())
    x, bias = drawn(2, 8, DIM), drawn(8, 8, seed=2) if beside else None
    mask = torch.zeros(2, 8)
    mask[1, 5:] = low
    found = module(x, key_padding_mask=mask, attn_mask=bias)[0]
    torch.testing.assert_close(found, theirs(x, x, x, mask, attn_mask=bias)[0], rtol=0, atol=2e-6)
    masks = [mask.clamp(min=-9).requires_grad_() for _ in range(2)]
    module(x, key_padding_mask=masks[0], attn_mask=bias)[0].square().sum().backward()
    theirs(x, x, x, masks[1], attn_mask=bias)[0].square().sum().backward()
    torch.testing.assert_close(masks[0].grad, masks[1].grad, rtol=0, atol=1e-5)


def test_a_floating_point_padding_mask_in_a_graph() -> None:
    module, x = MultiheadAttention(DIM, HEADS), drawn(2, 8, DIM)
    hidden = torch.arange(8) >= torch.tensor([[8], [5]])
    mask = torch.zeros(2, 8).masked_fill(hidden, -math.inf)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, key_padding_mask=mask)[0], module(x, key_padding_mask=hidden)[0])
