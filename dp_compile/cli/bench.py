"""`dp-compile bench`: measure suites, compare two runs, show one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dp_compile.bench import compare, picture, report, runner, suite
from dp_compile.bench import results as result_files
from dp_compile.cli.parsing import Subparsers, add_command

_EPILOG = """\
examples:
  dp-compile bench run short
      the packaged suite `short`; its table is printed, its result written to bench-short.json
  dp-compile bench compare before.json bench-short.json
      exits with 1 if a mode has become slower than the noise of both runs explains
  dp-compile bench report bench-short.json --picture bench-short.svg
"""
_RUN_EPILOG = """\
A suite is a TOML file:

  workloads = ["gpt-4l", "my_models:net"]        # built in, or your own: a function that returns a
  modes = ["oracle", "ddp", "ours"]              # dp_compile.bench.contract.Workload (or Mode), found beside the file
  links = [
    {kind = "loopback"},
    {kind = "shaped", rate_mbit = 640},          # one network namespace per rank, tc-tbf; needs root and iproute2
    {kind = "shaped", comm_over_compute = 0.5},  # the rate at which communication takes half as long as compute
    {kind = "fabric", ranks = 64, link = "infiniband-ndr"},            # one process, 63 ranks are played; a
    {kind = "fabric", ranks = 64, latency_us = 10, rate_mbit = 8000},  # collective takes alpha + beta * bytes
    {kind = "nccl-1"},                           # NCCL with one rank: what launching costs; needs a GPU
  ]
  repetitions = 15                               # any other field of dp_compile.bench.suite.Suite

examples:
  dp-compile bench run short
  sudo dp-compile bench run my_suite.toml --out monday.json
      namespaces need root; without it shaped links are skipped, and the table says so
  dp-compile bench run short
      again: goes on where an interrupted run stopped, and tries skipped cells once more

Modes run in turns, one process per rank and mode; a step counts as long as its slowest rank. Nothing is timed whose
gradients are not those of one process. Exit status: 0, 1 if a mode failed, 2 if the suite or the file is wrong.
"""
_COMPARE_EPILOG = """\
examples:
  dp-compile bench compare baseline.json bench-short.json
  dp-compile bench compare baseline.json bench-short.json --reference ddp --tolerance 0.05

Compared are ratios to the reference inside each run, so a machine that is slower today does not matter, another machine
does: it is refused. Bounds are not compared. A change counts if it is above --tolerance and above the noise band, which
follows from the repetitions (bootstrap of the ratio of medians, 1% false alarms over all comparisons together).
Exit status: 0, 1 if a mode became slower or fails now, 2 if the files cannot be compared.
"""
_REPORT_EPILOG = """\
examples:
  dp-compile bench report bench-short.json
  dp-compile bench report bench-short.json --out docs/bench.md --picture docs/bench.svg
  dp-compile bench report bench-short.json --json

A result whose links had not proved themselves (self-check) is refused.
"""


def add(subparsers: Subparsers) -> None:
    bench = add_command(
        subparsers,
        "bench",
        help="measure workloads x modes x links side by side, compare runs, show tables",
        description="Measure ways to train data parallel, side by side in one run, and guard the result.",
        epilog=_EPILOG,
    )
    commands = bench.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_compare(commands)
    _add_report(commands)


def _add_run(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "run",
        help="measure a suite",
        description="Measure every workload of a suite with every mode over every link.",
        epilog=_RUN_EPILOG,
    )
    parser.add_argument("suite", help=f"a TOML file, or a packaged suite: {', '.join(suite.packaged())}")
    parser.add_argument("--out", metavar="FILE", help="the result (bench-SUITE.json)")
    parser.add_argument("--fresh", action="store_true", help="begin anew, do not continue the file")
    parser.add_argument("--json", action="store_true", help="print figures as JSON instead of the table")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_run)


def _add_compare(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "compare",
        help="has anything become slower?",
        description="Compare two results; exits with 1 on a regression.",
        epilog=_COMPARE_EPILOG,
    )
    parser.add_argument("baseline", metavar="BASELINE", type=Path)
    parser.add_argument("new", metavar="NEW", type=Path)
    parser.add_argument("--reference", default="", metavar="MODE", help="ratios to this mode (the suite's reference)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=compare.TOLERANCE,
        metavar="SHARE",
        help="smaller changes are never a regression (%(default)g)",
    )
    parser.add_argument("--force", action="store_true", help="compare with a baseline from another machine")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(run=_compare)


def _add_report(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "report",
        help="a result as table and picture",
        description="Show a result as Markdown tables, and as a picture.",
        epilog=_REPORT_EPILOG,
    )
    parser.add_argument("result", metavar="RESULT", type=Path)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables there instead of printing them")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios there, as SVG")
    parser.add_argument("--json", action="store_true", help="figures as JSON, a row per workload, link and mode")
    parser.set_defaults(run=_report)


def _run(args: argparse.Namespace) -> int:
    asked = suite.load(args.suite)
    path = Path(args.out or f"bench-{asked.name}.json")
    try:
        with runner.ended_by_signals():
            found = runner.run(asked, path, fresh=args.fresh, show_progress=not args.quiet)
    except KeyboardInterrupt:
        print(f"\nfinished cells are in {path}; the same command goes on from there", file=sys.stderr)
        raise
    print(json.dumps(report.rows(found), indent=1) if args.json else report.markdown(found), end="\n" * args.json)
    failures = found.failures()
    for cell, mode in failures:
        print(
            f"failed: {cell.workload} over {cell.link}, {mode.name}: {report.shortened(mode.reason)}", file=sys.stderr
        )
    print(f"written to {path}", file=sys.stderr)
    return 1 if failures else 0


def _compare(args: argparse.Namespace) -> int:
    baseline, new = _proved(args.baseline), _proved(args.new)
    compared = compare.compare(baseline, new, reference=args.reference, tolerance=args.tolerance, force=args.force)
    print(json.dumps(compared.to_dict(), indent=1) if args.json else compare.text(compared))
    return 1 if compared.regressions else 0


def _report(args: argparse.Namespace) -> int:
    found = _proved(args.result)
    text = json.dumps(report.rows(found), indent=1) + "\n" if args.json else report.markdown(found)
    if args.picture is not None:
        args.picture.write_text(picture.svg(found))
    if args.out is not None:
        args.out.write_text(text)
    else:
        print(text, end="")
    return 0


def _proved(path: Path) -> result_files.Results:
    found = result_files.load(path)
    result_files.check_proved(found, path)
    return found
