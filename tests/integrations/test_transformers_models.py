"""transformers' models by attend(): logits and gradients against its own attention, on random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from attn_dispatch.errors import InvalidInput
from tests.support.pairwise import thinned
from tests.support.small_transformers import (
    CACHE,
    DECODERS,
    LENGTH,
    OTHERS,
    PADDINGS,
    Case,
    assert_close,
    decoder,
    decoder_case,
    other_case,
    skip_if_ignored,
    static_cache,
    tokens,
    using,
)

pytestmark = pytest.mark.usefixtures("no_trials")


#: Attention layers: of an encoder, a decoder and across, two each; CLIP has two encoders.
ASKED = {"bert": 2, "modernbert": 2, "embedding_gemma": 2, "vit": 2, "clip": 4, "bart": 6, "whisper": 6, "t5": 6}
MASKED = [*DECODERS, *(name for name in OTHERS if name != "vit")]
PATTERNS = {
    "mistral": ["Window(left=5, right=0)"] * 2,
    "qwen2": ["Dense(causal)", "Window(left=4, right=0)"],
    "llama": ["Dense(causal)"] * 2,
    "llama4": ["Dense(causal)", "Dilated((8,), (1,), causal)"],
    "bert": ["Dense()"] * 2,
    "modernbert": ["Dense()", "Window(left=3, right=3)"],
    "embedding_gemma": ["Dense()", "Window(left=2, right=2)"],
    "bart": ["Dense()"] * 4 + ["Dense(causal)"] * 2,
    "clip": ["Dense()"] * 2 + ["Dense(causal)"] * 2,
}


def case_of(name: str, padding: str) -> Case:
    skip_if_ignored(name)
    return decoder_case(name, padding) if name in DECODERS else other_case(name, padding)


@thinned(("name", "padding"), [("vit", "none"), *product(MASKED, PADDINGS)], 3)
def test_equals_transformers(name: str, padding: str, asked: list[str]) -> None:
    case = case_of(name, padding)
    case.assert_equal()
    assert len(asked) == (ASKED.get(name) or case.model.config.num_hidden_layers)


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_layers(name: str, asked: list[str]) -> None:
    case = case_of(name, "none" if name in DECODERS else "left")
    using(case.model, "attn_dispatch")(**case.inputs)
    assert sorted(asked) == PATTERNS[name]


@pytest.mark.parametrize(("name", "dropout"), [("llama", 0.0), ("mistral", 0.0), ("mistral", 0.1)])
def test_selective_checkpoints_keep_attention(name: str, dropout: float, asked: list[str], forwards: list[str]) -> None:
    """Of two layers, two forward passes in place of four, and the same gradients."""
    model, found = using(decoder(name, attention_dropout=dropout), "attn_dispatch").train(), list[Any]()
    saving: Any = partial(create_selective_checkpoint_contexts, [torch.ops.attn_dispatch.attend.default])
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable  # older
    for more in (None, {}, {"context_fn": saving}):
        if more is not None:
            enable({"use_reentrant": False, **more})
        forwards.clear()
        model.zero_grad()
        torch.manual_seed(0)
        model(input_ids=tokens(), use_cache=False).logits.square().mean().backward()
        found.append((len(forwards), [x.grad for x in model.parameters()]))
    assert [count for count, _ in found] == [2, 4, 2]
    assert all(torch.equal(x, y) for _, grads in found[1:] for x, y in zip(grads, found[0][1], strict=True))


FIRST = 5  #: tokens of the first of two documents in a row
POSITIONS = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])[None]
STARTS = torch.tensor([0, FIRST, LENGTH], dtype=torch.int32)
PACKED: dict[str, dict[str, Any]] = {
    "alone": {"position_ids": POSITIONS, "use_cache": False},
    "beside a cache": {"position_ids": POSITIONS, "use_cache": True},
    "beside a mask": {"position_ids": POSITIONS, "use_cache": False, "attention_mask": torch.ones(1, LENGTH)},
    "by cu_seq_lens": {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 15, "max_length_k": 15},
    "by seq_idx": {"seq_idx": (torch.arange(LENGTH)[None] >= FIRST).int()},
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "how"),
    [*product(["llama", "mistral", "gpt_oss"], PACKED), ("llama4", "beside a cache"), ("llama4", "beside a mask")],
)
def test_packed_rows(name: str, how: str, asked: list[str]) -> None:
    """GPT-OSS makes no masks of position_ids; Llama 4's chunks begin with each document."""
    model, ids = using(decoder(name), "attn_dispatch"), tokens()[:1]
    packed = model(ids, **PACKED[how]).logits
    assert len(asked) == 2
    alone = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :FIRST], ids[:, FIRST:])], 1)
    assert_close(packed, alone)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "how"), [*product(["llama", "mistral"], ["alone", "beside a cache", "beside a mask"])]
)
def test_whole_graphs(name: str, how: str, asked: list[str], fresh_compiler: None) -> None:
    """Documents where transformers sees them in a graph, too; none with the positions it makes itself."""
    model, ids = using(decoder(name), "attn_dispatch"), tokens()[:1]
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    for given in [PACKED[how]] * (how == "alone") + [PACKED[how] | {"position_ids": None}]:
        assert_close(compiled(ids, **given).logits, model(ids, **given).logits)


