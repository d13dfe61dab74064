"""Random calls over all arguments, at odd addresses, in any stride, huge, tiny and empty, held to float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from attn_dispatch import attend
from attn_dispatch.errors import NoBackend
from tests.support.fixtures import INTERPRETED
from tests.support.random_calls import DTYPES, failures, random_call, title

CALLS = 25  #: of each backend
SLOW = {"triton": 5, "triton_tiles": 5}  #: the same, in Triton's interpreter
LONGEST = dict.fromkeys(SLOW, 14)  #: tokens
INTERPRETED_DTYPES = (torch.float32, torch.float16)
BACKENDS = ("native", "sdpa", "sdpa_float32", "sdpa_mask", "tiles", "flex", "manual", *SLOW)
pytestmark = pytest.mark.usefixtures("triton_interpreter", "uncompiled_flex")


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_calls(backend: str, request: pytest.FixtureRequest, set_mode: Any) -> None:
    """`--random-problems N`: N that the backend computes. A number is always the same call."""
    if backend in SLOW and not INTERPRETED:
        pytest.skip("Triton is not installed, or there is a GPU for it")
    set_mode("off")
    count, computed = int(request.config.getoption("--random-problems") or SLOW.get(backend, CALLS)), 0
    for seed in range(20 * count):
        rng = Random(seed)
        call = random_call(rng, rng.choice(INTERPRETED_DTYPES if backend in SLOW else DTYPES), LONGEST.get(backend, 40))
        try:
            found = failures(call, partial(attend, backend=backend))
        except NoBackend:
            continue
        assert found == [], f"seed {seed}: {title(call)}"
        computed += 1
        if computed == count:
            return
    pytest.fail(f"{backend} computes {computed} of {20 * count} random calls")


FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "out": lambda out, lse: (out * 1.02, lse),
    "lse": lambda out, lse: (out, lse + 0.02 + lse.abs() * 0.02),
    "last query": lambda out, lse: (torch.cat((out[:, :-1], out[:, -1:] * 0), 1), lse),
    "gradient": lambda out, lse: (out.detach() + (out - out.detach()) * 1.05, lse),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_results_are_noticed(fault: str, set_mode: Any) -> None:
    set_mode("off")
    noticed = 0
    for seed in range(2 * CALLS):
        call = random_call(Random(seed), torch.float32)
        call.options.pop("layout", None)
        noticed += bool(failures(call, lambda *qkv, **arguments: FAULTS[fault](*attend(*qkv, **arguments))))
    assert noticed > CALLS / 8  # the others are empty, or have no gradients
