"""`dp-compile explain`, `timeline`, `predict`: what a training has saved of its steps."""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dp_compile.cli.main import Subparsers, add_command
from dp_compile.errors import ConfigError, require
from dp_compile.plan.cost import LINKS
from dp_compile.plan.words import count

if TYPE_CHECKING:  # what looks at a step needs torch, help does not
    from dp_compile.insight.step import Step

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
    from dp_compile.insight.profile import with_profile
    from dp_compile.insight.step import Step

    try:
        step = Step.from_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
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
  dp-compile explain step.json --profile trace.json.gz       with measured times

A step file is written by dp-compile train --save-step step.json, or by
  pathlib.Path("step.json").write_text(dp_compile.step_of(model).to_json())
""",
    )
    _add_step(parser)
    parser.add_argument("--buckets", action="store_true", help="all buckets, with members and reasons")
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    from dp_compile.insight.explain import explanation_of

    print(explanation_of(_read_step(args.step, args.profile)).text(verbose=args.buckets))
    return 0


# --- timeline -------------------------------------------------------------------------------------------------------


def add_timeline(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "timeline",
        help="draw a step: compute and network, planned and measured",
        description="Draw a saved step as *.svg or *.json, a trace for ui.perfetto.dev.",
        epilog="""\
examples:
  dp-compile timeline step.json -o step.svg -o trace.json
  dp-compile timeline step.json -o step.svg --profile trace.json.gz

Times are predicted. Of a measured step both are drawn, on one axis.
""",
    )
    _add_step(parser)
    parser.add_argument("-o", "--output", type=Path, action="append", required=True, metavar="FILE")
    parser.set_defaults(run=_timeline)


def _timeline(args: argparse.Namespace) -> int:
    for path in args.output:
        require(path.suffix in (".svg", ".json"), "-o", "a name *.svg or *.json", str(path))
        require(path.resolve() != Path(args.step).resolve(), "-o", "another file than the step", str(path))
    from dp_compile.insight.timeline import timeline_picture, timeline_trace

    draw: dict[str, Callable[[Step], str]] = {
        ".svg": timeline_picture,
        ".json": lambda step: json.dumps(timeline_trace(step)),
    }
    step = _read_step(args.step, args.profile)
    for path in args.output:
        try:
            path.write_text(draw[path.suffix](step), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
        print(f"written to {path}")
    return 0


# --- predict --------------------------------------------------------------------------------------------------------


def add_predict(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "predict",
        help="predict a step on other ranks, links, dtypes",
        description="Predict a saved step for every combination of the options.",
        epilog=f"""\
example:
  dp-compile predict step.json --ranks 8,64 --link infiniband-ndr,ethernet-25
      four rows; what is not given stays as in the step

links   {", ".join(each.name for each in LINKS[:4])},
        {", ".join(each.name for each in LINKS[4:])}
dtypes  bfloat16, float16, float32

Nothing is run. Buckets are planned for each row if the step's were.
""",
    )
    _add_step(parser, profile=False)
    parser.add_argument("--ranks", metavar="N,..", type=whole_numbers, default=[None], help="numbers of ranks")
    text = "every hop between ranks is such a link"
    parser.add_argument("--link", metavar="NAME,..", type=words, default=[None], help=text)
    parser.add_argument("--dtype", metavar="NAME,..", type=words, default=[None], help="in which gradients are sent")
    parser.set_defaults(run=_predict)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    return list(map(int, words(text)))


def _predict(args: argparse.Namespace) -> int:
    from dp_compile.insight.predict import predict
    from dp_compile.insight.step import format_ms

    step = _read_step(args.step)
    rows = [
        predict(step, ranks=ranks, link=link, dtype=SHORT_NAMES.get(dtype or "", dtype))
        for ranks, link, dtype in itertools.product(args.ranks, args.link, args.dtype)
    ]
    cells = [["ranks", "link", "dtype", "buckets", "backward", "exposed", "end", "at best"]]
    for row in rows:
        times = map(format_ms, (row.backward_s, row.exposed_s, row.end_s, row.bound_s))
        cells.append([f"{row.ranks:,}", row.link or "-", row.dtype or "-", str(row.buckets), *times])
    least = min(rows, key=lambda row: row.exposed_s)
    where = ", ".join(filter(None, (count(least.ranks, "rank"), least.link, least.dtype)))
    what = "Least exposed" if len(rows) > 1 else "Predicted, exposed"
    print(f"{what}: {format_ms(least.exposed_s)} of {format_ms(least.end_s)}, {where}\n")
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print("", *(textwrap.fill(each, 80) for each in dict.fromkeys(row.basis for row in rows)), sep="\n")
    return 0
