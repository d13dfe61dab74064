"""transformers' models by attend(): logits and gradients against its own attention, on random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import dispatch
from attn_dispatch.errors import InvalidInput

transformers: Any = pytest.importorskip(
    "transformers",
    minversion="5.4",
    reason="transformers is not installed: pip install attn-dispatch[test-integrations]",
)

from attn_dispatch.integrations import transformers as integration  # noqa: E402 - it imports transformers

pytestmark = pytest.mark.usefixtures("short_trials")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT: dict[str, Any] = {
    "head_dim": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  #: values are narrower than keys
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 6}),
    "qwen2": ("Qwen2", {**SIZES, **WINDOWED, "use_sliding_window": True, "sliding_window": 5}),
    "qwen3": ("Qwen3", SIZES),
    "gemma2": ("Gemma2", {**SIZES, "sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {**SIZES, **WINDOWED, "sliding_window": 5, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {**SIZES, **WINDOWED, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "llama4": ("Llama4Text", {**SIZES, "attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64}),
    "deepseek_v3": ("DeepseekV3", {**SIZES, **LATENT}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "pad_token_id": 0}),
}
REFERENCE = {"gpt_oss": "eager", "gemma2": "eager"}  #: sdpa has neither sinks nor softcap
LENGTH = 20


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The patterns that attend() was asked for: models may ignore an attention implementation."""
    found: list[str] = []
    attend = dispatch.attend

    def noted(q: Tensor, k: Tensor, v: Tensor, pattern: Any, **more: Any) -> Any:
        if not torch.compiler.is_compiling():
            found.append(str(pattern))
        return attend(q, k, v, pattern, **more)

    monkeypatch.setattr(integration, "attend", noted)
    yield found
    integration.register()


def decoder(name: str, **changes: Any) -> Any:
    kind, sizes = DECODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
    config.dropout = config.attention_dropout = 0.0
    heads = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    model = getattr(transformers, heads.get(kind, f"{kind.removesuffix('Text')}ForCausalLM"))
    if kind == "Llama4Text":
        model = transformers.Llama4ForCausalLM
    return model(config).eval()


def using(model: Any, name: str) -> Any:
    model.set_attn_implementation(name)
    return model


def padded(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    if kind == "left":
        mask[0, :7] = 0
    if kind == "right":
        mask[1, 13:] = 0
    return mask


def logits_and_grads(model: Any, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Of the tokens that are no padding."""
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    kept = logits if mask is None else logits[mask.bool()]
    kept.float().square().mean().backward()
    return kept.detach(), [x.grad.clone() for x in model.parameters() if x.grad is not None]


@pytest.mark.parametrize("padding", ["none", "ones", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, padding: str, asked: list[str]) -> None:
    model, ids = decoder(name), torch.randint(3, 99, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = padded(padding)
    expected, exact = logits_and_grads(using(model, REFERENCE.get(name, "sdpa")), ids, mask)
    model = using(model, "attn_dispatch")
    if name == "llama4" and padding == "left":
        with pytest.raises(InvalidInput, match="chunks that do not start at the first key"):
            logits_and_grads(model, ids, mask)
        return
    found, grads = logits_and_grads(model, ids, mask)
    assert len(asked) == model.config.num_hidden_layers
    assert float((found - expected).abs().max()) <= 2e-6 * float(expected.abs().max())
    for mine, other in zip(grads, exact, strict=True):
        assert float((mine - other).abs().max()) <= 1e-5 * max(float(x.abs().max()) for x in exact)


def test_patterns_of_layers(asked: list[str]) -> None:
    ids = torch.randint(3, 99, (2, LENGTH))
    for name, patterns in {
        "mistral": ["Window(left=5, right=0)"] * 2,
        "qwen2": ["Window(left=4, right=0)", "Dense(causal)"],
        "llama": ["Dense(causal)"] * 2,
    }.items():
        asked.clear()
        using(decoder(name), "attn_dispatch")(input_ids=ids)
        assert asked == patterns


GENERATING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("how", GENERATING)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "deepseek_v3"])
def test_generation(name: str, how: str, asked: list[str]) -> None:
    """The same tokens, with a left-padded row, past the windows."""
    model = decoder(name)
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, **GENERATING[how]}
    rows = []
    for implementation in (REFERENCE.get(name, "sdpa"), "attn_dispatch"):
        torch.manual_seed(3)
        rows.append(using(model, implementation).generate(ids, attention_mask=mask, **options))
    assert asked
    assert torch.equal(*rows)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_rows(name: str, asked: list[str]) -> None:
    model = using(decoder(name), "attn_dispatch")
    ids = torch.randint(3, 99, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in (ids[:, :8], ids[:, 8:])], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


def test_packed_rows_with_a_cache_are_said(warnings: Callable[[], list[str]]) -> None:
    model = using(decoder("llama"), "attn_dispatch")
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    model(input_ids=torch.randint(3, 99, (1, LENGTH)), position_ids=positions, use_cache=True)
    assert any("pass use_cache=False" in text for text in warnings())


def test_prefill_in_two_parts() -> None:
    model = using(decoder("mistral"), "attn_dispatch")
    ids = torch.randint(3, 99, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = model(input_ids=ids).logits
    first = model(input_ids=ids[:, :13], use_cache=True)
    second = model(input_ids=ids[:, 13:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=1e-5, atol=1e-6)


def test_dilated_by_the_config(asked: list[str]) -> None:
    model = decoder("llama")
    model.config.attn_dispatch = {"segment_lengths": [8, 16], "dilation_rates": [1, 2]}
    using(model, "attn_dispatch")
    ids = torch.randint(3, 99, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = model(input_ids=ids).logits
    assert asked == ["Dilated((8, 16), (1, 2), causal)"] * 2
    cache, steps = None, []
    for at in range(LENGTH):
        step = model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-5, atol=1e-6)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with pytest.raises(InvalidInput, match="pad on the right"):
        model(input_ids=ids, attention_mask=mask)
