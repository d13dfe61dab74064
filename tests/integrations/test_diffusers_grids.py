"""neighborhood() in diffusers' Wan and Flux, against dense attention with a mask, in float64."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from tests.support import diffusion
from tests.support.definition import Spec
from tests.support.diffusion import FLUX_GRID, FLUX_TEXT, WAN_GRID, assert_equal, computed, integration

grids: Any = importlib.import_module("attn_dispatch.integrations.diffusers_grids")
neighborhood: Any = integration.neighborhood

pytestmark = pytest.mark.usefixtures("no_trials", "same_diffusers")

DEFAULTS = {"dilation": 1, "is_causal": False, "edges": "clip", "stride": 1}
WAN: dict[str, dict[str, Any]] = {
    "clip": {"window": (1, 3, 3)},
    "one window": {"window": 3},
    "shift": {"window": (2, 3, 2), "edges": "shift"},
    "causal in time": {"window": (3, 3, 3), "is_causal": (True, False, False)},
}
FLUX: dict[str, dict[str, Any]] = {
    "clip": {"window": (3, 3)},
    "shift": {"window": (3, 4), "edges": "shift"},
    "dilated": {"window": 3, "dilation": 2},
}


def grid_mask(grid: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """[tokens, tokens] bool, by the definition."""
    tokens = torch.Size(grid).numel()
    spec = Spec("Neighborhood", {**DEFAULTS, "grid": grid, **options}, tokens, tokens, 1)
    return torch.tensor(spec.multiplicity()[0], dtype=torch.bool)


def reference(
    monkeypatch: pytest.MonkeyPatch, module: str, mask: Tensor, model: Any, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What native attention computes with this mask in each self-attention, and without in cross-attention."""
    transformer = importlib.import_module(f"diffusers.models.transformers.{module}")
    original = transformer.dispatch_attention_fn
    calls: list[bool] = []

    def masked(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        # Wan's self- and cross-attention take turns; of Flux all are self-attention.
        calls.append(module == "transformer_flux" or len(calls) % 2 == 0)
        found: Tensor = original(query, key, value, **{**more, "attn_mask": mask if calls[-1] else None})
        return found

    model.set_attention_backend("native")
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "dispatch_attention_fn", masked)
        found = computed(model, tensors)
    assert sum(calls) == (2 if module == "transformer_wan" else 3)
    return found


@pytest.mark.parametrize("name", WAN)
def test_wan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tensors = diffusion.in_float64(*diffusion.wan())
    expected = reference(monkeypatch, "transformer_wan", grid_mask(WAN_GRID, WAN[name]), model, tensors)
    model.set_attention_backend("attn_dispatch")
    dense = computed(model, tensors)
    with neighborhood(WAN_GRID, **WAN[name]):
        found = computed(model, tensors)
    assert_equal(found, expected)
    assert float((dense["out"] - expected["out"]).abs().max()) > 1e-3
    assert_equal(computed(model, tensors), dense)  # and none after it


