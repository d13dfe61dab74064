"""A transformers decoder fine-tuned on long text: dense attention against dilated attention, by one line of config.

    python examples/long_finetuning.py [--tokens 16384] [--steps 2]

A small Llama with random weights first learns short texts (1,024 tokens), as a pretrained model has. Then copies of
it are fine-tuned on long ones: dense with PyTorch's attention ("sdpa"), dense with attn_dispatch, and dilated with
attn_dispatch. Printed for each: the loss of every step, seconds a step, and how far the process's memory rose. The
text is Python's own help on its language, read as bytes.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time
from multiprocessing import get_context
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attn_dispatch.integrations.transformers  # noqa: F401 - registers "attn_dispatch"

SHORT, SHORT_STEPS = 1024, 60
DILATED = {"segment_lengths": (1024, 4096, 16384), "dilation_rates": (1, 4, 16)}
RUNS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "dense, sdpa": ("sdpa", None),
    "dense, attn_dispatch": ("attn_dispatch", None),
    "dilated, attn_dispatch": ("attn_dispatch", DILATED),
}


def text() -> torch.Tensor:
    """Bytes of the help pages, [length]."""
    return torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))


def batch(tokens: int, seed: int) -> torch.Tensor:
    """One row of bytes from a place that the seed draws, [1, tokens]."""
    everything = text()
    start = int(torch.randint(len(everything) - tokens, (), generator=torch.Generator().manual_seed(seed)))
    return everything[None, start : start + tokens]


def model_of(tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def trained(model: LlamaForCausalLM, tokens: int, steps: int, rate: float, first_seed: int) -> list[dict[str, float]]:
    """Loss and seconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    found = []
    for step in range(steps):
        start = time.perf_counter()
        ids = batch(tokens, first_seed + step)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append({"loss": loss.item(), "seconds": time.perf_counter() - start})
    return found


def finetuned(weights: dict[str, Any], name: str, tokens: int, steps: int) -> dict[str, Any]:
    """One fine-tuning in a process of its own, so that its peak of memory is its own."""
    implementation, dilated = RUNS[name]
    model = model_of(tokens)
    model.load_state_dict(weights)
    if dilated is not None:
        model.config.attn_dispatch = dilated
    model.set_attn_implementation(implementation)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = trained(model, tokens, steps, 3e-4, first_seed=10_000)
    return {"steps": found, "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, default=16384, help="length of the texts to fine-tune on")
    options.add_argument("--steps", type=int, default=4, help="of fine-tuning; the first one of a machine also chooses")
    given = options.parse_args()
    short = model_of(given.tokens)
    short.set_attn_implementation("sdpa")
    losses = trained(short, min(SHORT, given.tokens), SHORT_STEPS if given.steps > 1 else 1, 1e-3, first_seed=0)
    print(f"short texts: loss {losses[0]['loss']:.3f} to {losses[-1]['loss']:.3f} in {len(losses)} steps")
    weights = copy.deepcopy(short.state_dict())
    results: dict[str, Any] = {}
    for name in RUNS:
        with get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(finetuned, (weights, name, given.tokens, given.steps))
        one = results[name]
        print(
            f"{name:24} loss {' '.join(format(each['loss'], '.3f') for each in one['steps'])}; "
            f"{one['steps'][-1]['seconds']:.2f} s a step (the first: {one['steps'][0]['seconds']:.2f} s), "
            f"{one['peak_mib']:,.0f} MiB more at the peak"
        )


if __name__ == "__main__":
    main()
