"""Groups of problems that differ only in sizes: measurements of some predict others. Imports no torch.

A group is (dtype, head_dim, pattern class, direction), and whether tensors mask keys or weights are dropped. Lengths,
batch, heads, windows, segments and the density of masks made of data differ within a group.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from attn_dispatch.text import where_true

SIZES = ("segment_lengths", "left", "right", "sinks", "grid", "window")  #: fields of a pattern; others are its class
OF_DATA = ("density", "imbalance")  #: the same of a mask made of data, where they are known
EXACT = ("dtype", "head_dim", "needs_grad", "has_seq_lens", "has_key_mask", "device")
#: What a call may do to the scores besides scaling them, and the fields of a problem that say so, left out if empty.
SCORE_TERMS = {"softcap": "softcap", "bias": "bias", "bias's gradient": "bias_needs_grad"}
SCORE_TERMS |= {"alibi_slopes": "alibi_axes"}
DIGITS = 12
KEY_DIGITS = 20
USUAL = {"offsets": "mod", "heads": "all", "edges": "clip"}  #: default fields of a pattern, left out of titles


def describe(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a problem's group in plain values; `problem` is as `Problem.to_dict` returns it."""
    found = {name: problem[name] for name in EXACT}
    found["pattern"] = pattern_class(problem["pattern"])
    found["dropout"] = problem["dropout_p"] > 0
    found["ranks"] = problem["ranks"]
    if terms := [name for name, field in SCORE_TERMS.items() if problem.get(field)]:
        found["score_terms"] = terms
    return found


def group_of(problem: Mapping[str, Any]) -> str:
    """12 hexadecimal digits that name the group.

    Raises:
        KeyError, TypeError: `problem` is not a problem.
    """
    text = json.dumps(describe(problem), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def key_of(problem: Mapping[str, Any], silicon: str) -> str:
    """20 hexadecimal digits that name the problem on one silicon.

    The values of scale, dropout_p and softcap cannot change which backend is valid or fast, only their presence can.

    Raises:
        KeyError, TypeError: it is not a problem.
    """
    default = problem["scale"] == math.pow(problem["head_dim"], -0.5)
    plain = {**problem, "scale": default, "dropout_p": problem["dropout_p"] > 0}
    if "softcap" in plain:
        plain["softcap"] = True
    text = json.dumps([silicon, plain], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]


def pattern_class(pattern: Mapping[str, Any]) -> dict[str, Any]:
    """A pattern without its sizes: its kind, whether it is causal, its rates, the number of grid axes."""
    known = {name for name in OF_DATA if pattern.get(name) is not None}
    found = {name: value for name, value in pattern.items() if name not in {*SIZES, *known}}
    if "pattern" in pattern:  # Reordered
        found["pattern"] = pattern_class(pattern["pattern"])
    if "grid" in pattern:
        found["axes"] = len(pattern["grid"])
    if "right" in pattern:
        found["ahead"] = pattern["right"] != 0
    if "sinks" in pattern:
        found["with_sinks"] = True
    return found


def title(problem: Mapping[str, Any]) -> str:
    """The group as readable text: `float32 d64 Dilated(r=1,2,4 causal) forward`.

    Raises:
        KeyError, TypeError: `problem` is not a problem.
    """
    found = describe(problem)
    words = [f"{found['dtype']} d{found['head_dim']}", _pattern_title(found["pattern"])]
    words += ["forward + backward" if found["needs_grad"] else "forward"]
    words += where_true(
        {"seq_lens": found["has_seq_lens"], "key_mask": found["has_key_mask"], "dropout": found["dropout"]}
        | dict.fromkeys(found.get("score_terms", ()), True)
        | {f"ranks {found['ranks']}": found["ranks"] > 1, found["device"]: found["device"] != "cpu"}
    )
    return " ".join(words)


def _pattern_title(pattern: Mapping[str, Any]) -> str:
    if "pattern" in pattern:
        return f"{pattern['kind']}({_pattern_title(pattern['pattern'])} {pattern['order']})"
    words = [f"{pattern['axes']}-D"] if "axes" in pattern else []
    if set(pattern.get("dilation_rates", ())):
        words.append("r=" + ",".join(map(str, pattern["dilation_rates"])))
    if set(pattern.get("dilation", (1,))) != {1}:
        words.append("dilation=" + ",".join(map(str, pattern["dilation"])))
    if "stride" in pattern:
        words.append("stride=" + ",".join(map(str, pattern["stride"])))
    causal = pattern.get("is_causal", not pattern.get("ahead", True))
    axes = causal if isinstance(causal, list | tuple) else [causal]
    which = "" if all(axes) else "=" + ",".join(str(int(axis)) for axis in axes)
    words += where_true({f"causal{which}": any(axes), "sinks": "with_sinks" in pattern})
    words += [f"{name}={pattern[name]}" for name, usual in USUAL.items() if pattern.get(name, usual) != usual]
    return f"{pattern['kind'].removesuffix('Form')}({' '.join([*words, *_form_words(pattern)])})"


def _form_words(pattern: Mapping[str, Any]) -> list[str]:
    """What a key holds of a mask made of data besides its density."""
    words = [f"size={','.join(map(str, pattern['size']))}"] if "size" in pattern else []
    words += [f"intervals={pattern['intervals']}"] if "intervals" in pattern else []
    words += [f"within {_pattern_title(pattern_class(pattern['within']))}"] if "within" in pattern else []
    return words + where_true({"lists": pattern.get("is_list", False), "by row": pattern.get("by_row", False)})
