"""The dtype of sums, and merging partial results in it."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_SCALE = {
    dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)
}  #: kernels flush smaller scales to 0
THREAD_BYTES = 4 * 2**20  #: of the CPU kernel's score tiles, per thread


def merge_(out: Tensor, lse: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Join a partial attention over other keys into `out` and `lse`, in place.

    Args:
        out, out_b: [..., head_dim], float32 or wider.
        lse, lse_b: [...], natural log; -inf for a query without keys. Two such parts give zeros and -inf, not NaN.

    Source: Milakov & Gimelshein 2018, online softmax; Dao et al. 2022, section 3.1.
    """
    share = torch.sigmoid(lse_b - lse)
    # -inf - -inf is NaN: neither side has a key, so the share is 0.
    out.lerp_(out_b, share.nan_to_num_(nan=0.0).unsqueeze(-1))
    torch.logaddexp(lse, lse_b, out=lse)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and merged results: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
