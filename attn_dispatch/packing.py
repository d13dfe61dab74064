"""Calls that are composed of others: sinks, documents in one row, rows whose keys end at different places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_dispatch import process_state, widths
from attn_dispatch.decisions import unmeasured
from attn_dispatch.decisions.call import MAX_CALLS, ResolvedCall, notify, observed, resolve
from attn_dispatch.decisions.decide import decision_for, drop_oldest, lock, on_trial
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.numerics import with_sink
from attn_dispatch.spec import tracing
from attn_dispatch.spec.checks import boolean
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense, Dilated, Window
from attn_dispatch.spec.problem import SHORTHANDS, Problem, choose_pattern
from attn_dispatch.spec.shapes import measured_for
from attn_dispatch.spec.tensors import autocast_dtype, check_sink

TENSORS = ("key_mask", "bias", "alibi_slopes")  #: of attend's arguments, those that documents share


class Run(NamedTuple):
    """Consecutive documents of one length, in tokens."""

    documents: int
    length: int

    @property
    def tokens(self) -> int:
        return self.documents * self.length


class Packed(NamedTuple):
    """The tensors of each call, with its further arguments, and how their results are put together."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    rows: list[list[Run]]
    layout: str

    def joined(self, results: Sequence[Any]) -> Any:
        """The results of the calls, out or (out, lse), as those of the packed rows."""
        with_lse = isinstance(results[0], tuple)
        out = _joined([each[0] if with_lse else each for each in results], self.rows)
        out = out.transpose(1, 2) if self.layout == "bhnd" else out
        if not with_lse:
            return out
        return out, _joined([lse.transpose(1, 2) for _, lse in results], self.rows).transpose(1, 2)


def composed(
    attend: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Any,
    cu_seqlens: Any,
    sink: Any,
    layout: str,
    **arguments: Any,
) -> Any:
    """attend with what no backend sees: a document is a call of its own, a sink is added to out and lse."""
    tracing.refuse_jit()
    if any(map(tracing.is_dtensor, (q, k, v))):
        from attn_dispatch.ring import dtensors  # loads torch.distributed

        more = {"documents": documents, "cu_seqlens": cu_seqlens, "sink": sink, "layout": layout}
        return dtensors.attend_local(attend, q, k, v, {**arguments, **more})
    packs = documents is not None or cu_seqlens is not None
    if packs and all(isinstance(x, Tensor) and x.ndim == 4 for x in (q, k, v)) and k.shape[-1] != v.shape[-1]:
        width, wide = v.shape[-1], widths.padded(q, k, v, arguments)
        found = composed(attend, *wide, documents, cu_seqlens, sink, layout, **arguments)
        return (found[0][..., :width], found[1]) if arguments["return_lse"] else found[..., :width]
    if arguments["mesh"] is None:
        arguments["mesh"] = tracing.context_parallel()
    if sink is not None:
        check_sink(sink, q, layout)
    q, k, v = widths.aligned(q, k, v, layout, arguments)
    key_lens = arguments.pop("key_lens")
    return_lse = arguments["return_lse"]
    boolean("return_lse", return_lse)
    arguments["return_lse"] = return_lse or sink is not None
    if documents is None and cu_seqlens is None and key_lens is None:
        found = attend(q, k, v, layout=layout, **arguments)
    elif key_lens is not None:
        given = {**arguments, "documents": documents, "cu_seqlens": cu_seqlens}
        rows = rows_of_lengths(q, k, v, key_lens, layout, given)
        found = stacked([attend(*part, layout=layout, **{**arguments, **rest}) for part, rest in rows])
    elif operators.applies(q, k, v, arguments):
        found = operators.call(q, k, v, layout=layout, documents=documents, cu_seqlens=cu_seqlens, **arguments)
    else:
        found = _by_documents(attend, q, k, v, documents, cu_seqlens, layout, arguments)
    if sink is None:
        return found
    out, lse = with_sink(found[0], found[1], sink, layout)
    return (out, lse) if return_lse else out


