"""`dp-compile train`: a small language model on several processes."""

from __future__ import annotations

import argparse

from dp_compile.cli.main import Subparsers, add_command
from dp_compile.errors import require_integer

_EPILOG = """\
Without torchrun it starts two processes on this machine, which take about two
minutes on two cores. Bytes are tokens, losses are in nats per byte, and every
tenth file is held out. Step times leave out two steps, which compile.
"""


def add_train(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "train",
        help="train a small GPT on several processes and show what happened to its gradients",
        description="Train a small GPT on the source of Python's standard library, data parallel.",
        epilog=_EPILOG,
    )
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="blocks (%(default)s)")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="%(default)s; a multiple of 32")
    parser.add_argument("--steps", type=int, metavar="N", help="(300, with --check 25)")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (one per GPU, at least 2)")
    parser.add_argument("--bucket-cap-mb", type=float, metavar="X", help="close buckets at this size, do not plan")
    parser.add_argument(
        "--mp", choices=("bf16", "fp16"), help="compute and reduce in this dtype, parameters stay float32"
    )
    parser.add_argument("--comm-hook", choices=("bf16", "fp16", "int8", "fp8"), help="send gradients in this dtype")
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train torch's DistributedDataParallel from the same seed, both with SGD, and compare all parameters",
    )
    parser.add_argument("--save-step", metavar="FILE", help="measure the last steps and write a step file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for name in ("layers", "width", "steps", "ranks"):
        if (value := getattr(args, name)) is not None:
            require_integer(f"--{name}", value, 1)
    from dp_compile.train import job

    return job.launch(args)
