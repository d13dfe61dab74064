"""Random calls over all arguments, at odd addresses, in any stride, huge, tiny and empty, held to float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import attend
from attn_dispatch.errors import AttnDispatchError, NoBackend
from tests.support.interpreted import INTERPRETED
from tests.support.random_calls import DTYPES, PRIVATE, failures, random_call, title

SLOW = ("triton", "triton_tiles")  #: in Triton's interpreter
LONGEST, LONGEST_SLOW = 40, 14  #: tokens
INTERPRETED_DTYPES = (torch.float32, torch.float16)
BACKENDS = ("native", "sdpa", "sdpa_float32", "sdpa_mask", "tiles", "flex", "manual", *SLOW)
pytestmark = pytest.mark.usefixtures("uncompiled_flex")


def asked(request: pytest.FixtureRequest, of_examples: float) -> int:
    """The number of calls, which `--random-problems` sets."""
    return int(request.config.getoption("--random-problems") or settings().max_examples * of_examples)


@pytest.mark.hypothesis
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_calls(backend: str, request: pytest.FixtureRequest, set_mode: Any) -> None:
    """Calls are drawn until the backend has computed `count` of them; a seed always draws the same call."""
    if backend in SLOW and not INTERPRETED:
        pytest.skip("Triton is not installed, or there is a GPU for it")
    set_mode("off")
    count, computed = asked(request, 0.2 if backend in SLOW else 1), 0
    for seed in range(20 * count):
        rng = Random(seed)
        dtypes, tokens = (INTERPRETED_DTYPES, LONGEST_SLOW) if backend in SLOW else (DTYPES, LONGEST)
        call = random_call(rng, rng.choice(dtypes), tokens)
        try:
            found = failures(call, partial(attend, backend=backend))
        except NoBackend:
            continue
        assert found == [], f"seed {seed}: {title(call)}"
        computed += 1
        if computed == count:
            return
    pytest.fail(f"{backend} computes {computed} of {20 * count} random calls")


# --- right and wrong arguments, traced and transformed ----------------------------------------------------------------

Run = Callable[[list[Any], dict[str, Any]], Any]
WRONG: tuple[Any, ...] = (
    "x", 3, -1, math.nan, True, [1.5], {}, object(), torch.ones(2), torch.ones(2, 2, 2, 2, 2), torch.tensor(1),
    torch.zeros(0), torch.ones(2, 7) > 0, torch.ones(3, 3).long(),
)  # fmt: skip
NAMES = tuple(name for name in inspect.signature(attend).parameters if name not in "qkv")


def run_plain(qkv: list[Any], given: dict[str, Any]) -> Any:
    return attend(*qkv, **given)


def under_a_mode(qkv: list[Any], given: dict[str, Any]) -> Any:
    with FlopCounterMode(display=False):
        return attend(*qkv, **given)


def with_tensors(transform: Callable[[Callable[..., Any], list[Tensor]], Any]) -> Run:
    """A run inside a transform, which takes a function of all tensors and these."""

    def run(qkv: list[Any], given: dict[str, Any]) -> Any:
        names = [name for name, x in given.items() if isinstance(x, Tensor)]

        def function(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
            return attend(q, k, v, **{**given, **dict(zip(names, others))})

        return transform(function, [x.detach() for x in (*qkv, *(given[name] for name in names))])

    return run


def mapped(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    results = PRIVATE.func.vmap(function)(*(torch.stack((x, x)) for x in tensors))
    return tuple(x[1] for x in results)


def differentiated(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    def loss(q: Tensor, *others: Tensor) -> Any:
        results = function(q, *others)
        return results[0].sum(), results

    return PRIVATE.func.grad(loss, has_aux=True)(*tensors)[1]


def with_tangents(function: Callable[..., Any], tensors: list[Tensor]) -> Any:
    q, *others = tensors
    return PRIVATE.func.jvp(lambda x: function(x, *others), (q.clone(),), (torch.ones_like(q),))[0]


RUNS: dict[str, Run] = {
    "plain": run_plain,
    "mode": under_a_mode,
    "vmap": with_tensors(mapped),
    "grad": with_tensors(differentiated),
    "jvp": with_tensors(with_tangents),
    "symbolic": with_tensors(lambda function, x: make_fx(function, tracing_mode="symbolic")(*x)(*x)),
}


#: Those of symbolic lengths take ten seconds.
KINDS = [pytest.param(kind, marks=[pytest.mark.full] * (kind == "symbolic")) for kind in RUNS]


@pytest.mark.parametrize("rows", [2, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_every_wrong_value_is_refused_by_name(kind: str, rows: int, set_mode: Any) -> None:
    set_mode("off")
    qkv = [torch.randn(rows, 4, heads, 8) for heads in (2, 1, 1)]
    branches = ("segment_lengths", "dilation_rates")
    for name in (*NAMES, "both"):
        for value in WRONG:
            with suppress(AttnDispatchError):
                wrong = dict.fromkeys(branches if name == "both" else (name,), value)
                RUNS[kind](qkv, {"return_lse": True, **wrong})
    for index, x in enumerate(qkv):
        for other in (x.long(), x.half(), x[..., :4].long(), x.sum(0), x.to("meta"), *WRONG):
            # Transforms take tensors, that of the gradient floating-point ones.
            if kind in ("plain", "mode") or (isinstance(other, Tensor) and (index or other.is_floating_point())):
                with suppress(AttnDispatchError):
                    RUNS[kind]([*qkv[:index], other, *qkv[index + 1 :]], {"return_lse": True})


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_result_or_a_refusal_by_name(kind: str, request: pytest.FixtureRequest, set_mode: Any) -> None:
    """Of right and wrong arguments: no bare exception of Python or PyTorch."""
    set_mode("off")
    count, computed = asked(request, 2), 0
    for seed in range(count):
        rng = Random(seed)
        call, wrong = random_call(rng, rng.choice((torch.float32, torch.float64)), 9), dict[str, Any]()
        if rng.random() < 0.6:
            wrong = {rng.choice(NAMES): rng.choice(WRONG) for _ in range(rng.choice((1, 1, 2)))}
        if kind not in ("plain", "mode"):
            call.needing = ()
        try:
            found = failures(call, lambda *qkv, **given: RUNS[kind](list(qkv), {**given, **wrong}))  # noqa: B023
        except AttnDispatchError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {wrong} in {title(call)}") from error
        assert wrong or found == [], f"seed {seed}: {title(call)}"
        computed += not wrong
    assert computed > count / 8


FAULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "out": lambda out, lse: (out * 1.02, lse),
    "lse": lambda out, lse: (out, lse + 0.02 + lse.abs() * 0.02),
    "last query": lambda out, lse: (torch.cat((out[:, :-1], out[:, -1:] * 0), 1), lse),
    "gradient": lambda out, lse: (out.detach() + (out - out.detach()) * 1.05, lse),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_results_are_noticed(fault: str, set_mode: Any) -> None:
    set_mode("off")
    count, noticed = 40, 0
    for seed in range(count):
        call = random_call(Random(seed), torch.float32)
        call.options.pop("layout", None)
        noticed += bool(failures(call, lambda *qkv, **arguments: FAULTS[fault](*attend(*qkv, **arguments))))
    assert noticed > count / 16  # the others are empty, or have no gradients
