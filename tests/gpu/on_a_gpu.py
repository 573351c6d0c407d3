"""`.ci/gpu [first|second] [--rehearse] [--out DIR]`: runs the experiments G1 to G8 and writes a table of claims.

The runner imports no torch. Each experiment of `experiments.py` is a set of processes with one time-out. A process
appends a line of JSON to `results.jsonl` as soon as it has a result, so a run that is cut keeps its numbers. The table
`summary.md` is written again after each experiment, from these lines alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PART_S = 274.0
"""Of the 280 s of a part; starting and ending take the rest."""
OLDEST = (2, 11)
NEEDED = ("torch", "sympy", "numpy", "tqdm")
WHOLE = "its processes end by themselves"
"""The last claim of each experiment."""
PATIENCE = 3
"""By how much limits of a rehearsal are longer. Two idle cores take less than a GPU is given, but cores are shared."""
STOPPED = "was stopped"
MOST_DEATHS = 4
GRACE_S = 10.0
"""How long the other ranks of a group may go on after one of them died."""
CACHE = Path(os.environ.get("DP_COMPILE_GPU_CACHE", "/tmp/dp_compile_gpu"))
"""Compiled code: the second part finds what the first has compiled, on the same warm machine."""

PASSED, FAILED, MEASURED, NEEDS_A_GPU = "passed", "FAILED", "measured", "needs a GPU"
PLANNED, NOT_RUN, OUT_OF_TIME, BEGUN = "planned", "not run", "not run (time)", "begun"
WORST_FIRST = (FAILED, OUT_OF_TIME, NOT_RUN, NEEDS_A_GPU, PASSED, MEASURED, PLANNED)


@dataclass(frozen=True)
class Task:
    """What a process of an experiment is given: which one it is, where it runs, from when until when (Unix times).

    `features`: a pattern for those of G2. `again`: it was started before, and died.
    """

    experiment: str
    role: str
    rank: int
    ranks: int
    device: str
    rehearse: bool
    gpus: int
    features: str
    patience: float
    again: bool
    out: str
    scratch: str
    until_s: float

    @property
    def results(self) -> Path:
        return Path(self.out) / "results.jsonl"

    def planned(self, *claims: str) -> None:
        """Claims that this process is going to examine. Those without a result at the end are reported too."""
        append(self.results, *({"experiment": self.experiment, "claim": each, "status": PLANNED} for each in claims))

    def record(self, claim: str, status: str | bool, figure: str = "", detail: str = "") -> None:
        """The result for one claim. A claim of several ranks has passed if it has on each."""
        status = {True: PASSED, False: FAILED}.get(status, status) if isinstance(status, bool) else status
        line = {"experiment": self.experiment, "claim": claim, "status": status, "figure": figure, "detail": detail}
        append(self.results, line | {"role": self.role, "rank": self.rank, "time": round(time.time(), 1)})

    # What processes of one experiment tell each other: small files. They outlive a process that was killed.

    def publish(self, name: str, value: Any) -> None:
        part = Path(self.scratch, f"{name}.part{os.getpid()}")
        part.write_text(json.dumps(value))
        part.replace(Path(self.scratch, name))

    def read(self, name: str, of: str = "") -> Any:
        """What was published under this name, once it is there; `None` if `of`, a role and rank, ends without it."""
        while time.time() < self.until_s:
            ended = of and Path(self.scratch, f"ended.{of}").exists()
            if Path(self.scratch, name).exists():
                return json.loads(Path(self.scratch, name).read_text())
            if ended:
                return None
            time.sleep(0.002)
        return None


@dataclass(frozen=True)
class Process:
    """One process of an experiment. `wave`: those of the next start when those of one before have ended."""

    role: str
    rank: int = 0
    ranks: int = 1
    wave: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    may_die: bool = False


@dataclass(frozen=True)
class Machine:
    """What the experiments are adapted to. `nccl`: its version, `(0, 0, 0)` without a GPU. `patience`: times limits."""

    gpus: int
    nccl: tuple[int, ...]
    rehearse: bool
    features: str = ""
    patience: float = 1.0

    @property
    def ranks(self) -> int:
        """Of experiments on the real network: one for each GPU."""
        return max(1, min(self.gpus, 8))


@dataclass(frozen=True)
class Experiment:
    """`processes(machine)` start together. `limit_s`: on a GPU. `judge`: records what processes left that may die.

    Processes that say which claim they examine (`now.ROLE.RANK`) are started again after a death, for those that have
    no result yet.
    """

    name: str
    title: str
    part: str
    limit_s: float
    processes: Callable[[Machine], list[Process]]
    judge: Callable[[Task], None] | None = None


def roles(*names: str, wave: int = 0, ranks: int = 1, **given: Any) -> list[Process]:
    return [Process(name, rank, ranks, wave, **given) for name in names for rank in range(ranks)]


def pair(machine: Machine, role: str, **given: Any) -> list[Process]:
    """Two ranks: on two GPUs if there are two, else on one."""
    return [Process(role, rank, 2, environment=nccl_settings(machine, rank), **given) for rank in range(2)]


def nccl_settings(machine: Machine, rank: int) -> dict[str, str]:
    """Variables with which NCCL accepts a second rank on the same GPU.

    Up to 2.30.2 NCCL compares host and bus to find "Duplicate GPU"; `NCCL_HOSTID` makes each rank a host of its own,
    and they communicate over sockets. From 2.30.3 on it has a variable for it, which excludes NVLS.
    """
    if machine.gpus != 1:
        return {}
    if machine.nccl >= (2, 30, 3):
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
    over_sockets = "NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_NET=Socket NCCL_ALGO=Ring NCCL_PROTO=Simple"
    settings = dict(each.split("=") for each in f"{over_sockets} NCCL_MAX_CTAS=4".split())
    return settings | {"NCCL_HOSTID": f"rank-{rank}"}


def g1(machine: Machine) -> list[Process]:
    peers = ("python_reducer",) if machine.ranks > 1 else ()
    return roles("ours", "compute", "ddp", "ddp_compiled", *peers, ranks=machine.ranks)


def g2(machine: Machine) -> list[Process]:
    """Pairs of ranks at the same time: with one, the GPU would wait for its compiler."""
    names = ("nccl captured", "nccl eager")
    if machine.rehearse:
        names = ("stand-in captured", "stand-in eager", "gloo captured")
    return [each for name in names for each in pair(machine, name)]


def g3(machine: Machine) -> list[Process]:
    cases = ("kill stand-in", "skip gloo") if machine.rehearse else ("kill", "skip", "kill reading", "kill blocking")
    quick = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}  # the watchdog would write a record of all collectives first
    found = []
    for case in cases:
        more = quick | ({"TORCH_NCCL_BLOCKING_WAIT": "1"} if "blocking" in case else {})
        for each in pair(machine, case, may_die=True):
            found.append(replace(each, environment={**each.environment, **more}))
    return found


def judge_g3(task: Task) -> None:
    """What the rank that is left said, and when it ended."""
    scratch = Path(task.scratch)
    for case in sorted(path.name.split(".")[1] for path in scratch.glob("out.*.0")):
        fault, *how = case.split()
        what = {"kill": "rank 1 is killed in a backward", "skip": "rank 1 skips a step"}[fault]
        known = {"reading": "nccl, the loop reads each loss", "blocking": "nccl, TORCH_NCCL_BLOCKING_WAIT=1"}
        claim = f"{what} ({known.get(how[0], how[0]) if how else 'nccl'})"
        printed = (scratch / f"out.{case}.0").read_text(errors="replace")
        ended = json.loads((scratch / f"ended.{case}.0").read_text())
        task.record(f"{claim}: rank 0 ends", ended["code"] is not None, f"{ended['seconds']:.0f} s after the start")
        lines = [line for line in printed.splitlines() if "rank 1" in line and "synchronised backward" in line]
        task.record(
            f"{claim}: rank 0 names rank and step", bool(lines), lines[-1][-400:] if lines else "", printed[-800:]
        )


def g4(machine: Machine) -> list[Process]:
    """The code is compiled first without the tool. Memory is not cached: else nothing is outside of an allocation."""
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found = [Process("plain")]
    if not machine.rehearse and shutil.which("compute-sanitizer"):
        for tool in ("memcheck", "racecheck"):
            prefix = ("compute-sanitizer", "--tool", tool, "--log-file", f"{{scratch}}/{tool}.log")
            found.append(Process(tool, wave=1, prefix=prefix, environment=uncached, may_die=True))
    return found


def judge_g4(task: Task) -> None:
    """What the tools wrote at the end of their logs."""
    marks = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}
    for tool, mark in marks.items():
        claim, log = f"{tool} finds nothing in one step", Path(task.scratch, f"{tool}.log")
        text = log.read_text(errors="replace") if log.exists() else ""
        said = [line for line in text.splitlines() if "SUMMARY" in line]
        path = Path(task.scratch, f"ended.{tool}.0")
        ended = path.exists() and json.loads(path.read_text())["code"] is not None
        if task.rehearse:
            task.record(claim, NEEDS_A_GPU)
        elif not shutil.which("compute-sanitizer"):
            task.record(claim, NOT_RUN, "no compute-sanitizer here")
        elif said:
            task.record(claim, mark in said[-1], said[-1].strip("= "), text[:1500])
        else:
            task.record(claim, FAILED if ended else OUT_OF_TIME, detail=f"no summary in its log: {text[-1000:]}")


def g5(machine: Machine) -> list[Process]:
    modes = ("ours", "ddp") if machine.rehearse else ("ours", "ddp", "ddp_compiled", "python_reducer")
    found = roles(*(f"{mode}@{ranks}" for ranks in ((8,) if machine.rehearse else (8, 64)) for mode in modes))
    return [*found, *(roles("ours@nccl", ranks=machine.ranks, wave=1) if machine.ranks > 1 else ())]


def g8(machine: Machine) -> list[Process]:
    return roles("graph", *(() if machine.rehearse else ("reduce-overhead",)))


EXPERIMENTS = (
    Experiment("G1", "one rank: our step, plain compile, DDP, compiled DDP", "first", 80, g1),
    Experiment("G2", "two ranks: every feature, bits equal to torch's DDP", "first", 110, g2),
    Experiment("G3", "two ranks: a rank is killed, a rank skips a step", "first", 50, g3, judge_g3),
    Experiment("G4", "compute-sanitizer: memory and races", "first", 50, g4, judge_g4),
    Experiment("G5", "overlap on a simulated network of 8 and 64 ranks", "second", 100, g5),
    Experiment("G7", "memory with compiled DDP as reference", "second", 45, lambda _: roles("ours", "ddp_compiled")),
    Experiment("G8", "CUDA graphs", "second", 45, g8),
)


# --- one experiment -------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One call of `.ci/gpu`. `end_s`: when the part in progress has to be over, on the monotonic clock."""

    out: Path
    machine: Machine
    device: str
    end_s: float = 0.0

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def run(self, experiment: Experiment) -> None:
        """Start its processes, wait, kill what is left; report what has no result."""
        results, begin_s = self.out / "results.jsonl", time.monotonic()
        limit_s = min(experiment.limit_s * self.machine.patience, self.left_s())
        append(results, _line(experiment, WHOLE, BEGUN))
        if limit_s < 10:
            return append(results, _line(experiment, WHOLE, OUT_OF_TIME, "the part's 280 s were used up"))
        died: list[str] = []
        with tempfile.TemporaryDirectory(prefix=f"dp_compile-{experiment.name}-") as scratch:
            for again in range(1 + MOST_DEATHS):
                begun = _Begun(self, experiment, scratch, begin_s + limit_s, again=again > 0)
                ended = begun.run()
                died += [f"{each} {how}" for each, how in ended.items() if how]
                deadly = {claim: how for claim, how in begun.under_way(ended) if claim in self._waiting(experiment)}
                append(results, *(_line(experiment, claim, FAILED, detail=how) for claim, how in deadly.items()))
                if not deadly or not self._waiting(experiment) or begun.left_s() < 15:
                    break
        seconds = time.monotonic() - begin_s
        out_of_time = seconds >= limit_s
        why = f"stopped after {limit_s:.0f} s" if out_of_time else "; ".join(died)
        status = OUT_OF_TIME if out_of_time else FAILED if died else PASSED
        for claim in self._waiting(experiment):
            append(results, _line(experiment, claim, OUT_OF_TIME if out_of_time else FAILED, detail=why))
        append(results, _line(experiment, WHOLE, status, why if out_of_time else f"{seconds:.0f} s", why))

    def _waiting(self, experiment: Experiment) -> list[str]:
        rows = rows_of(self.out / "results.jsonl", experiment.name)
        return [row["claim"] for row in rows if row["status"] == PLANNED]


