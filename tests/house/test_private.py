"""PyTorch's private names stand in one module, and without any of them calls are right or refused."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import private
from attn_dispatch.dispatch import attend
from attn_dispatch.errors import AttnDispatchError
from attn_dispatch.kernels import registry
from attn_dispatch.spec.pattern import Neighborhood
from tests.call.test_second_derivatives import TRANSFORMS
from tests.call.test_tracing import TRACERS
from tests.house.test_architecture import MODULES, nodes
from tests.support import processes
from tests.support.calls import close, formula, qkv

#: Of FlexAttention without its compiler, which tests alone run.
OF_TESTS = {
    "torch._higher_order_ops.flex_attention.flex_attention",
    "library._create_empty_block_mask",
    "library._identity",
}


def names_of_torch(module: str) -> Iterator[tuple[str, str]]:
    """What a module imports from torch: the name there, and in the module."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from ((each.name, each.asname or each.name.split(".")[0]) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{each.name}", each.asname or each.name) for each in node.names)


def private_names(module: str) -> Iterator[str]:
    """PyTorch's, but for operators, which have schemas."""
    imported = {here: there for there, here in names_of_torch(module) if there.split(".")[0] == "torch"}
    yield from (there for there in imported.values() if "._" in there)
    for node in nodes(module):
        if isinstance(node, ast.Attribute) and re.match("_(?!_|scaled_dot)", node.attr):
            name = ast.unparse(node)
            yield from [name] if name.partition(".")[0] in imported else []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch._"):
            yield node.value


def test_private_names_stand_in_one_module() -> None:
    found = {name: names for name in MODULES if (names := set(private_names(name)))}
    assert found.keys() == {"private", "kernels.flex.attention"}
    assert found["kernels.flex.attention"] == OF_TESTS


# --- without them -----------------------------------------------------------------------------------------------------

#: A process that has loaded torch, and of the package nothing, is forked for each argument: the names that are gone.
CODE = """
import importlib, os, pkgutil, sys, traceback
preloaded = "_dynamo", "_subclasses.fake_tensor", "utils.checkpoint", "utils.flop_counter", "_functorch.aot_autograd"
for name in preloaded[: 9 * (len(sys.argv) > 2)]:  # for one process they would be loaded in vain
    importlib.import_module(f"torch.{name}")
resolve_name, failed = pkgutil.resolve_name, []
def check(gone):
    def resolve(name):
        if name in gone:
            raise AttributeError(name)
        return resolve_name(name)
    pkgutil.resolve_name = resolve
    from tests.house import test_private
    assert gone <= test_private.private.NAMES
    test_private.check_calls() if len(gone) == 1 else test_private.check_plain_calls()
for given in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            check(set(given.split()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    failed += [given] if os.waitpid(child, 0)[1] else []
sys.exit(f"without {failed}" if failed else 0)
"""


def plain(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return function(*tensors)


def fake(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        assert function(*map(mode.from_tensor, tensors)).shape == tensors[0].shape
    return function(*tensors)


def counted(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    with FlopCounterMode(display=False):
        return function(*tensors)


def on_meta(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    with torch.device("meta"):
        function(*tensors)
    return function(*tensors)


def recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Any:
    return checkpoint(function, *tensors, use_reentrant=False)


def compiled(function: Callable[..., Tensor], *tensors: Tensor) -> Any:
    return torch.compile(function, backend="aot_eager")(*tensors)


def traced(tracer: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda function, *tensors: tracer(function, *(x * 0.5 for x in tensors))(*tensors)


PATTERN = Neighborhood((4, 4), (3, 3))  #: whose backends keep tables
WAYS: dict[str, Callable[..., Tensor]] = {
    **{each.__name__: each for each in (fake, counted, on_meta, recomputed, compiled)},
    **{name: traced(tracer) for name, tracer in TRACERS.items()},
}


def check_plain_calls() -> None:
    for _ in range(3):
        assert right(plain)


def check_calls() -> None:
    """Plain calls are right; others are, or raise an exception of the package."""
    for name, way in WAYS.items():
        # A trace before autograd that is not seen ends in torch's own error: nothing requires a gradient.
        with suppress(AttnDispatchError, RuntimeError if name == "early" else AttnDispatchError):
            assert right(way), name
        assert right(plain), f"after {name}"
    q, k, v = qkv()
    for name, transform in TRANSFORMS.items():
        with suppress(AttnDispatchError):
            found = transform(lambda x: attend(x, k, v, PATTERN), q)
            assert close(found, transform(lambda x: formula(x, k, v, PATTERN)[0], q).double()), name


def right(way: Callable[..., Tensor]) -> bool:
    """Whether out and gradients are."""
    q, k, v = tensors = [x.requires_grad_() for x in qkv()]
    found, expected = (
        [out.detach(), *torch.autograd.grad(out.sin().sum(), tensors)]
        for out in (way(lambda q, k, v: attend(q, k, v, PATTERN), *tensors), formula(q, k, v, PATTERN)[0])
    )
    return all(close(one, other.double()) for one, other in zip(found, expected, strict=True))


for backend in registry.BUILT_IN:
    registry.load(backend)  # which looks up names, too
EACH = sorted(private.NAMES)


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param([" ".join(EACH)], id="all"),
        *(pytest.param(EACH[at::4], id=f"each-{at}", marks=pytest.mark.full) for at in range(4)),
    ],
)
def test_without(gone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_BUDGET_MS", "0")
    processes.printed("-c", CODE, *gone)


def test_a_lost_name_is_named() -> None:
    with pytest.raises(AttnDispatchError, match=r"needs torch\._gone, which torch .* does not have"):
        private.of_torch("torch:_gone")()


# --- warnings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_what_torch_itself_meets_is_no_failure(category: type[Warning]) -> None:
    """Of its own calls; what ours meet is one."""
    warnings.warn_explicit("deprecated", category, "file", 1, "torch.jit._script")
    for module in ("attn_dispatch.dispatch", "tests.house", "torchscale", "README.md"):
        with pytest.raises(category):
            warnings.warn_explicit("deprecated", category, "file", 1, module)
