"""Patterns whose tensors say what a pattern without tensors says: every backend takes their calls."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attn_dispatch import Blocks, Dense, Dilated, Ranges, Window, attend, explain
from attn_dispatch.calls import routes
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.spec.data import DataFacts, DataPattern
from attn_dispatch.spec.pattern import Pattern
from tests.support.calls import close, formula
from tests.support.graphs import aot, attended
from tests.support.interpreted import INTERPRETED
from tests.support.pairwise import thinned
from tests.support.random_calls import PRIVATE

SIDES = (None, 0, 1, 3, 8, 30)
LENGTHS = ((9, 9), (4, 9), (9, 4), (2, 9), (1, 9), (9, 1), (33, 40))
N = 32  #: tokens
Q, K, V = (torch.randn(2, N, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
ONES, LISTED = torch.ones(1, 2, 4, 8, dtype=torch.bool), torch.arange(8).expand(2, 1, 4, 8)


@pytest.fixture(autouse=True)
def _nothing_measured(set_mode: Any) -> None:
    set_mode("off")


@pytest.fixture(autouse=True)
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Pattern]:
    """The patterns of the problems for which a route is made."""
    found: list[Pattern] = []
    new = routes.new_route

    def noted(*args: Any) -> Any:
        route = new(*args)
        found.append(route.problem.pattern)
        return route

    monkeypatch.setattr("attn_dispatch.dispatch.new_route", noted)
    routes.routes.clear()
    return found


def intervals(window: Pattern, q_len: int, k_len: int) -> Tensor:
    """First and last key of each query, [2, q_len]; of queries without keys, odd ones."""
    seen = window.multiplicity(q_len, k_len)[0] > 0
    first, last = seen.int().argmax(1), k_len - 1 - seen.flip(1).int().argmax(1)
    none = ~seen.any(1)
    return torch.stack([first.masked_fill(none, 7), last.masked_fill(none, 3)])


def window(left: int | None = 3, right: int | None = 0, rows: int = 1, length: int = N) -> Ranges:
    first, last = intervals(Window(left, right), length, length)
    return Ranges(first.expand(rows, -1), last.expand(rows, -1))


PATTERNS: dict[str, tuple[Callable[[], DataPattern], Pattern]] = {
    "window": (window, Window(3, 0)),
    "window by row": (lambda: window(5, 2, rows=2), Window(5, 2)),
    "causal": (lambda: window(None), Dense(is_causal=True)),
    "dense": (lambda: Ranges(torch.full((1, N), -9), torch.full((1, N), 99)), Dense()),
    "spans without a token": (lambda: Ranges.spans(torch.full((1, N), -1), left=6), Window(6, 0)),
    "all blocks": (lambda: Blocks(ONES, (8, 4), Window(4, 1)), Window(4, 1)),
    "all blocks listed": (lambda: Blocks(LISTED, (8, 4)), Dense()),
    "all blocks within branches": (lambda: Blocks(ONES, (8, 4), Dilated((8, 16), (1, 2))), Dilated((8, 16), (1, 2))),
}
EVERY = pytest.mark.parametrize("name", PATTERNS)


# --- which patterns ---------------------------------------------------------------------------------------------------


def plain_of(pattern: DataPattern, k_len: int) -> Pattern | None:
    facts = pattern.facts(k_len)
    assert facts is not None
    return facts.plain


@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
def test_every_window_is_found(q_len: int, k_len: int) -> None:
    for left, right in product(SIDES, SIDES):
        exact = Window(left, right).simplify(q_len, k_len, 1)
        first, last = intervals(exact, q_len, k_len)
        beyond = torch.where(first == 0, -5, first), torch.where(last == k_len - 1, k_len + 5, last)
        for pattern in (Ranges(first[None], last[None]), Ranges(*(x.expand(3, 1, -1) for x in beyond))):
            found = plain_of(pattern, k_len)
            # Of one query, any interval to the end is a window: another one at each step of decoding.
            assert (found is None) == (q_len == 1 and exact != Dense())
            if found is not None:
                assert torch.equal(found.multiplicity(q_len, k_len), exact.multiplicity(q_len, k_len)), exact


@pytest.mark.parametrize(("q_len", "k_len"), [size for size in LENGTHS if min(size) > 1])
def test_nothing_else_is(q_len: int, k_len: int) -> None:
    """Each bound of a window changed by one, in one row of two."""
    for (left, right), end, query, step in product(
        product((0, 1, 3), (0, 2)), (0, 1), {0, 1, q_len - 2, q_len - 1}, (-1, 1)
    ):
        exact = intervals(Window(left, right), q_len, k_len).clone()
        exact[end, query] += step
        pattern = Ranges(*(torch.stack([x, y]) for x, y in zip(intervals(Window(left, right), q_len, k_len), exact)))
        found = plain_of(pattern, k_len)
        if found is not None:
            counts = pattern.multiplicity(q_len, k_len)
            assert torch.equal(found.multiplicity(q_len, k_len).expand_as(counts), counts), (exact, found)
        else:
            assert not torch.equal(*pattern.multiplicity(q_len, k_len))
    none, twice = Ranges(torch.full((1, q_len), 5), torch.full((1, q_len), 4)), torch.zeros(1, 2, q_len).long()
    assert plain_of(none, k_len) is None
    assert plain_of(Ranges(twice, twice + k_len), k_len) is None


def test_tables_with_a_gap_or_a_block_twice() -> None:
    holed = ONES.clone()
    holed[0, 1, 2, 3] = False
    twice = torch.cat([LISTED, LISTED[..., :1]], 3)
    for table in (holed, twice, LISTED[..., 1:]):
        assert plain_of(Blocks(table, (8, 4)), N) is None
    padded = torch.cat([LISTED.flip(3), torch.full((2, 1, 4, 2), -1)], 3)
    assert plain_of(Blocks(padded, (8, 4)), N) == Dense()


# --- what is computed -------------------------------------------------------------------------------------------------


def results(run: Callable[..., Any], pattern: Any, **arguments: Any) -> list[Tensor]:
    """out, lse and gradients."""
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out, lse = run(*leaves, pattern, return_lse=True, **arguments)
    return [x.detach().double() for x in (out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves))]


def exact_results(plain: Pattern) -> list[Tensor]:
    return results(lambda *x, return_lse: formula(*x), plain)


@EVERY
def test_results_and_gradients(name: str, decided: list[Pattern]) -> None:
    make, plain = PATTERNS[name]
    assert all(map(close, results(attended, make()), exact_results(plain)))
    assert decided == [plain]
    assert str(plain) in explain(Q, K, V, make()).problem
    assert explain(Q, K, V, make()).choice == explain(Q, K, V, plain).choice


@pytest.mark.parametrize("name", ["causal", "dense"])
def test_by_a_backend_without_tensors(name: str) -> None:
    make, plain = PATTERNS[name]
    assert all(map(close, results(attended, make(), backend="sdpa"), exact_results(plain)))
    with pytest.raises(NoBackend, match="takes no tensors of a pattern"):
        attend(Q, K, V, Ranges.spans(torch.arange(N)[None] // 8, left=3), backend="sdpa")


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("backend", ["triton", "triton_tiles"])
def test_by_triton(backend: str, decided: list[Pattern]) -> None:
    """The one takes no tensors, the other no window."""
    q, k, v = Q[:1, :, :2], K[:1, :, :1], V[:1, :, :1]
    assert close(attend(q, k, v, window(), backend=backend), formula(q, k, v, Window(3, 0))[0])
    assert [each.holds_data for each in decided] == [backend == "triton_tiles"]


def test_a_forced_backend_that_takes_tensors_gets_them(decided: list[Pattern]) -> None:
    for backend in ("native", "manual", "tiles"):
        for make, plain in PATTERNS.values():
            if backend != "native" or not plain.branches:
                assert close(attend(Q, K, V, make(), backend=backend), formula(Q, K, V, plain)[0])
    assert all(each.holds_data for each in decided)


OTHERS: dict[str, dict[str, Any]] = {
    "seq_lens": {"seq_lens": torch.tensor([N, 9])},
    "key_mask": {"key_mask": torch.rand(2, N, generator=torch.Generator().manual_seed(1)) < 0.7},
    "key_lens": {"key_lens": torch.tensor([N, 5])},
    "documents": {"documents": torch.arange(2 * N).view(2, N) // 7},
    "sink": {"sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": torch.randn(1, 4, N, N, generator=torch.Generator().manual_seed(2))},
    "alibi_slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "heads": {"first_head": 4, "all_heads": 12},
    "heads first": {"layout": "bhnd"},
}


@pytest.mark.parametrize("other", OTHERS)
@EVERY
def test_with_other_arguments(name: str, other: str) -> None:
    """As `manual` computes it, which gets the tensors."""
    pattern, arguments = PATTERNS[name][0](), OTHERS[other]
    q, k, v = [x.transpose(1, 2) for x in (Q, K, V)] if other == "heads first" else (Q, K, V)
    if isinstance(pattern, Blocks) and (other == "documents" or (other == "key_lens" and pattern.within != Dense())):
        with pytest.raises(InvalidInput, match=f"{other} .*cannot be given with Blocks"):
            attend(q, k, v, pattern, **arguments)
        return
    exact = attend(q.double(), k.double(), v.double(), pattern, backend="manual", **arguments)
    assert close(attend(q, k, v, pattern, **arguments), exact)


@thinned("name", PATTERNS, 3)
@pytest.mark.usefixtures("fresh_compiler")
def test_in_graphs_and_transforms(name: str, decided: list[Pattern]) -> None:
    make, plain = PATTERNS[name]
    exact = exact_results(plain)
    assert all(map(close, results(aot(attended), make()), exact))
    pattern = make()
    attend(Q, K, V, pattern)  # its values are known then
    assert close(make_fx(lambda *x: attended(*x, pattern))(Q, K, V)(Q, K, V), exact[0])
    found = PRIVATE.func.grad(lambda x: attended(Q, x, V, pattern).sum())(K)
    leaf = K.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(formula(Q, leaf, V, plain)[0].sum(), leaf)
    assert close(found, wanted.double())
    with pytest.raises(NoBackend, match="cannot be mapped"):
        PRIVATE.func.vmap(lambda x: attended(Q, x, V, pattern))(K[None])
    assert any(each == plain for each in decided)


# --- routes and checks ------------------------------------------------------------------------------------------------


def test_others_of_the_form_have_another_route(decided: list[Pattern]) -> None:
    table = ONES[:1, :1, :4, :4].clone()
    for _ in range(2):
        for full in (True, False):
            table = table.clone()
            table[0, 0, 3, 0] = full
            pattern = Blocks(table, (8, 8), Dense(is_causal=True))
            assert close(attend(Q, K, V, pattern), formula(Q, K, V, pattern)[0])
    for left in (4, 5):
        assert close(attend(Q, K, V, window(left)), formula(Q, K, V, Window(left, 0))[0])
    plain = [each for each in decided if not each.holds_data]
    assert plain == [Dense(is_causal=True), Window(4, 0), Window(5, 0)]
    assert len(decided) == 4


def test_values_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = Ranges._read

    def counted(self: Ranges, k_len: int) -> DataFacts:
        reads.append(k_len)
        return read(self, k_len)

    monkeypatch.setattr(Ranges, "_read", counted)
    pattern, compiled = window(), aot(attended)
    for _ in range(2):
        attend(Q, K, V, pattern)
        attend(Q, K, V, pattern, backend="manual")
        compiled(Q, K, V, pattern)
    assert reads == [N]


def test_what_does_not_fit_is_refused() -> None:
    table, first = ONES.clone(), torch.zeros(1, N).long()
    patterns = [Blocks(table, (8, 4)), Ranges(first, first + N)]
    for pattern in patterns:
        attend(Q, K, V, pattern)
    table[:], first[:] = False, 3
    for pattern in patterns:
        more: list[dict[str, Any]] = [{}, {"backend": "sdpa"}, {"sink": torch.zeros(4)}]
        for arguments in more:
            with pytest.raises(InvalidInput, match="was changed in place after its"):
                attend(Q, K, V, pattern, **arguments)
    for pattern in (window(rows=3), window(length=N - 1)):
        with pytest.raises(InvalidInput, match=r"must have shape \[1 or 2, \(branches,\) 32\]"):
            attend(Q, K, V, pattern)
    with pytest.raises(InvalidInput, match=r"must have shape \[1, \(branches,\) 32\]"):
        attend(Q[:1], K[:1], V[:1], window(rows=3))
    with pytest.raises(InvalidInput, match=r"must have shape \[1, 1 or 2 or 4, \.\.\]"):
        attend(Q[:1], K[:1], V[:1], Blocks(ONES.expand(2, 2, 4, 8), (8, 4)))
    with pytest.raises(InvalidInput, match="give pattern or the shorthands"):
        attend(Q, K, V, window(), is_causal=True)
