"""Models from their input to their loss, from tools/results/end_to_end.json: tables, and the loss as an SVG."""

from __future__ import annotations

from typing import Any

from tools.bench.end_to_end import PATTERNS
from tools.docs.hilbert_plot import Panel, document, line, text
from tools.docs.results import load, machine
from tools.lib.tables import table

PYTORCH = "F.sdpa"
TITLES = {PYTORCH: "PyTorch's dense attention", "natural": "row by row", "hilbert": "along a Hilbert curve"}
COLOURS = {PYTORCH: "#777777", "dense": "#009e73", "window": "#d55e00", "dilated": "#0072b2"}
WIDTH, HEIGHT = 640, 380


def models() -> str:
    found = load("end_to_end")
    about = (
        f"By `python -m tools.bench.end_to_end`: {found['layers']} layers of {found['width']} features and "
        f"{found['heads']} heads, float32, batch 1, that differ in their function of q, k and v. They are timed in "
        "turns, after a call that is not timed, in which `attend` measures; ratios with 95 % intervals, of under six "
        "rounds (all but those of new tokens) with their range. Only `attend`, dense computes what PyTorch's dense "
        "attention does; `window` and `dilated` compute less. But for the loss, "
        f"{'; '.join(f'{name}: `{pattern}`' for name, pattern in PATTERNS.items())}. Peak memory is "
        f"the rise of the process's own during one step. {machine(found)}."
    )
    picture = "![Cross-entropy against steps, for each attention](../../tools/results/end_to_end.svg)"
    parts = (
        *(about, "## A training step of a decoder", _training(found)),
        *("## Generation", _generation(found)),
        *("## The loss", _curves_text(found), picture, _curves(found)),
        *("## An image, each pixel of which sees its neighbourhood", _image(found)),
        *("## A Llama of transformers", _llama(found)),
    )
    return "\n\n".join(parts)


def _title(name: str) -> str:
    return TITLES.get(name, f"`attend`, {name}")


def _gain(one: Any) -> str:
    return f"{one['median']:.2f}x ({one['low']:.2f} to {one['high']:.2f})"


def _step(one: Any) -> tuple[str, str]:
    peak = one["peak_bytes"]
    return f"{one['median_ms'] / 1e3:,.2f} s", "-" if peak is None else f"{peak / 2**20:,.0f} MiB"


def _training(found: Any) -> str:
    head = ("tokens", "attention", "backend", "a step", "PyTorch's dense / this", "peak memory")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for each in found["training"]:
        base = next(iter(each["models"]))
        for name, one in each["models"].items():
            took, peak = _step(one)
            gain = "-" if base != PYTORCH else "1" if name == base else _gain(one["gain"])
            rows.append((f"{each['tokens']:,}", _title(name), each["choices"].get(name, "-"), took, gain, peak))
    return table(rows)


def _generation(found: Any) -> str:
    head = ("attention", f"reading {found['prompt']:,} tokens", "each new token", "PyTorch's dense / this")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for one in found["generation"]:
        gain = "1" if one["model"] == PYTORCH else _gain(one["gain"])
        rows.append(
            (_title(one["model"]), f"{one['read_ms'] / 1e3:,.2f} s", f"{one['token']['median_ms']:,.1f} ms", gain)
        )
    about = "Keys and values of earlier tokens are held; new tokens come one by one."
    return f"{about}\n\n{table(rows)}"


def _curves_text(found: Any) -> str:
    one = found["curves"][0]
    patterns = "; ".join(
        f"{each['model']}: `{each['pattern']}`" for each in found["curves"] if each["model"] != PYTORCH
    )
    return (
        f"Cross-entropy of the next byte of this documentation, in nats, as the mean of {one['every']} steps of "
        f"{one['tokens']:,} tokens each. All models have the same first weights and the same text. {patterns}. It "
        "does not show which pattern a large model wants; both dense rows agree, as right gradients require."
    )


