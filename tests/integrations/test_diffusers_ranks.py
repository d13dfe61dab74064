"""diffusers' context parallelism by attend()'s mesh, on two ranks over gloo, against one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attn_dispatch import dispatch as own
from attn_dispatch.errors import InvalidInput
from tests.support import diffusion
from tests.support.diffusion import FLUX_GRID, WAN_GRID, computed, diffusers, integration
from tests.support.ring_ranks import Ranks

pytestmark = pytest.mark.usefixtures("no_trials", "same_diffusers")

OLD = tuple(map(int, diffusers.__version__.split(".")[:2])) < (0, 39)
MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "flux": partial(diffusion.flux, text=6),
    "wan": partial(diffusion.wan, text=10),
    "qwen_image": diffusion.qwen_image,
    "flux, uneven": partial(diffusion.flux, text=5),
}
#: Relative to the largest value. Wan computes its norms and time embeddings in float32.
WITHIN = {**dict.fromkeys(MODELS, 1e-12), "wan": torch.finfo(torch.float32).eps}
OVER_RANKS = {"flux": 3, "wan": 2, "qwen_image": 2, "flux, uneven": 3}  #: self-attentions in a forward pass


@pytest.fixture
def pair(_processes: Callable[[int], Ranks]) -> Ranks:
    """Two processes: diffusers makes its mesh of all."""
    return _processes(2)


def parallel(model: Any, degrees: dict[str, Any]) -> Any:
    """In a job: a model whose sequence is sharded over all ranks."""
    model.set_attention_backend("attn_dispatch")
    # diffusers divides by the number of accelerators.
    with mock.patch.object(torch.accelerator, "device_count", return_value=1):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
    return model


def sharded(name: str, degrees: dict[str, Any], near: Any) -> tuple[int, dict[str, Tensor]]:
    """A job: how many calls of attend() were over a mesh, and this rank's output and part of the gradients."""
    meshes: list[Any] = []

    def noted(*args: Any, **more: Any) -> Any:
        meshes.append(more.get("mesh"))
        return own.attend(*args, **more)

    model, tensors = diffusion.in_float64(*MODELS[name]())
    parallel(model, degrees)
    with mock.patch.object(integration, "attend", noted), near_by(near):
        found = computed(model, tensors)
    return sum(mesh is not None for mesh in meshes), found


def near_by(near: Any) -> Any:
    return nullcontext() if near is None else integration.neighborhood(*near)


@pytest.mark.parametrize("degrees", [{"ring_degree": 2}, {"ulysses_degree": 2}], ids=["ring", "ulysses"])
@pytest.mark.parametrize("name", ["flux", "wan", "qwen_image"])
def test_models(name: str, degrees: dict[str, int], pair: Ranks) -> None:
    if name == "qwen_image" and OLD:
        pytest.skip("up to 0.38, diffusers' Qwen-Image has no mask that suits shards")
    check(name, degrees, None, pair)


def test_neighborhoods_of_wan(pair: Ranks) -> None:
    check("wan", {"ring_degree": 2}, (WAN_GRID, 3), pair)


@pytest.mark.skipif(
    not hasattr(diffusers.ContextParallelConfig, "ring_anything"), reason="this version of diffusers shards evenly"
)
def test_uneven_shards(pair: Ranks) -> None:
    check("flux, uneven", {"ring_degree": 2, "ring_anything": True}, None, pair)


def check(name: str, degrees: dict[str, int], near: Any, pair: Ranks) -> None:
    model, tensors = diffusion.in_float64(*MODELS[name]())
    model.set_attention_backend("attn_dispatch")
    with near_by(near):
        expected = computed(model, tensors)
    found = pair.everywhere(sharded, name, degrees, near)
    assert [asked for asked, _ in found] == [OVER_RANKS[name]] * 2
    largest = max(float(x.abs().max()) for x in expected.values())
    for key, exact in expected.items():
        # The output is gathered on every rank; of gradients each has the part that passed through its tokens.
        mine = [each[key] for _, each in found]
        for each in mine if key == "out" else [mine[0] + mine[1]]:
            assert float((each - exact).abs().max()) <= WITHIN[name] * largest, key


def config(**more: Any) -> Any:
    """In a job: what diffusers hands on, of all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    return SimpleNamespace(context_parallel_config=SimpleNamespace(_flattened_mesh=mesh, **more))


def cross_attention(mask: Tensor | None) -> list[Tensor]:
    """A job: out, and this rank's gradients of q, k, v, of which it has a half each."""
    rank = torch.distributed.get_rank()
    q, k, v = (x.chunk(2, 1)[rank].clone().requires_grad_() for x in crossing())
    if mask is not None and mask.shape[-1] == 10:
        mask = mask.chunk(2, -1)[rank]
    out = integration.attention(q, k, v, mask, _parallel_config=config())
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]


def crossing() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, size, 2, 8, generator=generator, dtype=torch.float64) for size in (16, 10, 10)]


@pytest.mark.parametrize("kind", ["none", "bool", "added"])
def test_cross_attention(kind: str, pair: Ranks) -> None:
    """Keys are sharded, too: diffusers 0.36 does so with Wan's text."""
    seen = torch.rand(2, 1, 1, 10, generator=torch.Generator().manual_seed(1)) > 0.3
    masks = {"none": None, "bool": seen, "added": torch.randn(1, 2, 1, 10, dtype=torch.float64)}
    q, k, v = (x.requires_grad_() for x in crossing())
    out = integration.attention(q, k, v, masks[kind])
    exact = [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]
    found = pair.everywhere(cross_attention, masks[kind])
    for mine, other in zip(zip(*found, strict=True), exact, strict=True):
        torch.testing.assert_close(torch.cat(mine, 1), other, rtol=1e-12, atol=1e-12)


def refused_calls() -> list[str]:
    """A job."""
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 5, 2, 8)
    whole = torch.ones(1, 1, 1, 12, dtype=torch.bool)  # up to 0.38 Qwen-Image's, in another order than the ranks'
    calls: list[tuple[Tensor, dict[str, Any], dict[str, Any]]] = [
        (q, {"attn_mask": whole}, {}),
        (q, {"is_causal": True}, {}),
        (k, {}, {"ring_anything": True}),
    ]
    found = []
    for keys, arguments, degrees in calls:
        with pytest.raises(InvalidInput) as error:
            integration.attention(q, keys, keys, _parallel_config=config(**degrees), **arguments)
        found.append(str(error.value))
    return found


def refused_neighborhood() -> str:
    """A job."""
    model, tensors = MODELS["flux"]()
    parallel(model, {"ring_degree": 2})
    with integration.neighborhood(FLUX_GRID, 3), torch.no_grad(), pytest.raises(InvalidInput) as error:
        model(**tensors)
    return str(error.value)


def test_what_is_refused(pair: Ranks) -> None:
    for mask, causal, uneven in pair.everywhere(refused_calls):
        assert "attn_mask is for 12 keys, this rank has 6" in mask
        assert "is_causal cannot be given with context parallelism" in causal
        assert "cannot run with ulysses_anything or ring_anything" in uneven
    texts = pair.everywhere(refused_neighborhood)
    assert all("cannot run with context parallelism" in text for text in texts)