def _by_documents(
    attend: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: object,
    cu_seqlens: object,
    layout: str,
    arguments: dict[str, Any],
) -> Any:
    """attend for packed rows: by a backend that takes all documents at once, else a call for each run of one length.

    Raises:
        InvalidInput: an argument is wrong, or cannot be given with documents.
    """
    if arguments["seq_lens"] is not None:
        why = "let the padding be a document of its own"
        raise InvalidInput(f"documents and cu_seqlens cannot be given with seq_lens; {why}")
    if arguments["mesh"] is not None:
        from attn_dispatch.ring import packed_rows  # loads torch.distributed

        return packed_rows.attend_packed(attend, _lengths_of, q, k, v, layout, documents, cu_seqlens, arguments)
    tracing.check_sizes(q=q, k=k, v=v)
    tensors = {name: arguments.pop(name) for name in TENSORS}
    pattern = choose_pattern(arguments["pattern"], *(arguments[name] for name in SHORTHANDS))
    common = isinstance(pattern, Dense | Window | Dilated)  # a pattern of rows of any length
    forced = arguments.pop("backend"), arguments.pop("order")
    given = {name: value for name, value in arguments.items() if name != "mesh"}
    problem = Problem.of(q, k, v, layout=layout, may_be_empty=True, **tensors, **(given if common else {}))
    rows = _rows(documents, cu_seqlens, problem.batch, problem.q_len, problem.k_len)
    if not q.numel():
        return attend(q, k, v, layout=layout, backend=forced[0], order=forced[1], **tensors, **arguments)
    if tracing.is_traced(q, k, v) or tracing.has_tangents(q, k, v, *tensors.values()):
        parts, names = packed(q, k, v, rows, layout, tensors), {"backend": forced[0], "order": forced[1]}
        return parts.joined([attend(*part, **arguments, **own, **names) for part, own in parts.calls])
    unmeasured.check_names(*forced)
    cast = None if q.dtype == torch.float64 else autocast_dtype(q.device.type)
    with nullcontext() if cast is None else torch.autocast(q.device.type, enabled=False):
        if cast is not None:
            q, k, v = q.to(cast), k.to(cast), v.to(cast)
        if common and (call := _at_once(replace(problem, is_document=True), rows, forced)) is not None:
            return _all_documents(call, q, k, v, rows, layout, tensors)
        parts = packed(q, k, v, rows, layout, tensors)
        return parts.joined([_of_one_length(*each, forced, given) for each in parts.calls])


def _of_one_length(part: Any, own: dict[str, Any], forced: tuple[Any, Any], given: dict[str, Any]) -> Any:
    """attend for documents of one length, decided as of their class."""
    q, k, v = part
    problem = replace(Problem.of(q, k, v, **given, **own), is_document=True)
    found = resolve(problem, *forced).result(q, k, v, **own)
    return found if problem.return_lse else found[0]


def _at_once(problem: Problem, rows: list[list[Run]], forced: tuple[Any, Any]) -> ResolvedCall | None:
    """A call of the `run_documents` of the backend that is forced, or decided for most of the work.

    None where it has none, or that does not take this problem, which is of packed rows, or a trial goes on between
    calls, which are those of single documents.
    """
    if problem.bias or (problem.alibi_axes > 1 and not _alike(rows)):
        return None
    runs = [run for row in rows for run in row]
    pairs = sum(run.tokens * run.length for run in runs)
    length = sum(run.tokens * run.length**2 for run in runs) // pairs  # the mean, weighted by pairs
    pattern = problem.pattern.simplify(length, length, problem.heads)
    usual = replace(problem, batch=1, q_len=length, k_len=length, pattern=pattern)
    key = problem, measured_for(usual), forced, torch.get_num_threads()
    if key in _calls_at_once:
        return _calls_at_once[key]
    name, order = forced
    if forced == (None, None):
        notify(measured_for(usual))
        decision = decision_for(usual)
        if (decision.silicon, measured_for(usual)) in on_trial:
            return None
        name, order = decision.chosen
    run = None if name is None else registry.load(name).run_documents
    if name is None or run is None or order not in (None, NATURAL):
        return None
    if not unmeasured.can_run(problem, (name, NATURAL)):
        return None
    with lock:
        call = _calls_at_once[key] = ResolvedCall(observed(run, measured_for(usual)), problem, name)
        drop_oldest(_calls_at_once, MAX_CALLS)
    return call


_calls_at_once: dict[Any, ResolvedCall] = {}
process_state.register(process_state.ROUTES, _calls_at_once.clear)


def _all_documents(
    call: ResolvedCall, q: Tensor, k: Tensor, v: Tensor, rows: list[list[Run]], layout: str, tensors: dict[str, Any]
) -> Any:
    """The results of a call that takes all documents. Rows that differ are computed as one."""
    if layout == "bhnd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    batch, alike = len(rows), _alike(rows)
    if not alike:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        mask = tensors["key_mask"]
        tensors = {**tensors, "key_mask": None if mask is None else mask.flatten(0, 1)[None]}
        call = replace(call, problem=replace(call.problem, batch=1, q_len=q.shape[1], k_len=q.shape[1]))
    lengths = tuple(run.length for row in rows[: 1 if alike else batch] for run in row for _ in range(run.documents))
    out, lse = replace(call, run=partial(call.run, lengths=lengths)).result(q, k, v, **tensors)
    if not alike:
        out = torch.unflatten(out[0], 0, (batch, -1))
        lse = None if lse is None else torch.unflatten(lse[0], 1, (batch, -1)).transpose(0, 1)
    out = out.transpose(1, 2) if layout == "bhnd" else out
    return (out, lse) if call.problem.return_lse else out


