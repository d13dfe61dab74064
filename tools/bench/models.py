"""Models of transformers after the change of one line: their first minute, training with dropout, and checkpoints.

    python -m tools.bench.models [first_minute dropout checkpoints]

Weights are random, float32. `first_minute` runs the same calls in one process each, in turns, with empty folders of
decisions.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing import get_context
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from attn_dispatch.machine.memory import peak_bytes
from tools.lib.common import in_turns, parser, ratio, timing, write
from tools.lib.tables import Table, interval, megabytes, ms

TAKES = "6 minutes"
OURS = "attn_dispatch"
ROUNDS = 4  #: of the first minute's calls: decisions are made in the first, or in slices of later ones
TOKENS, STEPS = 16_384, 3  #: of a decoder's training step

#: What a user does: rows and tokens of a prompt, new tokens, and tokens of padding on the left of the first row.
CALLS = (
    (1, 100, 0, 0),
    (1, 1000, 0, 0),
    (1, 200, 30, 0),
    (1, 1200, 30, 0),
    (4, 64, 0, 20),
    (8, 200, 0, 90),
    (4, 150, 30, 40),
)


def llama(implementation: str, **sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**sizes, max_position_embeddings=2 * TOKENS, use_cache=False, bos_token_id=1)
    config._attn_implementation = implementation
    return LlamaForCausalLM(config)


def small_decoder(implementation: str) -> Any:
    """135 million weights, as SmolLM2 has them."""
    return llama(
        implementation, vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3,
    )  # fmt: skip


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@cache
def user(implementation: str) -> tuple[Any, Warned]:
    """A model of this process, and what this was warned of."""
    if implementation == OURS:
        import attn_dispatch.integrations.transformers  # noqa: F401
    warned = Warned()
    logging.getLogger(OURS).addHandler(warned)
    return small_decoder(implementation).eval(), warned


@torch.no_grad()
def call(implementation: str, rows: int, tokens: int, new: int, padding: int) -> tuple[float, list[str]]:
    """Seconds of one of `CALLS`, and all warnings so far."""
    model, warned = user(implementation)
    ids = torch.randint(2, 49_152, (rows, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    start = time.perf_counter()
    if new:
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, use_cache=True)
    else:
        model(ids, attention_mask=mask)
    return time.perf_counter() - start, warned.found


def first_minute() -> Iterator[dict[str, Any]]:
    """What calls take beyond those of sdpa, by mode."""
    modes = {"tune": OURS, "online": OURS, "sdpa": "sdpa"}
    seconds: dict[str, list[list[float]]] = {mode: [] for mode in modes}
    warned = dict[str, list[str]]()
    with ExitStack() as stack:
        processes = {mode: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"))) for mode in modes}
        for mode, process in processes.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            with patch.dict(os.environ, ATTN_DISPATCH_MODE=mode, ATTN_DISPATCH_CACHE_DIR=folder):  # sdpa reads neither
                process.submit(os.getpid).result()  # starts it
        for _ in range(ROUNDS):
            for took in seconds.values():
                took.append([])
            for one in CALLS:
                for mode, process in processes.items():
                    took_s, warned[mode] = process.submit(call, modes[mode], *one).result()
                    seconds[mode][-1].append(took_s)
    usual = [median(each) for each in zip(*seconds["sdpa"][1:])]
    for mode in ("tune", "online"):
        extra = [[one - base for one, base in zip(row, usual)] for row in seconds[mode]]
        yield {"mode": mode, "usual_s": usual, "extra_s": extra, "seconds": seconds[mode], "warned": warned[mode]}


def dropout() -> Iterator[dict[str, Any]]:
    """A training step of four layers of BERT-base, with and without dropout of attention weights."""
    from transformers import BertConfig, BertModel

    import attn_dispatch.integrations.transformers  # noqa: F401

    for rows, tokens in ((8, 128), (2, 512)):
        steps = dict[str, Callable[[], None]]()
        ids = torch.randint(2, 30_000, (rows, tokens), generator=torch.Generator().manual_seed(0))
        for implementation in ("sdpa", OURS):
            for p in (0.0, 0.1):
                torch.manual_seed(0)
                config = BertConfig(num_hidden_layers=4, attention_probs_dropout_prob=p)
                config._attn_implementation = implementation
                steps[f"{implementation}, {p}"] = partial(_step, BertModel(config).train(), ids)
                steps[f"{implementation}, {p}"]()
        found = in_turns(steps, 9)
        with_ours = ratio(found[f"{OURS}, 0.1"], found[f"{OURS}, 0.0"])
        over_sdpa = ratio(found["sdpa, 0.1"], found[f"{OURS}, 0.1"])
        times = {name: timing(one) for name, one in found.items()}
        yield {"rows": rows, "tokens": tokens, "steps": times, "dropout": with_ours, "sdpa": over_sdpa}


def _step(model: Any, ids: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        out = model(input_ids=ids)
        torch.autograd.backward(out[0].square().mean())


def checkpoints() -> Iterator[dict[str, Any]]:
    """A training step of a decoder over many tokens: what is kept of a layer for its backward pass."""
    import attn_dispatch.integrations.transformers  # noqa: F401

    saving: Any = partial(create_selective_checkpoint_contexts, [torch.ops.attn_dispatch.attend.default])
    steps = dict[str, Callable[[], None]]()
    ids = torch.randint(2, 256, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    kinds: dict[str, dict[str, Any] | None] = {"all": None, "nothing": {}, "attention": {"context_fn": saving}}
    for name, more in kinds.items():
        model = llama(
            OURS, vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4
        ).train()
        if more is not None:
            model.activation_checkpointing_enable({"use_reentrant": False, **more})
        steps[name] = partial(_step, model, ids)
        steps[name]()
    found = in_turns(steps, STEPS)
    for name, step in steps.items():
        _, peak = peak_bytes(step, torch.device("cpu"))
        over = ratio(found["nothing"], found[name])
        yield {"kept": name, "step": timing(found[name]), "gain": over, "peak_bytes": peak}


PARTS = {"first_minute": first_minute, "dropout": dropout, "checkpoints": checkpoints}


def tables(found: Any) -> Iterator[Table]:
    rows: list[tuple[str, ...]] = []
    for each in found.get("first_minute", ()):
        first, *_, last = each["extra_s"]
        every = [one for row in each["extra_s"] for one in row]
        later = 1 + sum(last) / sum(each["usual_s"])
        cells = f"{max(every):.2f} s", f"{sum(first):+.1f} s", f"{sum(every):+.1f} s", f"{later:.2f}"
        rows.append((f"`{each['mode']}`", *cells, str(len(each["warned"]))))
    yield Table(
        ("mode", "one call at most", "the first of each", "all", "last of each / `sdpa`", "warnings"),
        rows,
        f"A decoder of 135 million weights: {len(CALLS)} calls of other sizes (prompts of 100 to 1,600 tokens, 3 with "
        f"30 new ones, 3 with padding), {ROUNDS} times. Times beyond the usual one of `sdpa` for the same call.",
        "The first minute",
    )
    steps = "`sdpa`", "`sdpa`, dropout", "`attend`", "`attend`, dropout"
    rows = [
        (
            f"{each['rows']} x {each['tokens']}",
            *(ms(one) for one in each["steps"].values()),
            interval(each["dropout"]),
            interval(each["sdpa"]),
        )
        for each in found.get("dropout", ())
    ]
    about = "Four layers of BERT-base, forward and backward; 0.1 of the attention weights are dropped."
    head = "rows x tokens", *steps, "with / without", "`sdpa` / `attend`"
    yield Table(head, rows, about, "Training with dropout")
    rows = [
        (each["kept"], ms(each["step"]), interval(each["gain"]), megabytes(each["peak_bytes"] or 0))
        for each in found.get("checkpoints", ())
    ]
    about = f"A decoder of 4 layers, 256 features and 4 heads, {TOKENS:,} tokens, forward and backward."
    kept = "kept of a layer", "a step", "nothing kept / this", "memory"
    yield Table(kept, rows, about, "Gradient checkpoints")


def main() -> None:
    options = parser(__doc__, "models.json")
    options.add_argument("parts", nargs="*", default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    given = options.parse_args()
    found: dict[str, Any] = {name: list(PARTS[name]()) for name in given.parts}
    write(given, found, tables, whole=set(given.parts) == set(PARTS))


if __name__ == "__main__":
    main()
