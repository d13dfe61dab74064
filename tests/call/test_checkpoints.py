"""Selective checkpointing: what a policy saves of attention is not computed again, and changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import attend
from attn_dispatch.calls import packing
from attn_dispatch.decisions.call import resolve
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.errors import BackendFailed
from attn_dispatch.spec.data import Ranges
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tests.support.calls import drawn, forget
from tests.support.graphs import OP
from tests.support.pairwise import by_turns, thinned

pytestmark = pytest.mark.usefixtures("no_trials")

LENGTH, HEADS, WIDTH = 32, 4, 8
PATTERNS = (Dense(is_causal=True), Window(5, 0), Dilated((8, 32), (1, 2)), Neighborhood((4, 8), (3, 3)))
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
contexts: Any = create_selective_checkpoint_contexts
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 22, [0] * 32])
SEEN = torch.arange(LENGTH) % 5 != 2


Context = Callable[[], AbstractContextManager[Any]]


def step(
    attention: Attention, around: Callable[..., Any] = lambda block, x: block(x), backward: Context = nullcontext
) -> tuple[Tensor, ...]:
    """The result of a layer, and the gradients of its input and weights."""
    torch.manual_seed(0)
    weights = [(0.2 * drawn(HEADS * WIDTH, HEADS * WIDTH, seed=s)).requires_grad_() for s in range(4)]
    x = drawn(2, LENGTH, HEADS * WIDTH, seed=4).requires_grad_()

    def block(x: Tensor) -> Tensor:
        q, k, v = ((x @ weight).view(2, LENGTH, HEADS, WIDTH) for weight in weights[:3])
        return x + attention(q, k, v).flatten(2) @ weights[3]

    y: Tensor = around(block, x)
    with backward():
        return (y, *torch.autograd.grad(y.sin().sum(), (x, *weights)))


def saving(*operators: Any) -> Callable[..., Any]:
    """In a checkpoint whose policy saves the results of these operators."""
    return partial(checkpoint, use_reentrant=False, context_fn=partial(contexts, list(operators)))


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(map(torch.equal, found, expected))


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, is_causal=True, layout="bhnd").transpose(1, 2)  # type: ignore[no-any-return]


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.einsum("nd,md->nm", q[0, :, 0], k[0, :, 0])[None, None]
    return attend(q, k, v, bias=bias, backend="native")  # type: ignore[no-any-return]


def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = attend(q, k, v, Window(5, 0), return_lse=True)
    return out * lse.transpose(1, 2)[..., None]  # type: ignore[no-any-return]


def packed_with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = SEEN.expand(2, -1)
    out, lse = attend(q, k, v, is_causal=True, documents=DOCUMENTS, key_mask=mask, return_lse=True, backend="native")
    return out * lse.transpose(1, 2)[..., None]  # type: ignore[no-any-return]


def narrow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([attend(q, k, v[..., :4], is_causal=True)] * 2, -1)


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return attend(q, k, v, is_causal=True).float()  # type: ignore[no-any-return]


def dropped_before(pattern: Pattern, **given: Any) -> Attention:
    """With numbers drawn after those of attention, which a checkpoint draws again."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.dropout(attend(q, k, v, pattern, dropout_p=0.3, **given), 0.5, train=True)

    return attention


CALLS: dict[str, Attention] = {
    "mask": lambda q, k, v: attend(q, k, v, Window(5, 5), key_mask=SEEN.expand(2, -1)),
    "lengths": lambda q, k, v: attend(q, k, v, is_causal=True, seq_lens=torch.tensor([LENGTH, 7])),
    "sink": lambda q, k, v: attend(q, k, v, Window(5, 0), sink=torch.ones(HEADS)),
    "softcap": lambda q, k, v: attend(q, k, v, is_causal=True, softcap=5.0, backend="native"),
    "bias": biased,
    "data": lambda q, k, v: attend(q, k, v, Ranges.spans(DOCUMENTS, left=3)),
    "documents": lambda q, k, v: attend(q, k, v, is_causal=True, documents=DOCUMENTS, backend="native"),
    "documents alike": lambda q, k, v: attend(
        q, k, v, Window(5, 0), documents=DOCUMENTS[:1].expand(2, -1), backend="native"
    ),
    "documents and lse": packed_with_lse,
    "documents of data": lambda q, k, v: attend(q, k, v, Ranges.spans(DOCUMENTS, left=3), documents=DOCUMENTS),
    "queries": lambda q, k, v: torch.cat([attend(q[:, :8], k, v), attend(q[:, 8:], k, v)], 1),
    "heads first": heads_first,
    "lse": with_lse,
    "narrow values": narrow,
    "autocast": under_autocast,
    "dropout": dropped_before(PATTERNS[0]),
    "dropout of a window": dropped_before(PATTERNS[1], key_mask=SEEN.expand(2, -1)),
    "dropout of branches": dropped_before(PATTERNS[2], sink=torch.ones(HEADS)),
    "dropout of a grid": dropped_before(PATTERNS[3]),
    "dropout of data": dropped_before(Ranges.spans(DOCUMENTS, left=3)),
    "dropout of documents": dropped_before(PATTERNS[0], documents=DOCUMENTS, backend="native"),
}


