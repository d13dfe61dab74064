"""A tiny model of each family of the installed transformers, from its registry and the names of config fields.

What a model is called with is tried: the first of a few sets of inputs that its own attention takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tests.support.small_transformers import LENGTH, padded, transformers

MOST_PARAMETERS = 8_000_000
WIDTH, HEADS, VOCABULARY = 64, 4, 128
IMAGE, PATCH = 32, 8


def narrow(n: int) -> int:
    return min(n, WIDTH)


#: What a whole number becomes, by the end of its field's name: the first that fits.
SIZES: tuple[tuple[str, Callable[[int], int]], ...] = (
    (r"n_group|topk_group|num_expert_group\w*", lambda n: 1),
    (r"\w*(experts_per_tok\w*|top_?k\w*|num_selected_experts)|moe_k", lambda n: min(n, 2)),
    (r"(first_k_dense_replace|n_shared_experts|num_shared_experts)", lambda n: min(n, 1)),
    (r"\w*experts", lambda n: min(n, 4)),
    (r"mamba_(n|num)_heads", lambda n: 2 * HEADS),
    (r"(num_|n_)?(\w+_)?(key_value|kv)_heads?", lambda n: 2),
    (r"linear_num_key_heads", lambda n: 2),
    (r"\w*(num|n|attention)_(\w+_)?heads?|num_heads?|heads", lambda n: 2 if n == 3 else min(n, HEADS)),
    (r"qk_head_dim", lambda n: 32),
    (r"rotary_dim|rope_dim", lambda n: 8),
    (r"\w*(head_dim|head_size|d_kv|d_head|kv_channels|key_dim|value_dim|attention_key_value_channels)", lambda n: 16),
    (r"\w*(d_state|state_size|ssm_state_size)", lambda n: min(n, 16)),
    (r"\w*(lora_rank|_rank|lora_r)", lambda n: min(n, 16)),
    (r"(num_|n_|\w+_)?(hidden_|encoder_|decoder_)?(layers|layer|depth|blocks)", lambda n: min(n, 2)),
    (r"(attn_layer_period|full_attention_interval|expert_layer_period|global_attn_every_n_layers)", lambda n: 2),
    (r"attn_layer_offset", lambda n: 1),
    (r"\w*(intermediate|ffn|ff|feedforward|mlp|inner)_?(hidden_)?(size|dim|dims)|d_ff|n_inner", narrow),
    (r"\w*(hidden|embed\w*|model|projection|emb|output|width|latent\w*|attn)_?(size|dim|width|channels)?", narrow),
    (r"(d_model|n_embd|dim|width|d_embed|d_latents|bottleneck_size|conv_pos_embed\w*)", narrow),
    (r"\w*vocab\w*", lambda n: min(n, VOCABULARY)),
    (r"\w*(max_position\w*|positions|max_seq\w*|max_\w*length|context_length|block_size)", lambda n: min(n, 64)),
    (r"\w*image_size", lambda n: IMAGE),
    (r"\w*patch_size", lambda n: min(n, PATCH)),
    (r"\w*window_size", lambda n: 2 if n <= 16 else 32),
    (r"\w*(sliding_window|local_attention|attention_window|window)", lambda n: min(n, 6)),
    (r"\w*chunk_size", lambda n: min(n, 8)),
    (r"\w*(queries|query_tokens|num_latents|num_labels|codebook_size)", lambda n: min(n, 8)),
)
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
IDS = re.compile(r"\w*token(_id|_index|_ids|_idx)?")


def kinds() -> list[str]:
    """The type of every config, those of parts of models too."""
    return list(transformers.CONFIG_MAPPING.keys())


def config_class(kind: str) -> Any:
    return transformers.CONFIG_MAPPING[kind]


def model_class(config_class: type) -> Any:
    """The model of a config without a head, or with one where there is no other; None: there is none."""
    auto = transformers.models.auto.modeling_auto
    every = [x for name, x in sorted(vars(auto).items()) if name.startswith("MODEL") and hasattr(x, "_model_mapping")]
    for mapping in (auto.MODEL_MAPPING, *every):
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    file = import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    found = [x for x in vars(file).values() if isinstance(x, type) and getattr(x, "config_class", None) is config_class]
    found = [x for x in found if "PreTrained" not in x.__name__]
    return min(found, key=lambda x: not x.__name__.endswith("Model"), default=None)


def tiny(config: Any) -> Any:
    """Make a config small, its parts too."""
    ids = iter(range(VOCABULARY - 28, VOCABULARY))
    _shrink(config, ids)
    return config


def _shrink(config: Any, ids: Iterator[int]) -> None:
    fields = {name: x for name, x in vars(config).items() if not name.startswith("_")}
    layers = next((x for name, x in fields.items() if name in LAYERS), 0)
    kinds = fields.get("layer_types") or fields.get("layers_block_type")
    count = max(2, len(dict.fromkeys(kinds))) if kinds else 2
    for name, x in fields.items():
        if name in (config.sub_configs or ()) and hasattr(x, "sub_configs"):
            _shrink(x, ids)
            continue
        if kinds and name in LAYERS:
            new: Any = count
        elif x is kinds and kinds:
            new = (list(dict.fromkeys(kinds)) * 2)[:count]
        elif name == "num_key_value_heads" and x in (fields.get("num_attention_heads"), fields.get("n_head")):
            new = HEADS
        else:
            new = _small(name, x, ids, layers, count)
        if new is not x:
            setattr(config, name, new)


def _small(name: str, x: Any, ids: Iterator[int], layers: int, count: int) -> Any:
    if isinstance(x, bool) or x is None:
        return x
    if IDS.fullmatch(name) and not name.startswith(("num_", "max_")):
        if isinstance(x, int):
            return next(ids) if x >= VOCABULARY - 28 else x
        return [next(ids) for _ in x] if isinstance(x, list) and all(isinstance(n, int) for n in x) else x
    if isinstance(x, int):
        return next((small(x) for pattern, small in SIZES if re.fullmatch(pattern, name)), x)
    if isinstance(x, list | tuple):
        if len(x) == layers > count:
            x = type(x)(x[:count])
        return type(x)(_small(name, each, ids, 0, count) for each in x)
    if isinstance(x, dict):
        half = int(8 * (x.get("partial_rotary_factor") or 1))
        more = {"mrope_section": [half // 2, half // 4, half // 4]} if "rope_theta" in x else {}
        factors = {key: x[key][:8] for key in ("short_factor", "long_factor") if key in x}
        return {**x, **more, **factors}
    return x


def made(model: Any, config_class: Any, implementation: str | None = None) -> Any:
    """A tiny model of random weights, made with an attention implementation.

    Raises:
        ValueError: it is not tiny.
    """
    if implementation is not None:
        torch.manual_seed(0)
        return model._from_config(tiny(config_class()), attn_implementation=implementation).eval()
    with torch.device("meta"):
        large = model(tiny(config_class()))
    if (n := sum(x.numel() for x in large.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"{n:,} parameters")
    torch.manual_seed(0)
    return model(tiny(config_class())).eval()


# --- inputs -----------------------------------------------------------------------------------------------------------


def _field(config: Any, *names: str, default: int) -> int:
    """Of a config or of one of its parts."""
    for each in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        for name in names:
            x = getattr(each, name, None)
            x = x[0] if isinstance(x, list | tuple) and x else x
            if isinstance(x, int):
                return x
    return default


def candidates(model: Any, padding: str) -> Iterator[dict[str, Any]]:
    """What a model may be called with: text, images, sound, or several of them."""
    taken, config = signature(model.forward).parameters, model.config
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    ids = torch.randint(3, VOCABULARY - 30, (2, LENGTH), generator=random)
    text = {"input_ids": ids, "attention_mask": padded(padding)}
    if "bbox" in taken:
        text["bbox"] = torch.arange(4).expand(2, LENGTH, -1)
    target = {"decoder_input_ids": ids.flip(1)}
    size, patch = _field(config, "image_size", default=IMAGE), _field(config, "patch_size", default=PATCH)
    channels = _field(config, "num_channels", "in_channels", "in_chans", default=3)
    pixels = {"pixel_values": normal(2, channels, size, size)}
    bins = _field(config, "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_size", default=80)
    frames = 2 * _field(config, "max_source_positions", default=64)
    images = _field(config, "num_frames", default=4)
    grid = {"grid_thw": torch.tensor([[1, 4, 4]])}
    temporal = _field(config, "temporal_patch_size", default=1)
    flat = normal(16, channels * temporal * patch * patch)
    sets: list[dict[str, Any]] = [
        text | pixels,
        text,
        text | target,
        pixels,
        pixels | target,
        {"pixel_values": normal(2, images, channels, size, size)},
        {"pixel_values": normal(2, 2, channels, size, size)},
        {"pixel_values_videos": normal(2, images, channels, size, size)},
        text | {"input_features": normal(2, 1, frames, bins)},
        {"input_features": normal(2, 1, frames, bins)},
        {"input_features": normal(2, bins, frames)},
        {"input_features": normal(2, frames, bins)},
        {"input_features": normal(2, bins, frames)} | target,
        {"input_features": normal(2, frames, bins)} | target,
        {"input_values": normal(2, 3200)},
        {"input_values": normal(2, 3200)} | target,
        {"input_values": normal(2, 1, 3200)},
        {"input_values": normal(2, frames, bins)},
        {"hidden_states": flat, **grid},
        {"pixel_values": flat, **grid},
        {"pixel_values": flat, "image_grid_thw": grid["grid_thw"]},
        {"inputs_embeds": normal(2, LENGTH, WIDTH)},
        {"hidden_states": normal(2, LENGTH, WIDTH)},
        {"past_values": normal(2, _field(config, "context_length", default=64))},
        {"past_values": normal(2, _field(config, "context_length", default=64), 1)},
        {"pixel_values": normal(2, 16, channels * patch * patch)},
    ]
    needed = {name for name, x in taken.items() if x.default is x.empty and x.kind == x.POSITIONAL_OR_KEYWORD}
    masked = _masked if "attention_mask" in taken else lambda *_: ()
    for each in (more for one in sets for more in (*masked(one, padding), one)):
        given = {name: x for name, x in each.items() if name in taken}
        if needed <= given.keys() >= each.keys() - {"attention_mask"}:
            yield given | {name: False for name in ("use_cache",) if name in taken}


def _masked(inputs: dict[str, Any], padding: str) -> Iterator[dict[str, Any]]:
    """Sound, half of one row of which is padding, by frames or by samples."""
    for x in (inputs.get("input_features"), inputs.get("input_values")):
        if x is not None and padding == "right":
            for length in dict.fromkeys(n for n in x.shape[1:] if n > 1):
                mask = torch.ones(2, length, dtype=torch.int64)
                mask[1, length // 2 :] = 0
                yield {**inputs, "attention_mask": mask}


def is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def pairs(found: Any, expected: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The floating-point tensors of two results of a model, side by side, but those that the first one has not."""
    if is_real(found):
        yield found, expected
    elif isinstance(found, dict):
        assert expected.keys() >= found.keys()
        for name, x in found.items():
            yield from pairs(x, expected[name])
    elif isinstance(found, list | tuple):
        for x, y in zip(found, expected, strict=True):
            yield from pairs(x, y)


def kept(x: Tensor, mask: Tensor | None) -> Tensor:
    """Without what was computed of padding, where an output's first axes are those of the mask."""
    return x[mask.bool()] if mask is not None and x.shape[:2] == mask.shape else x
