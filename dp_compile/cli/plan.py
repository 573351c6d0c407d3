"""`dp-compile plan`: show, compare and check plan files."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from dp_compile.cli.files import read_plan_file, read_step_file
from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.plan_file import Reach, differences, problems, reach
from dp_compile.plan.buckets import BucketPlan

_EPILOG = """\
examples:
  dp-compile plan show plan.json
      the buckets in launch order, and why each ends where it ends
  dp-compile plan diff before.json after.json
      which gradients moved to another bucket, what else changed; exits with 1 if anything did
  dp-compile plan check plan.json --step step.json
      is every gradient in it once, does it fit the gradients of a step, and what is it predicted to reach there

A plan file is written with dp_compile.plan.strategies.plan_to_json(dp_compile.report(model).plan), may be edited by
hand, and is used with dp_compile.replicate(model, plan="plan.json").

Exit status: 0 done, the same, or nothing wrong; 1 different, or something wrong; 2 a file cannot be read, is of
another kind, or of another version.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "plan",
        help="show, compare or check plan files",
        description="Plan files: which gradients are reduced together, in which order.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print a plan file", allow_abbrev=False)
    show.add_argument("file", metavar="FILE")
    show.set_defaults(run=_run_show)
    diff = actions.add_parser("diff", help="what is different in a second plan file", allow_abbrev=False)
    diff.add_argument("first", metavar="FIRST")
    diff.add_argument("second", metavar="SECOND")
    check = actions.add_parser("check", help="whether a plan file makes sense, and fits a step", allow_abbrev=False)
    check.add_argument("file", metavar="FILE")
    check.add_argument(
        "--step", metavar="STEP", help="a step file: does the plan fit it, and what would it reach there"
    )
    for action, run in ((diff, _run_diff), (check, _run_check)):
        action.add_argument("--json", action="store_true", help="print data instead of text")
        action.set_defaults(run=run)


def _run_show(args: argparse.Namespace) -> int:
    print(read_plan_file(args.file))
    return 0


def _run_diff(args: argparse.Namespace) -> int:
    found = list(differences(read_plan_file(args.first), read_plan_file(args.second)))
    if args.json:
        print(json.dumps({"differences": found}))
    elif found:
        print("\n".join(found))
    else:
        print("no difference")
    return 1 if found else 0


def _run_check(args: argparse.Namespace) -> int:
    plan = read_plan_file(args.file)
    step = None if args.step is None else read_step_file(args.step)
    found, reached = list(problems(plan)), None
    if step is not None and not found:
        try:
            reached = reach(plan, step)
        except ConfigError as error:
            found.append(str(error))
    if args.json:
        print(json.dumps({"problems": found, "reach": None if reached is None else asdict(reached)}))
    else:
        print("\n".join(found or _all_well(plan, reached)))
    return 1 if found else 0


def _all_well(plan: BucketPlan, reached: Reach | None) -> list[str]:
    return [str(plan).partition("\n")[0] + "; every gradient is in it once", *([str(reached)] if reached else [])]