@thinned(
    ("pattern", "backend"),
    [
        *product(PATTERNS, (None, "native", "tiles")),
        *product(PATTERNS[::2], ["sdpa"]),  # the others need a mask
    ],
    3,
)
def test_saved_attention_is_computed_once(pattern: Pattern, backend: str | None, forwards: list[str]) -> None:
    """Its out and lse serve the backward pass."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, pattern, backend=backend)  # type: ignore[no-any-return]

    expected = step(attention)
    forwards.clear()
    found = step(attention, saving(OP))
    assert len(forwards) == 1
    assert same(found, expected)
    forwards.clear()
    found = step(attention, saving(torch.ops.aten.mm.default))
    assert len(forwards) == 2
    assert same(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_whatever_a_call_asks_for(name: str, forwards: list[str]) -> None:
    expected = step(CALLS[name])
    once = len(forwards)
    assert once
    forwards.clear()
    found = step(CALLS[name], saving(OP))
    assert len(forwards) == once
    assert same(found, expected)


def plain(block: Callable[..., Any], x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False)


def counted(block: Callable[..., Any], x: Tensor) -> Any:
    with FlopCounterMode(display=False):
        return plain(block, x)


def inside(block: Callable[..., Any], x: Tensor) -> Any:
    return saving(OP)(lambda x: plain(block, x), x)


def other(block: Callable[..., Any], x: Tensor) -> Any:
    return plain(lambda x: saving(OP)(block, x), x)


MORE: dict[str, Attention] = {
    "shorter keys": lambda q, k, v: attend(q, k, v, is_causal=True, key_lens=torch.tensor([LENGTH, 7])),
    "no shorter keys": lambda q, k, v: attend(q, k, v, is_causal=True, key_lens=torch.tensor([LENGTH] * 2)),
    "bias and mask": lambda q, k, v: attend(
        q, k, v, bias=q[:1, None, :, 0, :1] * k[:1, None, :, 0, 0].unsqueeze(2), key_mask=SEEN.expand(2, -1)
    ),
    **{
        f"{backend}, scale {scale}": partial(attend, is_causal=True, scale=scale, backend=backend)
        for backend in ("native", "sdpa", "sdpa_mask", "tiles", "manual")
        for scale in (-0.3, 0.0)
    },
    **{
        f"{backend}, mask": partial(attend, is_causal=True, backend=backend, key_mask=SEEN.expand(2, -1))
        for backend in ("native", "sdpa", "sdpa_mask", "tiles", "manual")
    },
}
WHERE: dict[str, tuple[Callable[..., Any], Context]] = {
    "forward": (counted, nullcontext),
    "backward": (plain, lambda: FlopCounterMode(display=False)),
    "both": (counted, lambda: FlopCounterMode(display=False)),
    "inside": (inside, nullcontext),
    "around": (other, nullcontext),
}


@by_turns(("name", "where"), CALLS | MORE, tuple(WHERE))
def test_a_mode_over_one_of_two_forward_passes(name: str, where: str) -> None:
    """Both save the same tensors in the same order: PyTorch compares their sizes alone."""
    attention = (CALLS | MORE)[name]
    assert same(step(attention, *WHERE[where]), step(attention))


@by_turns(("name", "where"), CALLS | MORE, ("nothing", "flops", "second"))
def test_hooks_alone(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is one problem is a node of autograd, whose backward pass modes and second derivatives see."""
    by_operator, counts = Mock(wraps=operators.attend_by_operator), FlopCounterMode(display=False)
    monkeypatch.setattr(operators, "attend_by_operator", by_operator)

    def hooked(block: Callable[..., Any], x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return block(x)

    attention, expected = (CALLS | MORE)[name], step((CALLS | MORE)[name])
    if where == "second":
        q, k, v = (drawn(2, LENGTH, HEADS, WIDTH, seed=seed).requires_grad_() for seed in range(3))
        (grad,) = torch.autograd.grad(hooked(lambda q: attention(q, k, v), q).sum(), q, create_graph=True)
        if "manual" not in name:
            with pytest.raises(BackendFailed, match="second derivatives"):
                torch.autograd.grad(grad.sum(), q)
    else:
        assert same(step(attention, hooked, lambda: counts if where == "flops" else nullcontext()), expected)
    if where == "flops" and "manual" not in name:
        assert counts.get_flop_counts()["Global"][torch.ops.attn_dispatch.attend_backward] > 0
    assert by_operator.called is name.startswith(("dropout", "documents", "data"))


@pytest.mark.parametrize("name", [name for name in CALLS | MORE if "manual" not in name])  # whose parts hooks see
def test_errors_of_hooks(name: str) -> None:
    """They are the caller's own, not failures of a backend: of the first call, and of one with a known route."""

    def raising(x: Tensor) -> Tensor:
        raise MemoryError

    q, k, v = (drawn(2, LENGTH, HEADS, WIDTH, seed=seed).requires_grad_() for seed in range(3))
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(raising, raising), pytest.raises(MemoryError):
            (CALLS | MORE)[name](q, k, v)


@pytest.mark.parametrize(
    "given",
    [
        {"documents": DOCUMENTS, "backend": "tiles"},
        {"backend": "manual"},
        {"backend": "manual", "dropout_p": 0.2},
    ],
    ids=str,
)
def test_what_is_no_operator_is_computed_again(given: Any, forwards: list[str]) -> None:
    """Twice, and no third time for gradients."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, is_causal=True, **given)  # type: ignore[no-any-return]

    expected, once = step(attention), len(forwards)
    assert once or "documents" not in given
    assert same(step(attention, saving(OP)), expected)
    assert len(forwards) == 3 * once


def test_dropout_entry_by_entry() -> None:
    """Of the formula in float64, which drops the same weights of one seed."""
    tensors = [drawn(2, LENGTH, HEADS, WIDTH, seed=seed).requires_grad_() for seed in range(3)]
    q, k, v = tensors
    torch.manual_seed(5)
    found = saving(OP)(lambda q: attend(q.sin(), k, v, Window(9, 0), dropout_p=0.3, backend="native").square(), q)
    torch.manual_seed(5)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    x, y, z = doubles
    exact = attend(x.sin(), y, z, Window(9, 0), dropout_p=0.3, backend="manual").square()
    expected = (exact, *torch.autograd.grad(exact.sum(), doubles))
    for one, other in zip((found, *torch.autograd.grad(found.sum(), tensors)), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_dropout_keeps_its_choice(monkeypatch: pytest.MonkeyPatch, forwards: list[str]) -> None:
    """Backends drop other weights of this grid: that of the forward pass serves the backward pass."""
    attention = dropped_before(PATTERNS[3])
    expected = step(attention)
    forwards.clear()
    found = step(attention, saving(OP))
    monkeypatch.setattr(packing, "resolve", lambda problem, name, order: resolve(problem, name or "manual", order))
    assert len(forwards) == 1
    assert same(found, expected)
    assert same(step(attention, saving(OP)), expected)
    forget()
    assert not same(step(attention, saving(OP)), expected)


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_dropout_keeps_its_seed(preserve_rng_state: bool) -> None:
    """It is saved with the result, and not drawn again."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, dropout_p=0.3, backend="native")  # type: ignore[no-any-return]

    assert same(step(attention, partial(saving(OP), preserve_rng_state=preserve_rng_state)), step(attention))


def test_dropout_by_another_generator(monkeypatch: pytest.MonkeyPatch, forwards: list[str]) -> None:
    """A kernel that takes no seed runs again, and draws the same numbers."""
    monkeypatch.setattr(packing, "BY_SEED", ())
    attention = dropped_before(PATTERNS[0])
    expected = step(attention)
    forwards.clear()
    assert same(step(attention, saving(OP)), expected)
    assert len(forwards) == 2


def test_a_policy_sees_each_call_once() -> None:
    """And nothing of what is inside, which depends on the choice."""
    seen: list[Any] = []

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(operator)
        return CheckpointPolicy.MUST_SAVE if operator is OP else CheckpointPolicy.PREFER_RECOMPUTE

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(attend(q, k, v, Window(3, 0)), k, v, is_causal=True)  # type: ignore[no-any-return]

    step(attention, partial(checkpoint, use_reentrant=False, context_fn=partial(contexts, policy)))
    assert seen.count(OP) == 2
    assert not [each for each in seen if "attention" in str(each)]


def test_another_choice_in_the_backward_pass(forwards: list[str]) -> None:
    """Here another backend is forced once the forward pass has ended: the saved results serve it, too."""
    names = iter(["sdpa", "native"])

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, is_causal=True, backend=next(names))  # type: ignore[no-any-return]

    found = step(attention, saving(OP))
    assert len(forwards) == 1
    expected = step(lambda q, k, v: attend(q, k, v, is_causal=True, backend="manual"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("little_time")
def test_a_first_call_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_DISPATCH_MODE", "tune")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, Window(4, 1))  # type: ignore[no-any-return]

    found = step(attention, saving(OP))
    assert same(found, step(attention))
    forget()
    assert same(step(attention, saving(OP)), found)
