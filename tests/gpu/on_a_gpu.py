"""`.ci/gpu [first|second] [--rehearse] [--out DIR]`: runs the experiments G1 to G9 and writes a table of claims.

Each experiment of `experiments.py` is a set of processes with one time-out. A process appends each result to
`results.jsonl` at once, so a run that is cut keeps its numbers; `summary.md` is written from these lines alone.
"""

import argparse
import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PART_S = 274.0
"""Of the 280 s of a part; starting and ending take the rest."""
OLDEST = (2, 11)
NEEDED = ("torch", "filelock", "sympy", "numpy", "tqdm")
WHOLE = "its processes end by themselves"
"""The last claim of each experiment."""
PATIENCE = 3
"""By how much limits of a rehearsal are longer. Two idle cores take less than a GPU is given, but cores are shared."""
STOPPED = "was stopped"
MOST_STARTS = 5
GRACE_S = 10.0
"""How long the other ranks of a group may go on after one of them died."""
CACHE = Path(os.environ.get("DP_COMPILE_GPU_CACHE", "/tmp/dp_compile_gpu"))
"""Compiled code: the second part finds what the first has compiled, on the same warm machine."""

PASSED, FAILED, MEASURED, NEEDS_A_GPU = "passed", "FAILED", "measured", "needs a GPU"
PLANNED, NOT_RUN, OUT_OF_TIME, BEGUN = "planned", "not run", "not run (time)", "begun"
WORST_FIRST = (FAILED, OUT_OF_TIME, NOT_RUN, NEEDS_A_GPU, PASSED, MEASURED, PLANNED)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`nccl`: its version, zeros without a GPU. `features`: a pattern for those of G2. `patience`: times limits."""

    gpus: int = 0
    nccl: tuple[int, ...] = (0, 0, 0)
    rehearse: bool = False
    features: str = ""
    patience: float = 1.0

    @property
    def cards(self):
        """The ranks of experiments on the real network: one for each GPU."""
        return max(1, min(self.gpus, 8))


@dataclass(frozen=True, kw_only=True)
class Task(Machine):
    """What a process is given; times are Unix times. `roles`: all of its wave. `again`: a process died before."""

    experiment: str
    out: str
    scratch: str
    until_s: float
    again: bool = False
    role: str = "judge"
    roles: Sequence[str] = ()
    rank: int = 0
    ranks: int = 1
    begun_s: float = 0.0

    @property
    def results(self):
        return Path(self.out) / "results.jsonl"

    def planned(self, *claims):
        """Claims that this process is going to examine. Those without a result at the end are reported too."""
        append(self.results, *({"experiment": self.experiment, "claim": each, "status": PLANNED} for each in claims))

    def record(self, claim, status, figure="", detail=""):
        """The result for one claim. A claim of several ranks has passed if it has on each."""
        status = (PASSED if status else FAILED) if isinstance(status, bool) else status
        append(self.results, line(self.experiment, claim, status, figure, detail, role=self.role, rank=self.rank))

    def waiting(self):
        """PlanResult claims without a result."""
        return [row["claim"] for row in rows_of(self.results, self.experiment) if row["status"] == PLANNED]

    def publish(self, name, value):
        """For other processes of the experiment, in a small file: it outlives a process that was killed."""
        part = Path(self.scratch, f"{name}.part{os.getpid()}")
        part.write_text(json.dumps(value))
        part.replace(Path(self.scratch, name))

    def published(self, name):
        path = Path(self.scratch, name)
        return json.loads(path.read_text()) if path.exists() else None

    def read(self, name, of=""):
        """What was published under this name, once it is there; `None` if `of`, a role and rank, ends without it."""
        while time.time() < self.until_s:
            ended = of and Path(self.scratch, f"ended.{of}").exists()
            if ended or Path(self.scratch, name).exists():
                return self.published(name)
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

    @property
    def name(self):
        return f"{self.role}.{self.rank}"


@dataclass(frozen=True)
class Experiment:
    """`limit_s`: on a GPU. `judge`: records what processes left that may die.

    Processes that publish the claim that they examine (`now.ROLE.RANK`) are started again for the rest if they die.
    """

    name: str
    title: str
    part: str
    limit_s: float
    processes: Callable[[Machine], list[Process]]
    judge: Callable[[Task], None] | None = None


def roles(*names, ranks=1, **given):
    return [Process(name, rank, ranks, **given) for name in names for rank in range(ranks)]


def pairs(machine, *names, **more):
    """Two ranks of each role: on two GPUs if there are two, else on one. `more`: variables."""
    found = roles(*names, ranks=2, may_die=bool(more))
    return [replace(each, environment=nccl_settings(machine, each.rank) | more) for each in found]


def nccl_settings(machine, rank):
    """Variables with which NCCL accepts a second rank on the same GPU.

    Up to 2.30.2 each rank seems to have another host by `NCCL_HOSTID`, and they communicate over sockets. From 2.30.3
    on NCCL has a variable for it, which excludes NVLS.
    """
    if machine.gpus != 1:
        return {}
    if machine.nccl >= (2, 30, 3):
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
    over_sockets = "NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_NET=Socket NCCL_ALGO=Ring NCCL_PROTO=Simple"
    settings = dict(each.split("=") for each in f"{over_sockets} NCCL_MAX_CTAS=4".split())
    return settings | {"NCCL_HOSTID": f"rank-{rank}"}


def g1(machine):
    peers = ("python_reducer",) if machine.cards > 1 else ()
    return roles("ours", "compute", "ddp", "ddp_compiled", *peers, ranks=machine.cards)


def g2(machine):
    """Pairs of ranks at the same time: with one, the GPU would wait for its compiler."""
    rehearsed = ("stand-in captured", "stand-in eager", "gloo captured")
    return pairs(machine, *(rehearsed if machine.rehearse else ("nccl captured", "nccl eager")))


def g3(machine):
    no_record = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}  # else the watchdog first writes one
    if machine.rehearse:
        return pairs(machine, "kill stand-in", "skip gloo", **no_record)
    blocking = pairs(machine, "kill blocking", **no_record, TORCH_NCCL_BLOCKING_WAIT="1")
    return pairs(machine, "kill", "skip", "kill reading", **no_record) + blocking


def judge_g3(task):
    """What the rank that is left printed, and when it ended."""
    known = {"": "nccl", "reading": "nccl, the loop reads each loss", "blocking": "nccl, TORCH_NCCL_BLOCKING_WAIT=1"}
    for log in sorted(Path(task.scratch).glob("out.*.0")):
        case, printed = log.name.split(".")[1], log.read_text(errors="replace")
        fault, _, how = case.partition(" ")
        what = {"kill": "rank 1 is killed in a backward", "skip": "rank 1 skips a step"}[fault]
        claim, ended = f"{what} ({known.get(how, how)})", task.published(f"ended.{case}.0")
        task.record(f"{claim}: rank 0 ends", ended["code"] is not None, f"{ended['seconds']:.0f} s after the start")
        lines = [each for each in printed.splitlines() if "rank 1" in each and "synchronised backward" in each]
        figure = lines[-1][-400:] if lines else ""
        task.record(f"{claim}: rank 0 names rank and step", bool(lines), figure, printed[-800:])


def g4(machine):
    """The code is compiled first without the tool. Memory is not cached: else nothing is outside of an allocation."""
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found = [Process("plain")]
    for tool in ("memcheck", "racecheck") if not machine.rehearse and shutil.which("compute-sanitizer") else ():
        prefix = ("compute-sanitizer", "--tool", tool, "--log-file", f"{{scratch}}/{tool}.log")
        found.append(Process(tool, wave=1, prefix=prefix, environment=uncached, may_die=True))
    return found


def judge_g4(task):
    """What the tools wrote at the end of their logs."""
    for log in sorted(Path(task.scratch).glob("*check.log")):
        text = log.read_text(errors="replace")
        for last in [each for each in text.splitlines() if "SUMMARY" in each][-1:]:
            passed = "ERROR SUMMARY: 0 errors" in last or "RACECHECK SUMMARY: 0 hazards" in last
            task.record(f"{log.stem} finds nothing in one step", passed, last.strip("= "), text[:1500])


def g5(machine):
    modes = ("ours", "ddp") if machine.rehearse else ("ours", "ddp", "ddp_compiled", "python_reducer")
    found = roles(*(f"{mode}@{ranks}" for ranks in ((8,) if machine.rehearse else (8, 64)) for mode in modes))
    return found + (roles("ours@nccl", ranks=machine.cards, wave=1) if machine.cards > 1 else [])


def g9(machine):
    """In a folder for each mode, that is empty for the first wave and full for the second."""
    found = []
    for wave, when in enumerate(("cold", "warm")):
        for mode in ("ours", "ddp_compiled") if machine.rehearse else ("ours", "ddp_compiled", "compute"):
            folder = f"{{scratch}}/{mode}"
            caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            found.append(Process(f"{mode} {when}", wave=wave, environment=caches))
    return found


EXPERIMENTS = (
    Experiment("G1", "one rank: our step, plain compile, DDP, compiled DDP", "first", 80, g1),
    Experiment("G2", "two ranks: every feature, bits equal to torch's DDP", "first", 110, g2),
    Experiment("G3", "two ranks: a rank is killed, a rank skips a step", "first", 50, g3, judge_g3),
    Experiment("G4", "compute-sanitizer: memory and races", "first", 50, g4, judge_g4),
    Experiment("G5", "overlap on a simulated network of 8 and 64 ranks", "second", 100, g5),
    Experiment("G7", "memory with compiled DDP as reference", "second", 45, lambda _: roles("ours", "ddp_compiled")),
    Experiment("G8", "CUDA graphs", "second", 45, lambda _: roles("graph", "reduce-overhead")),
    Experiment("G9", "start of a process, cold and warm", "second", 80, g9),
)


def run(experiment, machine, out, end_s):
    """Start its processes, wait, kill what is left; report what has no result. `end_s`: on the monotonic clock."""
    name, begin_s = experiment.name, time.monotonic()
    limit_s, results, died = min(experiment.limit_s * machine.patience, end_s - begin_s), out / "results.jsonl", []
    append(results, line(name, WHOLE, BEGUN))
    if limit_s < 10:
        return append(results, line(name, WHOLE, OUT_OF_TIME, "the part's 280 s were used up"))
    with tempfile.TemporaryDirectory(prefix=f"dp_compile-{name}-") as scratch:
        given = {**asdict(machine), "experiment": name, "out": str(out), "scratch": scratch}
        task = Task(**given, until_s=time.time() + limit_s)
        for start in range(MOST_STARTS):
            ended = _run_once(experiment, machine, replace(task, again=start > 0))
            died += [f"{each} {how}" for each, how in ended.items() if how]
            examined = {task.published(f"now.{each}"): how for each, how in ended.items() if how not in ("", STOPPED)}
            deadly = [claim for claim in examined if claim in task.waiting()]
            append(results, *(line(name, claim, FAILED, detail=examined[claim]) for claim in deadly))
            if not any(examined) or not task.waiting() or task.until_s - time.time() < 15:
                break
    seconds = time.monotonic() - begin_s
    if seconds >= limit_s:
        status = left = OUT_OF_TIME
        figure = why = f"stopped after {limit_s:.0f} s"
    else:
        status, left = FAILED if died else PASSED, FAILED
        figure, why = f"{seconds:.0f} s", "; ".join(died)
    append(results, *(line(name, claim, left, detail=why) for claim in task.waiting()))
    append(results, line(name, WHOLE, status, figure, why))


def _run_once(experiment, machine, task):
    """By process how it died; an empty text if it ended well, or as it was meant to."""
    ended = {}
    shutil.rmtree(task.scratch, ignore_errors=True)
    Path(task.scratch).mkdir()
    processes = experiment.processes(machine)
    for wave in sorted({each.wave for each in processes}):
        started = []
        together = [each for each in processes if each.wave == wave]
        names = tuple(dict.fromkeys(each.role for each in together))
        try:
            started += (_Started(each, replace(task, roles=names)) for each in together)
            ended |= _wait(started, task)
        finally:
            with Path(task.out, "log.txt").open("a") as whole:
                for each in started:
                    each.kill()
                    how = ended.get(each.process.name) or "ended"
                    whole.write(f"--- {experiment.name} {each.process.name}: {how}\n{each.printed()[-60_000:]}\n")
    if experiment.judge is not None:
        try:
            experiment.judge(task)
        except (OSError, ValueError, LookupError, TypeError) as error:  # the experiments after this one still run
            ended["judge.0"] = f"{type(error).__name__}: {error}"
    return ended


class _Started:
    """A process that runs, with all that it starts in one session."""

    def __init__(self, process, task):
        self.process, self._log = process, Path(task.scratch, f"out.{process.name}")
        given = replace(task, role=process.role, rank=process.rank, ranks=process.ranks, begun_s=time.time())
        command = [*process.prefix, sys.executable, str(HERE / "experiments.py"), json.dumps(asdict(given))]
        own = {
            "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
            "TRITON_CACHE_DIR": str(CACHE / "triton"),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if task.rehearse else {}),
            **process.environment,
        }
        command = [part.replace("{scratch}", task.scratch) for part in command]
        own = {name: value.replace("{scratch}", task.scratch) for name, value in own.items()}
        with self._log.open("ab") as to:
            more = {"cwd": ROOT, "env": os.environ | own, "start_new_session": True}
            self._popen = subprocess.Popen(command, stdout=to, stderr=subprocess.STDOUT, **more)

    def code(self):
        return self._popen.poll()

    def printed(self):
        return self._log.read_text(errors="replace")

    def death(self):
        """How it ended, with its last line; nothing if it ended well."""
        if (code := self._popen.returncode) == 0:
            return ""
        last = [each for each in self.printed().splitlines() if each.strip()][-1:]
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"{how}: {''.join(last)[:300]}"

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


def _wait(started, task):
    """Until all have ended, or the time is up. Ranks of a role in which one has died have `GRACE_S`."""
    ended = {}
    begin_s, until_s = time.time(), dict.fromkeys((each.process.role for each in started), task.until_s)
    while len(ended) < len(started):
        for each in started:
            process, code = each.process, each.code()
            if process.name in ended or (code is None and time.time() < until_s[process.role]):
                continue
            how = STOPPED if code is None else each.death()
            each.kill()
            ended[process.name] = "" if process.may_die else how
            task.publish(f"ended.{process.name}", {"code": code, "seconds": round(time.time() - begin_s, 1)})
            if ended[process.name]:
                until_s[process.role] = min(until_s[process.role], time.time() + GRACE_S)
        time.sleep(0.02)
    return ended


def append(results, *lines):
    """Lines of JSON, in one write: several processes append to the same file."""
    with results.open("ab", buffering=0) as file:
        file.write("".join(json.dumps(each) + "\n" for each in lines).encode())


def line(experiment, claim, status, figure="", detail="", **more):
    given = {"experiment": experiment, "claim": claim, "status": status, "figure": figure, "detail": detail}
    return given | more | {"time": round(time.time(), 1)}


def rows_of(results, experiment=None):
    """One row for each claim, of all ranks and processes: the worst status counts. What ran again replaces."""
    rows = {}
    for each in _lines(results):
        key = each["experiment"], each["claim"]
        if each["status"] == BEGUN:
            rows = {other: row for other, row in rows.items() if other[0] != each["experiment"]}
        elif key not in rows or WORST_FIRST.index(each["status"]) < WORST_FIRST.index(rows[key]["status"]):
            rows[key] = each  # in the place of the one before
    return [row for row in rows.values() if experiment in (None, row["experiment"])]


def _lines(results):
    for text in results.read_text().splitlines() if results.exists() else ():
        with contextlib.suppress(ValueError):  # a process was killed while it wrote
            yield json.loads(text)


def summary(rows, head):
    """The table for people."""

    def cell(text, most=None):
        return " ".join(str(text).split())[:most].replace("|", "/")

    counts = {status: sum(row["status"] == status for row in rows) for status in WORST_FIRST}
    counted = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    lines = [f"# {head}", "", counted, "", "| | claim | | figure |", "|---|---|---|---|"]
    titles = {each.name: each.title for each in EXPERIMENTS}
    for row in rows:
        if row["experiment"] in titles:
            lines.append(f"| **{row['experiment']}** | **{titles.pop(row['experiment'])}** | | |")
        status = f"**{row['status']}**" if row["status"] == FAILED else row["status"]
        lines.append(f"|  | {cell(row['claim'])} | {status} | {cell(row.get('figure', ''))} |")
    failed = [row for row in rows if row["status"] == FAILED and row.get("detail")]
    lines += ["", "## Details", ""] * bool(failed)
    lines += [f"- {row['experiment']}, {row['claim']}: {cell(row['detail'], 1500)}" for row in failed]
    return "\n".join(lines) + "\n"


def missing(*, rehearse):
    """What is not there, each with what to do. On a GPU Inductor needs Triton."""
    needed = NEEDED if rehearse else (*NEEDED, "triton")
    lacks = [f"no Python package {name}: pip install it" for name in needed if importlib.util.find_spec(name) is None]
    if lacks:
        return lacks
    import torch

    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) < OLDEST:
        lacks.append(f"torch {torch.__version__} is too old: {OLDEST[0]}.{OLDEST[1]} or newer")
    if not rehearse and torch.version.cuda is None:
        lacks.append(f"torch {torch.__version__} was built without CUDA: install a build with it, or --rehearse")
    elif not rehearse and not torch.cuda.is_available():
        lacks.append("no GPU that torch can use: nvidia-smi says whether the driver sees one; or --rehearse")
    elif not rehearse and not torch.distributed.is_nccl_available():
        lacks.append("torch was built without NCCL")
    return lacks


def about(head):
    """The text of `machine.txt`."""
    lines = [head, platform.platform(), f"Python {platform.python_version()}, {os.cpu_count()} cores"]
    for command in (("git", "rev-parse", "HEAD"), ("git", "status", "--short"), ("nvidia-smi",)):
        try:
            done = subprocess.run(command, cwd=ROOT, text=True, timeout=30, check=False, capture_output=True)
            printed = done.stdout + done.stderr
        except (OSError, subprocess.TimeoutExpired) as error:
            printed = str(error)
        lines += [f"$ {' '.join(command)}", printed]
    return "\n".join(lines) + "\n"


def parsed(arguments):
    parser = argparse.ArgumentParser(prog=".ci/gpu", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("first", "second"), help="one half, of at most 280 s; else both")
    parser.add_argument("--rehearse", action="store_true", help="the same on this CPU, with small sizes")
    parser.add_argument("--out", type=Path, help="the folder of the results (gpu-results/DATE)")
    parser.add_argument("--only", default="", help="names of experiments, separated by commas")
    parser.add_argument("--features", default="", help="only features of G2 whose names this pattern matches")
    parser.add_argument("--patience", type=float, help=f"limits are so many times longer ({PATIENCE} in a rehearsal)")
    return parser.parse_args(arguments)


def main(arguments=None):
    """0: nothing failed; 1: something failed, or cannot start; 3: nothing failed, but not everything was run."""
    begin_s, asked = time.monotonic(), parsed(arguments)
    for each in (lacks := missing(rehearse=asked.rehearse)):
        print(f"missing: {each}", file=sys.stderr)
    if lacks:
        return 1
    import torch

    out = (asked.out or ROOT / "gpu-results" / time.strftime("%Y-%m-%d-%H%M")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    patience, where = asked.patience or (PATIENCE if asked.rehearse else 1), "a rehearsal on a CPU"
    machine = Machine(rehearse=asked.rehearse, features=asked.features, patience=patience)
    if not asked.rehearse:
        machine = replace(machine, gpus=torch.cuda.device_count(), nccl=torch.cuda.nccl.version())
        where = f"{machine.gpus} x {torch.cuda.get_device_name()}, NCCL {machine.nccl}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes of an experiment are killed too
    head = f".ci/gpu, {time.strftime('%Y-%m-%d %H:%M')}: {where}, torch {torch.__version__}"
    (out / "machine.txt").write_text(about(head))
    print(f"results: {out}", flush=True)
    names = set(asked.only.split(",")) if asked.only else {each.name for each in EXPERIMENTS}
    for part in (asked.part,) if asked.part else ("first", "second"):
        end_s = begin_s + PART_S * machine.patience
        for experiment in (each for each in EXPERIMENTS if each.part == part and each.name in names):
            run(experiment, machine, out, end_s)
            rows = rows_of(out / "results.jsonl")
            (out / "summary.md").write_text(summary(rows, head))
            for row in (row for row in rows if row["experiment"] == experiment.name):
                figure = f": {row['figure']}" if row.get("figure") else ""
                print(f"{row['experiment']} {row['status']}: {row['claim']}{figure}", flush=True)
        begin_s = time.monotonic()
    statuses = {row["status"] for row in rows_of(out / "results.jsonl") if row["experiment"] in names}
    return 1 if FAILED in statuses else 3 if statuses & {OUT_OF_TIME, NOT_RUN} else 0


if __name__ == "__main__":
    sys.exit(main())
