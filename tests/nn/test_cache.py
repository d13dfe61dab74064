"""A KVCache: what comes out is what all tokens at once give; what it holds, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from attn_dispatch import Dense, Dilated, Window
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.nn import DilatedAttention, KVCache, MultiheadAttention
from tests.nn.test_attention import DIM, HEADS
from tests.support.calls import drawn
from tests.support.pairwise import crossed

pytestmark = pytest.mark.usefixtures("no_trials")


@crossed(
    kv_heads=(2, 4),
    rotary_base=(None, 1e4),
    pattern=(Dense(True), Window(3, 0, sinks=1), Dilated((4, 64), (1, 2), True), "fields"),
    padded=(False, True),
)
def test_a_cache_gives_what_all_tokens_at_once_give(
    kv_heads: int, rotary_base: float | None, pattern: Any, padded: bool
) -> None:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"kv_heads": kv_heads, "rotary_base": rotary_base, "dtype": torch.float64}
    module: Any
    if pattern == "fields":
        module = DilatedAttention(DIM, HEADS, [4, 8], [1, 2], is_causal=True, **fields)
    else:
        module = MultiheadAttention(DIM, HEADS, pattern=pattern, **fields)
    x = drawn(2, 20, DIM, dtype=torch.float64)
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[1, [2, 11]] = padded
    whole = module(x, key_padding_mask=mask if padded else None)[0]
    cache = KVCache()
    parts = []
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 14), (14, 20)):
        parts.append(module(x[:, start:end], key_padding_mask=mask[:, :end] if padded else None, cache=cache)[0])
        assert len(cache) == end
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)
    assert cache.keys is not None
    assert cache.keys.shape == (2, 20, kv_heads, 8)


def test_a_cache_is_written_in_place_and_copies_go_their_own_way() -> None:
    """Under no_grad, in inference mode and after it; a shallow copy, as beam search makes, shares no new tokens."""
    module, x = MultiheadAttention(DIM, HEADS, is_causal=True).eval(), drawn(2, 20, DIM)
    with torch.no_grad():
        exact = module(x)[0]
        cache = KVCache()
        for end in range(1, 9):
            module(x[:, end - 1 : end], cache=cache)
        assert cache.keys is not None
        before = cache.keys.data_ptr()
        other = copy.copy(cache)
        module(x[:, 8:9], cache=cache)
        assert cache.keys.data_ptr() == before, "a new token moves no other"
        module(drawn(2, 1, DIM), cache=other)
        assert torch.allclose(module(x[:, 9:10], cache=cache)[0], exact[:, 9:10], atol=1e-6)
    with torch.inference_mode():
        cache = KVCache()
        module(x[:, :3], cache=cache)
        module(x[:, 3:4], cache=cache)
    with torch.no_grad():
        assert torch.allclose(module(x[:, 4:5], cache=cache)[0], exact[:, 4:5], atol=1e-6)
    with pytest.raises(InvalidInput, match=r"cache holds torch\.float32, got torch\.float64"):
        copy.deepcopy(module).double()(x[:, 5:6].double(), cache=cache)
    out = module(x[:, 5:6].requires_grad_(), cache=cache)[0]
    assert torch.allclose(out, exact[:, 5:6], atol=1e-6)
    out.sum().backward()


@pytest.mark.parametrize("trained", [True, False])
def test_reorder_holds_other_rows(trained: bool) -> None:
    """A beam goes on as if its tokens had been given alone; the memory of the first rows is not written again."""
    module, x = MultiheadAttention(DIM, HEADS, is_causal=True, rotary_base=1e4), drawn(3, 12, DIM)
    rows = torch.tensor([2, 0, 0, 1])
    with torch.set_grad_enabled(trained):
        cache = KVCache()
        for end in (7, 8):
            module(x[:, len(cache) : end], cache=cache)
        cache.reorder(rows)
        found = [module(x[rows, end - 1 : end], cache=cache)[0] for end in range(9, 13)]
        assert torch.allclose(torch.cat(found, 1), module(x[rows])[0][:, 8:], atol=1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_crop_takes_tokens_back(trained: bool) -> None:
    """As if they had not come; a copy keeps them."""
    module, x = MultiheadAttention(DIM, HEADS, is_causal=True), drawn(2, 12, DIM)
    with torch.set_grad_enabled(trained):
        cache = KVCache()
        for end in range(1, 9):
            module(x[:, end - 1 : end], cache=cache)
        other = copy.copy(cache)
        cache.crop(5)
        assert len(cache) == 5
        skipped = torch.cat((x[:, :5], x[:, 8:]), 1)
        assert torch.allclose(module(x[:, 8:], cache=cache)[0], module(skipped)[0][:, 5:], atol=1e-6)
        assert torch.allclose(module(x[:, 8:], cache=other)[0], module(x)[0][:, 8:], atol=1e-6)
        cache.crop(0)
        assert (cache.keys, cache.values, len(cache)) == (None, None, 0)
        assert torch.allclose(module(x[:1], cache=cache)[0], module(x[:1])[0], atol=1e-6)


def test_a_call_that_raises_adds_nothing() -> None:
    """So that it may be made again, in another way."""
    module, x = MultiheadAttention(DIM, HEADS, is_causal=True), drawn(2, 9, DIM)
    refusing = MultiheadAttention(DIM, HEADS, is_causal=True, backend="flash")
    with torch.no_grad():
        cache = KVCache()
        with pytest.raises(NoBackend):
            refusing(x[:, :4], cache=cache)
        assert len(cache) == 0
        module(x[:, :4], cache=cache)
        module.backend = "flash"
        with pytest.raises(NoBackend):
            module(x[:, 4:], cache=cache)
        assert len(cache) == 4
        module.backend = None
        assert torch.allclose(module(x[:, 4:], cache=cache)[0], module(x)[0][:, 4:], atol=1e-6)


def test_a_cache_belongs_to_one_module() -> None:
    """One cache handed through all layers of a model would mix their keys."""
    layers = [MultiheadAttention(DIM, HEADS, is_causal=True) for _ in range(2)]
    cache, x = KVCache(), drawn(2, 8, DIM)
    with torch.no_grad():
        layers[0](x, cache=cache)
        for given in (cache, copy.copy(cache)):
            with pytest.raises(InvalidInput, match="cache holds tokens of another module"):
                layers[1](x, cache=given)
        expected = layers[0](x[:, :1], cache=copy.copy(cache))[0]
        module, held = pickle.loads(pickle.dumps((layers[0], cache)))
        assert torch.equal(module(x[:, :1], cache=held)[0], expected)
        module, held = copy.deepcopy((layers[0], cache))
        assert torch.equal(module(x[:, :1], cache=held)[0], expected)
        cache.crop(0)
        layers[1](x, cache=cache)
        assert len(cache) == 8


def test_what_cannot_be_is_named() -> None:
    module, cache = MultiheadAttention(DIM, HEADS, is_causal=True), KVCache()
    with pytest.raises(InvalidInput, match=r"cache must be an attn_dispatch\.nn\.KVCache or None, got list"):
        module(drawn(2, 8, DIM), cache=[])
    module(drawn(2, 8, DIM), cache=cache)
    with pytest.raises(InvalidInput, match=r"cache holds \(batch, kv_heads, head_dim\) \(2, 4, 8\), got \(3, 4, 8\)"):
        module(drawn(3, 1, DIM), cache=cache)
    for length, text in ((13, "at most 8, the tokens held, got 13"), (-1, "an integer >= 0, got -1")):
        with pytest.raises(InvalidInput, match=f"length must be {text}"):
            cache.crop(length)
    assert len(cache) == 8
