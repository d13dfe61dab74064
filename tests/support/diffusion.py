"""Small models of diffusers with random weights, their inputs, and what they compute with a backend.

Importing this module skips the tests that do so where diffusers is not installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

diffusers: Any = pytest.importorskip(
    "diffusers", minversion="0.36", reason="diffusers is not installed: pip install attn-dispatch[test-integrations]"
)
integration: Any = import_module("attn_dispatch.integrations.diffusers")
registry: Any = integration.dispatch._AttentionBackendRegistry

FLUX_GRID, FLUX_TEXT = (4, 6), 5
WAN_GRID, WAN_TEXT = (2, 4, 3), 24  #: as many text tokens as the grid has: only the processor knows which is which


def flux(text: int = FLUX_TEXT, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    """Two double blocks and a single one; [2, 24] image and some text tokens."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, **more}
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), **sizes
    )
    rows, columns = FLUX_GRID
    places = torch.arange(rows * columns)
    tensors = {
        "hidden_states": torch.randn(2, rows * columns, 4),
        "encoder_hidden_states": torch.randn(2, text, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 1.0]),
        "img_ids": torch.stack([places * 0, places // columns, places % columns], 1).float(),
        "txt_ids": torch.zeros(text, 3),
    }
    return model.eval(), tensors


def wan(text: int = WAN_TEXT, **more: Any) -> tuple[Any, dict[str, Tensor]]:
    """Two blocks, each of self- and cross-attention; [2, 24] video tokens."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "ffn_dim": 32, **more}
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), in_channels=4, out_channels=4, freq_dim=256, rope_max_seq_len=32, **sizes
    )
    frames, rows, columns = WAN_GRID
    tensors = {
        "hidden_states": torch.randn(2, 4, frames, 2 * rows, 2 * columns),
        "timestep": torch.tensor([3, 3]),
        "encoder_hidden_states": torch.randn(2, text, sizes["text_dim"]),
    }
    return model.eval(), tensors


def qwen_image(masked: bool = True) -> tuple[Any, dict[str, Any]]:
    """Two blocks; [2, 16] image and 6 text tokens, of which the first row has 4."""
    torch.manual_seed(0)
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:] = not masked
    tensors = {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 6, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([1.0, 1.0]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }
    if "txt_seq_lens" in model.forward.__code__.co_varnames:  # up to 0.36
        tensors["txt_seq_lens"] = [6, 6]
    return model.eval(), tensors


def computed(model: Any, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The output, and the gradients of all parameters and of the image or video and the text."""
    model.zero_grad()
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("hidden_states", "encoder_hidden_states")}
    out = model(**{**tensors, **leaves}, return_dict=False)[0]
    out.square().sum().backward()
    found = {"out": out.detach(), **{name: x.grad for name, x in leaves.items()}}
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return {**found, **grads}


def in_float64(model: Any, tensors: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in tensors.items()}
    return model.double(), wide


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-12) -> None:
    """Relative to the output's largest value, and of gradients to that of all."""
    assert found.keys() == expected.keys()
    largest = max(float(x.abs().max()) for name, x in expected.items() if name != "out")
    for name, exact in expected.items():
        scale = float(exact.abs().max()) if name == "out" else largest
        assert float((found[name] - exact).abs().max()) <= within * scale, name
