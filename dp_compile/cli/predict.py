"""`dp-compile predict`: a saved step on other ranks, links and dtypes."""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Final

from dp_compile.cli.files import read_step_file
from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.predict import DTYPES, Prediction, predict
from dp_compile.insight.step import format_ms
from dp_compile.plan.links import LINKS

SHORT_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_EPILOG = f"""\
example:
  dp-compile predict step.json --ranks 8,64 --link infiniband-ndr,ethernet-25 --dtype bfloat16
      every combination; what is not given stays as in the step

links   {", ".join(each.name for each in LINKS)}
dtypes  {", ".join(DTYPES)}

Nothing is run and nothing is measured. Buckets are planned for each row if the step's strategy plans.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "predict",
        help="predict a step on other ranks, links, dtypes",
        description="Predict a saved step for every combination of the options. Lists are separated by commas.",
        epilog=_EPILOG,
    )
    parser.add_argument("step", metavar="STEP.json")
    parser.add_argument("--ranks", metavar="N,..", default="", help="numbers of ranks")
    parser.add_argument("--link", metavar="NAME,..", default="", help="every hop between ranks is such a link")
    parser.add_argument("--dtype", metavar="NAME,..", default="", help="in which gradients are sent")
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    step = read_step_file(args.step)
    names = [[word.strip() or None for word in text.split(",")] for text in (args.ranks, args.link, args.dtype)]
    try:
        ranks = [None if word is None else int(word) for word in names[0]]
    except ValueError as error:
        raise ConfigError(f"--ranks must be whole numbers with commas between them, got {args.ranks!r}.") from error
    rows = [
        predict(step, ranks=n, link=link, dtype=SHORT_NAMES.get(dtype or "", dtype))
        for n, link, dtype in itertools.product(ranks, *names[1:])
    ]
    print(json.dumps([row.to_dict() for row in rows], indent=1) if args.json else "\n".join(_table(rows)))
    return 0


def _table(rows: list[Prediction]) -> list[str]:
    cells = [["ranks", "link", "dtype", "buckets", "backward", "exposed", "end", "at best"]]
    for row in rows:
        times = map(format_ms, (row.backward_s, row.exposed_s, row.end_s, row.bound_s))
        cells.append([f"{row.ranks:,}", row.link or "-", row.dtype or "-", str(row.buckets), *times])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return [*lines, "", *dict.fromkeys(row.basis for row in rows)]
