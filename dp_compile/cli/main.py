"""The command `dp-compile`. Declaring its options needs no torch, which takes seconds to load."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from dp_compile import bench
from dp_compile.errors import ConfigError, DPCompileError, require, require_integer
from dp_compile.plan.cost import LINKS
from dp_compile.plan.words import count, in_columns, table

if TYPE_CHECKING:
    from dp_compile.insight.step import Step

SHORT_NAMES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
Add = Callable[..., Any]  # adds a subcommand by its name, and returns its parser
_FORMAT: Final[dict[str, Any]] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dp-compile`. Returns the exit status: 0 done, 1 failed, 2 bad options or files, 130 interrupted."""
    args = _build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        status = run(args)
        sys.stdout.flush()
        return status
    except DPCompileError as error:
        print(f"dp-compile: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's flush at exit reports it
        return 0
    except KeyboardInterrupt:
        print("\ndp-compile: interrupted", file=sys.stderr, flush=True)
        if argv is None:  # as a command: the interpreter takes more than a second to unload torch
            sys.stdout.flush()
            os._exit(130)
        return 130


class Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"dp-compile: error: {message}. See {self.prog} --help.\n")


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="dp-compile", description="Data-parallel training under torch.compile.")
    versions = f"dp-compile {version('dp_compile')}, torch {version('torch')}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=versions, help="print versions of dp-compile and torch")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for declare in (_add_train, _add_explain, _add_timeline, _add_predict, _add_bench):
        declare(partial(subparsers.add_parser, **_FORMAT))
    return parser


def _add_train(add: Add) -> None:
    parser = add(
        "train",
        help="train a small GPT on several processes and show what happened to its gradients",
        description="Train a small GPT on the source of Python's standard library, data parallel.",
        epilog="""\
Without torchrun it starts its processes on this machine. Two of them take half
a minute on two idle cores, most of it compilation. A token is a byte. Losses
are rank 0's, in nats per byte. Step times exclude two steps, which compile.
""",
    )
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="blocks (%(default)s)")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="a multiple of 32 (%(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps (300; 25 with --check)")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (one per GPU, at least 2)")
    parser.add_argument("--bucket-cap-mb", type=float, metavar="X", help="bucket size in MiB (default: planned)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="also train torch's DistributedDataParallel from the same seed, both with SGD, and compare all parameters",
    )
    parser.add_argument("--save-step", metavar="FILE", help="measure the last steps and write a step file")
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    for name in ("layers", "width", "steps", "ranks"):
        if (value := getattr(args, name)) is not None:
            require_integer(f"--{name}", value, 1)
    from dp_compile.train import job

    return job.launch(args)


def _add_step(parser: Any) -> None:
    parser.add_argument("step", metavar="STEP.json")
    text = "a torch.profiler trace of steps under this plan; .gz too"
    parser.add_argument("--profile", metavar="TRACE", help=text)


def _read_step(args: argparse.Namespace) -> Step:
    from dp_compile.insight.profile import measured_step
    from dp_compile.insight.step import Step

    try:
        step = Step.from_json(Path(args.step).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{args.step}: {getattr(error, 'strerror', None) or error}") from error
    return step if args.profile is None else replace(step, measured=measured_step(args.profile, step))


def _add_explain(add: Add) -> None:
    parser = add(
        "explain",
        help="what bounds a saved step, what is exposed and why, what would help",
        description="Explain a step that was saved by Step.to_json.",
        epilog="""\
A step file is written by dp-compile train --save-step step.json, or by
  pathlib.Path("step.json").write_text(dp_compile.step_of(model).to_json())
""",
    )
    _add_step(parser)
    parser.add_argument("--buckets", action="store_true", help="all buckets, with members and reasons")
    parser.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    from dp_compile.insight.explain import Explanation

    print(Explanation(_read_step(args)).text(verbose=args.buckets))
    return 0


def _add_timeline(add: Add) -> None:
    parser = add(
        "timeline",
        help="draw a step: compute and network, planned and measured",
        description="Draw a saved step as *.svg or *.json, a trace for ui.perfetto.dev.",
        epilog="Times are predicted. Measured ones, if any, are drawn below on the same axis.",
    )
    _add_step(parser)
    parser.add_argument("-o", "--output", type=Path, action="append", required=True, metavar="FILE")
    parser.set_defaults(run=_timeline)


def _timeline(args: argparse.Namespace) -> int:
    for path in args.output:
        require(path.suffix in (".svg", ".json"), "-o", "a name *.svg or *.json", str(path))
        require(path.resolve() != Path(args.step).resolve(), "-o", "another file than the step", str(path))
    from dp_compile.insight.timeline import timeline_picture, timeline_trace

    step = _read_step(args)
    for path in args.output:
        text = timeline_picture(step) if path.suffix == ".svg" else json.dumps(timeline_trace(step))
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}.") from error
        print(f"written to {path}")
    return 0