def packed(
    q: Tensor, k: Tensor, v: Tensor, rows: list[list[Run]], layout: str, given: dict[str, Tensor | None]
) -> Packed:
    """One call for each run of equally long documents, with its part of the tensors of `TENSORS`."""
    key_mask, bias, slopes = (given[name] for name in TENSORS)
    parts = [_split(x.transpose(1, 2) if layout == "bhnd" else x, rows) for x in (q, k, v)]
    tensors = {
        "key_mask": None if key_mask is None else _split(key_mask, rows),
        "bias": None if bias is None else _blocks(bias, rows),
        "alibi_slopes": None if slopes is None else _of_documents(slopes, rows),
    }
    calls = [
        (each, {name: None if x is None else x[number] for name, x in tensors.items()})
        for number, each in enumerate(zip(*parts))
    ]
    return Packed(calls, rows, layout)


def rows_of_lengths(
    q: Tensor, k: Tensor, v: Tensor, key_lens: Tensor, layout: str, arguments: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """One call for each run of rows with equally many keys: views, with those tensors of `arguments` that go by row.

    Raises:
        InvalidInput: an argument is wrong, or cannot be given with `key_lens`.
    """
    for name in ("mesh", "seq_lens", "documents", "cu_seqlens"):
        if arguments.get(name) is not None:
            raise InvalidInput(f"key_lens cannot be given with {name}")
    widths.check_whole(q, k, v, layout, arguments)
    tokens, lengths = layout.index("n"), _integers("key_lens", key_lens)
    batch, k_len = k.shape[0], k.shape[tokens]
    if list(lengths.shape) != [batch]:
        raise InvalidInput(f"key_lens must have shape [batch] = [{batch}], got {list(lengths.shape)}")
    if not all(0 <= length <= k_len for length in lengths.tolist()):
        raise InvalidInput(f"key_lens must lie in 0..{k_len}, got {_shortened(lengths.tolist())}")
    if not batch:
        return [((q, k, v), {})]
    key_mask, bias, slopes = (arguments[name] for name in TENSORS)
    calls, first = [], 0
    for length, same in groupby(lengths.tolist()):
        rows = slice(first, first + len(list(same)))
        first = rows.stop
        own = {
            "key_mask": None if key_mask is None else key_mask[rows, :length],
            "bias": None if bias is None else bias[rows if len(bias) > 1 else slice(None), ..., :length],
            "alibi_slopes": slopes if slopes is None or slopes.ndim == 1 else slopes[rows],
        }
        calls.append(((q[rows], *(x[rows].narrow(tokens, 0, length) for x in (k, v))), own))
    return calls


def stacked(results: Sequence[Any]) -> Any:
    """The results of the calls of `rows_of_lengths`, out or (out, lse), as those of the batch."""
    if not isinstance(results[0], tuple):
        return torch.cat(list(results))
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def _lengths_of(documents: object, cu_seqlens: object, batch: int, tokens: int) -> list[list[int]]:
    """The lengths of the documents of each row; arguments as for `_rows`."""
    rows = _rows(documents, cu_seqlens, batch, tokens, tokens)
    return [[run.length for run in row for _ in range(run.documents)] for row in rows]


def _rows(documents: object, cu_seqlens: object, batch: int, q_len: int, k_len: int) -> list[list[Run]]:
    """The documents of each row of the batch.

    Args:
        documents: integers [batch, len]; tokens with equal ids, which must stand together, are one document.
        cu_seqlens: integers [documents + 1], for a batch of one row: where each document starts, and the last one ends.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if q_len != k_len:
        raise InvalidInput(f"documents and cu_seqlens need q_len == k_len, got {q_len} and {k_len}")
    if documents is not None and cu_seqlens is not None:
        raise InvalidInput("give documents or cu_seqlens, not both")
    if documents is not None:
        lengths = _lengths_of_ids(documents, batch, q_len)
    else:
        lengths = [_lengths_of_starts(cu_seqlens, batch, q_len)]
    return [[Run(len(list(same)), length) for length, same in groupby(row) if length] for row in lengths]


def _split(x: Tensor, rows: Sequence[Sequence[Run]]) -> list[Tensor]:
    """x [batch, len, ...] as a tensor [documents, tokens, ...] for each run; views where rows differ."""
    if _alike(rows):
        pieces = torch.split(x, [run.tokens for run in rows[0]], 1)
        return [torch.unflatten(x, 1, run).flatten(0, 1) for x, run in zip(pieces, rows[0])]
    parts: list[Tensor] = []
    for row, runs in zip(torch.split(x, 1), rows):
        pieces = torch.split(row, [run.tokens for run in runs], 1)
        parts += [torch.unflatten(piece, 1, (run.documents, run.length))[0] for piece, run in zip(pieces, runs)]
    return parts


def _blocks(bias: Tensor, rows: Sequence[Sequence[Run]]) -> list[Tensor]:
    """The bias of each run, [1 or documents, 1 or heads, tokens, tokens], of the blocks on its diagonal."""
    once = _alike(rows)
    parts: list[Tensor] = []
    for number, runs in enumerate(rows[:1] if once else rows):
        row = bias if once or len(bias) == 1 else bias[number : number + 1]
        start = 0
        for run in runs:
            places = [slice(at, at + run.length) for at in range(start, start + run.tokens, run.length)]
            part = torch.stack([row[:, :, place, place] for place in places], 1)
            parts.append((part.expand(len(rows), *part.shape[1:]) if once else part).flatten(0, 1))
            start += run.tokens
    return parts


def _of_documents(slopes: Tensor, rows: Sequence[Sequence[Run]]) -> list[Tensor]:
    """The slopes [heads] or [documents, heads] of each run."""
    if slopes.ndim == 1:
        return [slopes] * sum(len(runs) for runs in (rows[:1] if _alike(rows) else rows))
    if _alike(rows):
        return [slopes.repeat_interleave(run.documents, 0) for run in rows[0]]
    return [row.expand(run.documents, -1) for row, runs in zip(slopes, rows) for run in runs]


def _joined(parts: Sequence[Tensor], rows: Sequence[Sequence[Run]]) -> Tensor:
    """Undo `_split`."""
    if _alike(rows):
        pieces = zip(parts, rows[0])
        return torch.cat([torch.unflatten(x, 0, (-1, run.documents)).flatten(1, 2) for x, run in pieces], 1)
    left = iter(parts)
    return torch.cat([torch.cat([next(left).flatten(0, 1) for _ in runs]).unsqueeze(0) for runs in rows])


def _alike(rows: Sequence[Sequence[Run]]) -> bool:
    """Whether all rows hold documents of the same lengths, so that one call takes those of all rows."""
    return all(row == rows[0] for row in rows)


def _lengths_of_ids(documents: object, batch: int, length: int) -> list[list[int]]:
    given = _integers("documents", documents)
    if list(given.shape) != [batch, length]:
        raise InvalidInput(f"documents must have shape [batch, len] = [{batch}, {length}], got {list(given.shape)}")
    found: list[list[int]] = []
    for row in given:
        ids, counts = torch.unique_consecutive(row, return_counts=True)
        if len(ids.unique()) != len(ids):
            again = next(each for each, same in groupby(sorted(ids.tolist())) if len(list(same)) > 1)
            raise InvalidInput(
                f"documents must have equal ids side by side, but {again} begins more than once in a row"
            )
        found.append(counts.tolist())
    return found


def _lengths_of_starts(cu_seqlens: object, batch: int, length: int) -> list[int]:
    given = _integers("cu_seqlens", cu_seqlens)
    if given.ndim != 1 or len(given) < 2:
        raise InvalidInput(f"cu_seqlens must have shape [documents + 1], got {list(given.shape)}")
    if batch != 1:
        raise InvalidInput(f"cu_seqlens needs a batch of one row, got {batch}; documents takes more")
    starts: list[int] = given.tolist()
    if (starts[0], starts[-1]) != (0, length) or starts != sorted(starts):
        raise InvalidInput(f"cu_seqlens must rise from 0 to {length}, got {_shortened(starts)}")
    return [end - start for start, end in pairwise(starts)]


def _integers(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        kind: Any = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(f"{name} must be an int32 or int64 tensor, got {kind}")
    return read_on_host(name, value)


def read_on_host(name: str, x: Tensor) -> Tensor:
    """The values of an argument that a call depends on. Raises NoBackend where they are not there to be read."""
    if tracing.graphed(x):
        raise NoBackend(f"{name} must be read by the host, so that a graph would hold for these values alone")
    while tracing.functorch.is_functorch_wrapped_tensor(x):
        if tracing.functorch.is_batchedtensor(x):
            raise NoBackend(f"{name} cannot be mapped by torch.vmap: let the examples be rows of one batch")
        x = tracing.functorch.get_unwrapped(x)
    return x.cpu()


def _shortened(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:7]))}, ... {values[-1]}]"
