"""`dp-compile timeline`: a step as a page, a trace or a picture."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dp_compile.cli.files import read_step_file
from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.profiling import first_backward_us
from dp_compile.insight.step import Step
from dp_compile.insight.timelines import timeline_page, timeline_picture, timeline_trace
from dp_compile.plan.words import format_bytes

_FORMATS: Final = {".html": "html", ".json": "trace", ".svg": "svg"}
_EPILOG: Final = """\
examples:
  dp-compile timeline step.json -o step.html
      one page for a browser: buckets from ready to launch to finish, members on hover, exposed time, critical path
  dp-compile timeline step.json -o step.html -o step.svg -o trace.json
      several files; the suffix says which: .html, .svg, .json (a trace for ui.perfetto.dev or chrome://tracing)
  dp-compile timeline step.json -o step.html --profile trace.json.gz
      what was measured under what was planned, joined by the names of the buckets in the trace
  dp-compile timeline step.json -o both.json --merge trace.json.gz
      our lanes beside those of a torch.profiler trace, on its clock

A training script saves its step with
  pathlib.Path("step.json").write_text(dp_compile.step_of(model).to_json())
All times are predictions unless the step was measured; then both are shown, on one axis.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "timeline",
        help="draw a step: compute and network, planned and measured",
        description="Draw a saved step as an HTML page, as a trace for Perfetto or as an SVG picture.",
        epilog=_EPILOG,
    )
    parser.add_argument("step", type=Path, metavar="STEP.json", help="a step, as Step.to_json() wrote it")
    parser.add_argument(
        "-o", "--output", type=Path, action="append", required=True, metavar="FILE", help="may be given several times"
    )
    parser.add_argument("--format", choices=sorted(_FORMATS.values()), help="of every file (by its suffix)")
    parser.add_argument(
        "--profile", metavar="TRACE", help="a trace that torch.profiler exported of steps under this plan; .gz too"
    )
    parser.add_argument("--merge", type=Path, metavar="TRACE.json", help="a trace to put our lanes into; .gz too")
    parser.add_argument(
        "--backward-at-us",
        type=float,
        metavar="X",
        help="when the backward starts on the clock of --merge, in us (the first of ours in it, if it names one)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    writers = {path: _writer(path, args) for path in args.output}
    step = read_step_file(str(args.step), profile=args.profile)
    for path, writer in writers.items():
        _write(path, writer(step))
        print(f"{path}: {format_bytes(path.stat().st_size)}")
    return 0


def _writer(path: Path, args: argparse.Namespace) -> Callable[[Step], str]:
    name = args.format or _FORMATS.get(path.suffix.lower())
    if name is None:
        raise ConfigError(f"what is {path}? Name it *{', *'.join(_FORMATS)} or say --format.")
    if path.resolve() in (args.step.resolve(), args.merge and args.merge.resolve()):
        raise ConfigError(f"{path} is read, it would be overwritten. Give another name.")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no directory {path.parent}. Make it first.")
    if name != "trace" and (args.merge is not None or args.backward_at_us is not None):
        raise ConfigError(f"--merge and --backward-at-us are for traces, {path} would be of format {name}.")
    if args.backward_at_us is not None and args.merge is None:
        raise ConfigError("--backward-at-us is on the clock of another trace. Give that with --merge.")
    if name == "trace":
        into, at_us = None if args.merge is None else _trace(args.merge), args.backward_at_us
        if into is not None and at_us is None:
            at_us = first_backward_us(into)
        return lambda step: json.dumps(timeline_trace(step, into=into, backward_at_us=at_us))
    return timeline_page if name == "html" else timeline_picture


def _trace(path: Path) -> Mapping[str, Any]:
    text = _read(path)
    try:
        trace = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    return trace if isinstance(trace, dict) else {"traceEvents": trace}


def _read(path: Path) -> str:
    try:
        return (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read {path}: {reason}.") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
