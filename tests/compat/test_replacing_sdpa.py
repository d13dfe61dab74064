"""replacing_sdpa(): whose calls go to attend(), what is left to PyTorch, and what is in its place afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

from attn_dispatch import compat, replacing_sdpa
from attn_dispatch.compat import sdpa
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec import tracing
from tests.support.calls import drawn

pytestmark = pytest.mark.usefixtures("no_trials")

Axes = tuple[int, ...]


def test_replacing_sdpa() -> None:
    """In PyTorch's own encoder layer; what attend() has not is left to PyTorch, and said."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    x = drawn(2, 9, 16).requires_grad_()
    expected = layer(x)
    before = functional.scaled_dot_product_attention
    with replacing_sdpa() as replaced:
        found = layer(x)
        integers = torch.ones(9, 9, dtype=torch.int64)
        with pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], integers)
    assert functional.scaled_dot_product_attention is before
    torch.testing.assert_close(found, expected)
    assert replaced.routed == 1
    assert "attn_mask must be a bool or floating-point tensor" in str(replaced)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((3, 4), (), ()), ((3, 4), (1,), (3, 1)), ((), (3, 4), (3, 4)), ((3, 1), (1, 4), (4,)), ((3, 4), (3, 4), ()),
        ((2, 3, 4), (3, 1), (3, 4)), ((3, 4), (3, 3), (3, 3)), ((3, 4), (2, 4), (2, 4)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("with_mask", [False, True])
def test_shapes_that_torch_broadcasts(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], with_mask: bool
) -> None:
    """Axes before the last two; those that do not fit raise what PyTorch raises."""
    x, y, z = (drawn(*axes, size, 8).requires_grad_() for axes, size in ((q, 5), (k, 7), (v, 7)))
    mask = drawn(*q, 1, 7) if with_mask else None

    def run() -> list[Tensor]:
        out = functional.scaled_dot_product_attention(x, y, z, mask)
        return [out, *torch.autograd.grad(out.square().sum(), (x, y, z))]

    with replacing_sdpa() as replaced:
        try:
            found = run()
        except RuntimeError:
            found = []
    if not found:
        with pytest.raises(RuntimeError):
            run()
        return
    assert replaced.routed == 1
    for one, other in zip(found, run(), strict=True):
        torch.testing.assert_close(one, other)


def test_what_torch_spreads_over_ranks_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """attend() would see one rank's part alone."""
    monkeypatch.setattr(tracing, "context_parallel", lambda: object())
    x = drawn(2, 4, 9, 8)
    with replacing_sdpa() as replaced:
        functional.scaled_dot_product_attention(x, x, x)
    assert replaced.routed == 0


@pytest.mark.parametrize("by_name", [False, True])
def test_dropout(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel of attend() has it, it is left to PyTorch."""
    x = drawn(2, 4, 9, 8)

    def dropped() -> Tensor:
        torch.manual_seed(0)
        if by_name:
            return functional.scaled_dot_product_attention(query=x, key=x, value=x, dropout_p=0.5)
        return functional.scaled_dot_product_attention(x, x, x, None, 0.5)

    expected = dropped()
    with replacing_sdpa() as replaced:
        assert not torch.equal(dropped(), expected)
        monkeypatch.setattr(sdpa, "KNOWN", ("cuda",))
        assert torch.equal(dropped(), expected)
    left = "1 left to PyTorch: dropout_p > 0, for which attend() has the plain formula alone on this device"
    assert str(replaced) == f"1 call by attend()\n{left}"


@pytest.mark.parametrize("upper", [True, False])
@pytest.mark.parametrize("left_to_torch", [False, True])
def test_masks_of_torch_that_hold_no_numbers(upper: bool, left_to_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CausalBias is a tensor of memory that nobody wrote; PyTorch's function knows it by its own name alone."""
    q, k, v = drawn(2, 4, 5, 8), drawn(2, 4, 9, 8, seed=1), drawn(2, 4, 9, 8, seed=2)
    mask = (causal_upper_left if upper else causal_lower_right)(5, 9)
    seen = torch.ones(5, 9, dtype=torch.bool).tril(0 if upper else 4)
    expected = functional.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(functional.scaled_dot_product_attention(q, k, v, mask), expected)
    torch.testing.assert_close(compat.scaled_dot_product_attention(q, k, v, mask), expected)
    if left_to_torch:
        monkeypatch.setattr(tracing, "context_parallel", lambda: object())
    with replacing_sdpa() as replaced:
        by_position = functional.scaled_dot_product_attention(q, k, v, mask)
        by_name = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(by_position, expected)
    torch.testing.assert_close(by_name, expected)
    assert replaced.routed == (0 if left_to_torch else 2)
    with pytest.raises(InvalidInput, match=r"attn_mask is for \[5, 9\] queries and keys, there are \[5, 8\]"):
        compat.scaled_dot_product_attention(q, k[:, :, :8], v[:, :, :8], mask)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_torch() -> None:
    rows = [drawn(4, 3, 8), drawn(4, 5, 8)]
    nested = torch.nested.nested_tensor(rows)
    with replacing_sdpa() as replaced:
        out = functional.scaled_dot_product_attention(nested, nested, nested)
    for row, found in zip(rows, out.unbind()):
        torch.testing.assert_close(found, functional.scaled_dot_product_attention(row, row, row))
    assert (replaced.routed, sum(replaced.left.values())) == (0, 1)
    assert "got nested" in str(replaced)


def test_contexts_end_in_any_order() -> None:
    """Two threads may enter and leave in turns: nothing is replaced after the last one."""
    before, x = functional.scaled_dot_product_attention, drawn(2, 4, 9, 8)
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with replacing_sdpa() as replaced:
            entered.set()
            assert left.wait(60)
            functional.scaled_dot_product_attention(x, x, x)
        counts.append(replaced.routed)

    counts: list[int] = []
    thread = threading.Thread(target=other)
    with replacing_sdpa() as first:
        with replacing_sdpa() as inner:
            functional.scaled_dot_product_attention(x, x, x)
        assert (first.routed, inner.routed) == (0, 1)
        functional.scaled_dot_product_attention(x, x, x)
        thread.start()
        assert entered.wait(60)
    left.set()
    thread.join()
    assert (first.routed, counts) == (1, [1])
    assert functional.scaled_dot_product_attention is before


def test_checkpointing_inside() -> None:
    x, y = drawn(2, 4, 9, 8).requires_grad_(), drawn(2, 4, 9, 8).requires_grad_()
    with replacing_sdpa() as replaced:
        out = checkpoint(lambda z: functional.scaled_dot_product_attention(z, z, z), x, use_reentrant=False)
        torch.autograd.backward(out.sum())
    torch.autograd.backward(functional.scaled_dot_product_attention(y, y, y).sum())
    assert replaced.routed >= 1
    torch.testing.assert_close(x.grad, y.grad)


def test_compiled_functions_keep_torchs() -> None:
    q, k = drawn(2, 4, 5, 8), drawn(2, 4, 9, 8, seed=1)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q: Tensor, k: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, k)

    with replacing_sdpa() as replaced:
        found = compiled(q, k)
    torch.testing.assert_close(found, functional.scaled_dot_product_attention(q, k, k))
    assert replaced.routed == 0
