"""The command `dp-compile`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Final

from dp_compile.cli.parsing import Parser
from dp_compile.errors import ConfigError, DPCompileError

_COMMANDS: Final = {
    "train": "train",
    "explain": "steps",
    "timeline": "steps",
    "predict": "steps",
    "bench": "bench",
}
"""By name: the file that has `add_NAME`, loaded when it is asked for: most need torch, some its compilers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dp-compile`. Returns the exit status: 0 done, 1 failed, 2 bad options, 130 interrupted."""
    given = sys.argv[1:] if argv is None else argv
    args = _build_parser(given[:1] if given[:1] and given[0] in _COMMANDS else _COMMANDS).parse_args(given)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except DPCompileError as error:
        print(f"dp-compile: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # who reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so when it flushes at its end
        return 0
    except KeyboardInterrupt:
        print("\ndp-compile: interrupted, all ranks stopped", file=sys.stderr)
        return 130


def _build_parser(commands: Iterable[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="dp-compile", description="Data-parallel training under torch.compile.")
    versions = f"dp-compile {version('dp_compile')}, torch {version('torch')}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions, help="print the versions of it and of torch")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands:
        getattr(import_module(f"dp_compile.cli.{_COMMANDS[command]}"), f"add_{command}")(subparsers)
    return parser
