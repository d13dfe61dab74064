"""Write the API reference as HTML, from the docstrings of what users import, by pdoc (the extra `docs`).

python -m tools.docs.reference [-o build/reference]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import warnings
from pathlib import Path

import attn_dispatch

ROOT = Path(__file__).parents[2]
#: What users import; everything else is the package's own.
MODULES = (
    "attn_dispatch",
    "attn_dispatch.nn",
    "attn_dispatch.nn.torchscale",
    "attn_dispatch.nn.fkodom",
    "attn_dispatch.compat",
    "attn_dispatch.integrations.transformers",
    "attn_dispatch.integrations.diffusers",
    "attn_dispatch.integrations.deepspeed",
    "attn_dispatch.testing",
    "attn_dispatch.errors",
    "attn_dispatch.kernels.contract",
)


def importable() -> tuple[list[str], dict[str, str]]:
    """Those of MODULES whose library is installed, and why the others cannot be imported."""
    found, missing = [], {}
    for name in MODULES:
        try:
            importlib.import_module(name)
            found.append(name)
        except ModuleNotFoundError as error:
            missing[name] = str(error)
    return found, missing


def write(folder: Path, modules: list[str]) -> list[str]:
    """Write a page for each module, and an index; returns pdoc's warnings, such as of a name that is not there.

    Raises:
        ModuleNotFoundError: pdoc is not installed.
    """
    pdoc = importlib.import_module("pdoc")
    for name in attn_dispatch.__all__:
        getattr(attn_dispatch, name)  # loaded now: pdoc looks into the module's dictionary
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*modules, output_directory=folder)
    return [str(each.message) for each in caught]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "reference", help="folder to write")
    output = options.parse_args().output
    modules, missing = importable()
    faults = write(output, modules)
    print(*(f"left out: {reason}" for reason in missing.values()), *faults, sep="\n")
    print(f"written to {output / 'index.html'}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
