"""`dp-compile dump`: the graphs that a training has dumped."""

from __future__ import annotations

import argparse
from pathlib import Path

from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.dumps import captures_in
from dp_compile.plan.words import count

_EPILOG = """\
examples:
  DP_COMPILE_DUMP_DIR=graphs dp-compile train --steps 3      every rank writes graphs/rank<k>/capture<n>
  dp-compile dump graphs                                     the stages of all captured backwards
  dp-compile dump graphs/rank0/capture0 --stage analysed     the text of one stage

In these texts a line that begins with >> starts a collective, one with << waits for it.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "dump",
        help="show dumped graphs",
        description="Show what a training with DP_COMPILE_DUMP_DIR has dumped.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="of a dump, of a rank in it, or of one capture")
    parser.add_argument("--stage", metavar="STAGE", help="print the file of this stage, by its name or number")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    captures = captures_in(args.directory)
    if not captures:
        raise ConfigError(f"no dump in {args.directory}. Train with DP_COMPILE_DUMP_DIR={args.directory}.")
    for capture in captures:
        files = sorted(capture.glob("*.*"), key=lambda path: path.name.partition("-")[0].zfill(3))
        if args.stage is not None:
            files = [path for path in files if args.stage in (path.stem, *path.stem.split("-", 1))]
            if not files:
                raise ConfigError(f"no stage {args.stage!r} in {capture}. `dp-compile dump {capture}` lists them.")
            print("\n".join(path.read_text(encoding="utf-8") for path in files), end="")
            continue
        print(capture)
        for path in files:
            text = path.read_text(encoding="utf-8")
            launches, waits = (sum(line.startswith(mark) for line in text.splitlines()) for mark in (">> ", "<< "))
            collectives = f", {launches} launches, {waits} waits" if launches else ""
            print(f"  {path.name:40} {count(text.count(chr(10)), 'line')}{collectives}")
    return 0
