"""attend() as the local attention of DeepSpeed's DistributedAttention (Ulysses sequence parallelism).

    from deepspeed.sequence.layer import DistributedAttention
    from attn_dispatch.integrations.deepspeed import LocalAttention

    attention = DistributedAttention(LocalAttention(Window(4095, 0), group), group, scatter_idx=2, gather_idx=1)
    out = attention(q, k, v, 0)  # [batch, this rank's tokens, heads, head_dim]

DeepSpeed exchanges tokens for heads, calls this with the whole sequence and a share of the heads, and exchanges back.
Its sequence parallelism for transformers (ALST) takes the attention implementation `attn_dispatch` by name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attn_dispatch.compat.names import attend_as
from attn_dispatch.errors import InvalidInput
from attn_dispatch.integrations.unmasked import differs_by_head
from attn_dispatch.spec.pattern import Pattern

NOT_LOCAL = ("mesh", "layout", "first_head", "all_heads", "return_lse")  #: arguments of attend() that are set here
BY_HEAD = {"bias": 1, "alibi_slopes": -1, "sink": 0}  #: tensors with an axis of heads

attend = attend_as(q="query", k="key", v="value")


class LocalAttention(torch.nn.Module):
    """What DistributedAttention calls as `local_attn(q, k, v, *args, **kwargs)`.

    Args:
        pattern: of the whole sequence, as `attend` takes it.
        group: the sequence process group, by whose ranks the heads are dealt: with it, patterns, biases, slopes and
            sinks that differ by head go by the numbers of all heads.
        batch_dim_idx: 0 for tensors [batch, len, heads, head_dim], 1 for [len, batch, heads, head_dim], as
            DistributedAttention is called with.
        arguments: further ones of `attend`, for every call: `scale`, `softcap`, `dropout_p`, `documents` .. Lengths and
            masks are those of the whole sequence, tensors by head those of all heads.

    Raises:
        InvalidInput: an argument that is set here, or a batch_dim_idx that is neither 0 nor 1.
    """

    def __init__(
        self,
        pattern: Pattern | None = None,
        group: dist.ProcessGroup | None = None,
        batch_dim_idx: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__()
        if batch_dim_idx not in (0, 1):
            raise InvalidInput(f"batch_dim_idx must be 0 or 1, got {batch_dim_idx!r}")
        _refuse(arguments)
        self.pattern, self.group, self.batch_dim_idx, self.arguments = pattern, group, batch_dim_idx, arguments

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **arguments: Any) -> Tensor:
        """Attention over the whole sequence, of this rank's heads.

        Args:
            query: [batch, len, heads, head_dim], or [len, batch, heads, head_dim] with batch_dim_idx 1.
            key, value: alike, with kv_heads.
            args: must be None: masks by position, as Megatron passes them.
            arguments: further ones of `attend`, for this call.

        Raises:
            InvalidInput: a mask by position, an argument that is set here, or something that differs by head where
                the heads of this rank are not known.
        """
        given = [type(x).__name__ for x in args if x is not None]
        if given:
            what = f"local attention takes no mask by position, got {', '.join(given)}"
            raise InvalidInput(f"{what}: give a pattern, or key_mask=, seq_lens= or documents=")
        _refuse(arguments)
        q, k, v = (x.transpose(0, 1) if self.batch_dim_idx else x for x in (query, key, value))
        merged = {**self.arguments, **arguments}
        merged |= self._share(q, merged)
        out: Tensor = attend(q, k, v, self.pattern, **merged)
        return out.transpose(0, 1) if self.batch_dim_idx else out

    def _share(self, q: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """Cut tensors by head in `arguments` down to this rank's; the numbers of its first head and of all heads."""
        heads = q.shape[2]
        tensors = [name for name in BY_HEAD if arguments.get(name) is not None]
        rates = arguments.get("dilation_rates") or (1,)
        if not tensors and max(rates) == 1 and not differs_by_head(self.pattern):
            return {}
        if self.group is None:
            what = ", ".join(tensors) or f"{self.pattern or f'dilation_rates {rates}'}"
            raise InvalidInput(f"{what} differs by head: give LocalAttention the group by which heads are dealt")
        first, total = self._dealt(heads, q.device)
        for name in tensors:
            x, axis = arguments[name], BY_HEAD[name]
            if x.shape[axis] == total:
                arguments[name] = x.narrow(axis, first, heads)
            elif x.shape[axis] != 1:
                raise InvalidInput(f"{name} must have all {total} heads, got {list(x.shape)}")
        return {"first_head": first, "all_heads": total}

    def _dealt(self, heads: int, device: torch.device) -> tuple[int, int]:
        """This rank's first head and the number of all, by what each rank has: DeepSpeed may deal them unevenly."""
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        dist.all_gather(counts, torch.tensor([heads], device=device), group=self.group)
        each = [int(count) for count in counts]
        return sum(each[:rank]), sum(each)


def _refuse(arguments: dict[str, Any]) -> None:
    for name in NOT_LOCAL:
        if name in arguments:
            raise InvalidInput(f"{name} cannot be given to LocalAttention, which sets it or has no use for it")
