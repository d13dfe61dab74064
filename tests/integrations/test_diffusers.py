"""diffusers' models by attend(): outputs and gradients against its own attention, on random weights."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_dispatch
from attn_dispatch import dispatch as own
from attn_dispatch.errors import InvalidInput
from tests.support import diffusion
from tests.support.diffusion import assert_equal, computed, diffusers, integration, registry

pytestmark = pytest.mark.usefixtures("no_trials", "same_diffusers")

MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "flux": diffusion.flux,
    "wan": diffusion.wan,
    "qwen_image": diffusion.qwen_image,
}
ASKED = {"flux": 3, "wan": 4, "qwen_image": 2}  #: attentions in a forward pass


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The pattern and the other arguments of each call of attend(): a model may ignore a backend."""
    found: list[dict[str, Any]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, pattern: Any, **more: Any) -> Any:
        if not torch.compiler.is_compiling():
            found.append({"pattern": str(pattern), **more})
        return own.attend(q, k, v, pattern, **more)

    monkeypatch.setattr(integration, "attend", noted)
    return found


def using(model: Any, name: str = "attn_dispatch") -> Any:
    model.set_attention_backend(name)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, asked: list[dict[str, Any]]) -> None:
    model, tensors = diffusion.in_float64(*MODELS[name]())
    expected = computed(using(model, "native"), tensors)
    assert not asked
    found = computed(using(model), tensors)
    assert len(asked) == ASKED[name]
    assert_equal(found, expected)


@pytest.mark.skipif(diffusers.__version__.startswith("0.36."), reason="Qwen-Image drops its mask itself in 0.36")
def test_key_masks_are_kept(asked: list[dict[str, Any]]) -> None:
    model, tensors = diffusion.in_float64(*diffusion.qwen_image())
    model.requires_grad_(False)
    found = using(model)(**tensors).sample
    hidden = [int((~each["key_mask"]).sum()) for each in asked]
    assert hidden == [2, 2]
    unmasked = {**tensors, "encoder_hidden_states_mask": torch.ones(2, 6, dtype=torch.bool)}
    assert float((found - using(model, "native")(**unmasked).sample).abs().max()) > 1e-3
    text = tensors["encoder_hidden_states"].clone()
    text[0, 4:] = 1e3
    changed = using(model)(**{**tensors, "encoder_hidden_states": text}).sample
    torch.testing.assert_close(changed, found, rtol=0, atol=0)


# --- one call ---------------------------------------------------------------------------------------------------------


def qkv(q_len: int = 7, k_len: int = 9, kv_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (q_len, 4), (k_len, kv_heads), (k_len, kv_heads)
    return [torch.randn(2, *size, 8, generator=generator, dtype=torch.float64) for size in sizes]


def call(*tensors: Tensor, backend: str = "attn_dispatch", **more: Any) -> Any:
    """As processors call; backends get what diffusers hands on."""
    return integration.dispatch.dispatch_attention_fn(
        *tensors, backend=integration.dispatch.AttentionBackendName(backend), **more
    )


def bools(*shape: int) -> Tensor:
    found = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    found[..., 0] = True
    return found


def scores(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def hiding(mask: Tensor, by: float = -torch.inf) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, by)


MASKS: dict[str, tuple[Tensor, str]] = {
    "keys": (bools(9), "key_mask"),
    "rows": (bools(2, 9), "key_mask"),
    "one row": (bools(1, 9), "key_mask"),
    "four axes": (bools(2, 1, 1, 9), "key_mask"),
    "added to keys": (hiding(bools(2, 1, 1, 9)), "key_mask"),
    "keys made unlikely": (hiding(bools(2, 1, 1, 9), -3.0), "bias"),
    "queries and keys": (bools(7, 9), "bias"),
    "queries and keys, three axes": (bools(1, 7, 9), "bias"),
    "rows, queries and keys": (bools(2, 1, 7, 9), "bias"),
    "heads": (scores(1, 4, 7, 9), "bias"),
    "everything": (scores(2, 4, 7, 9), "bias"),
    "added to queries and keys": (hiding(bools(1, 1, 7, 9)), "bias"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, asked: list[dict[str, Any]]) -> None:
    mask, becomes = MASKS[name]
    tensors = qkv()
    # native attention takes no single axis, and that of 0.36 two for queries and keys alone
    wide = mask.reshape(-1, 1, 1, 9) if name in ("keys", "rows") else mask
    expected = call(*tensors, attn_mask=wide, backend="native")
    torch.testing.assert_close(call(*tensors, attn_mask=mask), expected, rtol=1e-12, atol=1e-12)
    assert {"key_mask", "bias"} & asked[0].keys() == {becomes}
    assert float((call(*tensors) - expected).abs().max()) > 1e-3


def test_gradients_reach_a_mask() -> None:
    mask = torch.zeros(2, 1, 1, 9, dtype=torch.float64, requires_grad=True)
    found = []
    for backend in ("attn_dispatch", "native"):
        out = call(*qkv(), attn_mask=mask, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), mask)[0])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ((7, 9), {"is_causal": True}),
        ((9, 9), {"is_causal": True}),
        ((7, 9), {"scale": 0.7}),
        ((7, 9, 2), {"enable_gqa": True}),
    ],
)
def test_arguments(sizes: tuple[int, ...], more: dict[str, Any]) -> None:
    tensors = qkv(*sizes)
    expected = call(*tensors, backend="native", **more)
    torch.testing.assert_close(call(*tensors, **more), expected, rtol=1e-12, atol=1e-12)


