"""`dp-compile dump`: look at the graphs that a training has dumped."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.dump_files import (
    DumpedCapture,
    DumpedStage,
    captures_in,
    changes_between,
    counted,
    difference,
    read_capture,
)
from dp_compile.plan.words import count

_EPILOG = """\
examples:
  DP_COMPILE_DUMP_DIR=graphs dp-compile train --steps 3
      every rank writes what became of its backward into graphs/rank<k>/capture<n>
  dp-compile dump graphs
      the captured backwards of all ranks, and the counts of each stage
  dp-compile dump graphs/rank0/capture0 --stage bucket-reductions
      one stage as short text; a stage is named by its name or its number
  dp-compile dump graphs/rank0/capture0 --diff analysed schedule-collectives
      what the passes changed
  python graphs/rank0/capture0/repro.py
      the passes once more on the same graph, on any machine

In short texts a line that begins with >> starts a collective, one with << waits for it.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "dump",
        help="look at dumped graphs: stages, counts, short texts, differences",
        description="Look at the graphs that were dumped by ReplicateConfig(dump_dir=...) or DP_COMPILE_DUMP_DIR.",
        epilog=_EPILOG,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="of a dump, of a rank in it, or of one capture")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--stage", metavar="STAGE", help="print this stage of the one capture in DIR")
    shown.add_argument("--diff", nargs=2, metavar="STAGE", help="print how the second stage's text differs")
    parser.add_argument("--full", action="store_true", help="with --stage: all of the graph, not its short text")
    parser.add_argument("--json", action="store_true", help="print the stages as JSON")
    parser.set_defaults(run=_run_dump)


def _run_dump(args: argparse.Namespace) -> int:
    if args.full and args.stage is None:
        raise ConfigError("--full goes with --stage STAGE.")
    captures = captures_in(args.directory)
    if args.stage is not None or args.diff is not None:
        capture = _only(captures)
        dump = read_capture(capture)
        if args.stage is not None:
            stage = dump.find(args.stage)
            text = _read(capture, stage.full_file if args.full or not stage.has_outline else stage.short_file)
        else:
            before, after = map(dump.find, args.diff)
            text = difference(_short(capture, before), _short(capture, after), (before.label, after.label))
        print(json.dumps({"capture": str(capture), "text": text}) if args.json else text, end="\n" if args.json else "")
        return 0
    dumps = [(capture, read_capture(capture)) for capture in captures]
    if args.json:
        print(json.dumps([{"capture": str(capture)} | json.loads(dump.to_json()) for capture, dump in dumps]))
    else:
        details = len(dumps) == 1
        print("\n\n".join("\n".join(_described(capture, dump, details=details)) for capture, dump in dumps))
    return 0


def _only(captures: Sequence[Path]) -> Path:
    if len(captures) > 1:
        raise ConfigError(f"there are {len(captures)} captures. Give one of them: {', '.join(map(str, captures[:8]))}")
    return captures[0]


def _short(capture: Path, stage: DumpedStage) -> str:
    if not stage.has_outline:
        raise ConfigError(f"{stage.label} is generated code and has no short text. Look at it with --stage code.")
    return _read(capture, stage.short_file)


def _read(capture: Path, name: str) -> str:
    try:
        return (capture / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {capture / name}: {error.strerror}. Dump the graphs anew.") from error


def _described(capture: Path, dump: DumpedCapture, *, details: bool) -> Iterator[str]:
    yield f"{capture}: {dump.backend}, {count(dump.world_size, 'rank')}, {dump.versions}"
    yield from dump.notes
    names = list(counted(DumpedStage(0, "", {})))
    width = max((len(stage.label) for stage in dump.stages), default=0)
    yield f"  {'stage':{width}}  {'  '.join(names)}"
    for stage in dump.stages:
        if stage.has_outline:
            numbers = (f"{number:>{len(name)}}" for name, number in counted(stage).items())
            yield f"  {stage.label:{width}}  {'  '.join(numbers)}"
        else:
            yield f"  {stage.label}"
        yield from (f"    refused {refusal.node}: {refusal.reason}" for refusal in stage.refusals)
    if details:
        yield from _details(dump)


def _details(dump: DumpedCapture) -> Iterator[str]:
    for number, changes in changes_between(dump).items():
        if number > 1:  # from Dynamo's ops to ATen's everything changes
            yield f"{number}-{dump.all_stages[number]}: {', '.join(changes) or 'counts as before'}"
    if dump.collectives:
        yield "collectives of the final graph, in their order:"
        yield from (f"  {_cut(collective)}" for collective in dump.collectives)


def _cut(line: str, width: int = 106) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."
