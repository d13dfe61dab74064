"""Models from their input to their loss: a decoder over bytes, dense and with patterns, and a model of an image.

    python -m tools.bench.end_to_end [training generation image]

Models have 4 layers of 256 features and 4 heads, float32, batch 1. They differ in the function of q, k and v alone, and
start from the same weights. A step is forward, backward and AdamW; steps of all models are timed in turns, after one
that is not timed, in which `attend` measures. Peak memory is the rise of the process's own during a step.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss, scaled_dot_product_attention

from attn_dispatch import Dense, Dilated, Neighborhood, Reordered, Window, attend, explain, to_order
from attn_dispatch.machine.memory import peak_bytes
from attn_dispatch.spec.pattern import Pattern
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table, interval, ms

TAKES = "8 min"

LAYERS, WIDTH, HEADS, BYTES, RATE = 4, 256, 4, 256, 1e-3
PYTORCH = "F.sdpa"  #: the name of PyTorch's own attention
PATTERNS: dict[str, Pattern] = {
    "dense": Dense(is_causal=True),
    "window": Window(1024, 0),
    "dilated": Dilated((2048, 4096, 8192, 16384), (1, 2, 4, 8), is_causal=True),
}
ROUNDS = {16_384: 3, 32_768: 2, 65_536: 2}  #: of training steps, by tokens
LONGEST_DENSE = 16_384  #: tokens: a training step of dense attention over more takes minutes
PROMPT, NEW = 16_384, 32
SIDES, NEAR, MOST_MASKED = (64, 128), 13, 4096  #: of an image; a neighbourhood's; tokens up to which a mask is built
IMAGE_ROUNDS = 5
TEXT = Path(__file__).parents[2] / "docs"

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Held:
    """Keys and values of the tokens of a layer so far, in memory for as many as there will be."""

    def __init__(self, tokens: int) -> None:
        self.keys, self.values = (torch.empty(1, tokens, HEADS, WIDTH // HEADS) for _ in range(2))
        self.count = 0

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens, with these as the last ones."""
        start, self.count = self.count, self.count + k.shape[1]
        self.keys[:, start : self.count], self.values[:, start : self.count] = k, v
        return self.keys[:, : self.count], self.values[:, : self.count]


class Layer(nn.Module):
    """Attention, given as a function of q, k and v [batch, len, heads, head_dim], and a multilayer perceptron."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, held: Held | None = None) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if held is not None:
            k, v = held.add(k, v)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Model(nn.Module):
    """Layers between an embedding of bytes or of 3 colours and as many scores or colours."""

    def __init__(self, attention: Attention, inputs: nn.Module, outputs: int) -> None:
        super().__init__()
        self.inputs, self.head = inputs, nn.Linear(WIDTH, outputs)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(LAYERS))

    def forward(self, x: Tensor, held: Sequence[Held | None] = (None,) * LAYERS) -> Tensor:
        x = self.inputs(x)
        for layer, one in zip(self.layers, held):
            x = layer(x, one)
        out: Tensor = self.head(x)
        return out


def pytorch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal and q.shape[2] == k.shape[2])
    return out.transpose(1, 2)


def decoder(attention: Attention) -> Model:
    torch.manual_seed(0)
    return Model(attention, nn.Embedding(BYTES, WIDTH), BYTES)


def attentions(patterns: Mapping[str, Pattern]) -> dict[str, Attention]:
    ours = {name: partial(attend, pattern=pattern) for name, pattern in patterns.items()}
    return {PYTORCH: partial(pytorch, is_causal=True), **ours}


@cache
def text() -> Tensor:
    """The bytes of the documentation, one page after the other."""
    return torch.tensor(list(b"".join(page.read_bytes() for page in sorted(TEXT.glob("*.md")))))


def drawn(tokens: int, generator: torch.Generator) -> Tensor:
    """[1, tokens + 1] consecutive bytes; a text that is too short goes on from its beginning."""
    start = int(torch.randint(len(text()), (), generator=generator))
    return text()[(start + torch.arange(tokens + 1)) % len(text())][None]


class Training:
    """Steps of one model; a call is one step, and returns its loss."""

    def __init__(self, model: Model, loss: Callable[[Model], Tensor]) -> None:
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def __call__(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return float(loss.detach())


def next_byte_loss(model: Model, tokens: int, generator: torch.Generator) -> Tensor:
    given = drawn(tokens, generator)
    return cross_entropy(model(given[:, :-1])[0], given[0, 1:])


def trainings(found: Mapping[str, Attention], tokens: int) -> dict[str, Training]:
    """Of each kind of decoder, all on the same text."""
    return {
        name: Training(
            decoder(attention), partial(next_byte_loss, tokens=tokens, generator=torch.Generator().manual_seed(1))
        )
        for name, attention in found.items()
    }


def timed(calls: Mapping[str, Callable[[], Any]], rounds: int, base: str) -> dict[str, Any]:
    """Times in turns, each against the base's; the rise of memory in one more call."""
    found = in_turns(calls, rounds)
    return {
        name: {
            **timing(found[name]),
            "gain": ratio(found[base], found[name]),
            "peak_bytes": peak_bytes(call, torch.device("cpu"))[1],
        }
        for name, call in calls.items()
    }


