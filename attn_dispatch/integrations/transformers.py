"""attend() as an attention implementation of Hugging Face transformers; importing this module registers it.

    import attn_dispatch.integrations.transformers
    model.set_attn_implementation("attn_dispatch")

Masks are read and translated into patterns and key masks, never dropped, and built whole only for a model that computes
with them itself. What attend() has not is refused by name; with `register(fallback=True)` such masks are handed to
PyTorch's attention as transformers does.

Where a decoder's config has `attn_dispatch = {"segment_lengths": [...], "dilation_rates": [...]}`, its layers with full
causal attention become `Dilated`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from operator import methodcaller
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attn_dispatch.compat.names import attend_as, renamed
from attn_dispatch.compat.sdpa import mask_arguments
from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations import packed_rows, unmasked
from attn_dispatch.integrations.attention_interface import EAGER, gives, has_eager_alone, others, refuse_models
from attn_dispatch.integrations.libraries import library
from attn_dispatch.integrations.mask_functions import Facts, Unreadable, read, readable
from attn_dispatch.integrations.mask_runs import evaluated
from attn_dispatch.spec.data import Ranges
from attn_dispatch.spec.pattern import Dense, Dilated, Pattern, Window

transformers = library("transformers", "5.4")
# By name: type checkers need not find the library.
masking_utils: Any = import_module("transformers.masking_utils")
sdpa_attention_forward: Any = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
is_tracing: Any = import_module("transformers.utils.import_utils").is_tracing

Size = tuple[int, int, int, int]  #: [batch, 1, q_len, k_len] of a mask

NAME = "attn_dispatch"
#: Keywords of an attention function that change no result, or whose meaning the mask has already.
OF_MODELS = {"use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"}
OF_MODELS |= {"input_ids", "labels", "num_items_in_batch", "is_training", "training"}
OF_LAYERS = {"attention_interface", "layer_idx", "past_key_values", "past_key_value", "target_dtype"}
IN_MASKS = {"position_ids", "cache_position", "token_type_ids", "mm_token_type_ids"}
IN_MASKS |= {"sliding_window", "max_length_q", "max_length_k"}
WITHOUT_EFFECT = OF_MODELS | OF_LAYERS | IN_MASKS
#: Keywords that the functions of transformers read, whoever gives them.
REFUSED = {"output_attentions", "cache"}
#: Keywords that tell of documents in packed rows.
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def _of_whole(name: str) -> Any:
    """An operator of Keys: that of the tensor."""
    return lambda self, *others: getattr(self.whole(), name)(*others)


@dataclass(eq=False, repr=False)
class Keys(BlockMask):
    """What a mask means, as it reaches the layers. A BlockMask, for transformers hands on tensors and those alone.

    Args:
        pattern: of the queries at the end of the keys.
        sizes: [batch, 1, q_len, k_len] of the mask.
        key_mask: bool [batch, keys], or None.
        stop: keys from here on are not written yet; None: all are.
        documents: ids [batch, len], or None.
        refusal: why no layer can use it: some models make masks that none of their layers uses.
        dense: makes it whole, bool [batch, 1, q_len, k_len], as sdpa gets it: some models compute with their mask.
        config: of the layers that it is for.
    """

    pattern: Pattern
    sizes: Size
    key_mask: Tensor | None = None
    stop: int | None = None
    documents: Tensor | None = None
    refusal: str | None = None
    dense: Callable[[], Tensor] | None = None
    config: Any = None

    @property
    def shape(self) -> Size:
        return self.sizes

    def contiguous(self) -> Keys:  # generate() calls it
        return self

    def to(self, device: Any = None, non_blocking: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        """On another device, as accelerate's hooks ask; of another type it is a tensor."""
        kind = device if isinstance(device, torch.dtype) else dtype
        if kind is not None:
            return self.whole().to(dtype=kind, device=None if isinstance(device, torch.dtype) else device)
        moved = methodcaller("to", device, non_blocking=non_blocking)
        masks = {name: moved(x) for name in ("key_mask", "documents") if (x := getattr(self, name)) is not None}
        pattern = Ranges(*moved(self.pattern.data)) if isinstance(self.pattern, Ranges) else self.pattern
        return replace(self, pattern=pattern, dense=lambda: moved(self.whole()), **masks)

    def __getitem__(self, index: Any) -> Any:
        """The mask of the last queries, `[:, :, -n:, :]`, of all for 0: Gemma 4 drops the others while it generates."""
        every, at = slice(None), index[2] if isinstance(index, tuple) and len(index) == 4 else None
        if not isinstance(at, slice) or index != (every, every, slice(at.start, None), every) or (at.start or 0) > 0:
            return self.whole()[index]
        q_len = min(-at.start, self.shape[2]) if at.start else self.shape[2]
        pattern = Ranges(*self.pattern.data[..., -q_len:]) if isinstance(self.pattern, Ranges) else self.pattern
        sizes = (*self.shape[:2], q_len, self.shape[3])
        return replace(self, pattern=pattern, sizes=sizes, dense=lambda: self.whole()[:, :, -q_len:])

    def whole(self) -> Tensor:
        if self.dense is None or has_eager_alone(type(self.config)):  # eager adds its masks
            self._refuse()
        return self.dense()

    def __getattr__(self, name: str) -> Any:  # what a tensor has
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def whole(x: Any) -> Any:
            if isinstance(x, list | tuple):
                return type(x)(map(whole, x))
            if isinstance(x, Keys) and any(word in function.__name__ for word in ("add", "sub", "mul")):
                return x.added() if "add" in function.__name__ else x._refuse()
            return x.whole() if isinstance(x, Keys) else x

        return function(*whole(args), **{name: whole(x) for name, x in (kwargs or {}).items()})

    __invert__, __and__, __rand__, __or__, __ror__, __eq__ = map(
        _of_whole, ("__invert__", "__and__", "__rand__", "__or__", "__ror__", "__eq__")
    )
    __hash__ = object.__hash__

    def added(self, to: Any = 0) -> Any:
        """The sum with scores or a bias, as BEiT's layers make it: where all see all, there is nothing to add."""
        facts = (self.key_mask, self.documents, self.stop, self.refusal)
        if self.pattern != Dense() or any(x is not None for x in facts):
            self._refuse()
        return to

    def _refuse(self, *_: Any) -> NoReturn:
        what = "the model adds its mask to scores, or multiplies by it, which attn_dispatch does not make for that"
        raise InvalidInput(f"{what}: use attn_implementation={others(self.config)}")

    __add__ = __radd__ = added
    __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse

    def __repr__(self) -> str:
        return f"Keys({self.pattern}, {list(self.shape)})"


