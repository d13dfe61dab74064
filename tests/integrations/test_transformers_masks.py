"""What the integration with transformers makes of masks and keywords, what it refuses, and what it hands to sdpa."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_dispatch import Dilated, attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations import mask_runs
from tests.support.small_transformers import (
    LENGTH,
    SIZES,
    Case,
    assert_close,
    decoder,
    padded,
    tokens,
    transformers,
    using,
)  # fmt: skip

from attn_dispatch.integrations.attention_interface import parts_of  # isort: skip
from attn_dispatch.integrations import transformers as integration  # isort: skip - it imports transformers

pytestmark = pytest.mark.usefixtures("no_trials")


def layer_and_tensors() -> tuple[Any, Tensor, Tensor, Tensor]:
    """A layer of Llama, q, k and v of 2 heads and 6 tokens."""
    config = transformers.LlamaConfig(**{**SIZES, "num_attention_heads": 2})
    q, k, v = (torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    return transformers.models.llama.modeling_llama.LlamaAttention(config, 0).eval(), q, k, v


def layer(**more: Any) -> Any:
    """What is registered for layers, called as by one."""
    attention = transformers.AttentionInterface._global_mapping[integration.NAME]
    return attention(*layer_and_tensors(), **{"attention_mask": None, **more})


def same_parity(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Three runs of keys for each of 6 queries."""
    return key % 2 == query % 2


def causal_4d(dtype: torch.dtype) -> Tensor:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    seen = seen & padded("left").bool()[:, None, None] | torch.eye(LENGTH, dtype=torch.bool)  # type: ignore[union-attr]
    return seen if dtype == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("handed_on", [False, True])
def test_masks_of_four_axes(name: str, dtype: torch.dtype, handed_on: bool, asked: list[str]) -> None:
    """Handed on to sdpa they are too, but not with softcap and sinks, which sdpa has not."""
    integration.register(fallback=handed_on)
    inputs = {"input_ids": tokens(), "attention_mask": causal_4d(dtype), "use_cache": False}
    reference = "sdpa" if name == "llama" else "eager"
    if reference == "eager":
        inputs["attention_mask"] = causal_4d(torch.float32)  # eager adds masks
    Case(decoder(name), inputs, lambda found: found.logits, None, reference).assert_equal()
    assert len(asked) == (0 if handed_on and name == "llama" else 2)


def masked(function: Any, **more: Any) -> Any:
    """What is registered for masks makes of 6 queries and keys, as transformers calls it."""
    masks = transformers.AttentionMaskInterface._global_mapping[integration.NAME]
    return masks(batch_size=1, q_length=6, kv_length=6, mask_function=function, use_vmap=False, **more)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (1, 2, 1, 6), (1, 1, 6, 6), (1, 2, 6, 6)])
def test_shapes_of_masks(shape: tuple[int, ...], dtype: torch.dtype, asked: list[str]) -> None:
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.7
    seen[..., 0] = True
    mask = seen if dtype == torch.bool else torch.zeros(shape).masked_fill(~seen, -1.5)
    expected = integration.sdpa_attention_forward(*layer_and_tensors(), mask)[0]
    assert_close(layer(attention_mask=mask)[0], expected)
    assert asked == ["Dense()"]


def test_queries_after_the_last_key(asked: list[str]) -> None:
    """They see all keys, as for sdpa; segments of dilated attention are not known there."""
    module, q, k, v = layer_and_tensors()
    expected = integration.sdpa_attention_forward(module, q[:, :, :3], k, v, torch.ones(1, 1, 3, 6).bool())[0]
    found = integration.attention(module, q[:, :, :3], k, v, integration.mask(1, 3, 6, q_offset=5))[0]
    assert_close(found, expected)
    config = transformers.LlamaConfig(**SIZES, attn_dispatch={"segment_lengths": [4], "dilation_rates": [1]})
    with pytest.raises(InvalidInput, match="queries after the last key"):
        layer(attention_mask=integration.mask(1, 3, 6, q_offset=5, config=config))


def test_a_causal_layer_without_a_mask_has_the_first_tokens_aligned(asked: list[str]) -> None:
    """As for sdpa; with a position bias too, where that takes one."""
    module, q, k, v = layer_and_tensors()
    biases = [None, torch.randn(1, 2, 4, 6, generator=torch.Generator().manual_seed(4))]
    for bias in biases if "position_bias" in signature(integration.sdpa_attention_forward).parameters else biases[:1]:
        expected = integration.sdpa_attention_forward(module, q[:, :, :4], k, v, None, position_bias=bias)[0]
        found = integration.attention(module, q[:, :, :4], k, v, None, position_bias=bias)[0]
        assert_close(found, expected)