@pytest.mark.parametrize("name", DECODERS)
def test_weights_are_refused(name: str, asked: list[str]) -> None:
    """Whether or not the layers are told that they are asked for."""
    model = using(decoder(name), "attn_dispatch")
    for given, by_config in (({"output_attentions": True}, False), ({}, True)):
        model.config._output_attentions = by_config
        with pytest.raises(InvalidInput, match="has no output_attentions: use attn_implementation='eager'"):
            model(tokens(), **given)
    model(tokens(), output_attentions=False)
    assert asked


@torch.no_grad()
def test_packed_rows_with_padding(asked: list[str], warnings: Callable[[], list[str]]) -> None:
    """A row of two documents and a row of one, padded on both sides; the positions of padding mean nothing."""
    model, ids, mask = using(decoder("llama"), "attn_dispatch"), tokens(), torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, -4:], mask[1, :3] = 0, 0
    positions = (torch.cat([POSITIONS, torch.arange(-3, LENGTH - 3)[None]]) * mask).clamp(min=0)
    packed = model(ids, mask, positions).logits
    alone = [model(part[None]).logits[0] for part in (ids[0, :FIRST], ids[0, FIRST:-4], ids[1, 3:])]
    assert_close(packed[mask.bool()], torch.cat(alone))
    asked.clear()
    model(ids[1:], mask[1:], positions[1:])
    assert asked == ["Dense(causal)"] * 2
    assert not warnings()


def test_packed_rows_of_chunks(asked: list[str]) -> None:
    """As transformers has them: intervals of keys. Older versions count chunks from the first token."""
    positions = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)
    inputs = {"input_ids": tokens(), "position_ids": positions, "use_cache": False}
    Case(decoder("llama4"), inputs, lambda found: found.logits, None).assert_equal()
    assert {"Dense(causal)"} <= set(asked) <= {"Dense(causal)", "Ranges(first, last: [1, 1, 20] on cpu)"}


@torch.no_grad()
@pytest.mark.parametrize(("length", "first"), [(LENGTH + 1, 0), (LENGTH, 2)])
def test_packed_rows_that_see_each_other_are_said(
    length: int, first: int, warnings: Callable[[], list[str]], asked: list[str]
) -> None:
    """Beside a cache that holds places for more, and where no document starts at 0."""
    model = using(decoder("llama"), "attn_dispatch")
    model(tokens()[:1], position_ids=torch.arange(LENGTH)[None], **{CACHE: static_cache(model, length)})
    assert not warnings()
    model(tokens()[:1], position_ids=POSITIONS + first, **{CACHE: static_cache(model, length)})
    assert len(asked) == 4
    assert [text for text in warnings() if "let each start at 0, without a cache of another length" in text]


def test_a_mask_of_four_axes_says_itself_who_sees_whom(warnings: Callable[[], list[str]], asked: list[str]) -> None:
    """Two answers to one question: positions restart, but the second document sees the first part of the first one."""
    ids, mask = tokens()[:1], torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    mask[..., FIRST:, 3:FIRST] = False
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": POSITIONS, "use_cache": False}
    Case(decoder("llama"), inputs, lambda found: found.logits, None).assert_equal()
    assert asked
    assert not warnings()


def test_documents_of_keys_that_are_not_those_of_queries(asked: list[str]) -> None:
    model, starts = using(decoder("llama"), "attn_dispatch"), torch.tensor([0, 8, LENGTH], dtype=torch.int32)
    with pytest.raises(InvalidInput, match="cu_seq_lens_k must be cu_seq_lens_q"):
        model(input_ids=tokens()[:1], cu_seq_lens_q=starts, cu_seq_lens_k=starts.clone() + 1)


def test_dilated_by_the_config(asked: list[str]) -> None:
    model = decoder("llama")
    model.config.attn_dispatch = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
    using(model, "attn_dispatch")
    ids = tokens()
    whole = model(input_ids=ids).logits
    assert asked == ["Dilated((8, 16), (1, 2), causal)"] * 2
    for cache in (None, static_cache(model)):
        steps = []
        for at in range(LENGTH):
            step = model(input_ids=ids[:, at : at + 1], use_cache=True, **{CACHE: cache})
            cache = step[CACHE]
            steps.append(step.logits)
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(InvalidInput, match="pad on the right"):
        model(input_ids=ids, attention_mask=mask)
    asked.clear()
    model.config.attn_dispatch |= {"offsets": "block"}
    model(input_ids=ids)
    assert all("block" in pattern for pattern in asked)
    model.config.attn_dispatch = {"segments": [8]}
    with pytest.raises(InvalidInput, match=r"config.attn_dispatch must be a dict of segment_lengths .*'segments'"):
        model(input_ids=ids)
