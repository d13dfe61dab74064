"""A small causal transformer trained over many devices, its sequences cut into shards: two steps, each with its loss.

    torchrun --standalone --nproc_per_node=2 examples/context_parallel.py [--check]

Each rank holds an early and a late part of every sequence (zigzag), so that all have equally much causal work. Only
attention needs the other ranks' tokens. Positions, which the rotary embedding goes by, come from `shard_positions`;
each rank's loss is its share of the whole loss, so that gradients are summed up, not averaged. `--check` works out the
same steps in this process alone, on whole sequences, and fails where a loss differs.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from attn_dispatch import Sharded, attend, shard, shard_positions

BATCH, TOKENS, WORDS = 2, 256, 97
LAYERS, HEADS, HEAD_DIM = 2, 4, 16
STEPS, RATE = 2, 0.5


class Block(nn.Module):
    """Attention over all ranks of `spread`, or on this device alone where it is None; then a two-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, positions: Tensor, spread: Sharded | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        q, k = rotated(q, positions), rotated(k, positions)
        x = x + self.out(attend(q, k, v, is_causal=True, mesh=spread).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, HEADS * HEAD_DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * HEAD_DIM, WORDS)

    def forward(self, words: Tensor, positions: Tensor, spread: Sharded | None = None) -> Tensor:
        """Scores of the next word, [batch, tokens, WORDS], from words [batch, tokens] at these positions [tokens]."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x, positions, spread)
        return self.head(x)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [batch, tokens, heads, head_dim]. Source: Su et al. 2021, RoFormer."""
    rates = 10_000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = positions.to(x.device)[:, None, None] * rates
    first, second = x.chunk(2, dim=-1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)


def trained(words: Tensor, spread: Sharded | None) -> list[float]:
    """The loss of each step on words [batch, tokens + 1], the same on every rank."""
    torch.manual_seed(0)  # every rank begins with the same weights
    model = Model().to(words.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    inputs, targets = words[:, :-1], words[:, 1:]
    count, positions = targets.numel(), torch.arange(TOKENS)
    if spread is not None:
        inputs, targets = shard(inputs, spread), shard(targets, spread)
        positions = shard_positions(TOKENS, spread)
    losses = []
    for _ in range(STEPS):
        scores = model(inputs, positions, spread)
        loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if spread is not None:
            group = spread.mesh.get_group()
            for x in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(x, group=group)
        optimizer.step()
        losses.append(float(total))
    return losses


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--check", action="store_true", help="compare with whole sequences in one process")
    check = options.parse_args().check
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    ranks = dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    spread = Sharded(init_device_mesh(device, (ranks,), mesh_dim_names=("context",)), "zigzag")
    # In a real run: a batch of text, alike on all ranks of the mesh.
    words = torch.randint(WORDS, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(1)).to(device)
    losses = trained(words, spread)
    if dist.get_rank() == 0:
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.6f}, {TOKENS} tokens over {ranks} ranks")
    if check:
        alone = trained(words, None)
        # What float32 sums of as many terms, in another order, may differ by.
        allowed = 4 * torch.finfo(torch.float32).eps * (TOKENS * BATCH) ** 0.5 * max(alone)
        if any(abs(one - other) > allowed for one, other in zip(losses, alone)):
            raise SystemExit(f"over {ranks} ranks {losses}, in one process {alone}: more than {allowed:.1e} apart")
        if dist.get_rank() == 0:
            print(f"in one process: {', '.join(f'{loss:.6f}' for loss in alone)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