@pytest.mark.parametrize("keywords", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([0.5, 1.0])}])
def test_masks_that_are_not_translated(
    keywords: dict[str, Any], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused where a layer uses them, or reach it whole: sdpa, or attend() for what sdpa has not."""
    assert_close(layer(attention_mask=masked(same_parity), **keywords)[0], eager(parity(), **keywords))
    assert asked == ["Ranges(first, last: [1, 3, 6] on cpu)"]
    monkeypatch.setattr(mask_runs, "MOST_RUNS", 2)
    keys = masked(same_parity)
    what = r"the mask same_parity is none of .* \(query 0 sees over 2 runs of keys\)"
    with pytest.raises(InvalidInput, match=rf"{what}; .*register\(fallback=True\)"):
        layer(attention_mask=keys)
    integration.register(fallback=True)
    dense = masked(same_parity)
    assert torch.equal(dense, parity())
    out = layer(attention_mask=dense, **keywords)[0]
    expected = eager(dense, **keywords)
    assert_close(out, expected)


def parity() -> Tensor:
    at = torch.arange(6)
    return (at[:, None] % 2 == at % 2)[None, None]


def eager(seen: Tensor, softcap: float | None = None, s_aux: Tensor | None = None) -> Tensor:
    """attention() of layer(), by the library's formula for models that have softcap or sinks."""
    module, q, k, v = layer_and_tensors()
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    if s_aux is None:
        function = transformers.models.gemma2.modeling_gemma2.eager_attention_forward
        out: Tensor = function(module, q, k, v, added, scaling=8**-0.5, softcap=softcap)[0]
        return out
    module.sinks = s_aux
    function = transformers.models.gpt_oss.modeling_gpt_oss.eager_attention_forward
    return function(module, q, k, v, added, scaling=8**-0.5)[0]  # type: ignore[no-any-return]


def test_keywords_that_would_be_lost(asked: list[str]) -> None:
    """Those that the functions of transformers read, and those that a layer gives by name; others none would read."""
    for name in ("cache", "output_attentions"):
        ways = "'eager' for" if name == "output_attentions" else "'sdpa' or 'eager' for"
        with pytest.raises(InvalidInput, match=f"attn_dispatch has no {name}: use attn_implementation={ways}"):
            layer(**{name: torch.ones(1)})
    assert not asked
    layer(output_attentions=False, indices=None, output_router_logits=True, use_cache=True, grid_thw=torch.ones(1))
    assert asked == ["Dense(causal)"]
    module, q, k, v = layer_and_tensors()
    module.__class__ = Sparse
    with pytest.raises(InvalidInput, match="attn_dispatch has no indices: use"):
        integration.attention(module, q, k, v, None, indices=torch.ones(1))


class Sparse(torch.nn.Module):
    """A layer of a model that has no function of PyTorch's: it tells its own which keys are seen."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
        return integration.attention(self, q, k, v, None, indices=torch.ones(1), **more)


def test_a_layer_that_lost_its_mask(asked: list[str]) -> None:
    """Wrappers of attention functions lose masks; the window is the layer's own."""
    layer(sliding_window=3)
    assert asked == ["Window(left=2, right=0)"]
    with pytest.raises(InvalidInput, match="a window of 3 tokens got no mask"):
        layer(sliding_window=3, is_causal=False)
    module, q, k, v = layer_and_tensors()
    with pytest.raises(InvalidInput, match="a window of 3 tokens got no mask"):
        integration.attention(module, q[:, :, :1], k, v, None, sliding_window=3)


def test_masks_of_other_sizes(asked: list[str]) -> None:
    keys = masked(integration.masking_utils.causal_mask_function)
    with pytest.raises(InvalidInput, match=r"the mask is for \[4, 6\] queries and keys, the layer has \[6, 6, 6\] q"):
        layer(attention_mask=keys[:, :, -4:, :])
    module, q, k, v = layer_and_tensors()
    with pytest.raises(InvalidInput, match=r"the layer has \[6, 6, 12\] queries, keys and values"):
        integration.attention(module, q, k, v.repeat(1, 1, 2, 1), keys)
    assert keys[:, :, -0:, :].shape == keys.shape == (1, 1, 6, 6)
    with pytest.raises(InvalidInput, match="attention_mask must have shape"):
        layer(attention_mask=torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(InvalidInput, match=r"attention_mask must be a bool or floating-point tensor, got torch.int64"):
        layer(attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.int64))


def test_models_that_compute_with_their_mask(asked: list[str]) -> None:
    """They get what they would from sdpa's; what adds a mask to scores expects numbers, which it has not."""
    padding = torch.tensor([[False, True, True, True, True, True]])
    keys = masked(integration.masking_utils.causal_mask_function, attention_mask=padding)
    seen = torch.ones(6, 6).tril().bool()[None, None] & padding[:, None, None]
    computing: dict[str, Any] = {
        "type": lambda mask: torch.tensor(mask.dtype == torch.bool),
        "turned": lambda mask: ~mask,
        "method": lambda mask: mask.logical_not(),
        "function": lambda mask: torch.all(~mask, dim=2) | torch.all(mask, dim=2),
        "argument": lambda mask: torch.zeros(6, 6).masked_fill(mask, 1.0),
        "part": lambda mask: mask[:, 0, :, 2:],
        "joined": lambda mask: torch.cat([mask, torch.ones(1, 1, 6, 2, dtype=torch.bool)], dim=-1),
        "compared": lambda mask: mask == 0,
        "both": lambda mask: mask & padding | mask,
        "last": lambda mask: ~mask[:, :, -2:, :],
        "moved": lambda mask: ~mask.to("cpu"),
        "cast": lambda mask: mask.to(torch.float32) + mask.to(dtype=torch.float32),
    }
    for name, compute in computing.items():
        assert torch.equal(compute(keys), compute(seen)), name
    x = torch.zeros(6)
    for compute in (lambda: x + keys, lambda: keys + 1, lambda: 1 - keys, lambda: x.add(keys)):
        with pytest.raises(InvalidInput, match=r"the model adds its mask to scores.*: use attn_implementation="):
            compute()


def test_one_row_of_a_mask_for_all_queries(asked: list[str]) -> None:
    """BridgeTower's cross-attention: a mask of [batch, 1, 1, keys] is broadcast."""
    padding = torch.tensor([[False, True, True, True, False, True]])
    keys = integration.mask(
        1, 1, 6, mask_function=integration.masking_utils.bidirectional_mask_function, attention_mask=padding
    )
    expected = integration.sdpa_attention_forward(*layer_and_tensors(), padding[:, None, None])[0]
    assert_close(layer(attention_mask=keys)[0], expected)


def test_a_model_that_leaves_out_block_masks(asked: list[str]) -> None:
    sizes = {**SIZES, "keep_window_size": 8}
    model = using(transformers.DogeForCausalLM(transformers.DogeConfig(**sizes)), "attn_dispatch")
    with pytest.raises(InvalidInput, match="DogeAttention makes a mask of its own"):
        model(input_ids=tokens())


WITHOUT_THE_INTERFACE: dict[str, dict[str, Any]] = {
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
    "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 99},
}


@pytest.mark.parametrize("kind", WITHOUT_THE_INTERFACE)
def test_models_without_the_interface(kind: str) -> None:
    """Both ways to ask for an implementation raise, and change nothing."""
    config = getattr(transformers, f"{kind}Config")(**WITHOUT_THE_INTERFACE[kind])
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    model = model_class(config)
    before, sdpa = config._attn_implementation, model._supports_sdpa
    how = "replacing_sdpa" if kind == "Falcon" else "use attn_implementation='sdpa' or 'eager'" if sdpa else "'eager'$"
    what = rf"^{kind}Model would ignore attn_implementation='attn_dispatch', as {kind}Attention does not ask .*{how}"
    with pytest.raises(InvalidInput, match=what):
        model.set_attn_implementation("attn_dispatch")
    assert config._attn_implementation == before
    model.set_attn_implementation("eager")
    with pytest.raises(InvalidInput, match=what):
        model_class._from_config(config, attn_implementation="attn_dispatch")


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


def two_parts(is_made: bool) -> Any:
    """An encoder that computes attention itself, and a decoder that asks."""
    encoder = transformers.MegatronBertConfig(vocab_size=99, **SMALL)
    decoder = transformers.BertConfig(vocab_size=99, **SMALL, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    if is_made:
        return transformers.EncoderDecoderModel._from_config(config, attn_implementation="attn_dispatch")
    return using(transformers.EncoderDecoderModel(config), "attn_dispatch")


@pytest.mark.parametrize("is_made", [False, True])
def test_a_part_without_the_interface(is_made: bool, asked: list[str], warnings: Callable[[], list[str]]) -> None:
    """The others have it, and it is named once; where it alone is asked for, that raises."""
    model = two_parts(is_made)
    assert [
        text
        for text in warnings()
        if "not served by attn_dispatch: MegatronBertSelfAttention in MegatronBertModel" in text
    ]
    assert model.encoder.config._attn_implementation != model.decoder.config._attn_implementation == "attn_dispatch"
    model(input_ids=tokens(), decoder_input_ids=tokens(), attention_mask=padded("left"))
    assert asked == ["Dense(causal)", "Dense()"]
    with pytest.raises(InvalidInput, match=r"^MegatronBertModel would ignore"):
        model.set_attn_implementation({"encoder": "attn_dispatch"})
    model.set_attn_implementation({"encoder": "eager", "decoder": "sdpa"})
    model.set_attn_implementation({"decoder": "attn_dispatch"})
    assert model.decoder.config._attn_implementation == "attn_dispatch"


@pytest.mark.parametrize("is_made", [False, True])
def test_layers_of_a_table_by_name(is_made: bool, asked: list[str]) -> None:
    """SAM's vision tower chooses a class by the implementation's name; GIT's text has one class alone."""
    vision = transformers.SamVisionConfig(**SMALL, image_size=16, patch_size=4, output_channels=8, num_pos_feats=8)
    git = transformers.GitConfig(vision_config={**SMALL, "image_size": 16, "patch_size": 4}, vocab_size=99, **SMALL)
    with pytest.raises(InvalidInput, match=r"^SamVisionEncoder would ignore .*, as SamVisionSdpaAttention does not"):
        made_by(transformers.SamVisionModel, vision, is_made)
    model = made_by(transformers.GitForCausalLM, git, is_made)
    model(input_ids=tokens(), attention_mask=padded("right"), pixel_values=torch.ones(2, 3, 16, 16))
    assert asked == ["Dense()"]


def made_by(model_class: Any, config: Any, is_made: bool) -> Any:
    if is_made:
        return model_class._from_config(config, attn_implementation="attn_dispatch")
    model = model_class(config)
    model.set_attn_implementation("attn_dispatch")
    return model


@pytest.mark.parametrize("local", ["local", "transient-global"])
def test_one_class_that_asks_is_not_all(local: str, asked: list[str]) -> None:
    """LongT5's encoder computes local attention itself; its decoder asks, in the same file."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 99}
    config = transformers.LongT5Config(**sizes, encoder_attention_type=local, local_radius=3)
    for is_made in (False, True):
        with pytest.raises(InvalidInput, match=r"^LongT5Stack would ignore"):
            made_by(transformers.LongT5EncoderModel, config, is_made)
    if not any(part.asking for part in parts_of(transformers.LongT5Model(config))):
        pytest.skip("the decoder does not ask either in this version of transformers")
    model = made_by(transformers.LongT5Model, config, False)
    model(input_ids=tokens(), decoder_input_ids=tokens())
    assert asked == ["Dense(causal)", "Dense()"]


def test_a_model_without_attention() -> None:
    """It has nothing to ask for: nothing to refuse."""
    config = transformers.FlavaImageCodebookConfig(hidden_size=8, vocab_size=9)
    assert using(transformers.FlavaImageCodebook(config), "attn_dispatch") is not None


def test_dilated_attention_with_a_static_cache_in_a_graph() -> None:
    """There the number of keys is data, and segments could not be told."""
    config = transformers.LlamaConfig(**SIZES, attn_dispatch={"segment_lengths": [4], "dilation_rates": [1]})
    with FakeTensorMode():
        keywords = {"q_offset": torch.tensor(3), "config": config, "device": "cpu"}
        with pytest.raises(InvalidInput, match="dilated attention needs a cache that is not static"):
            integration.mask(1, 1, 6, **keywords)
    assert integration.mask(1, 1, 6, **{**keywords, "q_offset": 3}).stop == 4


def test_a_layer_without_a_mask_is_dilated_by_all_fields_of_its_config() -> None:
    """As wrappers call it that drop masks."""
    module, q, k, v = layer_and_tensors()
    attention = transformers.AttentionInterface._global_mapping[integration.NAME]
    module.config.attn_dispatch = {"segment_lengths": [4, 6], "dilation_rates": [2, 1], "heads": "split"}
    pattern = Dilated((4, 6), (2, 1), is_causal=True, heads="split")
    expected = attend(q, k, v, pattern, layout="bhnd", scale=module.scaling).transpose(1, 2)
    assert_close(attention(module, q, k, v, None, scaling=module.scaling)[0], expected)
    module.config.attn_dispatch = {"segment_length": [4]}
    with pytest.raises(InvalidInput, match=r"config.attn_dispatch must be a dict of .*, got {'segment_length': \[4\]}"):
        attention(module, q, k, v, None)
