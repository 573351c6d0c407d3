"""`dp-compile whatif`: what a step would take on other ranks, links, dtypes, buckets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.errors import ConfigError
from dp_compile.insight.prediction import AS_PLANNED, DTYPES, LINK_INSIDE, OPTIMIZERS
from dp_compile.insight.rehearsal import CPU, META, Rehearsal, load_subject, rehearse
from dp_compile.insight.step import Step
from dp_compile.insight.what_if import WhatIf, format_ms, what_if
from dp_compile.plan import topologies
from dp_compile.plan.cost import CostFit
from dp_compile.plan.devices import DEVICES, EFFICIENCY, device
from dp_compile.plan.links import LINKS
from dp_compile.plan.strategies import plan_to_json
from dp_compile.plan.words import format_bytes

T = TypeVar("T")
SHORT_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
MODEL_RANKS: Final = 8
MODEL_LINK: Final = "infiniband-ndr"
MODEL_DEVICE: Final = "h100-sxm"

_EPILOG = f"""\
examples:
  dp-compile train --steps 20 --save-step step.json
  dp-compile whatif step.json --ranks 8,64,512 --link infiniband-ndr,ethernet-25
      a step that was trained here, on more ranks and other links
  dp-compile whatif step.json --wire bf16,fp32 --strategy optimal,fixed:25 --latency-us 5,20
      every combination of the wishes; fixed:25 are buckets of 25 MiB
  dp-compile whatif step.json --ranks 64 --link ethernet-100 --two-level 1,8
      reduced on one level, and inside nodes of 8 ranks first
  dp-compile whatif step.json --calibration cost.json --ranks 16 --curve
      with a measured link (calibrate().to_json()), and a curve over 1 to 16,384 ranks
  dp-compile whatif --model package.module:make --ranks 8,64,512 --device h100-sxm
      a model that has never run, without a GPU and without its memory
  dp-compile whatif step.json --ranks 8 --link ethernet-25 --optimizer plain,in-backward,sharded --overlap-forward
      where the optimizer updates, and what may end under the next forward
  dp-compile whatif step.json --ranks 64,16384 --link ethernet-25 --topology ring,one-peer-exp
      with parameters mixed with neighbours in place of reduced gradients; how fast ranks agree
  dp-compile whatif step.json --ranks 64 --strategy optimal --save-plan plan.json
      the buckets for 64 ranks, for replicate(model, plan="plan.json")

make() takes nothing and returns (model, batch) or (model, batch, loss_fn), and loss_fn(model, batch) the scalar loss.
Without loss_fn the model is called with the batch (a tuple as *batch, a dict as **batch), and the loss is the result's
.loss, the result if it is a scalar, or the mean of what is floating in it. make() runs with the meta device as torch's
default: tensors have shapes and no values. The directory you are in is searched first.

links    {", ".join(each.name for each in LINKS)}
devices  {", ".join(each.name for each in DEVICES)}

