"""`dp-compile explain`: what bounds a saved step, what is exposed and why, what would help."""

from __future__ import annotations

import argparse

from dp_compile.cli.files import read_step_file
from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.insight.explain import explanation_of

_EPILOG = """\
examples:
  dp-compile explain step.json
  dp-compile explain step.json --profile trace.json.gz      with what a trace of torch.profiler measured

A step file is written after a training step, by dp-compile train --save-step step.json or
  pathlib.Path("step.json").write_text(dp_compile.step_of(model).to_json())
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain",
        help="what bounds a saved step, what is exposed and why, what would help",
        description="Explain a step that was saved by Step.to_json.",
        epilog=_EPILOG,
    )
    parser.add_argument("step", metavar="STEP.json")
    parser.add_argument("--profile", metavar="TRACE", help="a torch.profiler trace of steps under this plan; .gz too")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument("--buckets", action="store_true", help="all buckets, with members and reasons")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    explanation = explanation_of(read_step_file(args.step, profile=args.profile))
    print(explanation.to_json() if args.json else explanation.text(verbose=args.buckets))
    return 0
