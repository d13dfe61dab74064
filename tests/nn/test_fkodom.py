"""dilated-attention-pytorch's classes: strict state dicts, the exact pattern, and its numbers.

The library needs xFormers, which a stand-in for its attention replaces here, and for LongNet torchscale and einops:
`pip install --no-deps dilated-attention-pytorch torchscale einops`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_dispatch import Dilated
from attn_dispatch.errors import InvalidInput
from attn_dispatch.nn import fkodom as ours
from tests.support import calls
from tests.support.calls import formula
from tests.support.pairwise import crossed
from tools.lib.peer_calls import xformers_by_sdpa

SEGMENTS, RATES = (8, 16), (1, 2)
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj", "norm")


pytestmark = pytest.mark.usefixtures("no_trials")
drawn = partial(calls.drawn, dtype=torch.float64)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the library, with a stand-in for xformers.ops."""
    for name in ("dilated_attention_pytorch", "einops", "torchscale"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install --no-deps dilated-attention-pytorch torchscale einops")
    for name, module in xformers_by_sdpa().items():
        monkeypatch.setitem(sys.modules, name, module)
    return lambda name: importlib.import_module(f"dilated_attention_pytorch.{name}")


@crossed(heads=(2, 7, 8), is_causal=(False, True), scale=(None, 0.3))
def test_the_exact_pattern(heads: int, is_causal: bool, scale: float | None) -> None:
    """A length that is no multiple of segments too, which the library refuses."""
    q, k, v = (drawn(2, 21, heads, 8, seed=seed) for seed in range(3))
    found = ours.DilatedAttention(SEGMENTS, RATES, softmax_scale=scale)(q, k, v, is_causal)
    pattern = Dilated(SEGMENTS, RATES, is_causal, heads="split")
    seen = pattern.multiplicity(21, heads=heads).sum(-1).T > 0
    expected = formula(q * ((scale or 8**-0.5) * 8**0.5), k, v, pattern)[0]
    torch.testing.assert_close(found[:, seen], expected[:, seen])
    assert torch.equal(found[:, ~seen], torch.zeros_like(found[:, ~seen]))


def like_fkodom_by_hand(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """A branch at a time, for heads that the branches divide: its exact part divided by its sum, then by branches."""
    heads = q.shape[2] // 2
    parts = []
    for branch, (segment, rate) in enumerate(zip(SEGMENTS, RATES)):
        own = slice(branch * heads, (branch + 1) * heads)
        # Rolled by the branch's offset, the selected rows are those of head 0 of "mod".
        rolled = [x[:, :, own].roll(-(branch % rate), 1) for x in (q, k, v)]
        parts.append(torch.zeros_like(rolled[0]))
        for head in range(heads):
            pattern = Dilated((segment,), (rate,), is_causal)
            seen = pattern.multiplicity(q.shape[1]).sum(-1)[0] > 0
            one = [x[:, :, head : head + 1] for x in rolled]
            out = formula(one[0], one[1], one[2], pattern)[0]
            parts[-1][:, seen, head] = out[:, seen, 0]
        parts[-1] = parts[-1].roll(branch % rate, 1)
    out = torch.cat(parts, 2)
    return out / out.sum(1, keepdim=True) / 2


@pytest.mark.parametrize("is_causal", [False, True])
def test_its_numbers(is_causal: bool) -> None:
    q, k, v = (drawn(2, 32, 8, 8, seed=seed) for seed in range(3))
    found = ours.DilatedAttention(SEGMENTS, RATES, like_fkodom=True)(q, k, v, is_causal)
    torch.testing.assert_close(found, like_fkodom_by_hand(q, k, v, is_causal), rtol=1e-8, atol=1e-10)


def test_names_of_parameters() -> None:
    attention = {f"{name}.{kind}" for name in NAMES for kind in ("weight", "bias")}
    module = ours.MultiheadDilatedAttention(32, 4, RATES, SEGMENTS)
    assert module.state_dict().keys() == attention
    assert ours.MultiheadDilatedAttention(32, 4, RATES, SEGMENTS, bias=False, layer_norm=False).state_dict().keys() == {
        f"{name}.weight" for name in NAMES[:4]
    }


def test_initial_values() -> None:
    torch.manual_seed(0)
    module = ours.MultiheadDilatedAttention(256, 4, RATES, SEGMENTS, gamma_init=2.0)
    for name, gain in zip(NAMES, (1, 1, 2, 2)):
        each = getattr(module, name)
        assert each.weight.std().item() == pytest.approx(gain / 16, rel=0.02)
        assert not each.bias.any()
    net = ours.LongNet(64, 4, 2, 3, 64, SEGMENTS, RATES)
    first, second = (each for name, each in net.encoder.named_parameters() if name.endswith("linear1.weight"))
    assert not torch.equal(first, second)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidInput, match="op must be None"):
        ours.DilatedAttention(SEGMENTS, RATES, op=object())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInput, match="embed_dim must be a multiple of num_heads, got 32 and 5"):
        ours.MultiheadDilatedAttention(32, 5, RATES, SEGMENTS)
    with pytest.raises(InvalidInput, match="activation must be 'relu', 'gelu' or a function, got 'tanh'"):
        ours.DilatedTransformerEncoderLayer(32, 4, SEGMENTS, RATES, activation="tanh")
    x = torch.zeros(1, 24, 4, 8)
    with pytest.raises(InvalidInput, match="a multiple of each segment length, got 24 tokens and 16"):
        ours.DilatedAttention(SEGMENTS, RATES, like_fkodom=True)(x, x, x)