def _curves(found: Any) -> str:
    every = found["curves"][0]["every"]
    ends = range(every, every * len(found["curves"][0]["loss"]) + 1, every)
    rows = [("steps", *(f"to {end}" for end in ends)), ("---",) * (len(ends) + 1)]
    rows += [(_title(one["model"]), *(f"{loss:.2f}" for loss in one["loss"])) for one in found["curves"]]
    return table(rows)


def _image(found: Any) -> str:
    head = ("pixels", "attention", "a step", "time in rows / time", "peak memory")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for each in found["image"]:
        for name, one in each["models"].items():
            took, peak = _step(one)
            title = "PyTorch's with a mask" if name == PYTORCH else f"`attend`, {_title(name)}"
            rows.append((f"{each['side']} x {each['side']}", title, took, _gain(one["gain"]), peak))
    about = (
        f"`{found['image'][-1]['pattern']}`, in every layer. Along the curve, the image is reordered once before the "
        "first layer, and all layers attend by `Reordered`; with the same weights, all give the same loss. Row by row, "
        "`attend` may itself take `native` in Hilbert order in each call."
    )
    return f"{about}\n\n{table(rows)}"


def _llama(found: Any) -> str:
    head = ("tokens", "`attn_implementation`", "a step", "`sdpa` / this", "peak memory", "generating", "`sdpa` / this")
    rows: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for each in found["transformers"]:
        for name, one in each["training"].items():
            took, peak = _step(one)
            read, base = each["generation"][name], name == next(iter(each["training"]))
            gains = ("1", "1") if base else (_gain(one["gain"]), _gain(read["gain"]))
            rows.append((f"{each['tokens']:,}", f"`{name}`", took, gains[0], peak, _step(read)[0], gains[1]))
    about = (
        f"`LlamaForCausalLM` with random weights, of the sizes above and {found['heads'] // 2} heads of keys; `sdpa` "
        "is transformers' default. Generating is reading a prompt of that length and "
        f"{found['new']} new ones, by `generate()`. All implementations give the same loss with the same weights."
    )
    return f"{about}\n\n{table(rows)}"


def svg(found: Any) -> str:
    """The loss of each model against steps, both axes with logarithms."""
    curves = found["curves"]
    every, losses = curves[0]["every"], [loss for one in curves for loss in one["loss"]]
    ends = [every * (n + 1) for n in range(len(curves[0]["loss"]))]
    panel = Panel(70, (ends[0], ends[-1]), (0.95 * min(losses), 1.05 * max(losses)), 70, WIDTH - 110, HEIGHT - 140)
    ticks = [tick for tick in (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6) if panel.y[0] <= tick <= panel.y[1]]
    right, bottom = panel.left + panel.width, panel.top + panel.height
    parts = [line((panel.left, panel.up(tick)), (right, panel.up(tick)), 'stroke="#dddddd"') for tick in ticks]
    parts += [text(panel.left - 7, panel.up(tick) + 4, f"{tick:g}", "end") for tick in ticks]
    parts += [text(panel.across(end), bottom + 19, f"{end}", "middle") for end in ends]
    parts.append(text(panel.left + panel.width / 2, bottom + 42, "steps", "middle"))
    across = panel.left
    for one in curves:
        points = [(end, loss, loss, loss) for end, loss in zip(ends, one["loss"])]
        colour, words = COLOURS[one["model"]], _title(one["model"]).replace("`", "")
        parts += panel.curve(points, colour, 'stroke-dasharray="5 4"' if one["model"] == PYTORCH else "")
        parts.append(text(across, 54, words, "start", f'fill="{colour}"'))
        across += 6 * len(words) + 24
    parts.append(f'<path d="M{panel.left} {panel.top}V{bottom}H{right}" fill="none" stroke="#444444"/>')
    return document(WIDTH, HEIGHT, panel.left, "Cross-entropy of the next byte, in nats, while training", parts)
