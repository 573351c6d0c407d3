"""What `.ci/gpu` does: a few steps, each with its time, output and files; no number comes from anywhere but a run."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WITHIN_S = 1500.0
OLDEST = (2, 11)
NEEDED = ("torch", "triton", "sympy", "numpy", "tqdm", "pytest", "pytest_timeout", "xdist", "hypothesis", "expecttest")


@dataclass(frozen=True)
class Step:
    """A command whose output goes to `NAME.txt`, and the files that it makes beside that. `{out}` is the folder."""

    name: str
    command: tuple[str, ...]
    within_s: float
    files: tuple[str, ...] = ()


BENCH = ("-m", "dp_compile", "bench", "run", "--fresh", "--quiet", "--out")
STEPS = (
    Step("tests", ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"), 420),
    Step("profile", ("tests/gpu/profiled.py", "{out}"), 240, ("memory.json", "trace.json.gz", "step.json")),
    Step(
        "timeline",
        (
            "-m",
            "dp_compile",
            "timeline",
            "{out}/step.json",
            "-o",
            "{out}/timeline.html",
            "--profile",
            "{out}/trace.json.gz",
        ),
        60,
        ("timeline.html",),
    ),
    Step("nccl", (*BENCH, "{out}/nccl.json", "tests/gpu/nccl.toml"), 360, ("nccl.json",)),
    Step("fabric", (*BENCH, "{out}/fabric.json", "tests/gpu/fabric.toml"), 420, ("fabric.json",)),
)


def missing() -> list[str]:
    """What is not there, each with what to do."""
    lacks = [f"no Python package {name}: pip install it" for name in NEEDED if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("torch") is None:
        return lacks
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST:
        lacks.append(f"torch {torch.__version__} is too old: {OLDEST[0]}.{OLDEST[1]} or newer")
    if torch.version.cuda is None:
        lacks.append(f"torch {torch.__version__} was built without CUDA: install a build with it")
    elif not torch.cuda.is_available():
        lacks.append("no GPU that torch can use: nvidia-smi says whether the driver sees one")
    elif not torch.distributed.is_nccl_available():
        lacks.append("torch was built without NCCL")
    return lacks


def about() -> str:
    lines = [f"date {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}", platform.platform()]
    for command in (
        ("git", "rev-parse", "HEAD"),
        ("git", "status", "--short"),
        ("nvidia-smi",),
        (sys.executable, "-c", "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version())"),
    ):
        lines += [f"$ {' '.join(command)}", _output_of(command, 60.0)[1]]
    return "\n".join(lines) + "\n"


def _output_of(command: Sequence[str], within_s: float) -> tuple[str, str]:
    """How it ended, and what it printed."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, timeout=within_s, check=False, **both)
    except FileNotFoundError as error:
        return "not there", str(error)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed if isinstance(printed, str) else printed.decode(errors="replace")
        return f"stopped after {within_s:.0f} s", text
    return "ok" if done.returncode == 0 else f"failed with {done.returncode}", done.stdout


def run(out: Path) -> bool:
    """All steps, whatever becomes of those before; `summary.txt` is there after each of them."""
    end, summary, well = time.monotonic() + WITHIN_S, [], True
    (out / "machine.txt").write_text(about())
    for step in STEPS:
        start, left = time.monotonic(), end - time.monotonic()
        if left < 10:
            ended, printed = "not run: the 25 minutes were used up", ""
        else:
            command = [sys.executable, *(part.replace("{out}", str(out)) for part in step.command)]
            ended, printed = _output_of(command, min(step.within_s, left))
        well = well and ended == "ok"
        (out / f"{step.name}.txt").write_text(printed or f"{ended}\n")
        for name in step.files:
            if not (out / name).exists():
                (out / name).write_text(f"not made: {step.name} {ended}\n")
        summary.append(f"{step.name}: {ended}, {time.monotonic() - start:.0f} s")
        print(summary[-1], flush=True)
        (out / "summary.txt").write_text("\n".join(summary) + "\n")
    return well


def dry_run(out: Path, why: str) -> None:
    """Every file that a run makes, saying that it was not run; and every script and suite is looked at."""
    from dp_compile.bench import suite

    for step in STEPS:
        for part in step.command:
            if part.endswith(".toml"):
                suite.load(str(ROOT / part))
            elif part.endswith(".py"):
                compile((ROOT / part).read_text(), part, "exec")
        for name in (f"{step.name}.txt", *step.files):
            (out / name).write_text(f"not run: {why}\n")
        print(f"{step.name}: {' '.join(step.command)} (at most {step.within_s:.0f} s)")
    for name in ("machine.txt", "summary.txt"):
        (out / name).write_text(f"not run: {why}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=".ci/gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and check that it could start")
    parser.add_argument("--out", type=Path, help="the folder of the results (gpu-results/DATE)")
    asked = parser.parse_args(arguments)
    lacks = missing()
    for each in lacks:
        print(f"missing: {each}", file=sys.stderr)
    if lacks and not asked.dry_run:
        return 1
    out: Path = asked.out or ROOT / "gpu-results" / time.strftime("%Y-%m-%d-%H%M")
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(f"results: {out}", flush=True)
    if asked.dry_run:
        dry_run(out, "no GPU" if lacks else "--dry-run")
        return 0
    return 0 if run(out) else 1


if __name__ == "__main__":
    sys.exit(main())
