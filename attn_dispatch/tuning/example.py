"""Random tensors for a problem: the same values for every candidate; drawn on a CPU, on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_dispatch.kernels.autograd import gradients
from attn_dispatch.kernels.contract import Backend, runner
from attn_dispatch.machine.devices import KNOWN
from attn_dispatch.spec.data import BlocksForm, Form, RangesForm
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import randn

HIDDEN_SHARE, HIDDEN_KEYS = 0.2, 3  #: entries of a bias that are -inf; keys that it hides from all queries
BEYOND = 3  #: keys by which intervals reach out over the first and the last one


@dataclass(frozen=True, slots=True)
class Example:
    """Tensors of a problem's shapes, dtype and strides; `grad` is the gradient of out, None where none is needed.

    q and grad are [batch, q_len, heads, head_dim], k and v [batch, k_len, kv_heads, head_dim].
    """

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor | None
    masks: dict[str, Tensor]
    seed: int = 0
    on_device: bool = False  #: as for `make`, with `seed`

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors that get gradients, by the names of these: as a rule q, k and v, and maybe a bias."""
        tensors = {"dq": self.q, "dk": self.k, "dv": self.v, "dbias": self.masks.get("bias")}
        return {name: x for name, x in tensors.items() if x is not None and x.requires_grad}

    def call(self, backend: Backend, order: str = NATURAL) -> Callable[[], Sequence[Tensor]]:
        """The call to time: out and, where the problem needs gradients, those of `inputs`."""
        run, inputs = runner(backend, order, self.problem, (self.q, self.k, self.v)), tuple(self.inputs.values())

        def forward() -> Sequence[Tensor]:
            with torch.no_grad():
                result = run(self.q, self.k, self.v, self.problem, **self.masks)
            return (result,) if isinstance(result, Tensor) else result[:1]

        def forward_backward() -> Sequence[Tensor]:
            with torch.enable_grad():
                result = run(self.q, self.k, self.v, self.problem, **self.masks)
            out = result if isinstance(result, Tensor) else result[0]
            assert self.grad is not None
            return out.detach(), *gradients((out,), inputs, (self.grad,))

        return forward_backward if self.problem.needs_grad else forward

    def facts(self) -> list[float]:
        """A sum of each tensor, by which a change of its values is noticed."""
        return [float(exactly(x).sum(dtype=torch.float64)) for x in self._tensors()]

    def exact(self) -> Example:
        """The same tensors, detached, where there is float64."""
        if self.problem.device.type in KNOWN:
            return self
        q, k, v, *grads = map(exactly, (self.q, self.k, self.v, *([] if self.grad is None else [self.grad])))
        masks = {name: exactly(x) for name, x in self.masks.items()}
        return Example(replace(self.problem, device=q.device), q, k, v, grads[0] if grads else None, masks)

    def restore(self) -> None:
        """Draw the values of all tensors again, as `make` did: something has written into them."""
        for own, drawn in zip(self._tensors(), make(self.problem, self.seed, on_device=self.on_device)._tensors()):
            own.untyped_storage().copy_(drawn.untyped_storage())

    def _tensors(self) -> list[Tensor]:
        own = (self.q, self.k, self.v, *([] if self.grad is None else [self.grad]))
        return [*own, *self.masks.values()]

    def without_dropout(self) -> Example:
        """The same example with dropout 0, so that results can be compared."""
        return replace(self, problem=replace(self.problem, dropout_p=0.0)) if self.problem.dropout_p else self


def example_bytes(problem: Problem) -> int:
    """Bytes that `make` allocates: q, k, v, the gradient of out and the masks."""
    q = problem.batch * problem.q_len * problem.heads * problem.head_dim
    kv = problem.batch * problem.k_len * problem.kv_heads * problem.head_dim
    masks = problem.batch * (8 * problem.has_seq_lens + problem.k_len * problem.has_key_mask)
    masks += math.prod(problem.bias) * problem.q_len * problem.k_len * problem.dtype.itemsize * bool(problem.bias)
    return ((2 if problem.needs_grad else 1) * q + 2 * kv) * problem.dtype.itemsize + masks + data_bytes(problem)


def exactly(x: Tensor) -> Tensor:
    """The values of a tensor where there is float64: on its own device, or on the CPU."""
    return x.detach() if x.device.type in KNOWN else x.detach().cpu()


