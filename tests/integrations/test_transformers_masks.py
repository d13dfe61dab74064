"""What the integration with transformers makes of masks and keywords, what it refuses, and what it hands to sdpa."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from tests.support.small_transformers import (
    DECODERS, LENGTH, SIZES, Case, decoder, padded, tokens, transformers, using,
)  # fmt: skip

from attn_dispatch.integrations import transformers as integration  # isort: skip - it imports transformers

pytestmark = pytest.mark.usefixtures("short_trials")


@pytest.fixture
def fallback(asked: list[str]) -> None:
    integration.register(fallback=True)


def layer(**more: Any) -> Any:
    """attention() of 2 heads and 6 tokens, as a layer of Llama calls it."""
    module = transformers.models.llama.modeling_llama.LlamaAttention(transformers.LlamaConfig(**SIZES), 0)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return integration.attention(module, q, k, v, **{"attention_mask": None, **more})


def sees_the_first_key(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """No mask of attend()."""
    return key % 2 == query % 2


def image_mask() -> dict[str, Any]:
    """Decoders see image tokens, here those of the first 9, from either side."""
    kinds = torch.zeros(2, LENGTH, dtype=torch.int64)
    kinds[:, 2:9] = 1
    return {"token_type_ids": kinds}


def causal_4d(dtype: torch.dtype) -> Tensor:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    seen = seen & padded("left").bool()[:, None, None] | torch.eye(LENGTH, dtype=torch.bool)  # type: ignore[union-attr]
    return seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("handed_on", [False, True])
def test_masks_of_four_axes(name: str, dtype: torch.dtype, handed_on: bool, asked: list[str]) -> None:
    """Handed on to sdpa they are too, but not with softcap and sinks, which sdpa has not."""
    integration.register(fallback=handed_on)
    inputs = {"input_ids": tokens(), "attention_mask": causal_4d(dtype), "use_cache": False}
    reference = "sdpa" if name == "llama" else "eager"
    if reference == "eager":
        inputs["attention_mask"] = causal_4d(torch.float32)  # eager adds masks
    Case(decoder(name), inputs, lambda found: found.logits, None, reference).assert_equal()
    assert len(asked) == (0 if handed_on and name == "llama" else 2)
