"""The command `dp-compile`. A subcommand is a file in `commands/`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from dp_compile.commands import bench, dump, explain, plan, timeline, train, whatif
from dp_compile.commands.parsing import Parser, Subparsers
from dp_compile.errors import ConfigError, DPCompileError

_COMMANDS: Final[tuple[Callable[[Subparsers], None], ...]] = (
    train.add,
    explain.add,
    timeline.add,
    whatif.add,
    dump.add,
    plan.add,
    bench.add,
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
        print("\ndp-compile: interrupted, all ranks stopped", file=sys.stderr)
        return 130


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dp-compile", description="Data-parallel training under torch.compile.")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in _COMMANDS:
        add(subparsers)
    return parser