Started = dict[str, tuple[Process, "subprocess.Popen[bytes]", Path]]
"""By role and rank: the process, and the file of what it prints."""


@dataclass
class _Begun:
    """The processes of one experiment, once. `end_s`: on the monotonic clock."""

    of: Run
    experiment: Experiment
    scratch: str
    end_s: float
    again: bool

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def run(self) -> dict[str, str]:
        """By process how it died; an empty text if it ended well, or as it was meant to."""
        ended: dict[str, str] = {}
        processes = self.experiment.processes(self.of.machine)
        shutil.rmtree(self.scratch, ignore_errors=True)
        Path(self.scratch).mkdir()
        for wave in sorted({each.wave for each in processes}):
            started: Started = {}
            try:
                for each in (process for process in processes if process.wave == wave):
                    log = Path(self.scratch, f"out.{each.role}.{each.rank}")
                    started[f"{each.role}.{each.rank}"] = each, self._start(each, log), log
                ended |= _wait(started, self.scratch, self.end_s)
            finally:
                self._stop(started, ended)
        if self.experiment.judge is not None:
            try:
                self.experiment.judge(self._task(Process("judge")))
            except (OSError, ValueError, LookupError) as error:  # the experiments after this one still run
                ended["judge.0"] = f"{type(error).__name__}: {error}"
        return ended

    def under_way(self, ended: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """The claims that processes examined when they died, each with how."""
        for name, how in ended.items():
            path = Path(self.scratch, f"now.{name}")
            if how not in ("", STOPPED) and path.exists():
                yield json.loads(path.read_text()), how

    def _task(self, process: Process) -> Task:
        run = self.of
        return Task(
            experiment=self.experiment.name,
            role=process.role,
            rank=process.rank,
            ranks=process.ranks,
            device=run.device,
            rehearse=run.machine.rehearse,
            gpus=run.machine.gpus,
            features=run.machine.features,
            patience=run.machine.patience,
            again=self.again,
            out=str(run.out),
            scratch=self.scratch,
            until_s=time.time() + self.left_s(),
        )

    def _start(self, process: Process, log: Path) -> subprocess.Popen[bytes]:
        command = [
            *process.prefix,
            sys.executable,
            str(HERE / "experiments.py"),
            json.dumps(asdict(self._task(process))),
        ]
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
            "TRITON_CACHE_DIR": str(CACHE / "triton"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if self.of.machine.rehearse else {}),
            **process.environment,
        }
        command = [part.replace("{scratch}", self.scratch) for part in command]
        with log.open("ab") as to:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=to, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _stop(self, started: Started, ended: Mapping[str, str]) -> None:
        """Kill what is left, with all that it has started, and keep what was printed."""
        for _, process, _ in started.values():
            _kill(process)
        with (self.of.out / "log.txt").open("a") as whole:
            for name, (_, _, log) in started.items():
                text = log.read_text(errors="replace")
                whole.write(f"--- {self.experiment.name} {name}: {ended.get(name) or 'ended'}\n{text[-60_000:]}\n")


