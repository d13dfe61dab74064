"""A task that needs a long range: the last token of a sequence must name a symbol that stands at its beginning.

    python examples/long_range_recall.py [--steps 150] [--tokens 2048]

Tokens are noise, but for one of eight symbols in the first 32 places. Two causal layers with a window of 128 see no
further back than 254 tokens, and guess. Dilated attention has as many pairs of queries and keys, and reaches
everything: of the whole sequence, each of four heads takes every fourth token. Dense attention reaches it too, with
eight times the pairs at 2,048 tokens.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attn_dispatch import Dense, Dilated, Window
from attn_dispatch.nn import MultiheadAttention

SYMBOLS, NOISE, PLACES = 8, 24, 32
LAYERS, WIDTH, HEADS, BATCH, RATE = 2, 64, 4, 8, 3e-3


def patterns(tokens: int) -> dict[str, Window | Dilated | Dense]:
    return {
        "window": Window(left=127, right=0),
        "dilated": Dilated((128, tokens), (1, HEADS), is_causal=True),
        "dense": Dense(is_causal=True),
    }


class Model(nn.Module):
    def __init__(self, pattern: Window | Dilated | Dense) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS + NOISE, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.layers = nn.ModuleList(
            MultiheadAttention(WIDTH, HEADS, pattern=pattern, rotary_base=10_000.0) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the symbol, [batch, SYMBOLS], for tokens [batch, len]."""
        x = self.symbols(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return self.head(x[:, -1])


def batch_of(tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences [batch, tokens] and the symbol of each."""
    ids = torch.randint(SYMBOLS, SYMBOLS + NOISE, (BATCH, tokens), generator=generator)
    symbol = torch.randint(SYMBOLS, (BATCH,), generator=generator)
    ids[:, :PLACES] = symbol[:, None]
    return ids, symbol


def trained(pattern: Window | Dilated | Dense, tokens: int, steps: int) -> dict[str, float]:
    """Loss and share of right answers over the last quarter of the steps, and seconds a step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model(pattern)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, right, seconds = [], [], []
    for _ in range(steps):
        ids, symbol = batch_of(tokens, generator)
        start = time.perf_counter()
        scores = model(ids)
        loss = cross_entropy(scores, symbol)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        right.append((scores.argmax(-1) == symbol).double().mean().item())
    last = max(1, steps // 4)
    return {
        "loss": sum(losses[-last:]) / last,
        "right": sum(right[-last:]) / last,
        "seconds": sorted(seconds)[len(seconds) // 2],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--tokens", type=int, default=2048, help="length of a sequence, a multiple of 128")
    given = options.parse_args()
    found = {}
    for name, pattern in patterns(given.tokens).items():
        one = found[name] = trained(pattern, given.tokens, given.steps)
        print(f"{name:8} {one['right']:4.0%} right (chance: {1 / SYMBOLS:.0%}), loss {one['loss']:.3f}, "
              f"{one['seconds'] * 1e3:.0f} ms a step", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
