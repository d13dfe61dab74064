"""Calls that are composed of others: sinks, documents in one row, rows whose keys end at different places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from attn_dispatch import private, process_state
from attn_dispatch.calls.widths import is_empty, plain_call, unequal, widths
from attn_dispatch.decisions import unmeasured
from attn_dispatch.decisions.call import MAX_CALLS, ResolvedCall, Rewritten, notify, observed, only, resolve
from attn_dispatch.decisions.decide import decision_for, drop_oldest, explain_problem, lock, on_trial
from attn_dispatch.decisions.explanation import Explanation
from attn_dispatch.decisions.graphs import operators
from attn_dispatch.decisions.trial_limits import cannot_measure
from attn_dispatch.errors import InvalidInput, NoBackend
from attn_dispatch.kernels import device_cache, registry
from attn_dispatch.kernels.autograd import result_known
from attn_dispatch.kernels.dropout import BY_SEED
from attn_dispatch.kernels.limits import LARGEST_GRID
from attn_dispatch.kernels.numerics import with_sink
from attn_dispatch.spec import tracing
from attn_dispatch.spec.checks import boolean
from attn_dispatch.spec.data import Blocks, DataPattern, Ranges, derived
from attn_dispatch.spec.orders import NATURAL
from attn_dispatch.spec.pattern import Dense
from attn_dispatch.spec.problem import Call, Problem, choose_pattern, dropout
from attn_dispatch.spec.shapes import measured_for
from attn_dispatch.spec.tensors import autocast_dtype, check_seq_lens_values, check_sink, without_autocast
from attn_dispatch.store.decision import TIMED, Row

MOST_KEPT = 8  #: lengths of documents by which a pattern's intervals are kept cut
MOST_SLOWER = 2.0  #: of a backend that takes all documents at once, where the fastest does not


@dataclass(frozen=True)
class Documents:
    """The lengths of the documents of each row of a batch."""

    lengths: list[list[int]]
    device: torch.device

    @cached_property
    def counts(self) -> dict[int, int]:
        """How many documents have each length, the least first."""
        return dict(sorted(Counter(chain.from_iterable(self.lengths)).items()))

    @cached_property
    def tokens(self) -> Tensor:
        """The places of all tokens in the batch, one row after the other, ordered by the length of their document."""
        starts = list(accumulate(chain.from_iterable(self.lengths), initial=0))
        documents = sorted(pairwise(starts), key=lambda each: each[1] - each[0])
        return torch.cat([torch.arange(*each) for each in documents]).to(self.device)

    @property
    def rows_are_alike(self) -> bool:
        return all(row == self.lengths[0] for row in self.lengths)

    def split(self, x: Tensor) -> list[Tensor]:
        """x [batch, len, ...] as a tensor [documents, tokens, ...] for each length."""
        sizes = [length * count for length, count in self.counts.items()]
        parts = torch.split(x.flatten(0, 1).index_select(0, self.tokens), sizes)
        return [torch.unflatten(part, 0, (-1, length)) for part, length in zip(parts, self.counts)]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Undo `split`."""
        whole = torch.cat([part.flatten(0, 1) for part in parts]).index_select(0, self.tokens.argsort())
        return torch.unflatten(whole, 0, (len(self.lengths), -1))


def sink(call: Call) -> Rewritten | None:
    """The call without the sink, which is then added to out and lse. Raises InvalidInput."""
    score = call.sink
    if score is None:
        return None
    check_sink(score, call.q, call.layout)
    boolean("return_lse", call.return_lse)

    def added(results: list[Any]) -> Any:
        ((out, lse),) = results
        out, lse = with_sink(out, lse, score, call.layout)
        return (out, lse) if call.return_lse else out

    return Rewritten([call._replace(sink=None, return_lse=True)], added)


