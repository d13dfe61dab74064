"""The README's tables from tools/results/: five rows about LongNet, and an excerpt of an explanation."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.store.decision import Row
from tools.docs.results import load, machine
from tools.lib.tables import table

SHOWN = ("sdpa", "sdpa_mask", "native", "flex")  #: backends of the excerpt
DTYPES = ("float32", "bfloat16")


def longnet() -> str:
    """Causal LongNet attention four ways, and the longest sequence."""
    found = load("longnet")
    direct = {dtype: _causal(found["masked"], dtype) for dtype in DTYPES}
    compiled = {dtype: _causal(load("kernels")["rivals"], dtype) for dtype in DTYPES}
    head = (f"{found['pattern']}, causal, {direct['float32']['tokens']:,} tokens, forward", *DTYPES)
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    rows.append(("PyTorch's SDPA with a dense mask", *(_ms(one["torch_with_mask"]) for one in direct.values())))
    for name, about in (("sdpa", "SDPA on each branch, merged by lse"), ("native", "one pass of a C++ kernel")):
        cells = (f"{_ms(one[name])}: {_times(one[f'torch_with_mask_over_{name}'])}" for one in direct.values())
        rows.append((f"`{name}`: {about}", *cells))
    cells = (_ms(one["times"]["flex"]) + f": {_slower(one['times'])}" for one in compiled.values())
    rows.append(("`flex`: FlexAttention, compiled", *cells))
    long = max(found["long"], key=lambda one: one["tokens"])
    speed = f"{long['seconds']:.1f} s: {long['tokens_per_s']:,.0f} tokens/s"
    cells = (speed if dtype == long["dtype"] else "-" for dtype in DTYPES)
    rows.append((f"`{long['backend']}` on {long['tokens']:,} tokens, not causal", *cells))
    gains = [one["torch_with_mask_over_native"]["median"] for one in found["masked"]]
    note = (
        f"Batch 1, {found['heads']} heads of {found['head_dim']}, on {machine(found)}. Intervals are 95 %.\n"
        "These two are the cases that gain most: `native` is "
        f"{min(gains):.1f}x to {max(gains):.1f}x as fast in [all {len(gains)}](docs/results/figures.md). "
        f"The last row's peak memory is {long['peak_above_qkv_out']:.1%} above q, k, v and out "
        f"(a dense mask: {long['tokens'] ** 2 / 2**40:.0f} TiB)."
    )
    return f"{table(rows)}\n\n{note}"


def _causal(rows: Any, dtype: str) -> Any:
    """The forward pass of the causal LongNet pattern."""
    return next(
        one for one in rows if one["dtype"] == dtype and "causal" in one["pattern"] and not one.get("backward", False)
    )


def _ms(timing: Any) -> str:
    return f"{timing['median_ms']:,.0f} ms"


def _times(ratio: Any) -> str:
    return f"{ratio['median']:.1f}x as fast ({ratio['low']:.1f} to {ratio['high']:.1f})"


def _slower(times: Any) -> str:
    ratio = times["flex"]["median_ms"] / times["sdpa_mask"]["median_ms"]
    return f"{ratio:.1f} times `sdpa_mask`'s {_ms(times['sdpa_mask'])} in the same run"


def explained() -> str:
    """The first lines of `explain`, and the rows of a few backends without long reasons."""
    found = load("explain")
    values = {field.name: found[field.name] for field in fields(Explanation) if field.name in found}
    values["candidates"] = tuple(Row(**each) for each in found["candidates"])
    lines = str(Explanation(**values)).splitlines()
    table_at = next(number for number, line in enumerate(lines) if line.startswith("backend "))
    rows = [line for line in lines[table_at + 1 :] if line.split()[0] in SHOWN or "need CUDA" in line]
    return "\n".join(("```text", *lines[: table_at + 1], *rows, "```"))
