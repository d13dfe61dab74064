"""Keys and values of earlier tokens, for decoding with a module of attn_dispatch.nn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.checks import integer


class KVCache:
    """Keys and values of the tokens that a module has seen, for decoding: one for each module and sequence.

    Pass it as `cache=` with the next tokens only. Keys are held after their rotary embeddings. `keys` and `values` are
    [batch, len, kv_heads, head_dim], None before the first tokens; `reorder` and `crop` change what is held. Without
    gradients they lie in memory that doubles when it is full, so that a new token copies nothing but itself. A call
    that fails adds nothing. `copy.copy` makes a cache of the same tokens that goes on alone.
    """

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._space: tuple[Tensor, Tensor] | None = None  # what `keys` and `values` are the first tokens of
        self._module: int | None = None  # the id of the module whose tokens they are

    @property
    def keys(self) -> Tensor | None:
        return self._keys

    @property
    def values(self) -> Tensor | None:
        return self._values

    def __len__(self) -> int:
        """Tokens held."""
        return 0 if self._keys is None else self._keys.shape[1]

    def __copy__(self) -> KVCache:
        other = KVCache()
        other._keys, other._values, other._module = self._keys, self._values, self._module
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": None}  # a pickled or deep copy may serve a copy of the module

    def reorder(self, rows: Tensor) -> None:
        """Hold these rows of the batch instead, as a beam search does after each step.

        Args:
            rows: integers [new batch], each below the batch that is held.
        """
        self._set(*(None if x is None else x.index_select(0, rows.to(x.device)) for x in (self._keys, self._values)))

    def crop(self, length: int) -> None:
        """Hold the first `length` tokens only; with 0 the cache is as new.

        Raises:
            InvalidInput: length is not an integer from 0 up to the tokens held.
        """
        if integer("length", length, 0) > len(self):
            raise InvalidInput(f"length must be at most {len(self)}, the tokens held, got {length}")
        self._set(*(x[:, :length] if x is not None and length else None for x in (self._keys, self._values)))

    def _set(self, keys: Tensor | None, values: Tensor | None) -> None:
        self._keys, self._values = keys, values
        self._space = None  # a copy may hold other tokens of it
        if keys is None:
            self._module = None

    def joined(self, k: Tensor, v: Tensor, module: object) -> tuple[Tensor, Tensor]:
        """What is held, and then k and v, [batch, len, kv_heads, head_dim]; `hold` makes it what is held.

        Raises:
            InvalidInput: k and v do not fit to what is held, or are of another module than it is.
        """
        if self._keys is None or self._values is None:
            return k, v
        held, got = ((x.shape[0], *x.shape[2:]) for x in (self._keys, k))
        if got != held:
            what = f"cache holds (batch, kv_heads, head_dim) {held}, got {got}"
            raise InvalidInput(f"{what}: a KVCache belongs to one module and one batch")
        if (k.dtype, v.dtype) != (self._keys.dtype, self._values.dtype):
            raise InvalidInput(f"cache holds {self._keys.dtype}, got {k.dtype}: decode as the first tokens were read")
        if self._module not in (None, id(module)):
            raise InvalidInput("cache holds tokens of another module: a KVCache belongs to one, give each its own")
        return self._extended(self._keys, self._values, k, v)

    def hold(self, keys: Tensor, values: Tensor, module: object) -> None:
        """Hold what `joined` gave for this module."""
        self._keys, self._values, self._module = keys, values, id(module)

    def _extended(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and any(x.requires_grad for x in (keys, values, k, v)):
            self._space = None  # autograd may need the tensors of earlier steps
            return torch.cat((keys, k), 1), torch.cat((values, v), 1)
        held, total = keys.shape[1], keys.shape[1] + k.shape[1]
        space = self._space
        # Outside of inference mode, tensors made in it cannot be written.
        if space is None or space[0].shape[1] < total or space[0].is_inference() > torch.is_inference_mode_enabled():
            space = self._space = _doubled(keys, 2 * total), _doubled(values, 2 * total)
        for whole, x in zip(space, (k, v), strict=True):
            whole[:, held:total] = x
        return space[0][:, :total], space[1][:, :total]


def _doubled(x: Tensor, length: int) -> Tensor:
    """x at the beginning of uninitialised memory for `length` tokens."""
    whole = x.new_empty(x.shape[0], length, *x.shape[2:])
    whole[:, : x.shape[1]] = x
    return whole