def double(x: Tensor) -> Tensor:
    """The same in float64."""
    return exactly(x).double()


def make(problem: Problem, seed: int = 0, *, on_device: bool = False) -> Example:
    """Draw unit-normal q, k, v, gradient and bias, and masks that hide part of the keys.

    Args:
        on_device: whether to draw q, k, v and the gradient on a CUDA device itself: other values than a CPU's.
    """
    generator = torch.Generator().manual_seed(seed)
    on_cuda = on_device and problem.device.type == "cuda"
    values = torch.Generator(problem.device).manual_seed(seed) if on_cuda else generator
    q_shape = (problem.batch, problem.q_len, problem.heads, problem.head_dim)
    kv_shape = (problem.batch, problem.k_len, problem.kv_heads, problem.head_dim)
    shapes = (q_shape, kv_shape, kv_shape, *([q_shape] if problem.needs_grad else []))
    kinds = (*problem.strides, "bnhd")
    q, k, v, *grads = (randn(*each, problem.dtype, problem.device, values) for each in zip(shapes, kinds))
    if problem.needs_grad:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    masks = {}
    if problem.has_seq_lens:
        low = (problem.q_len + 1) // 2
        lens = torch.randint(low, problem.q_len + 1, (problem.batch,), generator=generator)
        masks["seq_lens"] = lens.to(problem.device)
    if problem.has_key_mask:
        visible = torch.rand(problem.batch, problem.k_len, generator=generator) < 0.75
        masks["key_mask"] = visible.to(problem.device)
    masks |= score_tensors(problem, generator) | pattern_data(problem, generator)
    return Example(problem, q, k, v, grads[0] if grads else None, masks, seed, on_device)


def score_tensors(
    problem: Problem, generator: torch.Generator, *, hides: bool = False, empty: bool = False
) -> dict[str, Tensor]:
    """The bias and the slopes of ALiBi, where the problem has them.

    Args:
        hides: whether the bias has entries of -inf, and hides some keys from every query.
        empty: whether the last query sees no key.
    """
    found = {}
    if problem.bias:
        bias = torch.randn(*problem.bias, problem.q_len, problem.k_len, generator=generator)
        if hides:
            bias[torch.rand(bias.shape, generator=generator) < HIDDEN_SHARE] = -math.inf
            bias[..., : HIDDEN_KEYS * (problem.k_len > 1)] = -math.inf
        if empty:
            bias[:, :, -1] = -math.inf
        found["bias"] = bias.to(problem.device, problem.dtype).requires_grad_(problem.bias_needs_grad)
    if problem.alibi_axes:
        slopes = torch.rand([problem.batch, problem.heads][-problem.alibi_axes :], generator=generator)
        found["alibi_slopes"] = slopes.to(problem.device)
    return found


def pattern_data(
    problem: Problem, generator: torch.Generator, *, hard: bool = False, hides: bool = False
) -> dict[str, Tensor]:
    """The tensors of a pattern that holds some, of its form and density; empty for others.

    Args:
        hard: whether there are queries that see no key, one or all, entries that stand twice, bounds beyond the keys.
        hides: whether there are keys that no query sees.
    """
    form = problem.pattern
    given = problem, generator
    if isinstance(form, RangesForm):
        found = _hard_intervals(form, *given, hides) if hard else _intervals(form, *given)
    elif isinstance(form, BlocksForm):
        found = _hard_block_table(form, *given, hides) if hard else _block_table(form, *given)
    else:
        return {}
    return {"pattern_data": found.to(problem.device)}


def _hard_intervals(form: RangesForm, problem: Problem, generator: torch.Generator, hides: bool) -> Tensor:
    """Each half of the queries sees keys of a half of them; with `hides`, no query sees those between."""
    shape = problem.batch if form.by_row else 1, form.intervals, problem.q_len
    later = torch.arange(problem.q_len) * 2 >= max(2, problem.q_len)
    middle, gap = problem.k_len // 2, min(HIDDEN_KEYS, problem.k_len // 4) * hides
    low, high = torch.where(later, middle + gap, -BEYOND), torch.where(later, problem.k_len + BEYOND, middle - gap - 1)
    ends = (torch.rand(2, *shape, generator=generator) * (high - low + 1)).long() + low
    first, last = ends.amin(0), ends.amax(0)
    none = torch.rand(shape[0], 1, shape[2], generator=generator) < HIDDEN_SHARE
    if hides:  # those of whole tiles, too
        none |= torch.arange(problem.q_len) * 3 // problem.q_len == 1
    last = torch.where(none & (problem.q_len > 1), first - 1, last)
    if not hides:
        first[..., 0], last[..., 0] = -BEYOND, problem.k_len + BEYOND
    last[..., 1:2] = first[..., 1:2]  # a single key
    return torch.stack([first, last]).int()


