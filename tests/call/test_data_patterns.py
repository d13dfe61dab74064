"""Masks made of data as arguments: what they go with, what is refused by name, where they are kept and freed."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from attn_dispatch import Blocks, Dense, Dilated, Neighborhood, Ranges, Reordered, Window, attend, explain
from attn_dispatch.calls import packing, routes
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend
from attn_dispatch.spec import data
from attn_dispatch.spec.data import DataPattern
from attn_dispatch.spec.problem import Problem
from tests.support.calls import close
from tests.support.graphs import Called, aot, attended, compile_, differentiated
from tests.support.random_calls import PRIVATE

N = 32  #: tokens
AT, LENS = torch.zeros(1, N).long(), torch.tensor([5, N])
TABLE = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
LISTS = torch.tensor([[[[1, -1, 1]] * 4]])
func: Any = PRIVATE.func
pytestmark = pytest.mark.usefixtures("one_thread")
here = pytest.mark.parametrize("name", ["manual", "native", "sdpa_mask"])


@pytest.fixture(autouse=True)
def _nothing_measured(set_mode: Any) -> None:
    set_mode("off")


def qkv(length: int = N, *, needs_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows, grouped heads."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, length, heads, 8, generator=generator).requires_grad_(needs_grad) for heads in (4, 2, 2))
    return q, k, v


def patterns(shift: int = 0) -> list[DataPattern]:
    """One of each form; with another `shift`, others of these forms."""
    starts = (torch.arange(2 * N).view(2, N) + shift) % 11
    spans = Ranges.spans((torch.arange(N)[None] + shift) // 5, left=3)
    lists, table = torch.where(LISTS < 0, LISTS, LISTS + shift), TABLE.roll(shift, 2)
    return [Ranges(starts, starts + 9), spans, Blocks(lists, 8), Blocks(table, 8, Window(9, 0))]


def exact(q: Tensor, k: Tensor, v: Tensor, pattern: DataPattern, **arguments: Any) -> Tensor:
    out: Tensor = attended(q.double(), k.double(), v.double(), pattern, backend="manual", **arguments)
    return out


def right(pattern: DataPattern, run: Callable[..., Any] = attended, **arguments: Any) -> bool:
    return close(run(*qkv(), pattern, **arguments), exact(*qkv(), pattern))


def gradient(pattern: DataPattern, run: Callable[..., Any] = attended, **arguments: Any) -> Tensor:
    """Of k."""
    q, k, v = qkv(needs_grad=True)
    run(q, k, v, pattern, **arguments).square().sum().backward()
    assert k.grad is not None
    return k.grad


@pytest.mark.parametrize("number", range(4))
def test_derivatives(number: int) -> None:
    (q, k, v), pattern = qkv(), patterns()[number]

    def of_k(x: Tensor) -> Any:
        return attended(q, x, v, pattern)

    wanted = gradient(pattern, backend="manual").double()
    assert close(func.grad(lambda x: of_k(x).square().sum())(k), wanted)
    for way in (True, False):
        assert close(gradient(pattern, lambda *x, way=way: checkpoint(attended, *x, use_reentrant=way)), wanted)
    (out, tangent), step = func.jvp(of_k, (k,), (k,)), 1e-6
    difference = exact(q, k.double() * (1 + step), v, pattern) - exact(q, k.double() * (1 - step), v, pattern)
    assert close(out, exact(q, k, v, pattern))
    assert torch.allclose(tangent.double(), difference / (2 * step), atol=1e-2)
    with pytest.raises(NoBackend, match="a pattern that holds tensors cannot be mapped"):
        func.vmap(of_k)(k[None])
    with pytest.raises(BackendFailed, match="native has no forward-mode derivatives"):
        func.jvp(lambda x: attended(q, x, v, pattern, backend="native"), (k,), (k,))
    result = attended(q, k.requires_grad_(), v, pattern, backend="native").square().sum()
    (grad,) = torch.autograd.grad(result, k, create_graph=True)
    with pytest.raises(BackendFailed, match="no second derivatives"):
        differentiated(grad.sum(), k)


@pytest.mark.parametrize("backend", ["native", "manual"])
@pytest.mark.parametrize("number", range(4))
def test_a_route_serves_all_tensors_of_a_form(number: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, new, made = [exact(*qkv(), patterns(shift)[number]) for shift in (0, 1)], routes.new_route, list[Any]()
    assert not torch.allclose(wanted[0], wanted[1])

    def noted(*args: Any) -> Any:
        made.append(args)
        return new(*args)

    monkeypatch.setattr("attn_dispatch.dispatch.new_route", noted)
    heads_first = [x.transpose(1, 2) for x in qkv()]
    for shift in (0, 1, 0, 1):
        pattern = patterns(shift)[number]
        assert close(attended(*qkv(), pattern, backend=backend), wanted[shift])
        found = attended(*heads_first, pattern, layout="bhnd", backend=backend)
        assert close(found.transpose(1, 2), wanted[shift])
    assert len(made) == 2  # one for each layout
    assert not any(isinstance(x, DataPattern) for key in routes.routes for x in key)


def test_with_other_arguments() -> None:
    there, sink = torch.arange(N) < LENS[:, None], torch.zeros(4)
    for pattern in patterns():
        (q, k, v), wanted = qkv(), exact(*qkv(), pattern)
        with torch.autocast("cpu", torch.bfloat16):
            assert attended(q, k, v, pattern).dtype == torch.bfloat16
        assert right(pattern, first_head=4, all_heads=12)
        assert close(attended(*(x.transpose(1, 2) for x in (q, k, v)), pattern, layout="bhnd").transpose(1, 2), wanted)
        assert close(attended(q, k, torch.cat([v, v], -1), pattern)[..., 8:], wanted)
        assert close(attended(q, k, v, pattern, sink=sink), exact(q, k, v, pattern, sink=sink))
        if getattr(pattern, "within", Dense()) == Dense():
            assert close(attended(q, k, v, pattern, key_lens=LENS), exact(q, k, v, pattern, key_mask=there))
    whole = Blocks(TABLE[:, :1], 8, Dilated((16,), (2,), first_head=1, all_heads=12))
    for name in ("manual", "sdpa_mask"):  # what blocks are within goes by the number of all heads
        part = Blocks(TABLE[:, :1], 8, Dilated((16,), (2,)))
        assert close(attended(*qkv(), part, backend=name, first_head=1, all_heads=12), exact(*qkv(), whole))


def test_empty_calls() -> None:
    (q, k, v), none, table = qkv(), torch.zeros(1, 0).long(), torch.zeros(1, 1, 0, 4) > 0
    for pattern in (Ranges(AT[:0], AT[:0]), Ranges(AT, AT), Blocks(TABLE[:0], 8)):
        assert attended(q[:0], k[:0], v[:0], pattern).shape == (0, N, 4, 8)
    assert attended(q[:0], k[:0], v[:0], Ranges(AT, AT), documents=AT[:0]).shape == (0, N, 4, 8)
    for pattern in (Ranges(none, none), Ranges.spans(none), Blocks(table, 8), Blocks(table.int(), 8)):
        assert attended(q[:, :0], k, v, pattern).shape == (2, 0, 4, 8)
    for pattern in (Ranges(AT, AT), Blocks(TABLE[..., :0], 8)):
        assert attended(q, k[:, :0], v[:, :0], pattern, return_lse=True)[1].eq(-torch.inf).all()


@pytest.mark.usefixtures("fresh_compiler")
def test_new_patterns_and_lengths_are_two_graphs() -> None:
    compiled = compile_(attended, fullgraph=True, backend=(counter := CompileCounter()))
    for length in (16, 16, 18, 20):
        first = torch.randint(0, length, (2, length))
        assert close(compiled(*qkv(length), Ranges(first, first + 5)), exact(*qkv(length), Ranges(first, first + 5)))
    assert counter.frame_count <= 2


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
def test_made_inside_a_compiled_function() -> None:
    """Of one table, too: what is derived of it goes by the pattern."""

    def function(at: Tensor, table: Tensor, lists: Tensor, *x: Tensor) -> Any:
        inside = [Ranges(at, at + 5), Ranges.spans(at, left=2), Blocks(lists, 8), Blocks(table, 8)]
        return [attended(*x, each) for each in (*inside, Blocks(table, 8, Dense(True)), Blocks(table, 8, Window(2, 0)))]

    given, exactly = (AT + 3, TABLE, LISTS), [x.double() for x in qkv()]
    assert all(map(close, aot(function)(*given, *qkv()), function(*given, *exactly)))
    assert all(close(gradient(each, aot(attended)), gradient(each, backend="manual").double()) for each in patterns())


@pytest.mark.full
def test_traced() -> None:
    for pattern in patterns():
        module = Called(lambda *x, p=pattern: attended(*x, p))
        assert right(pattern, lambda *x, f=module: make_fx(f)(*x[:3])(*x[:3]))
        assert right(pattern, lambda *x, f=module: torch.export.export(f, x[:3]).module()(*x[:3]))
        with pytest.raises(InvalidInput, match="pattern must hold fake tensors, as q is one"):
            make_fx(module, tracing_mode="symbolic")(*qkv())
    makes: list[Any] = [
        lambda x: Ranges(x, x + 3),
        Ranges.spans,
        lambda x: Blocks(x[:, None, None, :2].expand(1, 1, 4, 2), 8),
    ]
    for make in makes:
        traced = make_fx(lambda *x, make=make: attended(*x[:3], make(x[3])), tracing_mode="symbolic")(*qkv(), AT)
        assert close(traced(*qkv(), AT), exact(*qkv(), make(AT)))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(again: Callable[[Any], Any]) -> None:
    """Of tensors that were changed before: copies have other version counters."""
    for pattern in (*patterns(), Ranges(AT.clone().add_(1), AT + 5), Blocks(TABLE.clone().logical_not_(), 8)):
        assert right(pattern)
        assert right(again(pattern))


def test_moved_and_saved(tmp_path: Path) -> None:
    for pattern in patterns():
        assert pattern.to("cpu") is pattern
        moved = pattern.to("meta")
        assert (moved.device.type, moved.form(None, 4, 2)) == ("meta", pattern.form(None, 4, 2))
        torch.save({"mask": pattern}, tmp_path / "model.pt")
        assert right(torch.load(tmp_path / "model.pt", weights_only=False)["mask"])
    first = AT.clone()
    pattern = Ranges(first, AT)
    first += 1
    with pytest.raises(InvalidInput, match="first was changed in place"):
        pattern.to("meta")


def test_intervals_are_cut_by_documents_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, clipped = list[DataPattern](), Ranges.clipped

    def counted(self: Ranges, *bounds: torch.Tensor) -> Ranges:
        cuts.append(self)
        return clipped(self, *bounds)

    monkeypatch.setattr(Ranges, "clipped", counted)
    pattern, ids = patterns()[0], (torch.arange(N) // 10).expand(2, N).clone()
    for same in (ids, ids, ids + 7):
        assert close(attended(*qkv(), pattern, documents=same), exact(*qkv(), pattern, documents=ids))
    assert len(cuts) == 1
    ids[:, 20:] = 9  # the same tensor
    assert close(attended(*qkv(), pattern, documents=ids), exact(*qkv(), pattern, documents=ids))
    assert len(cuts) == 2
    for size in range(1, 20):
        attended(*qkv(), pattern, documents=(torch.arange(N) // size).expand(2, N))
    assert len(data.derived(pattern.data, "documents", dict[Any, Any])) == packing.MOST_KEPT
    kept = ref(pattern.data)
    cuts.clear()
    del pattern
    assert kept() is None


@here
def test_made_in_inference_mode_and_of_one_table(name: str) -> None:
    with torch.inference_mode():
        found = [*patterns(), Blocks(TABLE.clone(), 8)]
        assert all(right(pattern, backend=name) for pattern in found)
    for pattern in found:
        assert close(gradient(pattern, backend=name), gradient(pattern, backend="manual").double())
    for pattern in (
        Blocks(each, 8, within) for each in (TABLE, LISTS.int()) for within in (None, Dense(is_causal=True))
    ):
        assert right(pattern, backend=name)


@here
def test_lists_are_freed_with_the_pattern(name: str) -> None:
    for number in range(4):
        pattern = patterns()[number]
        gradient(pattern, backend=name)
        kept = ref(pattern.data)
        assert name == "manual" or pattern.data in data._kept
        del pattern
        assert kept() is None


def test_threads_make_lists_at_once() -> None:
    made = patterns()
    with ThreadPoolExecutor(8) as pool:
        for name in ("native", "sdpa_mask", "manual"):
            assert all(pool.map(lambda number, name=name: right(made[number % 4], backend=name), range(32)))


def test_problems_and_explanations() -> None:
    for pattern in patterns():
        problem = Problem.of(*qkv(), pattern)
        assert Problem.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem
    for changes in ({"intervals": 0}, {"by_row": 1}, {"density": "x"}, {"density": 1}, {"more": 1}):
        plain = Problem.of(*qkv(), patterns()[0]).to_dict()
        with pytest.raises(InvalidInput):
            Problem.from_dict({**plain, "pattern": {**plain["pattern"], **changes}})
    at = AT.to("meta")
    for pattern in (Ranges(at, at), Ranges.spans(at), Blocks(TABLE.to("meta"), 8), Blocks(LISTS.to("meta"), 8)):
        q, k, v = (x.to("meta") for x in qkv())
        assert explain(q, k, v, pattern).choice
        with pytest.raises(InvalidInput, match="must be on q's device cpu"):
            attend(*qkv(), pattern)


def given(number: int, **arguments: Any) -> Callable[[], Any]:
    return lambda: attend(*qkv(), patterns()[number], **arguments)


def in_place(number: int) -> Any:
    at, table, lists = AT.clone(), TABLE.clone(), LISTS.clone()
    pattern = [Ranges(at, AT), Ranges.spans(at), Blocks(table, 8), Blocks(lists, 8)][number]
    right(pattern, backend="native")
    for x in (at, table, lists):
        x[..., 0] = 1
    return pattern


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Ranges(AT.float(), AT), "first must be an integer tensor"),
    (lambda: Ranges(AT, AT > 0), "last must be an integer tensor"),
    (lambda: Ranges(AT[0], AT[0]), "first must be an integer tensor"),
    *((lambda x=x: Ranges(AT, x), "first and last must have one shape and device") for x in (AT[:, :4], AT.to("meta"))),
    (lambda: Ranges(AT[:, None][:, :0], AT[:, None][:, :0]), "first must have a branch"),
    *((lambda x=x: Ranges(x, x), "first and last of Ranges must have shape") for x in (AT.expand(3, N), AT[:, 1:])),
    (lambda: Ranges.spans(torch.tensor([[1, 2, 1]])), "ids must have the tokens of one id side by side"),
    (lambda: Ranges.spans(AT, left=-1), "left must be None or an integer >= 0"),
    (lambda: Ranges.spans(AT, 1), "is_causal must be True or False"),  # type: ignore[arg-type]
    *((lambda x=x: Blocks(x, 8), "table must be an integer") for x in (TABLE.float(), TABLE.to_sparse(), TABLE[0])),
    *(
        (lambda x=x: Blocks(TABLE, x), "size must be an integer")
        for x in list[Any]([0, -1, 8.0, True, (8, 8, 8), (8, 0)])
    ),
    *(
        (lambda x=x: Blocks(TABLE, 8, x), "within must be a pattern without tensors")
        for x in list[Any](["causal", *patterns()])
    ),
    (lambda: Blocks(TABLE, 8, Reordered(Neighborhood((4, 8), (3, 3)), "hilbert")), "within must be a pattern"),
    (lambda: Blocks(TABLE, 8, Neighborhood((4, 4), (3, 3))), r"grid \(4, 4\) holds 16 tokens"),
    (lambda: Reordered(patterns()[0], "hilbert"), "pattern must hold no tensors"),
    *(
        (lambda x=x: Blocks(x, 8), "table of Blocks must have shape .* by batch and heads")
        for x in (TABLE.expand(3, 2, 4, 4), TABLE[:, [0, 1, 1]])
    ),
    *((lambda x=x: Blocks(x, 8), "table of Blocks must have shape") for x in (TABLE[:, :, 1:], TABLE[..., 1:])),
    *((lambda n=n: Blocks(LISTS + n, 8), r"must have entries in -1\.\.3") for n in (3, -1, 2**32)),
    (given(0, key_lens=LENS + 1), r"key_lens must lie in 0\.\.32"),
    (given(3, key_lens=LENS), "key_lens cannot be given with Blocks within"),
    (given(0, key_lens=LENS, alibi_slopes=torch.ones(4)), "key_lens cannot be given with Ranges and alibi_slopes"),
    (given(0, key_lens=LENS, key_mask=AT > 0), "key_mask must have shape"),
    (given(0, key_lens=LENS, seq_lens=LENS), "key_lens cannot be given with seq_lens"),
    (given(2, documents=AT.expand(2, N)), "documents and cu_seqlens cannot be given with Blocks"),
    (given(0, documents=AT), r"documents must have shape \[batch, len\]"),
    (given(0, is_causal=True), "give pattern or the shorthands"),
    (given(0, alignment="upper_left"), "is for causal Dense and Window attention"),
    (given(2, layout="nope"), "layout"),
    (given(2, scale=[1]), "scale"),
    (given(2, key_mask=AT), "key_mask"),
    (lambda: attend(qkv()[0][0], *qkv()[1:], patterns()[2]), "q must"),
    *((lambda n=n: in_place(n), "(first|ids|table) was changed in place after its") for n in range(4)),
]


@pytest.mark.parametrize(("make", "text"), WRONG)
def test_what_is_wrong_is_refused_by_name(make: Callable[[], Any], text: str) -> None:
    for _ in range(2):  # then calls of each form have a route
        with pytest.raises(InvalidInput, match=text):
            attend(*qkv(), make())
        for each in patterns():
            attend(*qkv(), each)
