"""The command `dp-compile`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final, NoReturn

from dp_compile.errors import ConfigError, DPCompileError

_COMMANDS: Final = {"train": "train", "explain": "steps", "timeline": "steps", "predict": "steps", "bench": "bench"}
"""By name: the file that has `add_NAME`. Its options need no torch, which takes seconds to load."""
Subparsers = Any
"""What `ArgumentParser.add_subparsers` returns; argparse keeps its class private."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, not under a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dp-compile: error: {message}. See {self.prog} --help.\n")


def add_command(subparsers: Subparsers, name: str, *, help: str, description: str, epilog: str) -> Any:
    """A subcommand's parser. `epilog` teaches by example."""
    return subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dp-compile`. Returns the exit status: 0 done, 1 failed, 2 bad options, 130 interrupted."""
    args = _build_parser().parse_args(argv)
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
        print("\ndp-compile: interrupted", file=sys.stderr, flush=True)
        if argv is None:  # as a command: the interpreter takes more than a second to take torch apart
            sys.stdout.flush()
            os._exit(130)
        return 130


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dp-compile", description="Data-parallel training under torch.compile.")
    versions = f"dp-compile {version('dp_compile')}, torch {version('torch')}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions, help="print the versions of it and of torch")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, file in _COMMANDS.items():
        getattr(import_module(f"dp_compile.cli.{file}"), f"add_{command}")(subparsers)
    return parser
