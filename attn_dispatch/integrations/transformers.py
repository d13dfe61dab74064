"""attend() as an attention implementation of Hugging Face transformers; importing this module registers it.

    import attn_dispatch.integrations.transformers
    model.set_attn_implementation("attn_dispatch")

Masks are read and translated into patterns and key masks, never built and never dropped. What attend() has not is
refused by name; with `register(fallback=True)` such masks are handed to PyTorch's attention as transformers does.

Where a decoder's config has `attn_dispatch = {"segment_lengths": [...], "dilation_rates": [...]}`, its layers with full
causal attention become `Dilated`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations.mask_functions import Facts, Unreadable, read
from attn_dispatch.log import say_once
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window

# By name: type checkers need not find the library.
transformers: Any = import_module("transformers")
masking_utils: Any = import_module("transformers.masking_utils")
sdpa_attention_forward: Any = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
is_tracing: Any = import_module("transformers.utils.import_utils").is_tracing

NAME = "attn_dispatch"
#: Keywords of an attention function that change no result, or whose meaning the mask has already.
WITHOUT_EFFECT = frozenset(
    {
        "position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict", "logits_to_keep",
        "num_items_in_batch", "input_ids", "labels", "deterministic", "attention_interface", "layer_idx",
        "past_key_values", "past_key_value", "sliding_window", "max_length_q", "max_length_k", "cu_seq_lens_q",
        "cu_seq_lens_k", "target_dtype", "is_training", "training", "token_type_ids", "mm_token_type_ids",
    }
)  # fmt: skip


class Keys(BlockMask):
    """What a mask means, as it reaches the layers. A BlockMask, for transformers hands on tensors and those alone.

    Args:
        pattern: of the queries at the end of the keys.
        size: [batch, 1, q_len, k_len] of the mask.
        key_mask: bool [batch, keys], or None.
        stop: keys from here on are not written yet; None: all are.
        documents: ids [batch, len], or None.
    """

    def __init__(
        self,
        pattern: Pattern,
        size: tuple[int, int, int, int],
        key_mask: Tensor | None = None,
        stop: int | None = None,
        documents: Tensor | None = None,
    ) -> None:
        self.pattern, self.size, self.key_mask, self.stop, self.documents = pattern, size, key_mask, stop, documents

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.size

    def contiguous(self) -> Keys:  # generate() calls it
        return self

    def to(self, device: Any, non_blocking: bool = False) -> Keys:  # accelerate's hooks call it
        masks = [
            None if x is None else x.to(device, non_blocking=non_blocking) for x in (self.key_mask, self.documents)
        ]
        return Keys(self.pattern, self.size, masks[0], self.stop, masks[1])

    def __repr__(self) -> str:
        return f"Keys({self.pattern}, {list(self.size)})"


def register(*, fallback: bool = False) -> None:
    """Register the implementation `attn_dispatch`.

    Args:
        fallback: hand masks that are none of causal, window, chunks, padding and packed rows to PyTorch's attention,
            instead of raising.
    """
    transformers.AttentionInterface.register(NAME, partial(attention, fallback=fallback))
    transformers.AttentionMaskInterface.register(NAME, partial(mask, fallback=fallback))


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    fallback: bool = False,
    **given: Any,
) -> Any:
    """What transformers asks for once per forward pass and kind of layer.

    Raises:
        InvalidInput: the mask is none that attend() has.
    """
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    key_mask = None if padding is None else padding[:, kv_offset : kv_offset + kv_length]
    try:
        facts, stop = read(mask_function), None
        if facts.low is not None or facts.high is not None:
            facts, key_mask, stop = _aligned(
                facts, key_mask, q_length, kv_length, q_offset, kv_offset, batch_size, given.get("device")
            )
        pattern = _pattern(facts, key_mask, getattr(given.get("config"), NAME, None), kv_offset)
    except Unreadable as error:
        if not fallback:
            name = getattr(mask_function, "__qualname__", repr(mask_function))
            raise InvalidInput(
                f"the mask {name} is none of causal, window, chunks, padding and packed rows ({error}); "
                "attn_dispatch.integrations.transformers.register(fallback=True) hands such to PyTorch's attention"
            ) from error
        common = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, attention_mask=attention_mask, **common, **given
        )
    if key_mask is not None and not is_tracing(key_mask) and bool(key_mask.all()):
        key_mask = None  # one look at data for each forward pass, as sdpa's masks take; none while a graph is traced
    return Keys(pattern, (batch_size, 1, q_length, kv_length), key_mask, stop, facts.documents)


def _aligned(
    facts: Facts, key_mask: Tensor | None, q_length: int, kv_length: int, q_offset: Any, kv_offset: Any,
    batch_size: int, device: Any,
) -> tuple[Facts, Tensor | None, int | None]:  # fmt: skip
    """Facts and key mask for queries at the end of the keys, and where the written keys of a static cache stop."""
    if q_length == 1:
        if not isinstance(q_offset, Tensor) and q_offset + 1 == kv_offset + kv_length:
            return facts, key_mask, None
        # In a graph the length of a static cache is data, and so is which key is the last.
        if facts.chunk is not None or facts.documents is not None:
            raise Unreadable("chunks or documents in a static cache")
        at, seen = torch.arange(kv_length, device=device) + kv_offset, None
        if facts.high is not None:
            seen = at <= q_offset + facts.high
        if facts.low is not None:
            later = at >= q_offset + facts.low
            seen = later if seen is None else seen & later
        assert seen is not None
        seen = seen[None].expand(batch_size, -1)
        return Facts(), seen if key_mask is None else key_mask & seen, None
    if q_offset + q_length == kv_offset + kv_length:
        return facts, key_mask, None
    stop = int(q_offset) + q_length - int(kv_offset)
    return facts, None if key_mask is None else key_mask[:, :stop], stop


def _pattern(facts: Facts, key_mask: Tensor | None, spread: Any, kv_offset: Any) -> Pattern:
    """The pattern of these facts, made dilated by `spread` where it is causal. Raises Unreadable."""
    causal = facts.high == 0
    if facts.chunk is not None:
        size, left = facts.chunk
        if not causal or facts.low is not None or facts.documents is not None:
            raise Unreadable("chunks that are not plainly causal")
        if bool(torch.as_tensor(left).any()) or kv_offset:
            raise Unreadable("chunks that do not start at the first key: pad on the right")
        return Dilated((size,), (1,), is_causal=True)
    if facts.low is None and facts.high in (None, 0):
        if not (spread and causal):
            return Dense(causal)
        if key_mask is not None and not bool(key_mask[:, 0].all()):
            raise InvalidInput("segments are counted from the first token: pad on the right for dilated attention")
        return Dilated(tuple(spread["segment_lengths"]), tuple(spread["dilation_rates"]), is_causal=True)
    if (facts.low is not None and facts.low > 0) or (facts.high is not None and facts.high < 0):
        raise Unreadable("a window that leaves out the query's own position")
    return Window(None if facts.low is None else -facts.low, facts.high)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    *,
    fallback: bool = False,
    **given: Any,
) -> tuple[Tensor, None]:
    """What a layer calls: q, k and v [batch, heads, len, head_dim] to [batch, len, heads, head_dim].

    Raises:
        InvalidInput: an argument that attend() has not.
    """
    for name, x in given.items():
        if x is not None and x is not False and name not in WITHOUT_EFFECT:
            raise InvalidInput(f"attn_dispatch has no {name}: use attn_implementation='sdpa' or 'eager' for this model")
    if fallback and isinstance(attention_mask, Tensor):
        common: dict[str, Any] = {
            "dropout": dropout,
            "scaling": scaling,
            "is_causal": is_causal,
            "position_bias": position_bias,
        }
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **common)
        return found
    more: dict[str, Any] = {"softcap": softcap, "sink": s_aux, "bias": position_bias, "dropout_p": dropout}
    if isinstance(attention_mask, Keys):
        if (query.shape[2], key.shape[2]) != tuple(attention_mask.shape[2:]):
            sizes = [query.shape[2], key.shape[2]]
            raise InvalidInput(
                f"the mask is for {list(attention_mask.shape[2:])} queries and keys, the layer has {sizes}"
            )
        key, value = key[:, :, : attention_mask.stop], value[:, :, : attention_mask.stop]
        pattern = attention_mask.pattern
        more |= {"key_mask": attention_mask.key_mask, "documents": attention_mask.documents}
        _warn_of_packed_rows(attention_mask, given.get("position_ids"), query.shape[2], key.shape[2])
    elif attention_mask is None:  # the layer leaves it to is_causal, as for PyTorch's attention
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal, window = bool(causal) and query.shape[2] > 1, given.get("sliding_window")
        # Wrappers of attention functions may drop masks; then the layer's own window still holds.
        pattern = Window(window - 1, 0) if causal and window else Dense(causal)
        if window and (not causal or query.shape[2] != key.shape[2]):
            raise InvalidInput(f"a layer with a window of {window} tokens got no mask, which would say where it lies")
        more |= {"alignment": "upper_left"} if causal and query.shape[2] != key.shape[2] else {}
    else:
        pattern, more["bias"] = Dense(), _bias(attention_mask, query, key, position_bias)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q = q.expand(k.shape[0], -1, -1, -1) if q.shape[0] == 1 else q  # learned queries
    return attend(q, k, v, pattern, scale=scaling, **more), None


def _bias(attention_mask: Tensor, query: Tensor, key: Tensor, position_bias: Tensor | None) -> Tensor:
    """A mask [batch or 1, heads or 1, q_len, k_len] as a bias: what is added to scores, or True where keys are seen."""
    found = attention_mask[..., : key.shape[2]]
    if found.dtype == torch.bool:
        found = torch.zeros_like(found, dtype=query.dtype).masked_fill(~found, -torch.inf)
    return found if position_bias is None else found + position_bias


def _warn_of_packed_rows(keys: Keys, positions: Any, q_len: int, k_len: int) -> None:
    """transformers keeps packed rows apart where there is neither a mask nor a cache."""
    if (
        keys.documents is not None
        or q_len != k_len
        or torch.compiler.is_compiling()
        or not isinstance(positions, Tensor)
    ):
        return
    told = positions.ndim == 2 and positions.shape[1] == q_len > 1 and keys.key_mask is None
    if told and bool((positions.diff(dim=-1) != 1).any()):
        say_once("position_ids restart inside a row, but its sequences see each other: pass use_cache=False")


register()
