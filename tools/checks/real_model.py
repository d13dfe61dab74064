"""A trained model by attend(), held to transformers' own attention: logits, tokens, perplexity.

    python -m tools.checks real_model PATH [--text FILE] [--length 512] [--tokens 20]

PATH is a folder with config.json, weights and a tokenizer, or a GGUF file, which needs the library gguf. A model is
loaded with each attention: eager, sdpa, attn_dispatch. Numbers may lie twice as far from eager's as those of sdpa, and
1e-5 of the largest; tokens are the same. A model that generates nothing is compared by what it makes of the text and of
a padded batch. The exit code is 1 where something differs.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.lib.common import RESULTS
from tools.lib.tables import Table

TAKES = "5 min for 135 million parameters"
NAMES = ("eager", "sdpa", "attn_dispatch")
ROUNDING = 1e-5
SENTENCES = (
    "The capital of France is",
    "Attention",
    "In a hole in the ground there lived a small animal that liked tea. It",
)
GENERATING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3, "do_sample": False},
    "static cache": {"cache_implementation": "static", "do_sample": False},
}


def loaded(path: Path, name: str) -> tuple[Any, Any]:
    """A model with this attention, in float32, and its tokenizer."""
    auto: Any = import_module("transformers")
    where: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = auto.AutoTokenizer.from_pretrained(**where)
    config = auto.AutoConfig.from_pretrained(**where)
    heads = " ".join(config.architectures or ["ForCausalLM"])  # a GGUF file names none
    kind = auto.AutoModelForCausalLM if "ForCausalLM" in heads else auto.AutoModel
    model = kind.from_pretrained(**where, dtype=torch.float32, attn_implementation=name)
    if model.config._attn_implementation != name:
        sys.exit(f"the model has no {name}")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left" if model.can_generate() else "right"
    return model.eval(), tokenizer


@torch.no_grad()
def found(path: Path, name: str, given: argparse.Namespace) -> dict[str, Tensor]:
    """All that is compared: real numbers, and whole ones for tokens."""
    model, tokenizer = loaded(path, name)
    text = tokenizer(given.text.read_text(encoding="utf-8"), return_tensors="pt", truncation=False).input_ids
    text = text[:, : min(given.length, getattr(model.config, "max_position_embeddings", given.length))]
    batch = tokenizer(list(SENTENCES), return_tensors="pt", padding=True)
    whole, padded = model(text), model(**batch)
    rows = {"text": whole[0], "padded batch": padded[0][batch["attention_mask"].bool()]}
    if not model.can_generate():
        return rows
    rows["perplexity"] = torch.nn.functional.cross_entropy(whole.logits[0, :-1], text[0, 1:]).exp()
    lengths = {"max_new_tokens": given.tokens, "min_new_tokens": given.tokens}
    for how, options in GENERATING.items():
        torch.manual_seed(0)
        rows[how] = model.generate(**batch, **lengths, pad_token_id=tokenizer.pad_token_id, **options)
    return rows


def far(x: Tensor, y: Tensor) -> float:
    """The largest difference, of the largest number; of tokens, how many differ."""
    if not x.is_floating_point():
        return float((x != y).sum())
    return float((x - y).abs().max() / y.abs().max())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("path", type=Path)
    options.add_argument("--text", type=Path, default=RESULTS.parents[1] / "README.md")
    options.add_argument("--length", type=int, default=512, help="tokens of the text")
    options.add_argument("--tokens", type=int, default=20, help="tokens that are generated for each of three prompts")
    given = options.parse_args()
    import_module("attn_dispatch.integrations.transformers")
    eager, sdpa, ours = (found(given.path, name, given) for name in NAMES)
    rows, failed = [], False
    for what, exact in eager.items():
        known, mine = far(sdpa[what], exact), far(ours[what], exact)
        is_same = torch.equal(ours[what], sdpa[what]) or (exact.is_floating_point() and mine <= 2 * known + ROUNDING)
        shown = f"{float(ours[what]):.6f}" if exact.ndim == 0 else str(list(exact.shape))
        failed |= not is_same
        rows.append((what, shown, f"{known:.1e}", f"{mine:.1e}", "yes" if is_same else "NO"))
    Table(("what", "shape or value", "sdpa from eager", "attn_dispatch from eager", "same"), rows).show()
    sys.exit(failed)


if __name__ == "__main__":
    main()
