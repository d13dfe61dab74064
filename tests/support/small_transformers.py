"""Small models of Hugging Face transformers with random weights, compared by logits and gradients.

Importing this module skips the tests that do so where transformers is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput

transformers: Any = pytest.importorskip(
    "transformers",
    minversion="5.4",
    reason="transformers is not installed: pip install attn-dispatch[test-integrations]",
)

from attn_dispatch.integrations.attention_interface import parts_of  # noqa: E402 - it imports transformers

LENGTH = 20  #: tokens of each of two rows
_RESULTS = transformers.modeling_outputs.CausalLMOutputWithPast.__annotations__
CACHE = "cache" if "cache" in _RESULTS else "past_key_values"  #: among a model's arguments and results
PADDINGS = ("none", "ones", "left", "right")
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
WINDOWED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
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
CHUNKED = {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "num_local_experts": 2, "intermediate_size_mlp": 64}
SHARED: dict[str, Any] = {
    **WINDOWED,
    "num_hidden_layers": 4,
    "layer_types": WINDOWED["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
}  #: the last layers have the keys of others, and while generating one query alone
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 6}),
    "qwen2": ("Qwen2", {**SIZES, **WINDOWED, "use_sliding_window": True}),
    "qwen3": ("Qwen3", SIZES),
    "gemma2": ("Gemma2", {**SIZES, "sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3Text", {**SIZES, **WINDOWED, "query_pre_attn_scalar": 8}),
    "gemma4": ("Gemma4Text", {**SIZES, **SHARED}),
    "gpt_oss": ("GptOss", {**SIZES, **WINDOWED, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "llama4": ("Llama4Text", {**SIZES, **CHUNKED}),
    "deepseek_v3": ("DeepseekV3", {**SIZES, **LATENT}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "pad_token_id": 0}),
}
REFERENCE = {"gpt_oss": "eager", "gemma2": "eager"}  #: sdpa has neither sinks nor softcap
FEW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TWO_SIDED: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
#: Of other than decoders: config, model, sizes.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "BertForMaskedLM", {**FEW, "vocab_size": 99}),
    "modernbert": (
        "ModernBert",
        "ModernBertForMaskedLM",
        {**SIZES, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "embedding_gemma": (
        "Gemma3Text",
        "Gemma3TextModel",
        {**DECODERS["gemma3"][1], "use_bidirectional_attention": True},
    ),
    "vit": ("ViT", "ViTModel", {**FEW, "image_size": 16, "patch_size": 4}),
    "clip": (
        "CLIP",
        "CLIPModel",
        {
            "text_config": {**FEW, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 98},
            "vision_config": {**FEW, "image_size": 16, "patch_size": 4},
            "projection_dim": 16,
        },
    ),
    "bart": ("Bart", "BartForConditionalGeneration", {**TWO_SIDED, "max_position_embeddings": 64}),
    "whisper": ("Whisper", "WhisperForConditionalGeneration", {**TWO_SIDED, **SPEECH}),
    "t5": ("T5", "T5ForConditionalGeneration", {**T5_SIZES, "decoder_start_token_id": 0, "dropout_rate": 0.0}),
}
HEADS = {
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Text": "Gemma3ForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "Llama4Text": "Llama4ForCausalLM",
}


#: Ways to generate tokens, by arguments of `generate`.
GENERATING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "static": {"cache_implementation": "static"},
}


def assert_close(found: Tensor, expected: Tensor) -> None:
    """To 2e-6, of the largest number where that is over 1."""
    assert float((found - expected).abs().max()) <= 2e-6 * max(1.0, float(expected.abs().max()))


def assert_same_tokens(found: Any, expected: Any) -> None:
    """What `generate` returned: tokens and logits."""
    assert torch.equal(found.sequences, expected.sequences)
    for mine, exact in zip(found.logits, expected.logits, strict=True):
        assert_close(mine, exact)


class Case(NamedTuple):
    """A model, what it is called with, its output, and which of it counts, as padding does not."""

    model: Any
    inputs: dict[str, Any]
    output: Callable[[Any], Tensor]
    kept: Tensor | None
    reference: str = "sdpa"

    def run(self, implementation: str) -> tuple[Tensor, list[Tensor]]:
        """The output, and the gradients of all weights."""
        self.model.zero_grad()
        found = self.output(using(self.model, implementation)(**self.inputs))
        found = found if self.kept is None else found[self.kept]
        found.float().square().mean().backward()  # type: ignore[no-untyped-call]
        return found.detach(), [x.grad.clone() for x in self.model.parameters() if x.grad is not None]

    def assert_equal(self) -> None:
        """By attn_dispatch as by the reference: outputs, and gradients to 1e-5 of the largest."""
        expected, exact = self.run(self.reference)
        found, grads = self.run("attn_dispatch")
        assert_close(found, expected)
        largest = max(float(x.abs().max()) for x in exact)
        for mine, other in zip(grads, exact, strict=True):
            assert float((mine - other).abs().max()) <= 1e-5 * largest


def made(kind: str, model: str, sizes: dict[str, Any]) -> Any:
    """A model of random weights, without dropout."""
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this version of transformers has no {kind}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, model)(config).eval()


def decoder(name: str, **changes: Any) -> Any:
    kind, sizes = DECODERS[name]
    return made(kind, HEADS.get(kind, f"{kind}ForCausalLM"), {**sizes, **changes})


def using(model: Any, name: str) -> Any:
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name  # as when it is loaded: ModernBERT of 5.4 has no other way
    return model


def tokens(length: int = LENGTH, seed: int = 1) -> Tensor:
    """Ids [2, length], none of which is special."""
    return torch.randint(3, 98, (2, length), generator=torch.Generator().manual_seed(seed))


def padded(kind: str, length: int = LENGTH) -> Tensor | None:
    """The mask [2, length] of one row with 7 tokens of padding, and one without."""
    if kind == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.int64)
    if kind == "left":
        mask[0, :7] = 0
    if kind == "right":
        mask[1, -7:] = 0
    return mask


def decoder_case(name: str, padding: str) -> Case:
    mask = padded(padding)
    inputs = {"input_ids": tokens(), "attention_mask": mask, "use_cache": False}
    kept = None if mask is None else mask.bool()
    return Case(decoder(name), inputs, lambda found: found.logits, kept, REFERENCE.get(name, "sdpa"))


def other(name: str) -> Any:
    """A model that is not a decoder alone."""
    return made(*OTHERS[name])


def skip_if_ignored(name: str) -> None:
    """T5 has asked for its attention function since a version after 5.12."""
    model = other(name) if name in OTHERS else None
    if model is not None and not any(part.asking for part in parts_of(model)):
        with pytest.raises(InvalidInput, match="would ignore attn_implementation"):
            model.set_attn_implementation("attn_dispatch")
        pytest.skip(f"{name} ignores attention implementations in this version of transformers, and is refused")


def other_case(name: str, padding: str) -> Case:
    """Encoders; encoders with decoders, where both are padded; text and image."""
    mask, logits = padded(padding), lambda found: found.logits
    inputs: dict[str, Any] = {"input_ids": tokens(), "attention_mask": mask}
    kept = None if mask is None else mask.bool()
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    if name == "vit":
        inputs, kept = {"pixel_values": pixels}, None
    if name in ("vit", "embedding_gemma"):
        return Case(other(name), inputs, lambda found: found.last_hidden_state, kept)
    if name == "clip":
        inputs |= {"pixel_values": pixels}
        return Case(other(name), inputs, lambda found: both_sides(found, kept), None)
    if name in ("bart", "whisper", "t5"):
        inputs |= {"decoder_input_ids": tokens(seed=2), "decoder_attention_mask": mask, "use_cache": False}
    if name == "whisper":
        del inputs["input_ids"], inputs["attention_mask"]
        inputs["input_features"] = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(3))
    return Case(other(name), inputs, logits, kept)


def both_sides(found: Any, kept: Tensor | None) -> Tensor:
    """What CLIP makes of tokens that are no padding, and of patches."""
    text = found.text_model_output.last_hidden_state
    text = text.flatten(0, 1) if kept is None else text[kept]
    return torch.cat([text, found.vision_model_output.last_hidden_state.flatten(0, 1)])


def static_cache(model: Any, length: int = LENGTH) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=length)
