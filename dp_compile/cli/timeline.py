"""`dp-compile timeline`: a saved step as a picture, a page or a trace."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dp_compile.cli.files import read_step_file, write_file
from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.timeline import timeline_page, timeline_picture, timeline_trace

_EPILOG = """\
examples:
  dp-compile timeline step.json -o step.svg -o step.html -o trace.json      the last one for ui.perfetto.dev
  dp-compile timeline step.json -o step.svg --profile trace.json.gz         measured below planned

All times are predictions unless the step was measured; then both are shown, on one axis.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "timeline",
        help="draw a step: compute and network, planned and measured",
        description="Draw a saved step, as the suffix of each output file says: .svg, .html, .json (a trace).",
        epilog=_EPILOG,
    )
    parser.add_argument("step", metavar="STEP.json")
    parser.add_argument("-o", "--output", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--profile", metavar="TRACE", help="a torch.profiler trace of steps under this plan; .gz too")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for path in args.output:
        if path.suffix not in (".svg", ".html", ".json"):
            raise ConfigError(f"what is {path}? Name it *.svg, *.html or *.json.")
        if path.resolve() == Path(args.step).resolve():
            raise ConfigError(f"{path} is read, it would be overwritten. Give another name.")
    step = read_step_file(args.step, profile=args.profile)
    for path in args.output:
        if path.suffix == ".json":
            write_file(path, json.dumps(timeline_trace(step)))
        else:
            write_file(path, timeline_page(step) if path.suffix == ".html" else timeline_picture(step))
    return 0