@crossed(
    heads=(3, 7, 8), branches=(((8, 16), (1, 2)), ((8, 12), (3, 2)), ((4, 8, 16), (1, 2, 4))), is_causal=(False, True)
)
def test_attention_is_equal(theirs: Any, heads: int, branches: Any, is_causal: bool) -> None:
    """Quotients by sums near 0 are large: errors are relative to them."""
    q, k, v = (drawn(2, 48, heads, 8, seed=seed).requires_grad_() for seed in range(3))
    kind = theirs("dilated_attention").DilatedAttention
    outs = [each(q, k, v, is_causal) for each in (kind(*branches), ours.DilatedAttention(*branches, like_fkodom=True))]
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-8, atol=1e-10)
    grad = drawn(2, 48, heads, 8, seed=3)
    expected, found = (torch.autograd.grad((out * grad).sum(), (q, k, v)) for out in outs)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_layers_and_models_are_equal(theirs: Any) -> None:
    """With its weights, loaded strictly."""
    x, memory, tokens = drawn(2, 32, 32), drawn(2, 32, 32, seed=1), torch.arange(64).reshape(2, 32) % 50
    made: dict[str, Any] = {"dtype": torch.float64}
    pairs: list[tuple[str, str, tuple[Any, ...], tuple[Tensor, ...]]] = [
        ("dilated_attention", "MultiheadDilatedAttention", (32, 4, RATES, SEGMENTS), (x, memory, x)),
        ("transformer", "DilatedTransformerEncoderLayer", (32, 4, SEGMENTS, RATES, 48), (x,)),
        ("transformer", "DilatedTransformerDecoderLayer", (32, 4, SEGMENTS, RATES, 48), (x, memory)),
        ("long_net", "LongNet", (32, 4, 2, 1, 48, SEGMENTS, RATES), (x,)),
        ("long_net", "LongNetLM", (50, 32, 4, 1, 1, 48, SEGMENTS, RATES), (tokens,)),
    ]
    for module, name, sizes, given in pairs:
        reference: nn.Module = getattr(theirs(module), name)(*sizes, **made).eval()
        drop_in: nn.Module = getattr(ours, name)(*sizes, **made, like_fkodom=True).eval()
        drop_in.load_state_dict(reference.state_dict(), strict=True)
        expected, found = reference(*given), drop_in(*given)
        if isinstance(expected, tuple):
            assert expected[1] is found[1] is None
            expected, found = expected[0], found[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