@pytest.mark.parametrize("name", FLUX)
def test_flux(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tensors = diffusion.in_float64(*diffusion.flux())
    near = grid_mask(FLUX_GRID, FLUX[name])
    mask = torch.ones([FLUX_TEXT + len(near)] * 2, dtype=torch.bool)
    mask[FLUX_TEXT:, FLUX_TEXT:] = near
    expected = reference(monkeypatch, "transformer_flux", mask, model, tensors)
    model.set_attention_backend("attn_dispatch")
    dense = computed(model, tensors)
    with neighborhood(FLUX_GRID, **FLUX[name]):
        found = computed(model, tensors)
    assert_equal(found, expected)
    assert float((dense["out"] - expected["out"]).abs().max()) > 1e-3


@pytest.mark.parametrize("kept", ["some", "none"])
def test_key_masks_beside_text(kept: str) -> None:
    """Of a query whose keys are all hidden out is 0 and lse -inf; then no gradient is NaN."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 29, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keys = torch.rand(2, 29, generator=generator) > 0.4
    keys[0] &= kept == "some"
    near = torch.ones(29, 29, dtype=torch.bool)
    near[5:, 5:] = grid_mask((4, 6), {"window": 3})
    seen = (near & keys[:, None])[:, None]
    s = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(8**-0.5).masked_fill(~seen, -torch.inf)
    exact_lse = s.logsumexp(-1)
    weights = (s - exact_lse[..., None]).exp().masked_fill(~seen, 0.0)
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    mask = grids.GridMask(grids.Neighborhood((4, 6), 3), 5, keys)
    out, lse = integration.attention(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)
    # Sums over rows with keys alone: autograd's own softmax has no gradient of the others.
    rows = seen.any(-1)
    found = []
    for each_out, each_lse in ((out, lse), (exact, exact_lse)):
        loss = each_out.square().sum() + each_lse[rows.expand_as(each_lse)].sin().sum()
        found.append(torch.autograd.grad(loss, (q, k, v)))
    assert all(bool(x.isfinite().all()) for x in found[0])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine[1], other[1], rtol=1e-10, atol=1e-12)
        if kept == "some":
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_recomputed_activations() -> None:
    model, tensors = diffusion.in_float64(*diffusion.flux())
    model.set_attention_backend("attn_dispatch")
    with neighborhood(FLUX_GRID, 3):
        expected = computed(model, tensors)
        model.enable_gradient_checkpointing()
        model.train()
        assert_equal(computed(model, tensors), expected)
        loss = model(**tensors).sample.square().sum()
    with pytest.raises(InvalidInput, match=r"run backward\(\) inside the same neighborhood"):
        loss.backward()
    loss = model(**tensors).sample.square().sum()
    with neighborhood(FLUX_GRID, 3), pytest.raises(InvalidInput, match=r"run backward\(\) inside"):
        loss.backward()


def test_contexts_inside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tensors = diffusion.wan()
    model.set_attention_backend("attn_dispatch")
    patterns: list[Any] = []
    found_in = grids.found_in

    def noted(*args: Any) -> Any:
        found = found_in(*args)
        patterns.append(found.pattern and found.pattern.window)
        return found

    monkeypatch.setattr(grids, "found_in", noted)

    def fails() -> None:
        with neighborhood(WAN_GRID, 1):
            model(**tensors)
            raise RuntimeError("away")

    with torch.no_grad(), neighborhood(WAN_GRID, 3):
        with pytest.raises(RuntimeError, match="away"):
            fails()
        model(**tensors)
    assert patterns == [(1, 1, 1), None] * 2 + [(3, 3, 3), None] * 2


def running(made: tuple[Any, Any], grid: Any, backend: str = "attn_dispatch") -> None:
    model, tensors = made
    model.set_attention_backend(backend)
    with neighborhood(grid, 3):
        model(**tensors)


def calling(text: int, mask: Tensor | None, **more: Any) -> None:
    q = torch.randn(1, text + 24, 2, 8)
    integration.attention(q, q, q, grids.GridMask(grids.Neighborhood((4, 6), 3), text, mask), **more)


REFUSED: dict[str, tuple[Any, str]] = {
    "Wan's grid": (lambda: running(diffusion.wan(), (2, 4, 4)), r"\(2, 4, 4\) holds 32 tokens, but the sequence"),
    "Flux's grid": (lambda: running(diffusion.flux(), (4, 4)), r"grid \(4, 4\) holds 16 tokens, Flux has 24"),
    "single blocks": (lambda: running(diffusion.flux(num_layers=0), FLUX_GRID), "no double block before it said how"),
    "a backend": (lambda: running(diffusion.wan(), WAN_GRID, "native"), r'\("attn_dispatch"\), but WanAttnProcessor'),
    "a model": (lambda: running(diffusion.qwen_image(), (4, 4)), "tokens of WanAttnProcessor, FluxAttnProcessor only"),
    "a mask": (lambda: calling(5, torch.ones(29, 29, dtype=torch.bool)), "must be about keys alone"),
    "causal": (lambda: calling(0, None, is_causal=True), r"give it to neighborhood\(\)"),
    "a window": (lambda: neighborhood(WAN_GRID, 2).__enter__(), "window"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    ask, says = REFUSED[name]
    with torch.no_grad(), pytest.raises(InvalidInput, match=says):
        ask()


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_in_a_graph() -> None:
    """A model that was compiled outside."""
    model, tensors = diffusion.flux(num_layers=1)
    model.set_attention_backend("attn_dispatch")
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        dense = compiled(**tensors).sample
        with neighborhood(FLUX_GRID, 3):
            found, expected = compiled(**tensors).sample, model(**tensors).sample
        again = compiled(**tensors).sample
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again, dense, rtol=0, atol=0)
    assert float((found - dense).abs().max()) > 1e-3