def register(*, fallback: bool = False) -> None:
    """Register the implementation `attn_dispatch`.

    Args:
        fallback: hand masks where a query sees more than three runs of keys to PyTorch's attention, instead of raising.
    """
    function = partial(attention, fallback=fallback)
    transformers.AttentionInterface.register(NAME, function)
    setattr(transformers.AttentionInterface, NAME, staticmethod(function))  # Kosmos-2.5 looks for it
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
    """What transformers asks for once per forward pass and kind of layer: Keys, or with `fallback` PyTorch's mask.

    Raises:
        InvalidInput: dilated attention cannot be had with this padding or cache.
    """
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    key_mask = None if padding is None else padding[:, kv_offset : kv_offset + kv_length]
    size, config = (batch_size, 1, q_length, kv_length), given.get("config")
    spread = getattr(config, NAME, None)
    if mask_function is not masking_utils.bidirectional_mask_function or not _crosses(config):
        mask_function = _apart(mask_function, packed_rows.documents(size, key_mask, config, q_offset - kv_offset))
    of_it = {"kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function}
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}  # None would drop the mask
    dense = partial(masking_utils.sdpa_mask, batch_size, **given | of_it | whole)
    as_given = partial(dense, q_length=q_length, q_offset=q_offset, attention_mask=attention_mask)
    try:
        keys = _keys(mask_function, dense, size, key_mask, q_offset, kv_offset, spread)
    except Unreadable as error:
        if fallback:
            return as_given()
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        what = f"the mask {name} is none of causal, window, chunks, padding and packed rows ({error})"
        how = f"{__name__}.register(fallback=True) hands such to PyTorch's attention"
        keys = Keys(Dense(), size, refusal=f"{what}; {how}")
    keys.dense, keys.config = as_given, config
    if keys.key_mask is not None and not is_tracing(keys.key_mask) and bool(keys.key_mask.all()):
        keys.key_mask = None  # one look at data for each forward pass, as sdpa's masks take; none while tracing
    return keys