def _wait(started: Started, scratch: str, end_s: float) -> dict[str, str]:
    """Until all have ended, or `end_s`. Ranks of a role in which one has died have `GRACE_S`."""
    ended: dict[str, str] = {}
    begin_s, until_s = time.monotonic(), dict.fromkeys((each.role for each, _, _ in started.values()), end_s)
    while len(ended) < len(started):
        for name, (each, process, log) in started.items():
            if name in ended:
                continue
            code, how = process.poll(), STOPPED
            if code is not None:
                how = _death(code, log)
            elif time.monotonic() < until_s[each.role]:
                continue
            _kill(process)
            ended[name] = "" if each.may_die else how
            seconds = round(time.monotonic() - begin_s, 1)
            Path(scratch, f"ended.{name}").write_text(json.dumps({"code": code, "seconds": seconds}))
            if ended[name]:
                until_s[each.role] = min(until_s[each.role], time.monotonic() + GRACE_S)
        time.sleep(0.02)
    return ended


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _death(code: int, log: Path) -> str:
    """How a process ended, with its last line; nothing if it ended well."""
    if code == 0:
        return ""
    last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return f"{how}: {''.join(last)[:300]}"


# --- results --------------------------------------------------------------------------------------------------------


def append(results: Path, *lines: Mapping[str, Any]) -> None:
    """Lines of JSON, in one write: several processes append to the same file."""
    with results.open("ab", buffering=0) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def _line(experiment: Experiment, claim: str, status: str, figure: str = "", detail: str = "") -> dict[str, Any]:
    given = {"claim": claim, "status": status, "figure": figure, "detail": detail, "time": round(time.time(), 1)}
    return {"experiment": experiment.name, **given}


