"""The command `attn-dispatch`. Results go to stdout, progress and messages to stderr.

Exit codes: 0 done, 1 failed, 2 wrong usage. A command's module is imported only when that command runs, and torch only
where a command needs it.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module

from attn_dispatch.errors import AttnDispatchError, InvalidInput

COMMANDS = {
    "profile": "measure problems now and store the decisions",
    "warm": "compile, plan and load what stored decisions run by, for later processes",
    "inspect": "show the stored decisions",
    "explain": "show which backend would run a problem, and why; runs nothing",
    "plan": "predict memory, traffic and time of a sequence over many ranks; runs nothing",
    "limits": "find the longest sequence that fits, without endangering the machine",
    "export": "write the stored decisions into one file",
    "import": "merge decisions from files into the stored ones",
    "report": "write one HTML page about the stored decisions, with plots",
    "doctor": "show this machine's devices and which backends can run on them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Wrong usage raises SystemExit(2), as argparse does."""
    if argv is None:  # this process runs the command and nothing else
        # torch warns where NumPy is not installed; no command needs NumPy.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    arguments = list(sys.argv[1:] if argv is None else argv)
    named = next((word for word in arguments if word in COMMANDS), None)
    if arguments == ["--version"]:  # alone: reading the package's metadata takes longer than parsing all arguments
        print(import_module("importlib.metadata").version("attn-dispatch"))
        return 0
    args = _parser(named).parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # may lack a character of a name, or of a path's bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(args.run(args))
        if sys.stdout is not None:  # as where it was closed before the process began
            sys.stdout.flush()
    except InvalidInput as error:
        return _fail(named, str(error), 2)
    except AttnDispatchError as error:
        return _fail(named, str(error), 1)
    except KeyboardInterrupt:
        return _fail(named, "interrupted", 1)
    except OSError as error:
        if sys.stdout is not None:  # the interpreter's flush at exit must not raise again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Where the reader closed the pipe (`| head`), it wants no message.
        return 1 if isinstance(error, BrokenPipeError) else _fail(named, str(error), 1)
    return code


def _parser(named: str | None) -> argparse.ArgumentParser:
    """The parser, with the options of the named command only: other commands' modules are not imported."""
    parser = argparse.ArgumentParser(
        prog="attn-dispatch",
        description="Run attention with the backend measured fastest on this machine.",
        epilog="exit code: 0 done, 1 failed, 2 wrong usage; 'attn-dispatch COMMAND --help' shows examples",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == named:
            module = import_module(f"attn_dispatch.cli.commands.{name.replace('import', 'import_')}")
            command.description, command.epilog = module.__doc__, module.EXAMPLE
            command.set_defaults(run=module.run)
            module.configure(command)
            command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _fail(command: str | None, text: str, code: int) -> int:
    print(f"attn-dispatch {command}: {text}", file=sys.stderr)
    return code
