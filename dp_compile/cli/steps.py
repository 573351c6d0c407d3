"""`dp-compile explain`, `timeline`, `predict`: what a training has saved of its steps."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.explain import explanation_of
from dp_compile.insight.predict import DTYPES, predict
from dp_compile.insight.profile import with_profile
from dp_compile.insight.step import Step, format_ms
from dp_compile.insight.timeline import timeline_picture, timeline_trace
from dp_compile.plan.cost import LINKS

SHORT_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _add_step(parser: Any, *, profile: bool = True) -> None:
    parser.add_argument("step", metavar="STEP.json")
    if profile:
        text = "a torch.profiler trace of steps under this plan; .gz too"
        parser.add_argument("--profile", metavar="TRACE", help=text)


def _read_step(path: str, profile: str | None = None) -> Step:
    """A file that `Step.to_json` wrote; `profile`: a trace of `torch.profiler` with measured times of it.

    Raises:
        ConfigError: one of them cannot be read, is of another kind or version, or they are of different plans.
    """
    try:
        step = Step.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return step if profile is None else with_profile(step, profile)


# --- explain --------------------------------------------------------------------------------------------------------


def add_explain(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "explain",
        help="what bounds a saved step, what is exposed and why, what would help",
        description="Explain a step that was saved by Step.to_json.",
        epilog="""\
examples:
  dp-compile explain step.json
  dp-compile explain step.json --profile trace.json.gz      with what a trace of torch.profiler measured

A step file is written after a training step, by dp-compile train --save-step step.json or
  pathlib.Path("step.json").write_text(dp_compile.step_of(model).to_json())
""",
    )
    _add_step(parser)
    parser.add_argument("--buckets", action="store_true", help="all buckets, with members and reasons")
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    print(explanation_of(_read_step(args.step, args.profile)).text(verbose=args.buckets))
    return 0


# --- timeline -------------------------------------------------------------------------------------------------------


def add_timeline(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "timeline",
        help="draw a step: compute and network, planned and measured",
        description="Draw a saved step, as the suffix of each output file says: .svg, .json (a trace).",
        epilog="""\
examples:
  dp-compile timeline step.json -o step.svg -o trace.json      the last one for ui.perfetto.dev
  dp-compile timeline step.json -o step.svg --profile trace.json.gz         measured below planned

All times are predictions unless the step was measured; then both are shown, on one axis.
""",
    )
    _add_step(parser)
    parser.add_argument("-o", "--output", type=Path, action="append", required=True, metavar="FILE")
    parser.set_defaults(run=_timeline)


def _timeline(args: argparse.Namespace) -> int:
    draw: dict[str, Callable[[Step], str]] = {
        ".svg": timeline_picture,
        ".json": lambda step: json.dumps(timeline_trace(step)),
    }
    for path in args.output:
        if path.suffix not in draw:
            raise ConfigError(f"what is {path}? Name it *.svg or *.json.")
        if path.resolve() == Path(args.step).resolve():
            raise ConfigError(f"{path} is read, it would be overwritten. Give another name.")
    step = _read_step(args.step, args.profile)
    for path in args.output:
        try:
            path.write_text(draw[path.suffix](step), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
    return 0


# --- predict --------------------------------------------------------------------------------------------------------


def add_predict(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "predict",
        help="predict a step on other ranks, links, dtypes",
        description="Predict a saved step for every combination of the options. Lists are separated by commas.",
        epilog=f"""\
example:
  dp-compile predict step.json --ranks 8,64 --link infiniband-ndr,ethernet-25 --dtype bfloat16
      every combination; what is not given stays as in the step

links   {", ".join(each.name for each in LINKS)}
dtypes  {", ".join(DTYPES)}

Nothing is run and nothing is measured. Buckets are planned for each row if the step's strategy plans.
""",
    )
    _add_step(parser, profile=False)
    parser.add_argument("--ranks", metavar="N,..", default="", help="numbers of ranks")
    parser.add_argument("--link", metavar="NAME,..", default="", help="every hop between ranks is such a link")
    parser.add_argument("--dtype", metavar="NAME,..", default="", help="in which gradients are sent")
    parser.set_defaults(run=_predict)


def _predict(args: argparse.Namespace) -> int:
    step = _read_step(args.step)
    names = [[word.strip() or None for word in text.split(",")] for text in (args.ranks, args.link, args.dtype)]
    try:
        ranks = [None if word is None else int(word) for word in names[0]]
    except ValueError as error:
        raise ConfigError(f"--ranks must be whole numbers with commas between them, got {args.ranks!r}.") from error
    cells, bases = [["ranks", "link", "dtype", "buckets", "backward", "exposed", "end", "at best"]], []
    for n, link, dtype in itertools.product(ranks, *names[1:]):
        row = predict(step, ranks=n, link=link, dtype=SHORT_NAMES.get(dtype or "", dtype))
        times = map(format_ms, (row.backward_s, row.exposed_s, row.end_s, row.bound_s))
        cells.append([f"{row.ranks:,}", row.link or "-", row.dtype or "-", str(row.buckets), *times])
        bases.append(row.basis)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print("", *dict.fromkeys(bases), sep="\n")
    return 0
