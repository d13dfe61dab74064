"""What torchscale's DilatedAttention computes, whose weights were trained with it.

It is `Dilated` with offsets="block" where every rate divides its segment length and every segment length the sequence,
in the forward pass. Elsewhere zeros are appended to segments and to the sequence, which

* are attended to as keys where attention is not causal: their score is 0, and they weigh in the softmax;
* stay in the results of a segment that is not a multiple of the rate: those of later segments move to the right, and
  the last ones are cut off.

Branches are merged with weights that have no gradient. `docs/nn.md` shows how far both are apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from attn_dispatch.dispatch import attend
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dilated

NOT_COVERED = -1e8  #: lse of a query that a branch does not select


def attend_like_torchscale(
    q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, *, lengths: list[int] | None = None, dropout_p: float = 0.0,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """out [batch, len, heads, head_dim] for q, k, v as `attend` takes them.

    Args:
        lengths: tokens of each row that are not padding: a row is computed as if it stood alone, with zeros after it.
            (torchscale itself attends to padding.)
    """
    if q.shape[1] != k.shape[1]:
        raise InvalidInput(f"like_torchscale needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}")
    if not q.numel():
        return torch.zeros_like(q)
    if lengths is not None and set(lengths) != {q.shape[1]}:
        rows = [
            attend_like_torchscale(
                q[row : row + 1, :length], k[row : row + 1, :length], v[row : row + 1, :length], pattern,
                dropout_p=dropout_p, backend=backend,
            )
            for row, length in enumerate(lengths)
        ]  # fmt: skip
        return torch.cat([functional.pad(row, (0, 0, 0, 0, 0, q.shape[1] - row.shape[1])) for row in rows])
    parts = [_branch(q, k, v, w, r, pattern.is_causal, dropout_p, backend) for w, r in pattern.branches]
    weights = torch.stack([lse for _, lse in parts]).softmax(0).transpose(2, 3)[..., None]
    merged = torch.zeros_like(parts[0][0])
    for (out, _), weight in zip(parts, weights):
        merged = merged + out * weight.to(out.dtype)
    return merged


def _branch(
    q: Tensor, k: Tensor, v: Tensor, segment: int, rate: int, is_causal: bool, dropout_p: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    """out, and lse without a gradient, at the places where torchscale has them."""
    length = q.shape[1]
    segment = min(segment, length)
    padded = segment + -segment % rate

    def appended(x: Tensor) -> Tensor:
        whole = torch.unflatten(functional.pad(x, (0, 0, 0, 0, 0, -length % segment)), 1, (-1, segment))
        return functional.pad(whole, (0, 0, 0, 0, 0, padded - segment)).flatten(1, 2)

    alone = Dilated((padded,), (rate,), is_causal, "block")
    out, lse = attend(
        appended(q), appended(k), appended(v), alone, dropout_p=dropout_p, return_lse=True, backend=backend
    )
    lse = lse[:, :, :length].detach()
    return out[:, :length], lse.masked_fill((lse == -torch.inf) | (lse == 0), NOT_COVERED)
