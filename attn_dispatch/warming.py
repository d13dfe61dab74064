"""`warm`: compiles, plans and loads what stored decisions run by, so that no later call waits for that.

What is compiled is kept in the folders of `folders`, where later processes find it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_dispatch.decisions import decide, trial_limits
from attn_dispatch.errors import AttnDispatchError, BackendFailed, InvalidInput, NotDecided
from attn_dispatch.kernels import registry
from attn_dispatch.machine.devices import synchronize
from attn_dispatch.machine.hardware import silicon
from attn_dispatch.profiling import as_called, checked_problems, progress_bar
from attn_dispatch.recording import read_record
from attn_dispatch.settings import cache_folder, mode
from attn_dispatch.spec.problem import Problem
from attn_dispatch.spec.tensors import normal_device
from attn_dispatch.store.bundle import Refused, read_bundle
from attn_dispatch.store.decision import Decision
from attn_dispatch.store.folder import Store
from attn_dispatch.text import one_line, titled
from attn_dispatch.tuning.example import make

NOT_DECIDED = "not decided: `attn-dispatch profile` measures it"
#: Variables that name the folders of compilers, as these set or read them.
FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")

Problems = tuple[list[Problem], Counter[str]]  #: and how many decisions were left out, by reason


@dataclass(frozen=True, slots=True)
class Warmed:
    """A problem's title, the backend and order by which its calls run, and the seconds that its first one took.

    `reason`: why it is not warm; empty where it is. Backend and order are empty where it is not decided.
    """

    problem: str
    backend: str
    order: str
    seconds: float
    reason: str = ""


def warm(
    problems: Iterable[Problem] | str | os.PathLike[str] | None = None,
    *,
    progress: bool = True,
    report: Callable[[Warmed], object] | None = None,
) -> list[Warmed]:
    """Run each problem once, on random tensors, by its stored decision, so that no call compiles, plans or loads.

    Nothing is measured, but that decisions of other machines are checked where the mode has them checked.

    Args:
        problems: `Problem`s, or a file that `record` or `attn-dispatch export` wrote, for its problems alone; by
            default, those of all decisions in the cache folder that are of this machine.
        progress: show a bar with the remaining time on stderr.
        report: called with each problem's `Warmed` as soon as it is known.

    Returns:
        One `Warmed` for each problem, in order.

    Raises:
        InvalidInput: the mode is `off`, or the file cannot be read. Once all other problems are warm:
        NotDecided: one has no stored decision. BackendFailed: a backend raised.
    """
    if mode() == "off":
        raise InvalidInput("$ATTN_DISPATCH_MODE is 'off', which reads no decision: nothing can be made warm")
    if problems is None:
        problems, _ = stored_problems()
    elif isinstance(problems, str | os.PathLike):
        problems, _ = problems_in(problems)
    plain, found = checked_problems(problems), list[Warmed]()
    with progress_bar("warming", len(plain), progress) as advance:
        for problem in plain:
            found.append(_warmed(problem))
            advance(str(problem))
            if report is not None:
                report(found[-1])
    cold = [each for each in found if each.reason]
    if cold:
        kind = BackendFailed if any(each.backend for each in cold) else NotDecided
        lines = (f"\n  {each.problem}: {each.reason}" for each in cold)
        raise kind(f"{len(cold)} of {len(found)} problems are not warm:{''.join(lines)}")
    return found


def _warmed(problem: Problem) -> Warmed:
    """Run a problem once, in PyTorch's settings of its calls."""
    start, title, chosen = time.perf_counter(), str(problem), ("", "")
    try:
        with as_called(problem), trial_limits.isolated(problem.device), trial_limits.preserved_rng(problem):
            decision = decide.without_trial(problem)
            if decision is None:
                return Warmed(title, *chosen, 0.0, NOT_DECIDED)
            chosen = decision.chosen
            backend = registry.load(decision.choice)
            if backend.prepare is not None:
                backend.prepare()
            make(problem, on_device=True).call(backend, decision.order)()
            synchronize(problem.device)
        reason = ""
    except Exception as error:  # noqa: BLE001 - a backend may fail in any way; the other problems still get warm
        reason = f"{titled(*chosen)} failed: {one_line(error)}" if any(chosen) else one_line(error)
    return Warmed(title, *chosen, time.perf_counter() - start, reason)


def stored_problems() -> Problems:
    """The problems of the decisions in the cache folder that are of this machine, with its number of threads."""
    return _of_this_machine(decision for _, decision in Store(cache_folder()).all())


def problems_in(path: str | os.PathLike[str]) -> Problems:
    """The problems of a file that `record` or `export` wrote, of this machine. Raises InvalidInput for other files."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.startswith('{"schema"'):
            return _of_this_machine(read_bundle(text.encode()))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: cannot be read ({error})") from error
    return list(read_record(path, text=text)), Counter()


def _of_this_machine(decisions: Iterable[Decision | Refused]) -> Problems:
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    here, found, left = {silicon(normal_device(kind)): kind for kind in kinds}, list[Problem](), Counter[str]()
    for each in decisions:
        if isinstance(each, Refused):
            left[each.reason] += 1
        elif each.silicon not in here:
            left[f"of {each.silicon}, which is not this machine with its threads"] += 1
        elif each.problem.get("ranks", 1) != 1:
            left["over several ranks, which get warm together, by a call"] += 1
        else:
            try:
                found.append(Problem.from_dict(each.problem, here[each.silicon]))
            except AttnDispatchError as error:
                left[str(error)] += 1
    return list(dict.fromkeys(found)), left


def folders() -> dict[str, str]:
    """Where compiled code lies, by the variable that names each folder, where it is set or its compiler loaded."""
    found = {"ATTN_DISPATCH_CACHE_DIR": str(cache_folder())}
    found |= {name: os.environ[name] for name in FOLDERS if name in os.environ}
    knobs: Any = sys.modules.get("triton.knobs")
    return found | ({} if knobs is None else {"TRITON_CACHE_DIR": knobs.cache.dir})