def choice(pattern: Pattern, tokens: int) -> str:
    """What `attend` calls in a training step."""
    with torch.enable_grad():
        q, k, v = torch.empty(1, tokens, 3, HEADS, WIDTH // HEADS, requires_grad=True).unbind(2)
        found = explain(q, k, v, pattern)
    return f"{found.choice}@{found.order}"


def training() -> Iterator[dict[str, Any]]:
    for tokens, rounds in ROUNDS.items():
        every = attentions(PATTERNS)
        if tokens > LONGEST_DENSE:
            every = {name: every[name] for name in every if name not in (PYTORCH, "dense")}
        with torch.enable_grad():
            found = timed(trainings(every, tokens), rounds, PYTORCH if PYTORCH in every else next(iter(every)))
        choices = {name: choice(PATTERNS[name], tokens) for name in every if name in PATTERNS}
        yield {"tokens": tokens, "choices": choices, "models": found}


class Generation:
    """A decoder that reads a prompt, and then its own bytes; a call is one more."""

    def __init__(self, attention: Attention, prompt: Tensor) -> None:
        self.model, self.prompt = decoder(attention).eval(), prompt
        self.read()
        self()  # `attend` has measured
        self.read_ms = self.read()

    def read(self) -> float:
        """Milliseconds of reading the prompt."""
        start = time.perf_counter()
        self.held = [Held(PROMPT + NEW) for _ in range(LAYERS)]
        self.last = self.model(self.prompt, self.held)[:, -1:].argmax(-1)
        return 1e3 * (time.perf_counter() - start)

    def __call__(self) -> None:
        self.last = self.model(self.last, self.held).argmax(-1)


def generation() -> Iterator[dict[str, Any]]:
    prompt = drawn(PROMPT - 1, torch.Generator().manual_seed(2))
    models = {name: Generation(attention, prompt) for name, attention in attentions(PATTERNS).items()}
    found = in_turns(models, NEW - 2)
    for name, model in models.items():
        one = found[name]
        yield {"model": name, "read_ms": model.read_ms, "token": timing(one), "gain": ratio(found[PYTORCH], one)}


def painter(attention: Attention) -> Model:
    torch.manual_seed(0)
    return Model(attention, nn.Linear(3, WIDTH), 3)


def denoising_loss(model: Model, pictures: Sequence[Tensor]) -> Tensor:
    noisy, clean = pictures
    return mse_loss(model(noisy), clean)


def pictures(side: int) -> tuple[Tensor, Tensor]:
    """Smooth colours with noise, and without, both [1, side * side, 3]."""
    generator = torch.Generator().manual_seed(3)
    clean = interpolate(torch.rand(1, 3, 8, 8, generator=generator), (side, side), mode="bicubic")
    clean = clean.flatten(2).transpose(1, 2)
    return clean + 0.3 * torch.randn(clean.shape, generator=generator), clean


def image() -> Iterator[dict[str, Any]]:
    """Every pixel sees 13 x 13 others. Along the Hilbert curve, only the image is reordered, once and untimed."""
    for side in SIDES:
        pattern, noisy_and_clean = Neighborhood((side, side), (NEAR, NEAR)), pictures(side)
        models: dict[str, tuple[Attention, Iterable[Tensor]]] = {
            "natural": (partial(attend, pattern=pattern), noisy_and_clean),
            "hilbert": (
                partial(attend, pattern=Reordered(pattern, "hilbert")),
                (to_order(x, "hilbert", pattern) for x in noisy_and_clean),
            ),
        }
        if side * side <= MOST_MASKED:
            mask = pattern.multiplicity(side * side)[0] > 0
            models[PYTORCH] = partial(pytorch, mask=mask), noisy_and_clean
        steps = {
            name: Training(painter(attention), partial(denoising_loss, pictures=tuple(tensors)))
            for name, (attention, tensors) in models.items()
        }
        losses = {name: float(step.loss(step.model)) for name, step in steps.items()}
        if any(abs(each - losses["natural"]) > 1e-5 * losses["natural"] for each in losses.values()):
            raise RuntimeError(f"models with the same weights differ in their loss: {losses}")
        with torch.enable_grad():
            found = timed(steps, IMAGE_ROUNDS, "natural")
        yield {"side": side, "pattern": str(pattern), "loss_of_first_weights": losses, "models": found}


PARTS = {"training": training, "generation": generation, "image": image}


def tables(found: Any) -> Iterator[Table]:
    rows: list[tuple[str, ...]] = []
    for each in found.get("training", ()):
        base = next(iter(each["models"]))
        for name, one in each["models"].items():
            gain = gain_of(one["gain"], name == base) if base == PYTORCH else "-"
            rows.append((f"{each['tokens']:,}", titled(name), each["choices"].get(name, "-"), *step(one, gain)))
    patterns = "; ".join(f"{name}: `{pattern}`" for name, pattern in PATTERNS.items())
    yield Table(
        ("tokens", "attention", "backend", "a step", "peak memory", f"`{PYTORCH}` / this"),
        rows,
        f"Decoders of {found['layers']} layers, {found['width']} features and {found['heads']} heads, float32, "
        "batch 1, differ in their attention alone. Calls are timed in turns, after `attend` has measured; "
        f"ratios have their range or 95 % interval. Only `attend`, dense computes what `{PYTORCH}` does; "
        f"`window` and `dilated` compute less. {patterns}. Peak memory: the process's rise during a step.",
        "A training step",
    )
    rows = [
        (titled(one["model"]), seconds(one["read_ms"]), ms(one["token"], 1), gain)
        for one in found.get("generation", ())
        if (gain := gain_of(one["gain"], one["model"] == PYTORCH))
    ]
    head = ("attention", f"reading {found['prompt']:,} tokens", "each new token", f"`{PYTORCH}` / this")
    yield Table(head, rows, title="Generation with held keys and values")
    rows = [
        (f"{each['side']} x {each['side']}", IMAGES[name], *step(one, interval(one["gain"])))
        for each in found.get("image", ())
        for name, one in each["models"].items()
    ]
    yield Table(
        ("pixels", "attention", "a step", "peak memory", "row by row / this"),
        rows,
        f"Each pixel sees {NEAR} x {NEAR} others. Along the curve, the image is reordered once, before the first "
        "layer. With the same weights, all give the same loss.",
        "An image",
    )


IMAGES = {PYTORCH: "`F.sdpa` with a mask", "natural": "`attend`, row by row", "hilbert": "`attend`, along the curve"}


def titled(name: str) -> str:
    return f"`{PYTORCH}`" if name == PYTORCH else f"`attend`, {name}"


def gain_of(one: Any, is_base: bool) -> str:
    return "1" if is_base else interval(one)


def seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:,.2f} s"


def step(one: Any, gain: str) -> tuple[str, str, str]:
    peak = one["peak_bytes"]
    return seconds(one["median_ms"]), "-" if peak is None else f"{peak / 2**20:,.0f} MiB", gain


def main() -> None:
    options = parser(__doc__, "end_to_end.json")
    options.add_argument("parts", nargs="*", default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    given = options.parse_args()
    found: dict[str, Any] = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "prompt": PROMPT}
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ATTN_DISPATCH_CACHE_DIR"] = folder
        found |= {name: list(PARTS[name]()) for name in given.parts}
    write(given.output, found, tables, whole=set(given.parts) == set(PARTS))


if __name__ == "__main__":
    main()
