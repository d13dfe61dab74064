"""generate() of transformers by attend(): the same tokens and logits as by its own attention."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch

from attn_dispatch import dispatch
from tests.support.pairwise import thinned
from tests.support.small_transformers import (
    CACHE,
    DECODERS,
    GENERATING,
    REFERENCE,
    assert_close,
    assert_same_tokens,
    decoder,
    other,
    padded,
    skip_if_ignored,
    tokens,
    transformers,
    using,
)

from attn_dispatch.integrations import transformers as integration  # isort: skip - it imports transformers

pytestmark = pytest.mark.usefixtures("no_trials")

#: Windows of 5 and 6 tokens, chunks of 8: all are passed.
NAMES = ["llama", "mistral", "gemma3", "gemma4", "gpt_oss", "llama4", "deepseek_v3", "bart", "t5"]
PROMPT, NEW = 9, 12  #: tokens


def generated(model: Any, implementation: str, **options: Any) -> Any:
    """Of two prompts, one with 7 tokens of padding before it."""
    torch.manual_seed(3)
    return using(model, implementation).generate(
        tokens(PROMPT),
        attention_mask=padded("left", PROMPT),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def skip_what_fails_by_itself(name: str, options: dict[str, Any]) -> None:
    skip_if_ignored(name)
    masks = integration.masking_utils
    ahead, chunks = (
        "block_sequence_ids" in signature(function).parameters
        for function in (masks.create_masks_for_generate, masks.create_chunked_causal_mask)
    )
    if name == "llama4" and options.get("cache_implementation") == "static" and ahead and not chunks:
        pytest.skip("this version of transformers makes no masks of chunks for static caches: a TypeError of its own")


@thinned(("name", "how"), product(NAMES, GENERATING), 3)
def test_the_same_tokens(name: str, how: str, asked: list[str]) -> None:
    options = GENERATING[how]
    skip_what_fails_by_itself(name, options)
    model = decoder(name) if name in DECODERS else other(name)
    expected = generated(model, REFERENCE.get(name, "sdpa"), **options)
    found = generated(model, "attn_dispatch", **options)
    assert_same_tokens(found, expected)
    layers = {"gemma4": 4}.get(name, 2)
    assert len(asked) == (layers * NEW if name in DECODERS else layers + 2 * layers * NEW)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_chunks(name: str, asked: list[str], warnings: Callable[[], list[str]]) -> None:
    """The positions of padding start no document, beside a cache either."""
    model, options = decoder(name), {"prefill_chunk_size": 4}
    expected = generated(model, "sdpa", **options)
    assert_same_tokens(generated(model, "attn_dispatch", **options), expected)
    assert len(asked) == 2 * (NEW + 2)
    assert not warnings()


@pytest.mark.parametrize("name", ["mistral", "gemma3", "llama4"])
def test_sliding_caches_are_passed(name: str, asked: list[str]) -> None:
    """They hold fewer keys than there are tokens."""
    cache = generated(decoder(name), "attn_dispatch")[CACHE]
    assert asked
    assert cache.layers[0].keys.shape[-2] < PROMPT + NEW - 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4"])
def test_prefill_in_two_parts(name: str, asked: list[str]) -> None:
    model, ids = using(decoder(name), "attn_dispatch"), tokens()
    whole = using(model, "sdpa")(input_ids=ids).logits
    asked.clear()
    first = using(model, "attn_dispatch")(input_ids=ids[:, :7], use_cache=True)
    second = model(input_ids=ids[:, 7:], use_cache=True, **{CACHE: first[CACHE]})
    assert len(asked) == 4
    assert_close(torch.cat([first.logits, second.logits], 1), whole)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("mistral", "aot_eager"),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.full) for name in ("llama", "gemma3", "gpt_oss")),
        pytest.param("mistral", "inductor", marks=pytest.mark.full),
    ],
)
def test_a_static_cache_compiled(
    name: str, backend: str, fresh_compiler: None, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fullgraph=True: each step after the prompt runs attend()'s operator in each layer."""
    runs, computed = [], dispatch._computed

    def noted(call: Any, *args: Any, **more: Any) -> Any:
        runs.append(tuple(call.q.shape))
        return computed(call, *args, **more)

    monkeypatch.setattr(dispatch, "_computed", noted)
    model = decoder(name)
    options = {"cache_implementation": "static"}
    expected = generated(model, REFERENCE.get(name, "sdpa"), **options)
    compiling = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    compiling._compile_all_devices = True  # not only GPUs
    found = generated(model, "attn_dispatch", compile_config=compiling, **options)
    assert len(asked) == 2  # of the prompt, which is not compiled
    assert len(runs) == 2 * (NEW - 1)
    assert torch.equal(found.sequences, expected.sequences)