def test_lse_and_dropout(asked: list[dict[str, Any]]) -> None:
    q, k, v = qkv()
    out, lse = call(q, k, v, attention_kwargs={"return_lse": True})
    torch.testing.assert_close(lse, torch.einsum("bqhd,bkhd->bhqk", q, k).mul(8**-0.5).logsumexp(-1))
    torch.testing.assert_close(out, call(q, k, v))
    call(q, k, v, dropout_p=0.25)
    assert [each["dropout_p"] for each in asked] == [0.0, 0.0, 0.25]


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"attention_kwargs": {"window_size": (3, 3)}}, "no window_size"),
        ({"attention_kwargs": {"softcap": 3.0}}, "no softcap"),
        ({"attn_mask": "causal"}, "attn_mask must be a tensor, got str"),
        ({"attn_mask": torch.ones(2, 9, dtype=torch.int64)}, "attn_mask must be a bool or floating-point tensor"),
        ({"attn_mask": bools(2, 7, 9)}, "may be of rows or of heads"),
        ({"attn_mask": bools(2, 1, 1, 8)}, "attn_mask must be broadcastable"),
        ({"attn_mask": bools(9), "is_causal": True}, "attn_mask or is_causal"),
    ],
)
def test_what_is_refused(more: dict[str, Any], says: str, checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_checks_enabled", checks)
    with pytest.raises(InvalidInput, match=says):
        call(*qkv(), **more)


def test_ambiguous_calls_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"\[batch, k_len\] or \[q_len, k_len\]"):
        call(*qkv(q_len=2), attn_mask=bools(2, 9))
    with pytest.raises(InvalidInput, match="enable_gqa must be True where heads differ, got 4 and 2"):
        call(*qkv(kv_heads=2))


# --- how models are set to it -----------------------------------------------------------------------------------------


def dit() -> tuple[Any, dict[str, Tensor]]:
    """Its processors call PyTorch's function."""
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        norm_type="ada_norm_zero",
        num_embeds_ada_norm=4,
    )
    return model.eval(), {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor([1]),
        "class_labels": torch.tensor([1]),
    }


def test_models_that_never_ask() -> None:
    model, tensors = dit()
    before = registry._active_backend
    for name in ("attn_dispatch", integration.dispatch.AttentionBackendName.ATTN_DISPATCH):
        with pytest.raises(InvalidInput, match=r"DiT.* never asks .*AttnProcessor2_0.*replacing_sdpa"):
            model.set_attention_backend(name)
    assert registry._active_backend == before
    model.set_attention_backend("native")
    expected = model(**tensors).sample
    with attn_dispatch.replacing_sdpa() as replaced:
        found = model(**tensors).sample
    assert replaced.routed == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_processors_that_do_not_ask(warnings: Callable[[], list[str]]) -> None:
    transformer: Any = importlib.import_module("diffusers.models.transformers.transformer_flux")

    class Own(transformer.FluxAttnProcessor):  # type: ignore[misc]
        """It has what diffusers looks for, and calls something else."""

        def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **more: Any) -> Tensor:
            return hidden_states

    model, _ = diffusion.flux()
    model.transformer_blocks[0].attn.set_processor(Own())
    using(model)
    assert any("not asked for an attention backend by Own" in text for text in warnings())
    model.set_attn_processor(Own())
    with pytest.raises(InvalidInput, match="never asks"):
        using(model)


def test_the_name_is_listed(asked: list[dict[str, Any]]) -> None:
    names = integration.dispatch.AttentionBackendName
    assert names.ATTN_DISPATCH in list(names)
    assert names("attn_dispatch") in registry.list_backends()
    model, tensors = diffusion.wan()
    with pytest.raises(ValueError, match="attn_dispatch"):
        model.set_attention_backend("nonsense")
    with integration.dispatch.attention_backend("attn_dispatch"):
        model(**tensors)
    assert len(asked) == ASKED["wan"]


def test_copies_and_pickles(asked: list[dict[str, Any]]) -> None:
    model, tensors = diffusion.wan()
    expected = using(model)(**tensors).sample
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(**tensors).sample, expected, rtol=0, atol=0)
    assert len(asked) == 3 * ASKED["wan"]


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_in_a_graph() -> None:
    model, tensors = diffusion.flux(num_layers=1)
    compiled: Any = torch.compile(using(model), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = [model(**tensors).sample, compiled(**tensors).sample]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
