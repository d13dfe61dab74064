"""A LongNet language model of bytes, trained on text at hand: its loss curve, and what it writes.

    python examples/byte_language_model.py [--steps 250] [--tokens 2048]

The text is Python's own help on its language, 460 KB; a tenth of it is kept for validation. Four causal layers with
dilated attention read 2,048 bytes at once. Text is written byte by byte with a cache of keys and values.
"""

from __future__ import annotations

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attn_dispatch.nn import AttentionConfig, KVCache, LongNetDecoderLayer

LAYERS, BATCH, RATE, SHOWN = 4, 2, 2e-3, 10
PROMPT = "The class statement "


class LanguageModel(nn.Module):
    def __init__(self, tokens: int) -> None:
        super().__init__()
        config = AttentionConfig(
            embed_dim=128,
            num_heads=4,
            segment_lengths=(tokens // 16, tokens // 4, tokens),
            dilation_rates=(1, 2, 4),
            rotary_base=10_000.0,
            num_layers=LAYERS,
        )
        self.bytes = nn.Embedding(256, config.embed_dim)
        self.layers = nn.ModuleList(LongNetDecoderLayer(config, depth=depth) for depth in range(LAYERS))
        self.norm = nn.LayerNorm(config.embed_dim)
        self.head = nn.Linear(config.embed_dim, 256)

    def forward(self, ids: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """Scores of the next byte, [batch, len, 256], for bytes [batch, len]: those after the ones that caches hold."""
        x = self.bytes(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, cache=None if caches is None else caches[number])
        return self.head(self.norm(x))


def texts() -> tuple[Tensor, Tensor]:
    """Bytes to train on and to validate with."""
    everything = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    return everything.tensor_split([len(everything) * 9 // 10])


def batch_of(text: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """Rows of `tokens + 1` bytes."""
    starts = torch.randint(len(text) - tokens, (BATCH,), generator=generator).tolist()
    return torch.stack([text[start : start + tokens + 1] for start in starts])


def loss_of(model: LanguageModel, rows: Tensor) -> Tensor:
    """Mean nats a byte."""
    return cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.inference_mode()
def written(model: LanguageModel, prompt: str, count: int, temperature: float = 0.6) -> str:
    """`count` bytes after the prompt, each drawn from the model's distribution."""
    generator = torch.Generator().manual_seed(0)
    caches = [KVCache() for _ in range(LAYERS)]
    ids = torch.tensor([list(prompt.encode())])
    found: list[int] = []
    for _ in range(count):
        shares = (model(ids, caches)[0, -1] / temperature).softmax(-1)
        found.append(int(torch.multinomial(shares, 1, generator=generator)))
        ids = torch.tensor([found[-1:]])
    return prompt + bytes(found).decode(errors="replace")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=250)
    options.add_argument("--tokens", type=int, default=2048, help="bytes that are read at once, a multiple of 16")
    options.add_argument("--written", type=int, default=300, help="bytes to write")
    given = options.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    text, held_back = texts()
    validation = batch_of(held_back, min(given.tokens, len(held_back) - 1), torch.Generator().manual_seed(2))
    model = LanguageModel(given.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=given.steps)
    start = time.perf_counter()
    for step in range(given.steps):
        loss = loss_of(model, batch_of(text, given.tokens, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % math.ceil(given.steps / SHOWN) == 0 or step == given.steps - 1:
            with torch.inference_mode():
                held_out = loss_of(model, validation).item()
            print(f"step {step:4}: {loss.item():.3f} nats a byte, validation {held_out:.3f}", flush=True)
    seconds = time.perf_counter() - start
    sample = written(model, PROMPT, given.written)
    print(f"{seconds:.0f} s for {given.steps} steps of {BATCH} x {given.tokens:,} bytes\n\n{sample}")


if __name__ == "__main__":
    main()