def of_data(call: Call) -> Rewritten | None:
    """A pattern that holds tensors names keys by their place in the row: documents cut its intervals, and key_lens mask
    keys. Raises InvalidInput: it cannot be given with the others.
    """
    pattern = call.pattern
    if not isinstance(pattern, DataPattern) or not (call.packs or call.key_lens is not None):
        return None
    kind = type(pattern).__name__
    if call.mesh is not None:
        if call.packs:
            raise NoBackend(f"documents and cu_seqlens with {kind} over a mesh: let it end at their borders")
        return None
    if call.key_lens is not None:
        return _masked_after(call, pattern)
    check_alone(call)
    if not isinstance(pattern, Ranges):
        raise InvalidInput(f"documents and cu_seqlens cannot be given with {kind}: let its table name the blocks")
    if (plain := plain_call(call)) is not call:
        return Rewritten([plain], only)  # the same in each document
    operators.check_whole(call)
    problem = Problem.of_call(call._replace(v=call.k), may_be_empty=True)  # values may have another width
    lengths = lengths_of(call, problem.batch, problem.q_len, problem.k_len)
    if call.q.numel():
        key, kept = tuple(map(tuple, lengths)), derived(pattern.data, "documents", dict[Any, Ranges])
        if (found := kept.get(key)) is None:
            found = tracing.make_plain(_cut_by, pattern, lengths)
            with lock:
                kept[key] = found
                drop_oldest(kept, MOST_KEPT)
        pattern = found
    return Rewritten([call.with_pattern(pattern, documents=None, cu_seqlens=None)], only)


def _cut_by(pattern: Ranges, lengths: list[list[int]]) -> Ranges:
    """The intervals within documents of these lengths."""
    rows = [torch.tensor(row, device=pattern.device) for row in lengths]
    high = torch.stack([row.cumsum(0).repeat_interleave(row) for row in rows])
    return pattern.clipped(high - torch.stack([row.repeat_interleave(row) for row in rows]), high - 1)


def _masked_after(call: Call, pattern: DataPattern) -> Rewritten:
    """The call with a mask in place of key_lens."""
    lengths, kind = _lengths_of_keys(call), type(pattern).__name__
    if isinstance(pattern, Blocks) and pattern.within != Dense():
        raise InvalidInput(f"key_lens cannot be given with {kind} within {pattern.within}: its rows end at one key")
    if call.alibi_slopes is not None:
        raise InvalidInput(f"key_lens cannot be given with {kind} and alibi_slopes: their distances end at one key")
    keys = call.k.shape[call.layout.index("n")]
    if lengths.device.type == "cpu":
        _check_range(read_on_host("key_lens", lengths).tolist(), keys)
    there = torch.arange(keys, device=call.q.device) < lengths.to(call.q.device)[:, None]
    return Rewritten(
        [call._replace(key_lens=None, key_mask=there if call.key_mask is None else call.key_mask & there)], only
    )


def _lengths_of_keys(call: Call) -> Tensor:
    """`key_lens`, of which the values are not read. Raises InvalidInput: see `key_lens`."""
    for name in ("mesh", "seq_lens", "documents", "cu_seqlens"):
        if getattr(call, name) is not None:
            raise InvalidInput(f"key_lens cannot be given with {name}")
    operators.check_whole(call)
    lengths, batch = _integers("key_lens", call.key_lens, read=False), call.k.shape[0]
    if list(lengths.shape) != [batch]:
        raise InvalidInput(f"key_lens must have shape [batch] = [{batch}], got {list(lengths.shape)}")
    return lengths


def _check_range(lengths: list[int], k_len: int) -> None:
    if not all(0 <= length <= k_len for length in lengths):
        raise InvalidInput(f"key_lens must lie in 0..{k_len}, got {_shortened(lengths)}")


def key_lens(call: Call) -> Rewritten | None:
    """A call of a backend that takes them, on the device; else one for each run of rows with equally many keys.

    Raises:
        InvalidInput: an argument is wrong, or cannot be given with `key_lens`.
    """
    if call.key_lens is None:
        return None
    lengths = _lengths_of_keys(call)
    if (alike := widths(call)) is not None:
        return alike
    whole = _of_all_keys(call, lengths)
    on_device = whole is not None and lengths.device.type in device_cache.DEVICES
    rows, found = [] if on_device else _by_key_lens(call), list[ResolvedCall | None]()  # which checks the lengths
    if whole is None:
        stacked = partial(_stacked, call.return_lse)
        return Rewritten(rows, stacked) if rows else Rewritten([call._replace(key_lens=None)], only)

    def calls() -> Iterator[Call]:  # decided only where it runs
        found.append(_of_key_lens(whole, call.backend, call.order, torch.get_num_threads()))
        yield from _by_key_lens(call) if found[0] is None else ()

    def joined(results: list[Any]) -> Any:
        if found[0] is None:
            return _stacked(call.return_lse, results)
        with without_autocast(call.q.device.type):
            q, k, v = (x.to(whole.dtype) for x in call.tokens_first)
            return call.returned(*found[0].result(q, k, v, **call.tensors, key_lens=lengths))

    return Rewritten(calls(), joined, lambda: _explained_key_lens(call, whole))


