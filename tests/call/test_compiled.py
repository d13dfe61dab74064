"""attend() inside torch.compile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from attn_dispatch import attend, counters
from attn_dispatch.errors import InvalidInput
from attn_dispatch.spec.pattern import Dense, Dilated, Neighborhood, Pattern, Window
from tests.support.calls import close, forget, formula, qkv
from tests.support.graphs import PATTERNS, aot, attended, compile_, differentiated, exact
from tests.support.pairwise import crossed, thinned

pytestmark = pytest.mark.usefixtures("little_time", "no_trials", "fresh_compiler")


@crossed(
    lambda pattern, layout, return_lse: {"layout": layout, "return_lse": return_lse},
    too_slow=lambda pattern, *_: pattern not in PATTERNS[::3],
    pattern=PATTERNS,
    layout=("bnhd", "bhnd"),
    return_lse=(False, True),
)
def test_a_compiled_call_and_its_gradients(pattern: Pattern, layout: str, return_lse: bool) -> None:
    swapped = layout == "bhnd"
    q, k, v = inputs = [x.double().requires_grad_() for x in qkv()]
    given = [(x.transpose(1, 2) if swapped else x).detach().requires_grad_() for x in inputs]
    result = aot(attend)(*given, pattern, layout=layout, return_lse=return_lse)
    out, *lse = result if return_lse else (result,)
    found, expected = (out.transpose(1, 2) if swapped else out, *lse), exact(q, k, v, pattern)
    assert all(map(close, found, expected))
    grads, wanted = (
        differentiated(sum(x.square().sum() for x in results[: len(found)]), of)
        for results, of in ((found, given), (expected, inputs))
    )
    assert all(close(x.transpose(1, 2) if swapped else x, y) for x, y in zip(grads, wanted))


@thinned(
    "patterns",
    [
        [(Dense(is_causal=True), n) for n in range(16, 32, 2)],
        [(Window(w, 0), 40) for w in range(3, 19, 2)],
        [(Window(w, None, sinks=w), 40 + w) for w in range(2, 18, 2)],
        [(Neighborhood((n, n + 2), (3, 5)), n * (n + 2)) for n in range(5, 13)],
        [(Dilated((n, 4 * n), (1, 2)), 8 * n) for n in range(2, 10)],
    ],
    5,
    ids=["lengths", "windows", "sinks", "grids", "segments"],
)
def test_eight_lengths_windows_and_grids_are_two_graphs(patterns: list[tuple[Pattern, int]]) -> None:
    counter = CompileCounter()
    compiled = compile_(attend, fullgraph=True, backend=counter)
    for pattern, length in patterns:
        q, k, v = (torch.randn(1, length, 2, 8) for _ in range(3))
        assert close(compiled(q, k, v, pattern), formula(q, k, v, pattern)[0])
    assert counter.frame_count <= 2


@pytest.mark.full
def test_patterns_made_inside_the_compiled_function() -> None:
    counter = CompileCounter()

    def function(q: Tensor, k: Tensor, v: Tensor, window: int) -> Any:
        dilated = attend(q, k, v, segment_lengths=[window, 2 * window], dilation_rates=[1, 2])
        again = attend(q, k, v, Dilated((2 * window, window), (2, 1)))
        return attend(q, k, v, Window(window, 0)) + dilated / 2 + again / 2

    compiled = compile_(function, fullgraph=True, backend=counter)
    for window in range(3, 11):
        q, k, v = (torch.randn(1, 32, 2, 8) for _ in range(3))
        expected = formula(q, k, v, Window(window, 0))[0] + formula(q, k, v, Dilated((window, 2 * window), (1, 2)))[0]
        assert close(compiled(q, k, v, window), expected)
    assert counter.frame_count <= 2


def test_another_decision_is_no_other_graph(set_mode: Callable[[str], None]) -> None:
    set_mode("tune")
    counter = CompileCounter()
    compiled = compile_(attend, fullgraph=True, backend=counter)
    compiled(*qkv())
    assert counters()["measured"] == 1
    forget()
    compiled(*qkv())
    assert counter.frame_count == 1
    assert counters()["loaded"] + counters()["measured"] == 1  # where other programs ran, it was provisional


SEVERAL = torch.tensor([[0] * 6 + [1] * 10])  #: documents
MASK = torch.arange(16)[None] % 5 > 0


@thinned(
    ("width", "arguments"),
    [
        (8, {"documents": SEVERAL, "sink": torch.randn(4), "return_lse": True}),
        (8, {"documents": SEVERAL, "pattern": Window(3, 0)}),
        (8, {"cu_seqlens": torch.tensor([0, 6, 16]), "is_causal": True, "return_lse": True}),
        (12, {"return_lse": True}),
        (8, {"sink": torch.randn(4), "return_lse": True}),
        (8, {"scale": 0.3, "backend": "native"}),
        (8, {"pattern": Dilated((4, 8), (1, 2)), "first_head": 4, "all_heads": 8}),
        (8, {"seq_lens": torch.tensor([11]), "key_mask": MASK, "pattern": Window(4, 2)}),
    ],
    3,
)
def test_what_several_calls_make(width: int, arguments: dict[str, Any]) -> None:
    """Masks, documents, sinks, values of another width, grouped heads, a share of the heads."""
    shapes = ((4, 8), (2, 8), (2, width))
    q, k, v = (torch.randn(1, 16, *shape, requires_grad=True) for shape in shapes)
    found, expected = (
        result if isinstance(result, tuple) else (result,)
        for result in (aot(attend)(q, k, v, **arguments), attended(q, k, v, **arguments))
    )
    assert all(close(one, other.double()) for one, other in zip(found, expected))
    totals: Any = [sum(x.square().sum() for x in result) for result in (found, expected)]
    wants = [torch.autograd.grad(total, (q, k, v)) for total in totals]
    assert all(close(a, b.double()) for a, b in zip(*wants))


@thinned("arguments", [{"documents": SEVERAL}, {}], 2, ids=["several", "one"])
def test_gradients_through_lse_alone(arguments: dict[str, Any]) -> None:
    """Values get none: not of one call, and not of several."""
    grads = []
    for function in (aot(attend), attended):
        x = [each.requires_grad_() for each in qkv()]
        function(*x, is_causal=True, return_lse=True, **arguments)[1].square().sum().backward()
        grads.append([torch.zeros_like(each) if each.grad is None else each.grad for each in x])
    assert all(close(one, other.double()) for one, other in zip(*grads))
    assert not grads[0][2].any()


def test_autocast_and_no_grad() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = aot(attend)(q, k, v), attend(q, k, v)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert not aot(attend)(q, k, v).requires_grad


@pytest.mark.full
def test_dropout_and_wrong_arguments() -> None:
    """Dropout runs between graphs; errors name the argument as in a plain call."""
    q, k, v = qkv()
    torch.manual_seed(1)
    found = compile_(attend, backend="eager")(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(found, attend(q, k, v, dropout_p=0.5))
    for arguments, text in (
        ({"seq_lens": torch.tensor([99])}, "seq_lens"),
        ({"segment_lengths": (4, 8), "dilation_rates": (1,)}, "dilation_rates"),
        ({"pattern": Neighborhood((3, 3), (3, 3))}, "grid"),
    ):
        with pytest.raises(InvalidInput, match=text):
            aot(attend)(q, k, v, **arguments)
    with pytest.raises(Exception, match="4 axes"):
        aot(attend)(q[0], k, v)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_bitwise(reentrant: bool) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())

    def block(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q.sin(), k, v, Window(4, 2)).cos()

    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return checkpoint(block, q, k, v, use_reentrant=reentrant)

    grads = []
    for function in (compiled if reentrant else aot(compiled), aot(block)):
        for x in (q, k, v):
            x.grad = None
        function(q, k, v).sum().backward()
        grads.append([x.grad for x in (q, k, v)])
    assert all(map(torch.equal, *grads))


PROGRAM = """
import torch
from torch._dynamo.utils import counters
from attn_dispatch import attend, Window
q = torch.randn(1, 32, 2, 8, requires_grad=True)
out = torch.compile(lambda q: attend(q.sin(), q, q, Window(4, 0)).cos(), fullgraph=True)(q)
out.sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


@pytest.mark.full
def test_compiled_code_is_found_by_the_next_process(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    found = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, stdout=subprocess.PIPE, text=True)
        found.append(done.stdout.split())
    assert found == [["0", "1"], ["1", "0"]]
