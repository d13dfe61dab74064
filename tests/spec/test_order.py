"""Token orders as permutations, patterns on reordered tokens, to_order and from_order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_dispatch import Blocks, attend, from_order, positions, to_order
from attn_dispatch.errors import InvalidInput
from attn_dispatch.learning.features import bucket, features
from attn_dispatch.spec.groups import title
from attn_dispatch.spec.hilbert import curve
from attn_dispatch.spec.orders import EXCHANGES, ORDERS, Reordered, _permutation, check, permutation, places, serves
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from tests.support.calls import qkv
from tests.support.pairwise import crossed

REORDERED = ("hilbert", "residue")
TRICKY: list[tuple[Pattern, int]] = [
    (Dense(is_causal=True), 30),
    (Window(3, 1), 27),
    (Dilated((8,), (2,)), 32),
    (Dilated((9, 18), (2, 3), is_causal=True), 31),
    (Dilated((8, 32), (2, 4), offsets="block"), 32),
    (Dilated((8, 16), (2, 4), heads="split"), 32),
    (Neighborhood((5, 7), (3, 3)), 35),
    (Neighborhood((8, 8), (3, 5), is_causal=(True, False)), 64),
    (Neighborhood((6, 9), (3, 3), (2, 3), edges="shift"), 54),
    (Neighborhood((7, 9), (3, 4), (2, 1), (True, False), "shift", (3, 2)), 63),
    (Neighborhood((3, 4, 5), (3, 3, 3)), 60),
    (Neighborhood((32,), (5,), (3,)), 32),
]
EACH = pytest.mark.parametrize(("pattern", "length"), TRICKY, ids=lambda value: str(value))
ORDER = pytest.mark.parametrize("order", REORDERED)


# --- permutations -----------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("order", ORDERS)
def test_every_position_has_one_place(order: str, pattern: Pattern, length: int) -> None:
    found = permutation(order, pattern, length)
    if found is None:
        assert order == "natural" or not serves(order, pattern)
        return
    assert found.dtype == torch.int64
    assert torch.equal(found.sort().values, torch.arange(length))
    assert not torch.equal(found, torch.arange(length))
    assert torch.equal(found[places(found)], torch.arange(length))
    assert torch.equal(places(found)[found], torch.arange(length))


@pytest.mark.parametrize(
    ("order", "pattern", "expected"),
    [
        ("natural", Dense(), True),
        ("hilbert", Dense(), False),
        ("hilbert", Window(3, 3), False),
        ("hilbert", Neighborhood((8, 8), (3, 3)), True),
        ("hilbert", Neighborhood((8, 1), (3, 3)), False),
        ("hilbert", Neighborhood((64,), (3,)), False),
        ("residue", Neighborhood((64,), (3,), (2,)), True),
        ("residue", Neighborhood((64,), (3,)), False),
        ("residue", Neighborhood((8, 8), (3, 3), (2, 2)), False),
        ("residue", Dilated((8, 16), (1, 2)), True),
        ("residue", Dilated((8, 16), (1, 1)), False),
        ("hilbert", Dilated((8, 16), (1, 2)), False),
    ],
    ids=str,
)
def test_patterns_that_an_order_serves(order: str, pattern: Pattern, expected: bool) -> None:
    assert serves(order, pattern) == expected


def test_names_of_orders() -> None:
    assert [check(order) for order in ORDERS] == list(ORDERS)
    for name in ("spiral", None, *EXCHANGES):
        with pytest.raises(InvalidInput, match="order must be None or one of 'natural', ") as raised:
            check(name)
        assert ("which needs mesh=" in str(raised.value)) == (name in EXCHANGES)


def test_residues_are_adjacent_within_a_segment() -> None:
    assert positions("residue", Dilated((8,), (2,)), 12).tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 9, 11]
    assert positions("residue", Dilated((6, 12), (2, 3)), 12).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert positions("residue", Neighborhood((7,), (3,), (3,)), 7).tolist() == [0, 3, 6, 1, 4, 2, 5]


def test_residue_classes_of_a_dilated_grid_are_separate() -> None:
    """Tokens of different classes do not see each other."""
    pattern = Neighborhood((6, 8), (3, 3), (2, 1))
    rows = positions("hilbert", pattern, 48) // 8
    assert (rows[:24] % 2 == 0).all()
    assert (rows[24:] % 2 == 1).all()


# --- patterns of tokens in another order ------------------------------------------------------------------------------


@EACH
@ORDER
def test_a_reordered_pattern_is_the_pattern_on_positions(order: str, pattern: Pattern, length: int) -> None:
    at = positions(order, pattern, length)
    generator = torch.Generator().manual_seed(0)
    masks: dict[str, Any] = {
        "seq_lens": torch.tensor([length - 3, length]),
        "key_mask": torch.rand(2, length, generator=generator) < 0.7,
    }
    whole = pattern.multiplicity(length, heads=4)[:, at][:, :, at]
    found = Reordered(pattern, order).multiplicity(length, heads=4)
    assert torch.equal(found, whole)
    # Masks go by place in the tensors.
    some, lens = torch.tensor([0, 5, length - 2]), masks["seq_lens"][:, None, None, None]
    hidden = (
        whole[1:3, some] * masks["key_mask"][:, None, None] * (torch.arange(length) < lens) * (some[:, None] < lens)
    )
    found = Reordered(pattern, order).multiplicity(length, heads=4, h_pos=(1, 2), q_pos=some, **masks)
    assert torch.equal(found, hidden)


@EACH
@ORDER
def test_simplify_keeps_the_multiplicity(order: str, pattern: Pattern, length: int) -> None:
    reordered = Reordered(pattern, order)
    plain = reordered.simplify(length, length, 4)
    assert torch.equal(plain.multiplicity(length, heads=4), reordered.multiplicity(length, heads=4))
    assert plain.simplify(length, length, 4) == plain


GRID = Neighborhood((4, 4), (3, 3))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Reordered(GRID, "natural"), GRID),
        (Reordered(GRID, "residue"), GRID),
        (Reordered(GRID, "hilbert"), Reordered(GRID, "hilbert")),
        (Reordered(Dense(), "hilbert"), Dense()),
        (Reordered(Window(99, 99), "hilbert"), Dense()),
        (Reordered(Window(99, 0), "hilbert"), Reordered(Dense(is_causal=True), "hilbert")),
        (Reordered(Neighborhood((16,), (5,)), "hilbert"), Window(2, 2)),
        (Reordered(Dilated((4, 99), (2, 2)), "residue"), Reordered(Dilated((4, 16), (2, 2)), "residue")),
    ],
    ids=str,
)
def test_equal_calls_share_a_decision(given: Pattern, expected: Pattern) -> None:
    q, k, v = qkv()
    problem = Problem.of(q, k, v, given)
    assert problem.pattern == expected
    assert hash(problem) == hash(Problem.of(q, k, v, expected))


def test_title_and_dict() -> None:
    problem = Problem.of(*qkv(), Reordered(GRID, "hilbert"))
    assert "Reordered(Neighborhood(grid=(4, 4), window=(3, 3)), hilbert)" in str(problem)
    plain = problem.to_dict()
    assert plain["pattern"] == {"kind": "Reordered", "pattern": GRID.to_dict(), "order": "hilbert"}
    assert Problem.from_dict(plain) == problem
    assert "Reordered(Neighborhood(2-D) hilbert)" in title(plain)
    natural = replace(problem, pattern=GRID).to_dict()
    assert features(plain) == features(natural)
    assert bucket(plain)[1:] == bucket(natural)[1:]
    with pytest.raises(InvalidInput, match="order must be one of"):
        Problem.from_dict({**plain, "pattern": {**plain["pattern"], "order": "spiral"}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reordered(GRID, "spiral"), "order must be one of 'natural', 'hilbert', 'residue', got 'spiral'"),
        (lambda: Reordered(GRID, None), "order must be one of"),  # type: ignore[arg-type]
        (
            lambda: Reordered(Reordered(GRID, "hilbert"), "hilbert"),
            "pattern must be a pattern in natural order, got Reo",
        ),
        (lambda: Reordered(Blocks(torch.ones(1, 1, 2, 2) > 0, 8), "hilbert"), "pattern must hold no tensors"),
        (
            lambda: Reordered("hilbert", GRID),  # type: ignore[arg-type]
            "pattern must be a pattern in natural order, got 'hilbert'",
        ),
        (lambda: Reordered(GRID, "hilbert").check(15, 15), "grid (4, 4) holds 16 tokens, but the sequence has 15"),
        (lambda: Reordered(Dense(), "hilbert").check(4, 5), "Reordered needs q_len == k_len, got 4 and 5"),
    ],
)
def test_invalid_reordered(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        make()
    assert message in str(raised.value)


def by_hand(x: Tensor, order: str, pattern: Pattern) -> Tensor:
    return x[:, positions(order, pattern, x.shape[1])]


@crossed(backend=("manual", "sdpa_mask"), order=REORDERED, case=tuple(TRICKY))
def test_reordered_equals_permuting_by_hand(backend: str, order: str, case: tuple[Pattern, int]) -> None:
    """out, lse and all gradients, with different heads, and a mask in the order of the tensors."""
    pattern, length = case
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, length, 4, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(1, length, generator=generator) < 0.8
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v, pattern, key_mask=mask, return_lse=True, backend="manual")
    expected = torch.autograd.grad((out, lse), (q, k, v), (grad, grad[..., 0].transpose(1, 2)))
    q, k, v = (by_hand(x.detach(), order, pattern).requires_grad_() for x in (q, k, v))
    mask, grad = (by_hand(x, order, pattern) for x in (mask, grad))
    reordered = Reordered(pattern, order)
    reordered_out, reordered_lse = attend(q, k, v, reordered, key_mask=mask, return_lse=True, backend=backend)
    found = torch.autograd.grad((reordered_out, reordered_lse), (q, k, v), (grad, grad[..., 0].transpose(1, 2)))
    assert torch.allclose(reordered_out, by_hand(out, order, pattern))
    assert torch.allclose(reordered_lse, by_hand(lse.transpose(1, 2), order, pattern).transpose(1, 2))
    for one, other in zip(found, expected):
        assert torch.allclose(one, by_hand(other, order, pattern))


# --- to_order and from_order ------------------------------------------------------------------------------------------


@EACH
@ORDER
def test_to_order_and_from_order(order: str, pattern: Pattern, length: int) -> None:
    x = torch.randn(2, length, 3)
    there = to_order(x, order, pattern)
    assert torch.equal(there, by_hand(x, order, pattern))
    assert torch.equal(from_order(there, order, pattern), x)
    assert torch.equal(to_order(x.transpose(1, 2), order, pattern, dim=-1), there.transpose(1, 2))
    assert torch.equal(to_order(torch.arange(length), order, pattern, dim=0), positions(order, pattern, length))


@ORDER
def test_a_whole_model_in_another_order(order: str) -> None:
    """Permuted at input and output: result and gradient are those of the model in natural order."""
    pattern = Dilated((6, 12), (2, 4), is_causal=True)
    x = torch.randn(1, 24, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.arange(24.0, dtype=torch.float64)[None, :, None, None]

    def model(x: Tensor, angles: Tensor, pattern: Pattern) -> Tensor:
        for _ in range(2):
            x = x + attend(x * angles.cos(), x * angles.sin(), x, pattern, backend="manual")
        return x

    natural = model(x, angles, pattern)
    moved = positions(order, pattern, 24).double()[None, :, None, None]
    reordered = from_order(model(to_order(x, order, pattern), moved, Reordered(pattern, order)), order, pattern)
    assert torch.allclose(reordered, natural)
    weights = torch.randn_like(natural)
    one, other = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (natural, reordered))
    assert torch.allclose(one, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], "hilbert", GRID), "x must be a torch.Tensor, got list"),
        ((torch.zeros(1, 16), "spiral", GRID), "order must be one of 'natural', 'hilbert', 'residue', got 'spiral'"),
        ((torch.zeros(1, 16), None, GRID), "order must be one of"),
        ((torch.zeros(1, 16), "hilbert", "grid"), "pattern must be a pattern in natural order, got 'grid'"),
        ((torch.zeros(1, 16), "hilbert", Reordered(GRID, "hilbert")), "pattern must be a pattern in natural order"),
        ((torch.zeros(1, 15), "hilbert", GRID), "grid (4, 4) holds 16 tokens, but the sequence has 15"),
        ((torch.zeros(1, 16), "hilbert", GRID, 2), "dim must be an axis of x, which has 2, got 2"),
        ((torch.zeros(1, 16), "hilbert", GRID, "n"), "dim must be an axis of x, which has 2, got 'n'"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], message: str) -> None:
    for call in (to_order, from_order):
        with pytest.raises(InvalidInput) as raised:
            call(*arguments)
        assert message in str(raised.value)


def test_cached_permutations_work_in_every_mode() -> None:
    """Whatever the mode of the first call is: autograd saves the index."""
    _permutation.cache_clear()
    curve.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        found = permutation("hilbert", Neighborhood((6, 7), (3,)), 42)
    assert found is not None
    x = torch.randn(42, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(x.index_select(0, found).sum(), x)
    assert torch.equal(grad, torch.ones(42, 3))