def _row_shares(form: Form, rows: int) -> Tensor:
    """The share of the keys that each row of a form's data sees: the density on average, rising by its imbalance."""
    share, most = 2 ** ((form.density or 0) / 2), 2 ** (form.imbalance or 0)
    high = min(1.0, most * share)
    low = (most * share - high) / max(1, most - 1)
    shares: Tensor = low + (high - low) * ((torch.arange(rows) + 0.5) / rows) ** (most - 1)
    return shares


def _intervals(form: RangesForm, problem: Problem, generator: torch.Generator) -> Tensor:
    """As of spans beside a window: what neighbouring queries see begins or ends at the same keys."""
    shape, k_len = (problem.batch if form.by_row else 1, form.intervals, problem.q_len), problem.k_len
    counts = (_row_shares(form, problem.q_len) / form.intervals * k_len).round().long().clamp(1, k_len)
    size = int(counts.float().mean())
    centre = torch.arange(problem.q_len) * k_len // problem.q_len
    begin = (torch.randint(0, size, shape[:2], generator=generator)[..., None] + centre) // size * size
    first = (begin - size // 2).clamp(min=0).minimum(k_len - counts)
    return torch.stack([first, first + counts - 1]).int()


def _table_shape(problem: Problem, form: BlocksForm) -> tuple[int, int, int, int]:
    tables = {"all": 1, "kv_heads": problem.kv_heads, "heads": problem.heads}[form.heads]
    rows, columns = -(-problem.q_len // form.size[0]), -(-problem.k_len // form.size[1])
    return problem.batch if form.by_row else 1, tables, rows, columns


def _hard_block_table(form: BlocksForm, problem: Problem, generator: torch.Generator, hides: bool) -> Tensor:
    """Neighbouring heads see opposite blocks; lists are not in order, and have the last of their blocks twice."""
    *_, rows, columns = shape = _table_shape(problem, form)
    table = torch.rand(shape, generator=generator) < 0.5
    table[:, 1::2] = ~table[:, : 2 * (shape[1] // 2) : 2]
    table[:, 0, -1] = rows == 1  # no block
    table[:, -1, 0] = torch.arange(columns) == columns - 1 if hides else True  # one, the shorter last one; or all
    if hides and columns > 1:
        table[..., (columns - 1) // 2] = False
    if not form.is_list:
        return table
    shuffled = torch.rand(shape, generator=generator).argsort(-1)
    lists = torch.where(table, torch.arange(columns), -1).gather(-1, shuffled)
    return torch.cat([lists, lists.amax(-1, keepdim=True)], -1).int()


def _block_table(form: BlocksForm, problem: Problem, generator: torch.Generator) -> Tensor:
    """The blocks of a row are neighbours in one random order, from a random place on."""
    *_, rows, columns = shape = _table_shape(problem, form)
    counts = _row_shares(form, rows)[:, None] * columns + torch.rand(*shape[:3], 1, generator=generator) - 0.5
    at, starts = torch.arange(columns), torch.randint(0, columns, (*shape[:3], 1), generator=generator)
    chosen = torch.randperm(columns, generator=generator)[(starts + at) % columns].int()
    named = at < counts.round()
    if form.is_list:
        return torch.where(named, chosen, -1)[..., : max(1, int(named.sum(-1).max()))]
    return torch.zeros(shape, dtype=torch.bool).scatter_(-1, chosen.long(), named)


def data_bytes(problem: Problem) -> int:
    """Bytes of `pattern_data`, at most."""
    form, rows = problem.pattern, problem.batch
    if isinstance(form, RangesForm):
        return 8 * rows * form.intervals * problem.q_len
    if isinstance(form, BlocksForm):
        return 12 * rows * problem.heads * -(-problem.q_len // form.size[0]) * (2 - -problem.k_len // form.size[1])
    return 0
