"""attend() as one operator: exported, transformed, counted, differentiated."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import attend, compat
from attn_dispatch.decisions import decide
from attn_dispatch.decisions.graphs import encoding
from attn_dispatch.errors import BackendFailed, InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import Refusal
from attn_dispatch.spec.orders import Reordered
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.shapes import pair_count
from tests.support.calls import close, formula, qkv
from tests.support.flaws import Planted
from tests.support.graphs import OP, PATTERNS, Called, aot, attended, exact
from tests.support.pairwise import crossed, thinned

pytestmark = pytest.mark.usefixtures("one_thread", "no_trials", "fresh_compiler")


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="this PyTorch has no such tag")
def test_graphs_of_reduce_overhead_leave_every_operator_out() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("attn_dispatch::")]
    tags = {name: getattr(torch.ops.attn_dispatch, name.split("::")[1]).default.tags for name in names}
    assert [torch.Tag.cudagraph_unsafe in each for each in tags.values()] == [True] * len(tags) != []


# --- torch.export, opcheck, derivatives -------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_an_exported_program_is_saved_and_loaded(strict: bool) -> None:
    """Of any length, with gradients."""
    length = torch.export.Dim("length", min=2, max=4096)
    shapes = (({1: length},) * 3,)
    module = Called(lambda q, k, v: attend(q, k, v, Dilated((4, 8), (1, 2)), return_lse=True))
    program = torch.export.export(module, qkv(), dynamic_shapes=shapes, strict=strict)
    assert [node.target for node in program.graph.nodes if node.op == "call_function"].count(OP) == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded: Any = torch.export.load(file).module()
    for n in (16, 24, 37):
        q, k, v = (torch.randn(1, n, 2, 8) for _ in range(3))
        found, expected = loaded(q, k, v), formula(q, k, v, Dilated((4, 8), (1, 2)))
        assert all(close(one, other) for one, other in zip(found, expected))


@thinned(
    "pattern",
    [
        lambda n: Window(n // 4, 0, sinks=n // 8),
        lambda n: Dilated((n, n // 2), (2, 1)),
        lambda n: Neighborhood((n // 4, 4), (3, 3)),
    ],
    3,
    ids=["window", "dilated", "grid"],
)
def test_a_pattern_of_the_length_itself(pattern: Callable[[int], Pattern]) -> None:
    def growing(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, pattern(q.shape[1]))

    length = 4 * torch.export.Dim("quarter", min=4, max=999)
    shapes = (({1: length},) * 3,)
    for strict in (False, True):
        program: Any = torch.export.export(Called(growing), qkv(), dynamic_shapes=shapes, strict=strict).module()
        assert close(program(*qkv(48)), exact(*qkv(48), pattern(48))[0])
    graph = make_fx(growing, tracing_mode="symbolic")(*qkv())
    assert close(graph(*qkv(48)), exact(*qkv(48), pattern(48))[0])


def upper_masked(q: Tensor, k: Tensor, v: Tensor) -> Any:
    seen, bias = k[:, :, 0, 0] > -1, k.new_zeros(1, 1, q.shape[1], k.shape[1])
    return attend(q, k, v, is_causal=True, alignment="upper_left", key_mask=seen, bias=bias)


def upper_of_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return compat.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@thinned(("function", "lengths"), product([upper_masked, upper_of_sdpa], [(6, 9), (9, 6)]), 4)
def test_the_upper_left_alignment_of_any_lengths(function: Callable[..., Any], lengths: tuple[int, int]) -> None:
    def drawn(more: int) -> list[Tensor]:
        q_len, k_len = (length + more for length in lengths)
        return [torch.randn(2, length, 2, 8) for length in (q_len, k_len, k_len)]

    auto = {1: torch.export.Dim.AUTO}
    program = torch.export.export(Called(function), tuple(drawn(0)), dynamic_shapes=((auto,) * 3,))
    for made in (program.module(), make_fx(function, tracing_mode="symbolic")(*drawn(0))):
        given = drawn(7)
        assert torch.allclose(made(*given), function(*given), atol=1e-6)


def test_a_batch_whose_size_is_data() -> None:
    def chosen(x: Tensor, keep: Tensor, sink: Tensor) -> Any:
        x = x[keep]
        return attend(x, x, x, sink=sink)

    x, sink = torch.randn(5, 16, 2, 8), torch.randn(2)
    program = torch.export.export(Called(chosen), (x, torch.arange(5) > 2, sink)).module()
    for keep in (torch.arange(5) != 1, torch.zeros(5) > 0):
        assert torch.equal(program(x, keep, sink), chosen(x, keep, sink))


@crossed(
    lambda pattern, masked, kind: {"masked": masked, "kind": kind},
    too_slow=lambda pattern, *_: pattern not in PATTERNS[::4],
    pattern=PATTERNS,
    masked=(False, True),
    kind=(torch.float32, torch.bfloat16, torch.float64),
)
def test_opcheck(pattern: Pattern, masked: bool, kind: torch.dtype) -> None:
    code, numbers = encoding._encoded(pattern)
    assert encoding.decoded_pattern(code, tuple(numbers)) == pattern
    lens = torch.tensor([11]) if masked else None
    mask = torch.arange(16)[None] % 5 > 0 if masked else None
    tensors = [x.to(kind).requires_grad_() for x in qkv()]
    slopes = torch.rand(1, tensors[0].shape[2]) if masked else None
    bias = torch.randn(1, 1, 16, 16, requires_grad=masked) if kind == torch.float64 else None
    given: dict[str, Any] = {**dict.fromkeys(encoding.SCHEMA), "seq_lens": lens, "key_mask": mask, "bias": bias}
    given |= {"pattern": code, "numbers": numbers, "softcap": 3.0 if masked else None}
    given |= {"seed": torch.tensor([5]), "dropout_p": 0.3} if kind == torch.float32 else {"dropout_p": 0.0}
    given |= {"alibi_slopes": None if isinstance(pattern, Reordered) else slopes}
    given["bias_needs_grad"] = masked and bias is not None
    for needs_grad in (True, False):
        every = [*tensors, *encoding.Encoded(**given)]
        every = [x if needs_grad or not isinstance(x, Tensor) else x.detach() for x in every]
        torch.library.opcheck(OP, (*every, needs_grad, masked))


def test_second_derivatives_are_refused() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with FlopCounterMode(display=False):
        (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        with pytest.raises(BackendFailed, match="no second derivatives"):
            torch.autograd.grad(grad.sum(), q)


@thinned("pattern", [Dense(is_causal=True), Window(4, 2), Dilated((4, 16), (1, 2))], 3, ids=str)
def test_transforms_of_torch_func(pattern: Pattern) -> None:
    """vmap by folding examples into the batch, with masks; grads of single examples."""
    transforms: Any = torch.func
    batches = [torch.stack([x.roll(n, 1) for n in range(3)]) for x in qkv()]
    lens = torch.tensor([[9], [16], [3]])

    def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attended(q, k, v, pattern)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return function(q, k, v).square().sum()

    def gradients(q: Tensor, k: Tensor, v: Tensor) -> Any:
        x = [each.clone().requires_grad_() for each in (q, k, v)]
        return [each.double() for each in torch.autograd.grad(exact(*x, pattern)[0].square().sum(), x)]

    one = [x[0] for x in batches]
    found = (
        transforms.vmap(function)(*batches),
        transforms.vmap(function, in_dims=(0, None, None))(batches[0], *one[1:]),
    )
    wanted = (
        torch.stack([exact(*each, pattern)[0] for each in zip(*batches)]),
        torch.stack([exact(q, *one[1:], pattern)[0] for q in batches[0]]),
    )
    assert all(map(close, found, wanted))
    more: dict[str, Any] = {"pattern": pattern, "bias": torch.randn(1, 2, 16, 16)}
    plain = [attended(*x, seq_lens=n, **more) for *x, n in zip(*batches, lens)]
    for backend in (None, "manual"):
        masked = transforms.vmap(lambda q, k, v, n: attended(q, k, v, seq_lens=n, backend=backend, **more))  # noqa: B023
        assert close(masked(*batches, lens), torch.stack(plain).double())
    singles = zip(*(gradients(*each) for each in zip(*batches)))
    found = transforms.vmap(transforms.grad(loss, (0, 1, 2)))(*batches)
    assert all(close(x, torch.stack(y)) for x, y in zip(found, singles))


def test_what_cannot_be_counted_is_refused_by_name() -> None:
    q, k, v = qkv()
    with FlopCounterMode(display=False):
        with pytest.raises(InvalidInput, match="needs q_len <= k_len, got 16 and 0"):
            attend(q, k[:, :0], v[:, :0], Dilated((4, 8), (1, 2)))
        with pytest.raises(InvalidInput, match="must be on one device, got cpu, cpu, meta"):
            attend(q, k, v.to("meta"))


def test_vmap_of_nothing_and_what_cannot_be_mapped() -> None:
    transforms: Any = torch.func
    q, k, v = (torch.stack([x, x]) for x in qkv())
    assert transforms.vmap(attended)(q[:0], k[:0], v[:0]).shape == (0, *q.shape[1:])
    grads = transforms.vmap(transforms.grad(lambda x, y, z: attended(x, y, z).sum(), (0, 1, 2)))(q[:0], k[:0], v[:0])
    assert [x.shape for x in grads] == [(0, *q.shape[1:])] * 3
    with pytest.raises(InvalidInput, match="bias must have shape"):
        transforms.vmap(lambda *x: attended(*x, bias=torch.zeros(3, 1, 16, 16)))(q, k, v)
    several: list[dict[str, Any]] = [
        {"key_lens": torch.tensor([[3], [4]])},
        {"cu_seqlens": torch.tensor([[0, 16]] * 2)},
    ]
    for given in several:
        with pytest.raises(NoBackend, match=f"{min(given)} cannot be mapped by torch.vmap"):
            transforms.vmap(lambda q, k, v, x: attended(q, k, v, backend="manual", **x))(q, k, v, given)
    found = transforms.vmap(lambda q, k, v, x: attended(q, k, v, **x))(q, k, v, several[0])
    assert torch.equal(found, torch.stack([attended(q[0], k[0], v[0], key_lens=torch.tensor([n])) for n in (3, 4)]))
    for randomness in ("error", "same", "different"):
        with pytest.raises(NoBackend, match=r"dropout_p cannot be given inside torch\.vmap"):
            transforms.vmap(lambda *x: attended(*x, dropout_p=0.5), randomness=randomness)(q, k, v)


def test_what_the_host_reads_is_no_constant_of_a_graph() -> None:
    for given in ({"key_lens": torch.tensor([9])}, {"documents": torch.zeros(1, 16).long()}):
        with pytest.raises(NoBackend, match="must be read by the host"):
            make_fx(lambda q, k, v: attended(q, k, v, backend="manual", **given))(*qkv())  # noqa: B023
    made = make_fx(lambda q, k, v, n: attended(q, k, v, key_lens=n))(*qkv(), torch.tensor([9]))
    assert torch.equal(made(*qkv(), torch.tensor([4])), attended(*qkv(), key_lens=torch.tensor([4])))
    dropped = {"documents": torch.zeros(1, 16).long(), "dropout_p": 0.5}
    with pytest.raises(InvalidInput, match="must have sizes that are numbers"):
        make_fx(lambda q, k, v: attended(q, k, v, **dropped), tracing_mode="symbolic")(*qkv())


@pytest.mark.parametrize("given", [{}, {"backend": "manual"}, {"documents": torch.zeros(1, 16).long()}], ids=str)
def test_torch_jit_is_refused(given: dict[str, Any]) -> None:
    traced: Any = torch.jit.trace
    with pytest.raises(NoBackend, match=r"torch\.jit\.trace: use torch\.export or torch\.compile"):
        traced(lambda *x: attend(*x, **given), qkv())


def test_a_backend_without_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass is right though another backend takes it."""

    class Plain(Planted):
        def refusals(self, problem: Problem) -> list[Refusal]:
            return [Refusal("lse", "returns none")] * problem.return_lse

    registry.register(Plain(lambda q, k, v, problem, **_: exact(q, k, v, problem.pattern)[0].to(q.dtype), "plain"))
    q, k, v = (x.requires_grad_() for x in qkv())
    problem = Problem.of(q, k, v)
    decide.adopt(problem, decide.forced_decision(problem, "plain", None))
    out = aot(attend)(q, k, v)
    decide.adopt(problem, decide.forced_decision(problem, "native", None))
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(exact(q, k, v, Dense())[0].square().sum(), (q, k, v))
    assert all(close(one, other.double()) for one, other in zip(found, wanted))


# --- FLOPs ------------------------------------------------------------------------------------------------------------


@crossed(pattern=PATTERNS, queries=(16, 5))
def test_the_number_of_pairs(pattern: Pattern, queries: int) -> None:
    if queries < 16 and isinstance(pattern, Reordered):
        return
    expected = pattern.multiplicity(queries, 16, 4).expand(4, -1, -1).sum()
    assert pair_count(pattern, queries, 16, 4) == expected


@thinned("pattern", PATTERNS, 4, ids=str)
def test_flops_are_exact(pattern: Pattern) -> None:
    """4 d for each pair forward, 10 d backward; by plain calls, compiled ones and an exported program."""
    q, k, v = (x.requires_grad_() for x in qkv())
    pairs = int(pattern.multiplicity(16, 16, 2).expand(2, -1, -1).sum())
    exported: Any = torch.export.export(Called(lambda *x: attended(*x, pattern)), qkv()).module()
    for function in (lambda *x: attended(*x, pattern), lambda *x: attended(*x, pattern, backend="native"), exported):
        with FlopCounterMode(display=False) as counter:
            out = function(q, k, v)
        assert counter.get_total_flops() == 4 * 8 * pairs
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == 10 * 8 * pairs
