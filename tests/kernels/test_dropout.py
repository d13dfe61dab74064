"""Which weights `manual` drops: the asked share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_dispatch.dispatch import attend


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def _default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_default_dtype")
def test_the_share_of_dropped_weights() -> None:
    """Whatever the default dtype: there are few random numbers in bfloat16."""
    q = torch.zeros(1, 4096, 1, 64, dtype=torch.float32)
    k, v = torch.zeros(1, 64, 1, 64, dtype=torch.float32), torch.eye(64, dtype=torch.float32)[None, :, None, :]
    torch.manual_seed(0)
    out = attend(q, k, v, dropout_p=0.001, backend="manual")
    dropped = float((out == 0).float().mean())
    assert dropped == pytest.approx(0.001, abs=0.0003)  # 5 standard deviations of 262,144 draws