def rows_of(results: Path, experiment: str | None = None) -> list[dict[str, Any]]:
    """One row for each claim, of all ranks and processes: the worst status counts. What ran again replaces."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in _lines(results):
        key = line["experiment"], line["claim"]
        if line["status"] == BEGUN:
            rows = {each: row for each, row in rows.items() if each[0] != line["experiment"]}
            continue
        known = rows.get(key)
        if known is None or WORST_FIRST.index(line["status"]) < WORST_FIRST.index(known["status"]):
            rows[key] = line  # in the place of the one before
    return [row for row in rows.values() if experiment in (None, row["experiment"])]


def _lines(results: Path) -> Iterator[dict[str, Any]]:
    for text in results.read_text().splitlines() if results.exists() else ():
        with contextlib.suppress(ValueError):  # a process was killed while it wrote
            yield json.loads(text)


def summary(rows: Sequence[Mapping[str, Any]], head: str) -> str:
    """The table for people."""
    counts = {status: sum(row["status"] == status for row in rows) for status in WORST_FIRST}
    counted = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    lines = [f"# {head}", "", counted, "", "| | claim | | figure |", "|---|---|---|---|"]
    titles = {each.name: each.title for each in EXPERIMENTS}
    for row in rows:
        if row["experiment"] in titles:
            lines.append(f"| **{row['experiment']}** | **{titles.pop(row['experiment'])}** | | |")
        status = f"**{row['status']}**" if row["status"] == FAILED else row["status"]
        cells = "", row["claim"], status, row.get("figure", "")
        lines.append("| " + " | ".join(" ".join(str(cell).replace("|", "/").split()) for cell in cells) + " |")
    details = [row for row in rows if row["status"] == FAILED and row.get("detail")]
    lines += ["", "## Details", ""] if details else []
    for row in details:
        lines += [f"- {row['experiment']}, {row['claim']}: {' '.join(str(row['detail']).split())[:1500]}"]
    return "\n".join(lines) + "\n"


# --- the machine ----------------------------------------------------------------------------------------------------

PROBE = """
import json, torch
cuda = torch.cuda.is_available()
has_nccl = cuda and torch.distributed.is_nccl_available()
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count() if cuda else 0,
    "name": torch.cuda.get_device_name() if cuda else "", "nccl": torch.cuda.nccl.version() if has_nccl else [0, 0, 0],
}))
"""


def probe() -> dict[str, Any]:
    """What torch sees, asked in a process of its own; empty if it cannot be imported."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-500:]}


