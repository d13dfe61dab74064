"""100 attention problems of published models: their heads, head_dim and patterns, with short to medium lengths; and 50
of masks made of data.

Lengths and batches are chosen so that a call takes milliseconds on two cores; where a window or grid is smaller than
the model's own, the row says so.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Literal, NamedTuple

import torch

from attn_dispatch.spec.data import BlocksForm, Form, RangesForm
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.tuning.example import Example, make

CAUSAL = Dense(is_causal=True)


class Attention(NamedTuple):
    """One model's attention: q is `shape`, [batch, q_len, heads, head_dim]; k and v have `k_len` tokens (q_len unless
    given) and `kv_heads` heads (as many as q unless given). `is_trained`: timed with its backward pass too.
    """

    model: str
    shape: tuple[int, int, int, int]
    pattern: Pattern = Dense()
    kv_heads: int | None = None
    k_len: int | None = None
    mask: Literal["", "seq_lens", "key_mask"] = ""
    is_trained: bool = True


MODELS = (
    # Encoders of text.
    Attention("BERT-base, padded", (4, 128, 12, 64), mask="seq_lens"),
    Attention("BERT-large", (1, 512, 16, 64)),
    Attention("RoBERTa-base, padded", (2, 384, 12, 64), mask="key_mask"),
    Attention("MiniLM-L6 sentence embeddings, padded", (16, 64, 12, 32), mask="seq_lens"),
    Attention("Longformer-base, half of its window", (1, 2048, 12, 64), Window(128, 128)),
    Attention("LongNet encoder, a quarter of its segments", (1, 2048, 8, 64), Dilated((512, 1024, 2048), (1, 2, 4))),
    # Images.
    Attention("ViT-B/16, 224 pixels", (2, 197, 12, 64)),
    Attention("ViT-L/14, 224 pixels", (1, 257, 16, 64)),
    Attention("ViT-S/16, 384 pixels", (1, 577, 6, 64)),
    Attention("Swin-T, first stage: 64 windows of 7 x 7", (64, 49, 3, 32)),
    Attention("NAT-Mini, second stage", (1, 784, 4, 32), Neighborhood((28, 28), (7, 7))),
    Attention("HDiT, 32 x 32 tokens", (1, 1024, 8, 64), Neighborhood((32, 32), (7, 7))),
    Attention("Stable Diffusion 1.5, 32 x 32", (1, 1024, 8, 80)),
    Attention("Stable Diffusion 1.5, text", (2, 1024, 8, 80), k_len=77),
    # Video and sound.
    Attention("Video Swin-T: 8 windows of 8 x 7 x 7", (8, 392, 3, 32)),
    Attention("HunyuanVideo, 8 of 24 heads, 3-D windows", (1, 1024, 8, 128), Neighborhood((4, 16, 16), (3, 7, 7))),
    Attention("Whisper-tiny, encoder", (1, 1500, 6, 64)),
    # Causal language models.
    Attention("GPT-2", (1, 512, 12, 64), CAUSAL),
    Attention("Llama-3.2-1B", (1, 384, 32, 64), CAUSAL, kv_heads=8),
    Attention("Mistral-7B, window 63 of 4,095", (1, 256, 32, 128), Window(63, 0), kv_heads=8),
    # Decoding: few queries, many keys.
    Attention("GPT-2, one token", (1, 1, 12, 64), CAUSAL, k_len=1024, is_trained=False),
    Attention("Llama-3.2-1B, one token", (1, 1, 32, 64), CAUSAL, kv_heads=8, k_len=2048, is_trained=False),
    Attention("Llama-3.2-1B, draft of 5 tokens", (1, 5, 32, 64), CAUSAL, kv_heads=8, k_len=2048, is_trained=False),
    Attention("Llama-3-8B, one token", (1, 1, 32, 128), CAUSAL, kv_heads=8, k_len=4096, is_trained=False),
    Attention("Llama-3-8B, 8 padded rows", (8, 1, 32, 128), CAUSAL, 8, 1024, mask="key_mask", is_trained=False),
    Attention("Llama-3-8B, 128 tokens of a prompt", (1, 128, 32, 128), CAUSAL, 8, 1024, is_trained=False),
    Attention("Qwen2.5-0.5B, one token", (1, 1, 14, 64), CAUSAL, kv_heads=2, k_len=8192, is_trained=False),
    Attention("Mistral-7B, one token", (1, 1, 32, 128), Window(4095, 0), kv_heads=8, k_len=8192, is_trained=False),
    Attention("Gemma-3-1B, one token", (1, 1, 4, 256), Window(511, 0), kv_heads=1, k_len=4096, is_trained=False),
    Attention("Whisper-base, text on sound", (1, 1, 8, 64), k_len=1500, is_trained=False),
)

DENSITIES = (0, -3, -7, -10, -13)  #: half octaves: of all pairs to 1 in 90
BLOCKS = {32: 1024, 64: 1024, 128: 2048, 256: 2048}  #: tokens by the size of blocks; 0 stands for intervals


def of_data() -> tuple[Attention, ...]:
    """Blocks of each size, and intervals, at each density, of all kinds of tables."""
    found = []
    for number, (size, density) in enumerate(product((*BLOCKS, 0), DENSITIES)):
        uneven, within = min(number % 3, -density // 2), CAUSAL if number % 2 else Dense()
        scope = ("all", "heads", "kv_heads")[number % 3]
        form: Form = RangesForm(1, False, density, uneven)
        if size:
            form = BlocksForm((size, size), scope, False, number % 4 == 0, within, density, uneven)
        shape = (1, BLOCKS.get(size, 1024), 4, 64)
        found.append(Attention(str(form), shape, form, kv_heads=2))
    return tuple(found)


class Planned(NamedTuple):
    """A problem to tune."""

    of: Attention
    dtype: torch.dtype
    backward: bool

    def problem(self) -> Problem:
        shape, pattern, kv_heads, k_len, mask = self.of[1:6]
        kv_shape = (shape[0], k_len or shape[1], kv_heads or shape[2], shape[3])
        q, kv = (
            torch.empty(each, dtype=self.dtype, device="meta", requires_grad=self.backward)
            for each in (shape, kv_shape)
        )
        form = pattern if isinstance(pattern, Form) else None
        found = Problem.of(q, kv, kv, None if form else pattern, device="cpu")
        found = found if form is None else replace(found, pattern=form, given=form)
        return replace(found, has_seq_lens=mask == "seq_lens", has_key_mask=mask == "key_mask")

    def example(self, seed: int = 0) -> Example:
        """Random tensors: q, k, v and the masks."""
        return make(self.problem(), seed)


def planned() -> dict[str, list[Planned]]:
    """By family. Models: each one's attention in float32 and bfloat16; forward, and with the backward pass where it is
    trained. Blocks: each mask in both dtypes, of which one is trained.
    """
    dtypes = (torch.float32, torch.bfloat16)
    models = [
        Planned(one, dtype, backward)
        for one in MODELS
        for dtype in dtypes
        for backward in ((False, True) if one.is_trained else (False,))
    ]
    every = enumerate(of_data())
    blocks = [Planned(one, dtype, n % 2 == at) for n, one in every for at, dtype in enumerate(dtypes)]
    return {"models": models, "blocks": blocks}