def _of_all_keys(call: Call, lengths: Tensor) -> Problem | None:
    """The problem with all keys where a backend may take `key_lens`: on a GPU, or if it is forced."""
    unmeasured.check_names(call.backend, call.order)
    forced = call.backend is not None or lengths.device.type in device_cache.DEVICES
    traced = tracing.is_traced(*call.qkv, lengths) or tracing.has_tangents(*call.qkv, *call.tensors.values())
    if traced or not forced or lengths.device != call.q.device or is_empty(call):
        return None
    if choose_pattern(call).lengthened(1, 2) is None:  # it need not fit all keys
        return None
    return Problem.of_call(call)


def _takers(problem: Problem, backend: str | None, order: str | None) -> list[str]:
    """The backends that take `key_lens`, of all or a forced one, in order of preference."""
    found = []
    for name in registry.names() if backend is None else (backend,):
        with suppress(InvalidInput):  # it cannot be loaded
            takes = registry.load(name).takes_key_lens if order in (None, NATURAL) else None
            if takes is not None and unmeasured.can_run(problem, (name, NATURAL)) and takes(problem):
                found.append(name)
    return found


def _of_key_lens(*key: Any) -> ResolvedCall | None:
    """A call of the backend that takes them: the one decided on, else the first; None: there is none."""
    with suppress(KeyError):  # not asked for first: another thread may drop it
        return _calls_at_once[key]
    (problem, *forced, _), found = key, None
    if _takers(problem, *forced):
        chosen = resolve(problem, *forced).backend.split("@")[0]
        takers = _takers(problem, *forced)  # a trial may have ruled some out
        found = resolve(problem, chosen if chosen in takers else takers[0], NATURAL) if takers else None
    if not cannot_measure(problem.device):
        with lock:
            _calls_at_once[key] = found
            drop_oldest(_calls_at_once, MAX_CALLS)
    return found


def _explained_key_lens(call: Call, problem: Problem) -> list[Any]:
    found, takers = explain_problem(problem, call.backend, call.order), _takers(problem, call.backend, call.order)
    if not takers:
        return _by_key_lens(call)
    return [found if found.choice in takers else explain_problem(problem, takers[0])]


def _by_key_lens(call: Call) -> list[Call]:
    """A call for each run of rows with equally many keys: views, with what goes by row of the other tensors."""
    tokens, lengths = call.layout.index("n"), _integers("key_lens", call.key_lens).tolist()
    k_len = call.k.shape[tokens]
    _check_range(lengths, k_len)
    key_mask, bias, slopes = call.key_mask, call.bias, call.alibi_slopes
    calls, first = [], 0
    for length, same in groupby(lengths):
        rows = slice(first, first + len(list(same)))
        first = rows.stop
        own: dict[str, Any] = {name: getattr(call, name)[rows].narrow(tokens, 0, length) for name in "kv"}
        own["key_mask"] = None if key_mask is None else key_mask[rows, :length]
        own["bias"] = None if bias is None else bias[rows if len(bias) > 1 else slice(None), ..., :length]
        own["alibi_slopes"] = slopes if slopes is None or slopes.ndim == 1 else slopes[rows]
        calls.append(call._replace(key_lens=None, q=call.q[rows], **own))
    return calls


def _stacked(with_lse: bool, results: list[Any]) -> Any:
    """The results of rows as those of the batch."""
    if not with_lse:
        return torch.cat(results)
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def documents(call: Call) -> Rewritten | None:
    """Packed rows: a backend that takes all documents at once, else a call for each run of documents of one length.

    Raises:
        InvalidInput: an argument is wrong, or cannot be given with documents.
    """
    if not call.packs:
        return None
    given, whole = described(call)
    if not call.q.numel():
        return Rewritten([call._replace(documents=None, cu_seqlens=None)], only)
    traced = tracing.is_traced(*call.qkv) or tracing.has_tangents(*call.qkv, *call.tensors.values())
    if traced:
        return Rewritten(_calls(call, given), partial(_joined, call, given))
    unmeasured.check_names(call.backend, call.order)
    return Rewritten([], lambda _: _by_documents(call, given, whole), lambda: _explained(call, given, whole))