def missing(seen: Mapping[str, Any], *, rehearse: bool) -> list[str]:
    """What is not there, each with what to do."""
    needed = NEEDED if rehearse else (*NEEDED, "triton")  # Inductor needs it on a GPU
    lacks = [f"no Python package {name}: pip install it" for name in needed if importlib.util.find_spec(name) is None]
    if "torch" not in seen:
        return [*lacks, f"torch cannot be imported: {seen.get('error', '')}"]
    version = tuple(int(part) for part in seen["torch"].split("+")[0].split(".")[:2])
    if version < OLDEST:
        lacks.append(f"torch {seen['torch']} is too old: {OLDEST[0]}.{OLDEST[1]} or newer")
    if rehearse:
        return lacks
    if seen["cuda"] is None:
        lacks.append(f"torch {seen['torch']} was built without CUDA: install a build with it, or --rehearse")
    elif not seen["gpus"]:
        lacks.append("no GPU that torch can use: nvidia-smi says whether the driver sees one; or --rehearse")
    elif not any(seen["nccl"]):
        lacks.append("torch was built without NCCL")
    return lacks


def about(seen: Mapping[str, Any]) -> str:
    """The text of `machine.txt`."""
    lines = [f"date {datetime.datetime.now().astimezone().isoformat(timespec='seconds')}", platform.platform()]
    lines += [f"Python {platform.python_version()}, {os.cpu_count()} cores", json.dumps(seen)]
    for command in (("git", "rev-parse", "HEAD"), ("git", "status", "--short"), ("nvidia-smi",)):
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            printed = subprocess.run(command, cwd=ROOT, text=True, timeout=30, check=False, **both).stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            printed = str(error)
        lines += [f"$ {' '.join(command)}", printed]
    return "\n".join(lines) + "\n"


