"""`dp-compile explain`: what bounds a saved step, what is exposed and why, what would help."""

from __future__ import annotations

import argparse

from dp_compile.cli.files import read_step_file
from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.explanation import explanation_of

_EPILOG = """\
examples:
  dp-compile explain step.json
      one screen: compute- or communication-bound, what is exposed and why, what would help; then the buckets
  dp-compile explain step.json --buckets
      every bucket with its members by name, and why it ends where it ends
  dp-compile explain step.json --json | python -m json.tool
      the same as data
  dp-compile explain step.json --profile trace.json.gz
      with what was measured, bucket by bucket, beside what was predicted

A step file is written where the model trains, after a step of it, and can be read anywhere:
  pathlib.Path("step.json").write_text(dp_compile.step_of(model).to_json())
There, print(dp_compile.explain(model)) says the same without a file.

Exit status: 0 done, 2 the file cannot be read, is no step file, or is of another version.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain",
        help="say what bounds a saved step, what communication is exposed and why, and what would help",
        description="Explain a step that was saved by Step.to_json.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", metavar="FILE", help="a step file")
    parser.add_argument(
        "--profile", metavar="TRACE", help="a trace that torch.profiler exported of steps under this plan; .gz too"
    )
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument("--buckets", action="store_true", help="all buckets, with members and reasons")
    parser.set_defaults(run=_run_explain)


def _run_explain(args: argparse.Namespace) -> int:
    step = read_step_file(args.file, profile=args.profile)
    try:
        explanation = explanation_of(step)
    except ConfigError as error:
        raise ConfigError(f"{args.file}: {error}") from error
    print(explanation.to_json() if args.json else explanation.text(verbose=args.buckets))
    return 0