def described(call: Call) -> tuple[Documents, Problem | None]:
    """The documents of packed rows, and these as one problem, where their pattern is of rows of any length.

    Raises:
        InvalidInput: an argument is wrong, or cannot be given with documents.
    """
    check_alone(call)
    common = choose_pattern(call).lengthened(1, 2) is not None
    problem = Problem.of_call(call if common else call.with_pattern(None), may_be_empty=True)
    lengths = lengths_of(call, problem.batch, problem.q_len, problem.k_len)
    return Documents(lengths, call.q.device), replace(problem, is_document=True) if common else None


def decided(call: Call) -> tuple[Call, Documents | None, Problem, ResolvedCall | None] | None:
    """A call that a backend runs as one, and what runs it, unless documents run one by one; None for others."""
    if call.packs and (cut := of_data(call)) is not None:
        (call,) = cut.calls
    if call.key_lens is not None or unequal(call) or is_empty(call):
        return None
    call = plain_call(call)
    if call.packs:
        given, whole = described(call)
        return None if whole is None else (call, given, whole, at_once(whole, given, (call.backend, call.order)))
    problem = Problem.of_call(call)
    if call.seq_lens is not None:
        check_seq_lens_values(call.seq_lens, problem.q_len)
    return call, None, problem, resolve(problem, call.backend, call.order)


def as_one(call: Call) -> Call | None:
    """A call whose out and lse are all that its backward pass needs: a backend runs it as one.

    With dropout it is forced, takes a seed, and stays the same in the process: another may drop other weights.
    """
    drops = dropout(call.dropout_p)
    if not drops and not call.packs:
        return None if call.key_lens is not None or unequal(call) or is_empty(call) else call
    if (found := decided(call)) is None or found[3] is None or not drops:
        return None if found is None or found[3] is None else call
    with lock:
        name, _, order = _pinned.setdefault((found[2], call.backend, call.order), found[3].backend).partition("@")
        drop_oldest(_pinned, MAX_CALLS)
    return call._replace(backend=name, order=order or NATURAL) if name in BY_SEED else None


_pinned: dict[Any, str] = {}  #: the backend of calls with dropout in checkpoints
process_state.register(process_state.DECISIONS, _pinned.clear)


def check_alone(call: Call) -> None:
    """Raise InvalidInput for what cannot be given with documents."""
    if call.seq_lens is not None:
        why = "let the padding be a document of its own"
        raise InvalidInput(f"documents and cu_seqlens cannot be given with seq_lens; {why}")


def _by_documents(call: Call, given: Documents, whole: Problem | None) -> Any:
    """The results of packed rows; `described` has the rest."""
    cast = None if call.q.dtype == torch.float64 else autocast_dtype(call.q.device.type)
    with nullcontext() if cast is None else torch.autocast(call.q.device.type, enabled=False):
        if cast is not None:
            call = call._replace(**{name: getattr(call, name).to(cast) for name in "qkv"})
        if whole is not None and (resolved := at_once(whole, given, (call.backend, call.order))) is not None:
            return call.returned(*all_documents(resolved, call, given))
        return _joined(call, given, [_of_one_length(each) for each in _calls(call, given)])


def _of_one_length(call: Call) -> Any:
    """attend for documents of one length, decided as of their class."""
    problem = replace(Problem.of_call(call), is_document=True)
    out, lse = resolve(problem, call.backend, call.order).result(*call.qkv, **call.tensors)
    return call.returned(out, lse)


def _explained(call: Call, given: Documents, whole: Problem | None) -> list[Explanation]:
    """One for the length that most of the work is for, where a backend takes all at once; else one for each length."""
    if whole is not None and (usual := _usual(whole, given)) is not None:
        found = explain_problem(usual, call.backend, call.order)
        if (choice := _choice(whole, (found.choice, found.order), found.candidates)) is not None:
            return [replace(found, choice=choice[0], order=choice[1])]
    problems = [replace(Problem.of_call(each), is_document=True) for each in _calls(call, given)]
    return [explain_problem(each, call.backend, call.order) for each in problems]


