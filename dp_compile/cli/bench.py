"""`dp-compile bench`: measure suites, compare two runs, show one."""

from __future__ import annotations

import argparse
import signal
import sys
import tomllib
from pathlib import Path

from dp_compile import bench
from dp_compile.cli.main import Subparsers, add_command

_EPILOG = """\
A suite is packaged, or a TOML file:

  # Your own are functions in a module of the file's directory, which return a
  # dp_compile.bench.contract.Workload or Mode: "my_models:net".
  workloads = ["gpt-4l"]
  modes = ["oracle", "ddp", "ddp:5", "ours"]
  networks = [
    {kind = "loopback"},
    # Network namespaces and tc-tbf, as root; the second finds its rate.
    {kind = "shaped", rate_mbit = 640},
    {kind = "shaped", comm_over_compute = 0.5},
    # One process, 63 ranks are simulated.
    {kind = "simulated", ranks = 64, latency_us = 10, rate_mbit = 8000},
  ]
  repetitions = 15   # or another field of dp_compile.bench.suites.Suite

examples:
  dp-compile bench run short                        writes bench-short.json
  dp-compile bench compare before.json bench-short.json
  dp-compile bench report bench-short.json          prints the tables again

Exit status: 0; 1 if a mode failed, became slower than noise explains or does
more than before; 2 if a suite, file or option is wrong, or two runs cannot be
compared.
"""


def add_bench(subparsers: Subparsers) -> None:
    description = "Measure ways to train data parallel in one run, and compare runs."
    parser = add_command(subparsers, "bench", help=description.lower()[:-1], description=description, epilog=_EPILOG)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run = add_command(commands, "run", help="measure a suite", description="Measure a suite.", epilog=_EPILOG)
    packaged = tomllib.loads(Path(bench.__path__[0], "suites.toml").read_text())
    run.add_argument("suite", help=f"a TOML file, or packaged: {', '.join(packaged)}")
    run.add_argument("--out", metavar="FILE", help="the result (bench-SUITE.json)")
    run.set_defaults(run=_run)
    text = "compare two results, exit with 1 on a regression"
    parser = add_command(commands, "compare", help=text, description=text, epilog=_EPILOG)
    parser.add_argument("baseline", metavar="BASELINE", type=Path)
    parser.add_argument("new", metavar="NEW", type=Path)
    parser.set_defaults(run=_compare)
    text = "print a result as tables in Markdown"
    parser = add_command(commands, "report", help=text, description=text, epilog=_EPILOG)
    parser.add_argument("result", metavar="RESULT", type=Path)
    parser.set_defaults(run=_report)


def _run(args: argparse.Namespace) -> int:
    from dp_compile.bench import report, runner, suites

    suite = suites.load(args.suite)
    path = Path(args.out or f"bench-{suite.name}.json")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ranks stop, networks are removed
    try:
        found = runner.run(suite, path)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(report.markdown(found), end="")
    failures = report.failures(found)
    for each in failures:
        print(f"failed: {each}", file=sys.stderr)
    print(f"written to {path}", file=sys.stderr)
    return 1 if failures else 0


def _compare(args: argparse.Namespace) -> int:
    from dp_compile.bench import report, results

    text, regressions = report.compare(results.load(args.baseline), results.load(args.new))
    print(text, end="")
    return 1 if regressions else 0


def _report(args: argparse.Namespace) -> int:
    from dp_compile.bench import report, results

    print(report.markdown(results.load(args.result)), end="")
    return 0