def _add_predict(add: Add) -> None:
    parser = add(
        "predict",
        help="predict a step on other ranks, links, dtypes",
        description="Predict a saved step for every combination of the options.",
        epilog=f"""\
example:
  dp-compile predict step.json --ranks 8,64 --link infiniband-ndr,ethernet-25
      four rows; what is not given stays as in the step

links   {", ".join([*LINKS][:4])},
        {", ".join([*LINKS][4:])}
dtypes  bfloat16, float16, float32

Nothing is run. Planned buckets are replanned for each row.
""",
    )
    _add_step(parser)
    parser.add_argument("--ranks", metavar="N,..", type=whole_numbers, default=[None], help="numbers of ranks")
    text = "link between ranks (on two levels of network, between nodes)"
    parser.add_argument("--link", metavar="NAME,..", type=words, default=[None], help=text)
    parser.add_argument("--dtype", metavar="NAME,..", type=words, default=[None], help="dtype of sent gradients")
    parser.set_defaults(run=_predict)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    return list(map(int, words(text)))


def _predict(args: argparse.Namespace) -> int:
    from dp_compile.insight.predict import predict
    from dp_compile.insight.step import format_ms

    step, rows = _read_step(args), []
    cells = [["ranks", "link", "dtype", "buckets", "backward", "exposed", "end", "at best"]]
    for ranks, link, dtype in itertools.product(args.ranks, args.link, args.dtype):
        made = predict(step, ranks=ranks, link=link, dtype=SHORT_NAMES.get(dtype or "", dtype))
        times = map(format_ms, (made.backward_s, made.exposed_s, made.end_s, made.bound_s))
        cells.append([f"{made.world_size:,}", link or "-", dtype or "-", str(len(made.plan.buckets)), *times])
        where = ", ".join(filter(None, (count(made.world_size, "rank"), link, dtype)))
        basis = f"link: {made.cost_source}; backward: {made.ready.basis}"
        rows.append((made.exposed_s, f"{format_ms(made.exposed_s)} of {format_ms(made.end_s)}, {where}\n", basis))
    print(f"{'Least exposed' if len(rows) > 1 else 'Predicted, exposed'}: {min(rows)[1]}")
    print(*table(cells, left=[1, 2]), "", *dict.fromkeys(in_columns(basis) for *_, basis in rows), sep="\n")
    return 0


_OF_BENCH: Final = """\
A suite is packaged, or a TOML file:

  # Your own workload or mode is a function in a module of the file's directory.
  # It returns a dp_compile.bench.contract.Workload or Mode: "my_models:net".
  workloads = ["gpt-4l"]
  modes = ["oracle", "ddp", "ddp:5", "ours"]
  networks = [
    {kind = "loopback"},
    # Network namespaces and tc-tbf, as root; comm_over_compute sets the rate.
    {kind = "shaped", rate_mbit = 640},
    {kind = "shaped", comm_over_compute = 0.5},
    # One process, 63 ranks are simulated.
    {kind = "simulated", ranks = 64, latency_us = 10, rate_mbit = 8000},
  ]
  repetitions = 15   # or another field of dp_compile.bench.suites.Suite

examples:
  dp-compile bench run short                        writes bench-short.json
  dp-compile bench compare before.json bench-short.json
  dp-compile bench report bench-short.json          prints the tables again

Exit status: 0; 1 if a mode was not measured, became slower than noise explains
or has higher counts; 2 if a suite, file or option is wrong, or two runs
cannot be compared.
"""


def _add_bench(add: Add) -> None:
    description = "Measure ways to train data parallel in one run, and compare runs."
    parser = add("bench", help=description.lower()[:-1], description=description, epilog=_OF_BENCH)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add = partial(commands.add_parser, epilog=_OF_BENCH, **_FORMAT)
    parser = add("run", help="measure a suite", description="Measure a suite.")
    packaged = tomllib.loads(Path(bench.__path__[0], "suites.toml").read_text())
    parser.add_argument("suite", help=f"a TOML file, or packaged: {', '.join(packaged)}")
    parser.add_argument("--out", metavar="FILE", help="the result (bench-SUITE.json)")
    parser.set_defaults(run=_bench_run)
    text = "compare two results, exit with 1 on a regression"
    parser = add("compare", help=text, description=text)
    parser.add_argument("baseline", metavar="BASELINE", type=Path)
    parser.add_argument("new", metavar="NEW", type=Path)
    parser.set_defaults(run=_bench_compare)
    text = "print a result as tables in Markdown"
    parser = add("report", help=text, description=text)
    parser.add_argument("result", metavar="RESULT", type=Path)
    parser.set_defaults(run=_bench_report)


def _bench_run(args: argparse.Namespace) -> int:
    from dp_compile.bench import results, runner, suites

    suite = suites.load(args.suite)
    path = Path(args.out or f"bench-{suite.name}.json")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM stops ranks and removes networks
    try:
        found = runner.run(suite, path)
    finally:
        signal.signal(signal.SIGTERM, before)
    print(*results.lines(found), sep="\n")
    failures = results.failures(found)
    for each in failures:
        print(f"failed: {each}", file=sys.stderr)
    print(f"written to {path}", file=sys.stderr)
    return 1 if failures else 0


def _bench_compare(args: argparse.Namespace) -> int:
    from dp_compile.bench import results

    text, regressions = results.compare(results.load(args.baseline), results.load(args.new))
    print(text, end="")
    return 1 if regressions else 0


def _bench_report(args: argparse.Namespace) -> int:
    from dp_compile.bench import results

    print(*results.lines(results.load(args.result)), sep="\n")
    return 0
