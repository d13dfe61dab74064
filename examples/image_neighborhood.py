"""Pixels that attend to their neighbourhood: a model that finds discs in noise, with tokens in Hilbert order
throughout.

    python examples/image_neighborhood.py [--steps 60] [--side 64]

Every pixel is a token and sees 7 x 7 others; three layers make a reach of 19 x 19. Only the model's input and its
result are reordered, once each: in between tokens lie along a Hilbert curve, where neighbours in the image are
neighbours in memory. The same weights are run on tokens row by row too, and must give the same result.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from attn_dispatch import Neighborhood, Reordered, from_order, to_order
from attn_dispatch.nn import MultiheadAttention

LAYERS, WIDTH, HEADS, BATCH, RATE, NOISE = 3, 64, 4, 4, 3e-3, 1.5


class Model(nn.Module):
    """Layers that attend by one pattern, whose order of tokens is that of the input."""

    def __init__(self, pattern: Neighborhood | Reordered) -> None:
        super().__init__()
        self.inputs = nn.Linear(1, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.attention = nn.ModuleList(MultiheadAttention(WIDTH, HEADS, pattern=pattern) for _ in range(LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Scores of a disc, [batch, tokens], for pixels [batch, tokens]."""
        x = self.inputs(pixels[..., None])
        for number, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * number](x))[0]
            x = x + self.mlps[number](self.norms[2 * number + 1](x))
        return self.head(x)[..., 0]


def images(side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images and where their discs are, both [batch, side * side], row by row."""
    at = torch.arange(side)
    clean = torch.zeros(BATCH, side, side)
    for image in clean:
        for row, column, size in torch.rand(6, 3, generator=generator).tolist():
            radius = side * (0.05 + 0.1 * size)
            image[(at[:, None] - row * side) ** 2 + (at - column * side) ** 2 < radius**2] = 1
    noisy = clean + NOISE * torch.randn(clean.shape, generator=generator)
    return noisy.flatten(1), clean.flatten(1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--side", type=int, default=64, help="pixels of a row of the image, 7 or more")
    given = options.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    by_rows = Neighborhood((given.side, given.side), 7)
    pattern = Reordered(by_rows, "hilbert")
    model = Model(pattern)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, seconds = [], []
    for step in range(given.steps):
        start = time.perf_counter()
        noisy, clean = (to_order(x, "hilbert", by_rows) for x in images(given.side, generator))
        loss = binary_cross_entropy_with_logits(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step:3}: loss {losses[-1]:.3f}", flush=True)
    noisy, clean = images(given.side, generator)
    with torch.inference_mode():
        scores = from_order(model(to_order(noisy, "hilbert", by_rows)), "hilbert", by_rows)
        row_by_row = Model(by_rows)
        row_by_row.load_state_dict(model.state_dict())
        apart = (scores - row_by_row(noisy)).abs().max().item()
    right = ((scores > 0) == (clean > 0)).double().mean().item()
    alone = ((noisy > 0.5) == (clean > 0)).double().mean().item()
    typical = sorted(seconds)[len(seconds) // 2]
    print(f"{right:.1%} of the pixels right, {alone:.1%} by each pixel alone; {typical * 1e3:.0f} ms a step")
    print(f"row by row, the same weights give scores that differ by {apart:.1e} at most")


if __name__ == "__main__":
    main()
