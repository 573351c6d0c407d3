"""`dp-compile train`: a small language model on several processes."""

from __future__ import annotations

import argparse
from typing import Any

from dp_compile.cli.parsing import Subparsers, add_command
from dp_compile.train.launch import default_ranks, launch
from dp_compile.train.options import CHECK_LR, CHECK_STEPS, CHECK_TOLERANCE, TrainOptions

_EPILOG = """\
examples:
  dp-compile train
      two processes on this machine; about two minutes on two cores
  dp-compile train --check
      25 steps beside torch's DistributedDataParallel; exits with 1 if any parameter ends up elsewhere
  dp-compile train --ranks 4 --tp 2
      two copies of the model, each spread over two processes
  torchrun --nproc-per-node 2 --no-python dp-compile train --layers 8 --width 256 --bucket-cap-mb 4
      under torchrun, a larger model in more buckets

The text is the source of Python's standard library, bytes as tokens, every tenth file held out. Losses are in nats
per byte. Step times and tokens/s leave out the first two steps, which compile, and torch's side of a --check.
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        help="train a small language model on several processes and show what happened to its gradients",
        description="Train a decoder-only transformer on text that is on every machine, data parallel.",
        epilog=_EPILOG,
    )
    default = TrainOptions()
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=default.layers, metavar="N", help="blocks (%(default)s)")
    model.add_argument(
        "--width", type=int, default=default.width, metavar="N", help="a multiple of the heads (%(default)s)"
    )
    model.add_argument("--heads", type=int, default=default.heads, metavar="N", help="(%(default)s)")
    model.add_argument(
        "--context", type=int, default=default.context, metavar="N", help="tokens per sequence (%(default)s)"
    )
    _add_training(parser.add_argument_group("training"), default)
    _add_reductions(parser.add_argument_group("ranks and reductions"), default)
    parser.set_defaults(run=_run_train)


def _add_training(group: Any, default: TrainOptions) -> None:
    group.add_argument(
        "--batch-size", type=int, default=default.batch_size, metavar="N", help="sequences per rank (%(default)s)"
    )
    group.add_argument("--steps", type=int, metavar="N", help=f"({default.steps}, with --check {CHECK_STEPS})")
    group.add_argument(
        "--evaluate-every",
        type=int,
        default=default.evaluate_every,
        metavar="N",
        help="steps from one held-out loss to the next (%(default)s)",
    )
    group.add_argument(
        "--lr",
        type=float,
        metavar="X",
        help=f"learning rate of AdamW ({default.lr:g}), with --check of SGD ({CHECK_LR:g})",
    )
    group.add_argument(
        "--momentum", type=float, metavar="X", help="SGD with this momentum in place of AdamW (with --check 0.9)"
    )
    group.add_argument(
        "--optimizer",
        metavar="NAME",
        default=default.optimizer,
        help="plain: parameters are updated in optimizer.step(). in-backward: behind each reduction, in the captured "
        "backward. sharded: there, and each rank updates and remembers a part. crossing: in the next forward. "
        "sharded-crossing: as sharded, and parameters go round under the next forward (%(default)s)",
    )
    group.add_argument(
        "--seed", type=int, default=default.seed, metavar="N", help="of parameters and batches (%(default)s)"
    )


def _add_reductions(group: Any, default: TrainOptions) -> None:
    group.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="processes (one per GPU with NCCL where there are two GPUs or more, else 2 on CPU with gloo; under "
        "torchrun, torchrun's)",
    )
    group.add_argument(
        "--tp",
        type=int,
        default=default.tp,
        metavar="N",
        help="tensor parallel: N ranks share one copy of the model and train on the same batches; gradients are "
        "averaged over the copies (%(default)s)",
    )
    group.add_argument(
        "--bucket-cap-mb",
        type=float,
        default=default.bucket_cap_mb,
        metavar="X",
        help="close a bucket of gradients at this many MiB instead of planning, the first one at 1 MiB at most "
        "(inf: two buckets)",
    )
    group.add_argument(
        "--topology",
        metavar="NAME",
        help="decentralized: ranks mix parameters with few neighbours in each step and reduce no gradient; complete, "
        "ring, one-peer-exp, alternating-exp-ring. --check compares with the same computed by all-gathers",
    )
    group.add_argument(
        "--reduce-dtype", metavar="NAME", help="send gradients in bfloat16 or float16 (default: as they are, float32)"
    )
    group.add_argument(
        "--mp",
        metavar="NAME",
        help="compute in bf16 or fp16, parameters and loss stay float32; gradients travel in it too, unless "
        "--reduce-dtype says otherwise (fp16 without loss scaling)",
    )
    group.add_argument(
        "--comm-hook",
        metavar="NAME",
        help="let a comm hook reduce: int8 or fp8 with error feedback, or torch's own for bf16 or fp16; --check "
        "compares int8 and fp8 with torch's average in float32",
    )
    group.add_argument(
        "--no-ddp-python-hook",
        dest="ddp_python_hook",
        action="store_const",
        const=False,
        help="reduce with torch's C++ reducer instead of hooks that are traced with the backward",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="train torch's DistributedDataParallel (eager) beside it, same seed and batches, and fail if any "
        f"parameter ends up more than {CHECK_TOLERANCE:g} away: far above float32 rounding (compiled code sums in "
        "another order, 3e-7 measured), far below one gradient that is not averaged (1e-2). Uses SGD with momentum: "
        "AdamW blows rounding noise up where a gradient is zero",
    )
    group.add_argument(
        "--save-step",
        metavar="FILE",
        help="write the step at the end, for dp-compile explain, timeline and predict",
    )
    group.add_argument(
        "--timeout-s",
        type=float,
        default=default.timeout_s,
        metavar="X",
        help="seconds that a rank waits for the others (%(default)g)",
    )


def _run_train(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name != "run" and value is not None}
    defaults: dict[str, Any] = {"ranks": default_ranks()}
    if args.check:
        defaults |= {"steps": CHECK_STEPS, "lr": CHECK_LR}
    return launch(TrainOptions(**(defaults | given)))
