"""The README's table of what is gained where, from the shipped profiles and tools/results/."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from attn_dispatch.text import titled
from tools.docs.results import load
from tools.lib.common import RESULTS
from tools.lib.tables import markdown

PROFILES = RESULTS.parent.parent / "profiles"
#: By kind of pattern: what a user calls it, and its problems in tools/results/gpu/decisions.json.
KINDS = {
    "Dense": ("dense or causal attention", "causal"),
    "Window": ("a sliding window", "window"),
    "Dilated": ("LongNet's dilated attention", "longnet"),
    "Neighborhood": ("2-D and 3-D neighbourhoods", "neighborhood"),
}
OF_SDPA = ("sdpa", "sdpa_cudnn")  #: kernels that SDPA chooses from on a GPU
DTYPES = ("float32", "bfloat16")  #: PyTorch's float16 kernels for CPUs are slower still


def gains() -> str:
    """By what a user has: the fastest, and its gain over PyTorch's SDPA, without and with a mask."""
    head = ("you have", "fastest on the CPUs (problems)", "over SDPA", "over SDPA with a dense mask", "on an H100")
    rows: list[tuple[str, ...]] = []
    shipped = list(_shipped())
    for kind, (about, on_gpu) in KINDS.items():
        found = [each for each in shipped if each["problem"]["pattern"]["kind"] == kind]
        winners = Counter(titled(each["choice"], each["order"]) for each in found).most_common()
        over = (_range(_over(each, name) for each in found) for name in ("sdpa", "sdpa_mask"))
        rows.append((about, ", ".join(f"`{title}` ({n})" for title, n in winners), *over, _on_gpu(on_gpu)))
    decoded = [one for one in load("decode")["rows"] if "sdpa" in one and one["dtype"] in DTYPES]
    steps = [one["sdpa"]["median_ms"] / one["native"]["median_ms"] for one in decoded]
    rows.append(("decoding with a cache of keys", "`native`", _range(steps), "-", "not measured"))
    packed = [one["sdpa_over_packed"]["median"] for one in load("documents")["rows"] if one.get("sdpa_over_packed")]
    rows.append(("packed documents", "`native`", f"called once per document: {_range(packed)}", "-", "not measured"))
    training = [
        one["gain"]["median"]
        for each in load("end_to_end")["training"]
        for name, one in each["models"].items()
        if name == "dense"
    ]
    rows.append(("a whole dense model of 4 layers in training", "`native`", _range(training), "-", "not measured"))
    processors = ", ".join(sorted({each["provenance"]["name"] for each in shipped}))
    others = " and ".join(sorted({load(each)["provenance"]["name"] for each in ("decode", "documents", "end_to_end")}))
    note = (
        "Median (least to most; n: problems in which SDPA was timed, too), float32 and bfloat16, forward and backward. "
        "SDPA runs dilated patterns branch by branch and joins them; windows and neighbourhoods need a mask there. "
        f"The first four rows: `profiles/`, of {processors}; the others: `tools/results/`, of {others}. "
        "Another CPU may gain less, or more. One GPU, an H100, was measured for minutes, against the faster of SDPA's "
        "kernels. "
        "[All results](docs/results/README.md), each with its command."
    )
    return f"{markdown(head, rows)}\n\n{note}"


def _shipped() -> Iterator[Any]:
    for path in sorted(PROFILES.glob("*.json")):
        for each in json.loads(path.read_text(encoding="utf-8"))["decisions"]:
            if each["problem"]["dtype"] in DTYPES and each["silicon"].startswith("cpu"):
                yield each


def _over(decision: Any, name: str) -> float | None:
    """The time of a backend over the chosen one's."""
    times = {(row["backend"], row["order"]): row.get("median_ms") for row in decision["candidates"]}
    theirs, ours = times.get((name, "natural")), times.get((decision["choice"], decision["order"]))
    return theirs / ours if theirs and ours else None


def _range(ratios: Iterable[float | None]) -> str:
    known = [each for each in ratios if each is not None]
    if len(known) == 1:
        return f"{known[0]:.1f}x"
    return f"{median(known):.1f}x ({min(known):.1f} to {max(known):.0f}; n {len(known)})" if known else "-"


def _on_gpu(name: str) -> str:
    found = json.loads((RESULTS / "gpu" / "decisions.json").read_text(encoding="utf-8"))["rows"]
    decisions = [each["decision"] for each in found if "decision" in each and each["problem"].startswith(name)]
    if not decisions:
        return "not measured"
    both = ([_over(each, backend) for backend in OF_SDPA] for each in decisions)
    ratios = [min(known) for each in both if (known := [ratio for ratio in each if ratio is not None])]
    winners = ", ".join(sorted({f"`{each['choice']}`" for each in decisions}))
    least, most = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    gain = f"{least if least == most else f'{least} to {most}'}x SDPA" if max(ratios) > 1.05 else "nothing gained"
    return f"{winners}: {gain}, {len(ratios)} calls"