Nothing is run and nothing is measured: the model is one network that carries one bucket at a time. Exit status 0, or 2
for a mistake in what was given.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "whatif",
        help="predict a step on other ranks, links, latencies, gradient dtypes, bucket strategies",
        description="Predict a step for every combination of the wishes. Lists are separated by commas.",
        epilog=_EPILOG,
    )
    parser.add_argument("step", nargs="?", metavar="STEP.json", help="a step file: train --save-step, Step.to_json()")
    parser.add_argument("--model", metavar="PATH", help="package.module:callable in place of a step file")
    wishes = parser.add_argument_group("wishes (without them: as in the step)")
    wishes.add_argument("--ranks", metavar="N,..", help="numbers of ranks")
    wishes.add_argument("--link", metavar="NAME,..", help="every hop between ranks is such a link")
    wishes.add_argument(
        "--wire", "--dtype", dest="dtype", metavar="NAME,..", help=f"in which gradients travel: {', '.join(DTYPES)}"
    )
    wishes.add_argument(
        "--strategy", metavar="NAME,..", help="as planned, optimal, coalesced, fixed, fixed:MIB (as planned,optimal)"
    )
    wishes.add_argument("--optimizer", metavar="NAME,..", help=f"where the optimizer updates: {', '.join(OPTIMIZERS)}")
    wishes.add_argument(
        "--overlap-forward",
        action="store_true",
        help="these optimizers also with what may end under the next forward (plain,in-backward)",
    )
    wishes.add_argument("--latency-us", metavar="X,..", help="latency of one collective in microseconds")
    wishes.add_argument(
        "--compute-scale", metavar="X,..", help="the backward takes so many times as long: a larger batch"
    )
    wishes.add_argument(
        "--two-level", metavar="N,..", help="N ranks in a node, --link, or the step's, joins nodes; 1: one level"
    )
    wishes.add_argument(
        "--topology",
        metavar="NAME,..",
        help="also steps in which ranks mix parameters with few neighbours, and how fast they agree: "
        f"{', '.join(topologies.names())}; --two-level says how many are on a node",
    )
    wishes.add_argument("--link-inside", metavar="NAME", help=f"what joins the ranks of a node then ({LINK_INSIDE})")
    wishes.add_argument("--calibration", metavar="FILE", help="cost of a collective on the step's ranks, as calibrated")
    _add_model(parser.add_argument_group("with --model"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--curve", action="store_true", help="also 1 to 16,384 ranks, for each link, dtype and compute scale"
    )
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--save-plan", metavar="FILE", help="write the buckets of the row whose backward ends first")
    parser.set_defaults(run=_run)


def _add_model(group: Any) -> None:
    group.add_argument("--device", metavar="NAME", help=f"what it would run on ({MODEL_DEVICE})")
    group.add_argument(
        "--efficiency", type=float, metavar="X", help=f"share of the peak that products reach, assumed ({EFFICIENCY:g})"
    )
    group.add_argument("--on", choices=(META, CPU), help="where the tensors are: meta (no memory), or cpu (real ones)")
    group.add_argument("--save-step", metavar="FILE", help="write the step, to ask again without the model")


def _run(args: argparse.Namespace) -> int:
    rehearsal = _rehearse(args) if _wants_model(args) else None
    step = rehearsal.step if rehearsal else _read(args.step, "the step file", Step.from_json)
    links = _words(args.link) or ([rehearsal.link] if rehearsal else [])
    fit = None if args.calibration is None else _read(args.calibration, "--calibration", CostFit.from_json)
    found = what_if(
        step,
        ranks=_numbers(args.ranks, "--ranks", int),
        links=links,
        dtypes=[SHORT_NAMES.get(name, name) for name in _words(args.dtype)],
        strategies=_words(args.strategy) or (AS_PLANNED, "optimal"),
        latencies_us=_numbers(args.latency_us, "--latency-us", float),
        compute_scales=_numbers(args.compute_scale, "--compute-scale", float) or (1.0,),
        ranks_inside=_numbers(args.two_level, "--two-level", int),
        link_inside=args.link_inside,
        optimizers=_words(args.optimizer),
        overlap_forward=args.overlap_forward,
        cost=None if fit is None else fit.cost,
        curve=args.curve,
        topologies=_words(args.topology),
        forward_s=None if rehearsal is None else rehearsal.forward_s,
    )
    if args.save_plan is not None:
        _write(args.save_plan, "--save-plan", plan_to_json(found.fastest.plan))
    print(_json(found, rehearsal) if args.json else _text(found, rehearsal))
    return 0


# --- what was given -------------------------------------------------------------------------------------------------


def _wants_model(args: argparse.Namespace) -> bool:
    if (args.step is None) == (args.model is None):
        raise ConfigError("give a step file or --model package.module:callable, one of the two.")
    if args.model is None:
        odd = [name for name in ("device", "efficiency", "on", "save_step") if getattr(args, name) is not None]
        if odd:
            raise ConfigError(
                f"--{odd[0].replace('_', '-')} belongs to --model: a step file says how long it computes."
            )
    elif args.calibration is not None:
        raise ConfigError("--calibration belongs to a step file. With --model name a link.")
    return args.model is not None


def _rehearse(args: argparse.Namespace) -> Rehearsal:
    on = args.on or META
    chosen, efficiency = device(args.device or MODEL_DEVICE), EFFICIENCY if args.efficiency is None else args.efficiency
    ranks = next((each for each in _numbers(args.ranks, "--ranks", int) if each > 1), MODEL_RANKS)
    link = next(iter(_words(args.link)), MODEL_LINK)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    subject = load_subject(args.model, on=on)
    rehearsal = rehearse(subject, chosen, ranks=ranks, link=link, efficiency=efficiency, on=on)
    if args.save_step is not None:
        _write(args.save_step, "--save-step", rehearsal.step.to_json())
    return rehearsal


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


def _numbers(text: str | None, option: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return [kind(word) for word in _words(text)]
    except ValueError as error:
        wanted = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{option} must be {wanted} with commas between them, got {text!r}.") from error


def _read(path: str, what: str, parse: Callable[[str], T]) -> T:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path!r} cannot be read: {error}.") from error
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _write(path: str, option: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"{option} {path!r} cannot be written: {error}.") from error


# --- what comes out -------------------------------------------------------------------------------------------------


def _text(found: WhatIf, rehearsal: Rehearsal | None) -> str:
    parts = [] if rehearsal is None else ["\n".join(_describe(rehearsal))]
    return "\n\n".join([*parts, str(found), *([found.curve()] if found.curves else [])])


def _describe(rehearsal: Rehearsal) -> list[str]:
    memory = rehearsal.step.memory
    return [
        f"model: parameters {format_bytes(rehearsal.parameter_nbytes)}, gradients "
        f"{format_bytes(rehearsal.gradient_nbytes)}" + (f", {memory}" if memory else ""),
        f"on {rehearsal.device.name}: forward {format_ms(rehearsal.forward_s)}, backward "
        f"{format_ms(rehearsal.step.backward_s)} of compute, by roofline; the optimizer is not counted",
    ]


def _json(found: WhatIf, rehearsal: Rehearsal | None) -> str:
    if rehearsal is None:
        return found.to_json()
    memory = rehearsal.step.memory
    model = {
        "device": rehearsal.device.name,
        "forward_s": rehearsal.forward_s,
        "backward_s": rehearsal.step.backward_s,
        "parameter_nbytes": rehearsal.parameter_nbytes,
        "gradient_nbytes": rehearsal.gradient_nbytes,
        "peak_nbytes": memory.nbytes if memory else None,
    }
    return json.dumps(json.loads(found.to_json()) | {"model": model}, indent=1)
