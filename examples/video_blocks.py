"""Which order of a video's tokens leaves most blocks empty: row by row, in cubes, or along a Hilbert curve.

    python examples/video_blocks.py [--grid 8 16 28] [--window 7] [--share 0.125]

Tokens are those of a grid of frames x rows x columns; similar ones are near each other. In each order, 64 tokens
in a row are a block. One table has all blocks in which a token meets one of its 3-D neighbourhood: the fewer the
better. The other has equally many in each order, those that `top_k` takes: the more attention they keep the better.
Tables of two orders hide different pairs: these are different functions. Each is compared with float64.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor

from attn_dispatch import Blocks, Dense, Neighborhood, attend, positions
from attn_dispatch.blocks import recall, sliding_tiles, top_k

SIZE, CUBE, HEADS, HEAD_DIM, ROUNDS = 64, 4, 4, 64, 7  # a cube of 4 x 4 x 4 tokens is a block


def video(grid: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [1, tokens, heads, head_dim]: scores fall with the distance of two tokens, and differ by head."""
    at = torch.cartesian_prod(*(torch.arange(n, dtype=torch.float32) for n in grid))
    waves = torch.randn(HEADS, 3, HEAD_DIM, generator=generator) / torch.arange(2, HEADS + 2)[:, None, None]
    phase = 2 * math.pi * torch.rand(HEADS, 1, HEAD_DIM, generator=generator)
    features = 3 * torch.cos(at @ waves + phase).transpose(0, 1)[None]
    q, k, v = (torch.randn(features.shape, generator=generator) for _ in "qkv")
    return features + q, features + k, v


def meeting(near: Neighborhood, at: Tensor) -> Blocks:
    """The blocks in which a token sees another one, for tokens in this order."""
    rows = [near.multiplicity(len(at), q_pos=own, k_pos=at)[0].any(0) for own in torch.split(at, SIZE)]
    return Blocks(torch.unflatten(torch.stack(rows), 1, (-1, SIZE)).any(2)[None, None], SIZE)


def tried(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks | Dense) -> tuple[float, float]:
    """The median time of a call in ms, and the largest error of out."""
    exact = attend(q.double(), k.double(), v.double(), blocks, backend="manual")
    error, seconds = (attend(q, k, v, blocks) - exact).abs().max().item(), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        attend(q, k, v, blocks)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[ROUNDS // 2] * 1e3, error


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--grid", type=int, nargs=3, default=(8, 16, 28), help="frames, rows, columns, by 4")
    options.add_argument("--window", type=int, default=7, help="tokens on each axis, an odd number")
    options.add_argument("--share", type=float, default=0.125, help="share of the blocks that top_k takes")
    given = options.parse_args()
    grid = tuple(given.grid)
    near, tokens = Neighborhood(grid, given.window), math.prod(grid)
    orders = {
        "natural": torch.arange(tokens),
        "cubes": sliding_tiles(grid, CUBE, CUBE)[1],
        "hilbert": positions("hilbert", near, tokens),
    }
    q, k, v = video(grid, torch.Generator().manual_seed(0))
    blocks = round(given.share * tokens / SIZE)
    print(f"{grid} = {tokens} tokens; window {given.window}; top {blocks} of {tokens // SIZE} blocks")
    for name, at in orders.items():
        moved = q[:, at], k[:, at], v[:, at]
        cover, best = meeting(near, at), top_k(*moved[:2], SIZE, blocks)
        (cover_ms, one), (best_ms, two) = tried(*moved, cover), tried(*moved, best)
        empty, kept = 1 - cover.data.double().mean().item(), recall(*moved[:2], best).mean().item()
        print(f"{name:8} neighbourhoods: {empty:.1%} of the blocks are empty, {cover_ms:.1f} ms")
        print(f"{name:8} top_k: keeps {kept:.1%} of the attention, {best_ms:.1f} ms")
        print(f"{name:8} differs from float64 by {max(one, two):.1e} at most", flush=True)
    print(f"dense: {tried(q, k, v, Dense())[0]:.1f} ms")


if __name__ == "__main__":
    main()