def _crosses(config: Any) -> bool:
    """Whether a mask may be for the keys of another sequence."""
    return any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention"))


def _apart(mask_function: Any, documents: Tensor | None) -> Any:
    """A mask function that keeps documents apart, where they are not yet."""
    try:
        if documents is None or read(mask_function).documents is not None:
            return mask_function
    except Unreadable:
        pass
    return masking_utils.and_masks(mask_function, masking_utils.packed_sequence_mask_function(documents))


def _keys(
    mask_function: Any, dense: Any, size: Size, key_mask: Tensor | None, q_offset: Any, kv_offset: Any, spread: Any
) -> Keys:
    """A mask by its facts, or else by what its function returns for the queries and keys. Raises Unreadable."""
    try:
        if (keys := _translated(read(mask_function), size, key_mask, q_offset, kv_offset, spread)) is not None:
            return keys
    except Unreadable:
        if spread:
            raise
    if size[2] == 1:
        seen: Tensor = dense(q_length=1, q_offset=q_offset)[:, 0, 0]
        return Keys(Dense(), size, seen if key_mask is None else key_mask & seen)
    return _evaluated(dense, size, key_mask, q_offset, kv_offset)  # type: ignore  # its decorator is untyped


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _evaluated(dense: Any, size: Size, key_mask: Tensor | None, q_offset: Any, kv_offset: Any) -> Keys:
    """A mask of several queries by its values, between the graphs of torch.compile. Raises Unreadable."""
    if is_tracing(key_mask):
        raise Unreadable("its values would be read, which a graph cannot")
    queries, keys = (torch.arange(n, device=dense.keywords.get("device", "cpu")) for n in size[2:])

    def seen(at: int, n: int) -> Tensor:
        return dense(q_length=n, q_offset=q_offset + at)[:, 0]  # type: ignore[no-any-return]

    function = dense.keywords["mask_function"]
    found = evaluated(function, queries + q_offset, keys + kv_offset, size[0], seen)
    return Keys(found if isinstance(found, Ranges) else _pattern(found, key_mask, None), size, key_mask)


def _translated(
    facts: Facts, size: Size, key_mask: Tensor | None, q_offset: Any, kv_offset: Any, spread: Any
) -> Keys | None:
    """The facts of a mask, for queries at the end of the keys; None: a single query is better asked about.

    Raises:
        Unreadable: no pattern without tensors has them.
    """
    q_len, k_len, stop = size[2], size[3], None
    if facts.low is not None or facts.high is not None:
        # In a graph the length of a static cache is data, and so is which key is the last.
        is_data = isinstance(q_offset, Tensor) and q_len == 1
        if is_data or q_offset + q_len != kv_offset + k_len:
            if q_len == 1 and not (spread and facts.is_causal):
                return None
            if isinstance(q_offset, Tensor) and is_tracing(q_offset):
                raise InvalidInput("dilated attention needs a cache that is not static where generation is compiled")
            stop = int(q_offset) + q_len - int(kv_offset)
            if stop > k_len:
                raise Unreadable("queries after the last key")
            key_mask = None if key_mask is None else key_mask[:, :stop]
    if facts.chunk is None:
        return Keys(_pattern(facts, key_mask, spread), size, key_mask, stop, facts.documents)
    if q_len == 1:
        return None
    if not facts.is_causal or facts.within or kv_offset:
        raise Unreadable("chunks that are not plainly causal, from the first key on")
    (chunk, left), rows = facts.chunk, facts.documents
    left = torch.as_tensor(left, device=None if rows is None else rows.device).reshape(-1, 1)
    if rows is None and not bool(left.any()):
        return Keys(Dilated((chunk,), (1,), is_causal=True), size, key_mask, stop)
    if q_len != (k_len if stop is None else stop):
        raise Unreadable("chunks that start by row, of queries that are not the first")
    if rows is not None:  # chunks start with each document
        left = torch.maximum(left, torch.searchsorted(rows, rows))
    numbers = (torch.arange(q_len, device=left.device) - left).div(chunk, rounding_mode="floor")
    numbers = numbers if rows is None else numbers + rows * q_len
    return Keys(Dense(True), size, key_mask, stop, numbers.expand(size[0], -1))