# --- the command ----------------------------------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=".ci/gpu", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("first", "second"), help="one half, of at most 280 s; else both")
    parser.add_argument("--rehearse", action="store_true", help="the same on this CPU, with small sizes")
    parser.add_argument("--out", type=Path, help="the folder of the results (gpu-results/DATE)")
    parser.add_argument("--only", default="", help="names of experiments, separated by commas")
    parser.add_argument("--features", default="", help="only features of G2 whose names this pattern matches")
    parser.add_argument("--patience", type=float, help=f"limits are so many times longer ({PATIENCE} in a rehearsal)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: nothing failed; 1: something failed, or cannot start; 3: nothing failed, but not everything was run."""
    begin_s, asked, seen = time.monotonic(), parsed(arguments), probe()
    for each in (lacks := missing(seen, rehearse=asked.rehearse)):
        print(f"missing: {each}", file=sys.stderr)
    if lacks:
        return 1
    out: Path = (asked.out or ROOT / "gpu-results" / time.strftime("%Y-%m-%d-%H%M")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "machine.txt").write_text(about(seen))
    gpus = 0 if asked.rehearse else seen["gpus"]
    machine = Machine(
        gpus, tuple(seen["nccl"]), asked.rehearse, asked.features, asked.patience or (PATIENCE if asked.rehearse else 1)
    )
    run = Run(out, machine, "cpu" if asked.rehearse else "cuda")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of an experiment are killed too
    where = "a rehearsal on a CPU" if asked.rehearse else f"{gpus} x {seen['name']}, NCCL {seen['nccl']}"
    head = f".ci/gpu, {time.strftime('%Y-%m-%d %H:%M')}: {where}, torch {seen['torch']}"
    print(f"results: {out}", flush=True)
    names = set(asked.only.split(",")) if asked.only else {each.name for each in EXPERIMENTS}
    for part in (asked.part,) if asked.part else ("first", "second"):
        run.end_s = begin_s + PART_S * machine.patience
        for experiment in (each for each in EXPERIMENTS if each.part == part and each.name in names):
            run.run(experiment)
            rows = rows_of(out / "results.jsonl")
            (out / "summary.md").write_text(summary(rows, head))
            print("\n".join(_shown(row) for row in rows if row["experiment"] == experiment.name), flush=True)
        begin_s = time.monotonic()
    statuses = {row["status"] for row in rows_of(out / "results.jsonl") if row["experiment"] in names}
    return 1 if FAILED in statuses else 3 if statuses & {OUT_OF_TIME, NOT_RUN} else 0


def _shown(row: Mapping[str, Any]) -> str:
    return f"{row['experiment']} {row['status']}: {row['claim']}" + (f": {row['figure']}" if row.get("figure") else "")


if __name__ == "__main__":
    sys.exit(main())
