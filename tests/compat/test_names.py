"""Errors of other libraries' functions name the argument that their caller wrote, what it was and may be."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import compat
from attn_dispatch.compat.names import renamed
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.problem import Call

pytestmark = pytest.mark.usefixtures("no_trials")

STARTS, OTHERS = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 6], [0, 3, 6]))
TWO, ONE = torch.ones(2, 6, 4, 8), torch.ones(2, 1, 4, 8)
VARLEN = {**dict.fromkeys("qkv", TWO[0]), "max_seqlen_q": 4, "max_seqlen_k": 4, "alibi_slopes": torch.ones(4)}
CACHE = {"q": ONE, "k_cache": TWO, "v_cache": TWO, "alibi_slopes": torch.ones(4), "softmax_scale": 0.5}
#: Arguments that are right, each of which is then made wrong.
RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "flash": (compat.flash_attn_func, {**dict.fromkeys("qkv", TWO), "alibi_slopes": torch.ones(4)}),
    "packed": (compat.flash_attn_varlen_func, {**VARLEN, "cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}),
    "cut": (compat.flash_attn_varlen_func, {**VARLEN, "cu_seqlens_q": STARTS, "cu_seqlens_k": OTHERS}),
    "cache": (compat.flash_attn_with_kvcache, {**CACHE, "cache_leftpad": torch.tensor([0, 1])}),
    "written": (compat.flash_attn_with_kvcache, {**CACHE, "k": ONE, "v": ONE, "cache_seqlens": STARTS[:2]}),
    "xformers": (
        compat.memory_efficient_attention,
        {"query": TWO, "key": TWO, "value": TWO, "attn_bias": torch.ones(2, 4, 6, 6)},
    ),
    "sdpa": (
        compat.scaled_dot_product_attention,
        {"query": TWO, "key": TWO, "value": TWO, "attn_mask": torch.ones(6, 4, 4)},
    ),
    **{
        f"natten {axes}": (
            getattr(compat, f"na{axes}d"),
            {
                **dict.fromkeys(("query", "key", "value"), torch.ones(2, *[4] * axes, 4, 8)),
                **dict.fromkeys(("additional_keys", "additional_values"), torch.ones(2, 3, 4, 8)),
                "kernel_size": 3,
            },
        )
        for axes in (1, 2, 3)
    },
}
#: Those that have no effect, or may be anything that is true or false.
FREE = {"max_seqlen_q", "max_seqlen_k", "num_splits", "cache_batch_idx", "rotary_cos", "rotary_sin"}
ARGUMENTS = [(name, each) for name, (call, _) in RIGHT.items() for each in inspect.signature(call).parameters]


def wrong(name: str, right: Any) -> Iterator[Any]:
    """Values that this argument may not have."""
    yield "wrong"
    if isinstance(right, Tensor):
        yield right.int() if right.is_floating_point() else right.float()
        yield right.new_ones(17)
    elif "scale" in name or "softcap" in name or name in ("p", "dropout_p"):
        yield from (math.nan, math.inf, True)
    elif name in ("kernel_size", "dilation"):
        yield from (0, 2.5, (2,) * 4, 5)
    elif name == "stride":
        yield from (0, (2,) * 4, 4)
    elif name == "window_size":
        yield from (3, (1, 2, 3), (0.5, 1))


@pytest.mark.parametrize(("name", "argument"), [each for each in ARGUMENTS if each[1] not in FREE])
def test_messages_name_the_callers_argument(name: str, argument: str) -> None:
    call, right = RIGHT[name]
    parameters = inspect.signature(call).parameters
    call(**right)
    for value in wrong(argument, right.get(argument, parameters[argument].default)):
        with pytest.raises(InvalidInput) as raised:
            call(**{**right, argument: value})
        text = str(raised.value)
        words = set(re.findall(r"\w+", text))
        assert argument in words, text
        assert words & {*Call._fields, "window", "edges"} <= {*parameters, "layout"}, text
        assert "bhnd" not in words, text
        assert re.search(r"must|needs|may|give", text), text
        assert re.search(r"\bgot\b|but grid has|must be None", text), text


def test_other_words() -> None:
    """The longest of them, whole ones alone."""

    def refuse(text: str) -> None:
        raise InvalidInput(text)

    again = renamed(refuse, {"k": "key", "q and k": "query and key", "k_len": "tokens"})
    with pytest.raises(InvalidInput, match=r"^query and key have k_lens, key's tokens and rank$"):
        again("q and k have k_lens, k's k_len and rank")
