"""Keys and values of earlier tokens, for decoding with a module of attn_dispatch.nn."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_dispatch.errors import InvalidInput


class KVCache:
    """Keys and values of the tokens that a module has seen, for decoding: one for each module and sequence.

    Pass it as `cache=` with the next tokens only. Keys are held after their rotary embeddings. `keys` and `values` are
    [batch, len, kv_heads, head_dim], None before the first tokens. Without gradients they lie in memory that doubles
    when it is full, so that a new token copies nothing but itself.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._space: tuple[Tensor, Tensor] | None = None  # what `keys` and `values` are the first tokens of

    def __len__(self) -> int:
        """Tokens held."""
        return 0 if self.keys is None else self.keys.shape[1]

    def __copy__(self) -> KVCache:
        """A cache of the same tokens that goes on alone."""
        other = KVCache()
        other.keys, other.values = self.keys, self.values
        return other

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, [batch, len, kv_heads, head_dim], and return all that is held."""
        if self.keys is not None and self.values is not None:
            held, got = ((x.shape[0], *x.shape[2:]) for x in (self.keys, k))
            if got != held:
                raise InvalidInput(
                    f"cache holds (batch, kv_heads, head_dim) {held}, got {got}: "
                    "a KVCache belongs to one module and one batch"
                )
            if (k.dtype, v.dtype) != (self.keys.dtype, self.values.dtype):
                raise InvalidInput(
                    f"cache holds {self.keys.dtype}, got {k.dtype}: decode as the first tokens were read"
                )
            k, v = self._extended(self.keys, self.values, k, v)
        self.keys, self.values = k, v
        return k, v

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
