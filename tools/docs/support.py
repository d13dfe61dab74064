"""What each backend supports, by its own refusals, as if every package and a CUDA device were present."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import torch

from attn_dispatch import Dense, Dilated, Neighborhood, Problem, Window
from attn_dispatch.kernels import registry
from attn_dispatch.kernels.contract import refuse_score_terms
from attn_dispatch.spec.data import BlocksForm, Form, RangesForm
from attn_dispatch.spec.pattern import Pattern
from attn_dispatch.spec.shapes import problem_of
from tools.lib.tables import Table

CAPABILITY, SHARED_BYTES = (9, 0), 232_448  #: an H100's
#: Codes of refusals about this machine, not about the backend.
ABSENT = {"not_installed", "platform", "version", "capability"}
HEAD_DIMS = (32, 64, 96, 128, 192, 256, 512, 1024)
LENGTH = 256
PATTERNS = {
    "dense": Dense(),
    "causal": Dense(is_causal=True),
    "window": Window(31, 0),
    "sinks": Window(31, 0, sinks=4),
    "dilated": Dilated((64, 128), (1, 2), is_causal=True),
    "neighborhood": Neighborhood((16, 16), (5, 5)),
    "ranges": RangesForm(1, by_row=False),
    "blocks": BlocksForm((64, 64), "all", by_row=False, is_list=False, within=Dense()),
}


def problems(device: str, pattern: Pattern) -> dict[str, Problem]:
    """One problem for each column of the table: the patterns, and all other properties with `pattern`."""
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    plain = problem_of((1, LENGTH, 4, 64), pattern, torch.bfloat16, where)
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    training = replace(plain, needs_grad=True)
    return {
        **{name: replace(plain, pattern=each) for name, each in PATTERNS.items()},
        **{name: replace(plain, dtype=dtype) for name, dtype in dtypes.items()},
        "grouped heads": replace(plain, kv_heads=1),
        "`seq_lens`, `key_mask`": replace(plain, has_key_mask=True, has_seq_lens=True),
        "few queries": replace(plain, q_len=1),
        "softcap": replace(plain, softcap=50.0),
        "ALiBi": replace(plain, alibi_axes=1),
        "bias": replace(plain, bias=(1, 4)),
        "its gradient": replace(training, bias=(1, 4), bias_needs_grad=True),
        "dropout": replace(plain, dropout_p=0.1),
        "gradients": training,
        "through lse": replace(training, return_lse=True),
        "deterministic": replace(training, deterministic=True),
    }


def table() -> Table:
    """A row for each backend and device that it runs on."""
    known = [name for name in registry.names() if name in (*registry.BUILT_IN, registry.LAST_RESORT)]
    rows = [row for name in known for device in ("cpu", "cuda") for row in _row(name, device)]
    return Table(("backend", "on", *problems("cpu", Dense()), "head_dim"), rows)


def _row(name: str, device: str) -> Iterator[tuple[str, ...]]:
    patterns = problems(device, Dense())
    pattern = next((each for column, each in PATTERNS.items() if _takes(name, patterns[column])), Dense())
    by_column = problems(device, pattern)
    takes = {column: _takes(name, problem) for column, problem in by_column.items()}
    if any(takes.values()):
        cells = ("yes" if taken else "-" for taken in takes.values())
        yield f"`{name}`", device.upper(), *cells, _head_dims(name, by_column, takes)


def _head_dims(name: str, by_column: dict[str, Problem], takes: dict[str, bool]) -> str:
    """The largest supported of HEAD_DIMS, for a supported problem."""
    problem = next(by_column[column] for column, taken in takes.items() if taken)
    largest = max((d for d in HEAD_DIMS if _takes(name, replace(problem, head_dim=d))), default=0)
    return "any" if largest == HEAD_DIMS[-1] else f"to {largest}"


def _takes(name: str, problem: Problem) -> bool:
    board = SimpleNamespace(shared_memory_per_block_optin=SHARED_BYTES)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=CAPABILITY),
        mock.patch("torch.cuda.get_device_properties", return_value=board),
        mock.patch("attn_dispatch.kernels.branches.backend.installed", return_value="99"),
        mock.patch("attn_dispatch.kernels.branches.backend._load_fault", return_value=""),
    ):
        backend = registry.load(name)
        if isinstance(problem.pattern, Form) and not backend.takes_data:
            return False
        codes = {refusal.code for refusal in (*refuse_score_terms(backend, problem), *backend.refusals(problem))}
    return not codes - ABSENT