def at_once(problem: Problem, given: Documents, forced: tuple[Any, Any]) -> ResolvedCall | None:
    """A call of the `run_documents` of the backend that is forced, or decided for most of the work.

    None where it has none, or that does not take this problem, which is of packed rows, or a trial goes on between
    calls, which are those of single documents.
    """
    if (usual := _usual(problem, given)) is None:
        return None
    usual = measured_for(usual)
    key = problem, usual, forced, torch.get_num_threads()
    with suppress(KeyError):  # not asked for first: another thread may drop it
        return _calls_at_once[key]
    choice = _choice(problem, forced)
    if forced == (None, None):
        notify(usual)
        decision = decision_for(usual)
        if (decision.silicon, usual) in on_trial:
            return None
        choice = _choice(problem, decision.chosen, decision.candidates)
    with lock:
        found = None
        if choice is not None:
            run = observed(registry.load(choice[0]).run_documents, usual)  # type: ignore[arg-type]
            found = ResolvedCall(run, problem, choice[0])
        _calls_at_once[key] = found
        drop_oldest(_calls_at_once, MAX_CALLS)
    return found


def _usual(problem: Problem, given: Documents) -> Problem | None:
    """Documents of the mean length, weighted by pairs, of whose kind most of the work is, for all tokens.
    None where one call cannot take all documents.
    """
    if problem.bias or (problem.alibi_axes == 2 and not given.rows_are_alike):
        return None
    if sum(given.counts.values()) > LARGEST_GRID:
        return None
    cubes, squares, tokens = (sum(count * n**power for n, count in given.counts.items()) for power in (3, 2, 1))
    length = cubes // squares
    pattern = problem.pattern.simplify(length, length, problem.heads)
    return replace(problem, batch=tokens // length, q_len=length, k_len=length, pattern=pattern)


def _choice(problem: Problem, chosen: tuple[Any, Any], rows: tuple[Row, ...] = ()) -> tuple[str, str] | None:
    """The candidate that takes all documents: the chosen one, else the fastest of `rows` if it takes at most
    `MOST_SLOWER` times as long: others copy tensors by length, and back, and are called for each. None: none does.
    """
    timed = {row.id: row.median_ms for row in rows if row.status in TIMED and row.median_ms is not None}
    most = MOST_SLOWER * timed.get(chosen, 0.0)
    able = [each for each in sorted(timed, key=lambda each: timed[each]) if timed[each] <= most]
    return next((each for each in (chosen, *able) if _takes_all(problem, *each)), None)


def _takes_all(problem: Problem, name: str | None, order: str | None) -> bool:
    """Whether a backend that can take all documents at once takes these."""
    if name is None or order not in (None, NATURAL) or not unmeasured.can_run(problem, (name, NATURAL)):
        return False
    backend = registry.load(name)
    return backend.run_documents is not None and backend.takes_documents(problem)


_calls_at_once: dict[Any, ResolvedCall | None] = {}
process_state.register(process_state.ROUTES, _calls_at_once.clear)
process_state.register(process_state.ON_DEVICE, _calls_at_once.clear)


def all_documents(
    resolved: ResolvedCall, call: Call, given: Documents, known: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """out [batch, len, heads, head_dim] and lse of a backend that takes all documents.

    Rows that differ are computed as one.

    Args:
        known: out and lse, which are then not computed.
    """
    (q, k, v), tensors, lengths = call.tokens_first, call.tensors, given.lengths[0]
    if not given.rows_are_alike:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        mask = call.key_mask
        tensors = {**tensors, "key_mask": None if mask is None else mask.flatten(0, 1)[None]}
        problem = replace(resolved.problem, batch=1, q_len=q.shape[1], k_len=q.shape[1])
        resolved, lengths = replace(resolved, problem=problem), [length for row in given.lengths for length in row]
        known = known and (known[0].flatten(0, 1)[None], known[1].transpose(0, 1).flatten(1)[None])
    run = partial(resolved.run, lengths=tuple(lengths))
    with nullcontext() if known is None else result_known(k, v, *known):
        out, lse = replace(resolved, run=run).result(q, k, v, **tensors)
    if not given.rows_are_alike:
        batch = len(given.lengths)
        out = torch.unflatten(out[0], 0, (batch, -1))
        lse = None if lse is None else torch.unflatten(lse[0], 1, (batch, -1)).transpose(0, 1)
    return out, lse


def _calls(call: Call, given: Documents) -> list[Call]:
    """One call, with tokens first, for the documents of each length, with its part of the tensors."""
    tensors = {**dict(zip("qkv", call.tokens_first)), "key_mask": call.key_mask}
    parts = {name: given.split(x) for name, x in tensors.items() if x is not None}
    batch, length = call.q.shape[0], sum(given.lengths[0])
    places = torch.arange(batch * length, device=call.q.device).view(batch, length)
    bias, slopes, found = call.bias, call.alibi_slopes, []
    for number, tokens in enumerate(given.split(places)):  # [documents, tokens]
        own: dict[str, Any] = {name: some[number] for name, some in parts.items()}
        rows, within = tokens[:, 0] // length, tokens % length
        if bias is not None:  # the blocks on its diagonal
            own["bias"] = bias[rows[:, None, None] % len(bias), :, within[..., None], within[:, None]].movedim(-1, 1)
        if slopes is not None and slopes.ndim == 2:
            own["alibi_slopes"] = slopes[rows]
        found.append(call._replace(documents=None, cu_seqlens=None, layout="bnhd", **own))
    return found


def _joined(call: Call, given: Documents, results: list[Any]) -> Any:
    """The results of the calls for each length as those of the packed rows."""
    if not call.return_lse:
        return call.returned(given.joined(results), None)
    out, lse = given.joined([out for out, _ in results]), given.joined([lse.transpose(1, 2) for _, lse in results])
    return call.returned(out, lse.transpose(1, 2))


def lengths_of(call: Call, batch: int, q_len: int, k_len: int) -> list[list[int]]:
    """The lengths of the documents of each row of the batch: of `documents`, integers [batch, len], of which equal ids
    that stand together are one; or of `cu_seqlens`, [documents + 1], for one row: where each starts, and the last ends.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if q_len != k_len:
        raise InvalidInput(f"documents and cu_seqlens need q_len == k_len, got {q_len} and {k_len}")
    if call.documents is not None and call.cu_seqlens is not None:
        raise InvalidInput("give documents or cu_seqlens, not both")
    if call.documents is not None:
        return _lengths_of_ids(call.documents, batch, q_len)
    return [[length for length in _lengths_of_starts(call.cu_seqlens, batch, q_len) if length]]


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
    if given.ndim != 1 or not len(given):
        raise InvalidInput(f"cu_seqlens must have shape [documents + 1], got {list(given.shape)}")
    if batch != 1:
        raise InvalidInput(f"cu_seqlens needs a batch of one row, got {batch}; documents takes more")
    starts: list[int] = given.tolist()
    if (starts[0], starts[-1]) != (0, length) or starts != sorted(starts):
        raise InvalidInput(f"cu_seqlens must rise from 0 to {length}, got {_shortened(starts)}")
    return [end - start for start, end in pairwise(starts)]


def _integers(name: str, value: object, *, read: bool = True) -> Tensor:
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        kind: Any = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(f"{name} must be an int32 or int64 tensor, got {kind}")
    return read_on_host(name, value) if read else value


def read_on_host(name: str, x: Tensor) -> Tensor:
    """The values of an argument that a call depends on. Raises NoBackend where they are not there to be read."""
    if tracing.graphed(x):
        raise NoBackend(f"{name} must be read by the host, so that a graph would hold for these values alone")
    if device_cache.capturing(x.device):
        raise NoBackend(f"{name} must be read by the host, which no CUDA graph captures")
    while private.is_wrapped(x):
        if private.is_batched(x):
            raise NoBackend(f"{name} cannot be mapped by torch.vmap: let the examples be rows of one batch")
        x = private.unwrapped(x)
    if x.is_meta:
        raise InvalidInput(f"{name} is on the meta device and holds no data")
    return x.cpu()


def _shortened(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:7]))}, ... {values[-1]}]"
