"""The environment variables that are read, with defaults from attn_dispatch/settings.py."""

from __future__ import annotations

from attn_dispatch import settings
from attn_dispatch.settings import Number
from tools.lib.tables import markdown

NUMBERS = {value.variable: value for value in vars(settings).values() if isinstance(value, Number)}
#: The default and the allowed values of the other variables.
OTHERS = {
    "ATTN_DISPATCH_MODE": (settings.MODES[0], ", ".join(settings.MODES)),
    "ATTN_DISPATCH_COMPILE": (settings.COMPILE[0], ", ".join(settings.COMPILE)),
    "ATTN_DISPATCH_BATCH_INVARIANT": ("0", "0, 1"),
    "ATTN_DISPATCH_CACHE_DIR": ("`attn-dispatch` in the user's cache folder, as `~/.cache/attn-dispatch`", "a folder"),
    "ATTN_DISPATCH_RECORD": ("-", "a file"),
    settings.FLASH_KERNEL: ("-", "a folder"),
    "CXX": ("g++", "a command"),
    "CUDA_HOME": ("-", "a folder"),
    "TRITON_INTERPRET": ("-", "1"),
    "ATEN_CPU_CAPABILITY": ("-", "default, avx2, avx512"),
    **dict.fromkeys(("WORLD_SIZE", "RANK", "LOCAL_RANK"), ("-", "set by torchrun")),
}
MEANING = {
    "ATTN_DISPATCH_MODE": "what happens to a problem without a stored decision, see above",
    "ATTN_DISPATCH_COMPILE": "in mode `locked`, whether calls may compile; never: they raise `NotDecided`, unless "
    "`warm` has compiled or loaded what they run",
    "ATTN_DISPATCH_BUDGET_MS": "milliseconds after which no further candidate of one new problem is started; the first "
    "always runs, and unless this is 0 a second one of about its work; `profile` uses `--budget` instead",
    "ATTN_DISPATCH_TRIAL_SECONDS": "seconds of any minute that calls of `attend` may spend on trials; `profile` is not "
    "limited by it",
    "ATTN_DISPATCH_HOST_SHARE": "on CUDA, share of the host's time beyond the device's that counts "
    "where candidates are compared",
    "ATTN_DISPATCH_OVERHEAD": "in mode `online`, share of the time of calls on trial that trials beside them may take",
    "ATTN_DISPATCH_EXPECTED_CALLS": "calls over which the cost of a candidate's first call (compiling, planning) is "
    "spread when candidates are compared",
    "ATTN_DISPATCH_TIMEOUT_S": "seconds that a call in a trial may take beyond what was expected before the backend "
    "counts as hung",
    "ATTN_DISPATCH_CACHE_DIR": "where decisions, quarantines and crash markers are stored, with a copy of the code "
    "of `native`",
    "ATTN_DISPATCH_CACHE_MB": "megabytes of decisions; past it, those unused for longest are removed",
    "ATTN_DISPATCH_BATCH_INVARIANT": "1: all calls are as inside `batch_invariant`; read once",
    "ATTN_DISPATCH_RECORD": "where the process writes the problems of all its calls, as `record` does; read once, when "
    "`attend` is imported",
    settings.FLASH_KERNEL: "a build of flash-attn2 or flash-attn3 from the Hugging Face Hub, on disk: the folder with "
    "`_ops.py`; `flash` runs it in the place of an installed one of its generation; read once",
    "CXX": "the C++ compiler of `native`, and of `flex` on a CPU",
    "CUDA_HOME": "read by CUDA packages; after a change versions are compared again",
    "TRITON_INTERPRET": "Triton's interpreter: the `triton` backends then take CPU tensors",
    "ATEN_CPU_CAPABILITY": "PyTorch's instruction sets; `flex` refuses the CPU under `default`",
    "WORLD_SIZE": 'number of ranks, for `profile` and for `mesh="world"`',
    "RANK": "this process's rank: only rank 0 of `profile` prints",
    "LOCAL_RANK": "the CUDA device of this process",
}


def variables() -> str:
    """A row for each."""
    rows = []
    for name, meaning in MEANING.items():
        number = NUMBERS.get(name)
        default, allowed = OTHERS[name] if number is None else (f"{number.default:g}", number.what)
        rows.append((f"`{name}`", default, allowed, meaning))
    return markdown(("variable", "default", "may be", "meaning"), rows)