def _pattern(facts: Facts, key_mask: Tensor | None, spread: Any) -> Pattern:
    """The pattern of these facts, made dilated by `spread` where it is causal. Raises Unreadable."""
    if facts.low is None and facts.high in (None, 0):
        if not (spread and facts.is_causal):
            return Dense(facts.is_causal)
        if key_mask is not None and not bool(key_mask[:, 0].all()):
            raise InvalidInput("segments are counted from the first token: pad on the right for dilated attention")
        return unmasked.dilated(spread)
    if (facts.low is not None and facts.low > 0) or (facts.high is not None and facts.high < 0):
        raise Unreadable("a window that leaves out the query's own position")
    return Window(None if facts.low is None else -facts.low, facts.high)


masks = renamed(mask_arguments, {"attn_mask": "attention_mask"})
attend = attend_as(
    q="query", k="key", v="value", scale="scaling", dropout_p="dropout", sink="s_aux", key_mask="attention_mask",
    bias="attention_mask or position_bias", documents="seq_idx", cu_seqlens="cu_seq_lens_q",
)  # fmt: skip


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
        InvalidInput: an argument or a mask that attend() has not.
    """
    config = getattr(module, "config", None)
    for name, x in given.items():
        if x is None or x is False or name in WITHOUT_EFFECT or name in DOCUMENTS:
            continue
        # What came from above by **kwargs, and no function of transformers reads, is not about this layer.
        if name in REFUSED or gives(type(module), name):
            ways = EAGER if name == "output_attentions" else others(config)  # sdpa has no weights either
            raise InvalidInput(f"attn_dispatch has no {name}: use attn_implementation={ways} for this model")
    # What PyTorch's attention has not, in some versions of transformers.
    added = (softcap, s_aux, position_bias, *(given.get(name) for name in DOCUMENTS))
    if fallback and isinstance(attention_mask, Tensor) and all(x is None for x in added):
        common = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **common)
        return found
    query = query.expand(len(key), -1, -1, -1) if len(query) == 1 else query  # learned queries
    more: dict[str, Any] = {"softcap": softcap, "sink": s_aux, "bias": position_bias, "dropout_p": dropout}
    if isinstance(attention_mask, Keys):
        if attention_mask.refusal is not None:
            raise InvalidInput(attention_mask.refusal)
        sizes, (q_len, k_len) = [x.shape[2] for x in (query, key, value)], attention_mask.shape[2:]
        if q_len == 1 and isinstance(attention_mask.pattern, Dense):  # one row for all queries, as masks are broadcast
            attention_mask, q_len = replace(attention_mask, pattern=Dense()), sizes[0]
        if sizes != [q_len, k_len, k_len]:
            what = f"the mask is for {[q_len, k_len]} queries and keys"
            use = f"use attn_implementation={others(config)} for this model"
            raise InvalidInput(f"{what}, the layer has {sizes} queries, keys and values: {use}")
        stop, pattern = attention_mask.stop, attention_mask.pattern
        key, value = key[:, :, :stop], value[:, :, :stop]
        more["bias"] = None if position_bias is None else position_bias[..., :stop]
        more |= {"key_mask": attention_mask.key_mask, "documents": attention_mask.documents}
        unmasked.is_checked_over_ranks(given.get("position_ids"), query.shape[2])
    elif attention_mask is None:  # the layer leaves it to is_causal, as for PyTorch's attention
        both_ways = not (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        causal, window = not both_ways and query.shape[2] > 1, given.get("sliding_window")
        if causal and is_causal is None and not unmasked.is_wrapped() and has_eager_alone(type(config)):
            what = f"{type(module).__name__} is causal and got no mask: then eager, unlike sdpa, shows it all keys"
            raise InvalidInput(f"{what}; use attn_implementation={EAGER}")
        if both_ways and query.shape[2] < key.shape[2]:
            window = None  # DiffusionGemma's canvas sees all that stands before it in every layer
        # Wrappers of attention functions may drop masks; then the layer's own window still holds.
        pattern = Window(window - 1, 0) if causal and window else Dense(causal)
        if window and (not causal or query.shape[2] != key.shape[2]):
            raise InvalidInput(f"a layer with a window of {window} tokens got no mask, which would say where it lies")
        more |= {"alignment": "upper_left"} if causal and query.shape[2] != key.shape[2] else {}
        if causal and query.shape[2] == key.shape[2]:
            pattern = unmasked.pattern_of(module, pattern, getattr(config, NAME, None))
            positions, length = given.get("position_ids"), query.shape[2]
            if not unmasked.is_checked_over_ranks(positions, length) and unmasked.is_of_rows(positions, length):
                more["documents"] = masking_utils.find_packed_sequence_indices(positions)
    elif "BlockMask" in vars(sys.modules[type(module).__module__]):
        what = f"{type(module).__name__} makes a mask of its own, and leaves out attn_dispatch's block masks"
        raise InvalidInput(f"{what}: use attn_implementation={others(config)}")
    else:
        if attention_mask.ndim != 4:
            got = list(attention_mask.shape)
            raise InvalidInput(f"attention_mask must have shape [batch, heads or 1, q_len or 1, k_len], got {got}")
        pattern, more = Dense(), more | masks(attention_mask, key.shape[:1], query, key)
        if not _crosses(config):
            more["documents"] = packed_rows.documents((len(query), 1, query.shape[2], key.shape[2]), None, config)
        if position_bias is not None and more["bias"] is not position_bias:
            more["bias"] = more["bias"] + position_bias
    if more.get("documents") is None:
        more |= _documents(given)
    more |= unmasked.heads_of(module, query.shape[1], pattern)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend(q, k, v, pattern, scale=scaling, **more), None


def _documents(given: dict[str, Any]) -> dict[str, Tensor]:
    """Documents that flash-attn's keywords or those of recurrent layers tell of, where the mask tells of none.

    Raises:
        InvalidInput: documents of keys are others than those of queries.
    """
    starts, of_keys, ids = (given.get(name) for name in DOCUMENTS)
    if starts is None:
        return {} if ids is None else {"documents": ids}
    if of_keys is not None and of_keys is not starts and not torch.equal(of_keys, starts):
        raise InvalidInput("cu_seq_lens_k must be cu_seq_lens_q: documents attend to themselves")
    return {"cu_seqlens": starts}


def called(self: Any, *args: Any, **given: Any) -> Any:
    """The call of a model; many keep from their layers that weights are asked for, and would return none."""
    asked, name = given.get("output_attentions"), "output_attentions"
    if (getattr(self.config, name, None) if asked is None else asked) and self.config._attn_implementation == NAME:
        raise InvalidInput(f"attn_dispatch has no {name}: use attn_implementation={EAGER} for this model")
    return packed_rows.noted(self, *args, **given)


for name in {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"} & vars(masking_utils).keys():
    setattr(masking_utils, name, readable(getattr(masking_utils, name)))
refuse_models(NAME)
transformers.PreTrainedModel.__call__ = called
register()
