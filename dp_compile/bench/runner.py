"""Measure a suite: one process per rank and mode, the modes in turns, every finished cell written down at once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dp_compile.bench import catalogue
from dp_compile.bench.beds import Bed, Link, NoBedError, open_bed, rate_of
from dp_compile.bench.contract import Facts
from dp_compile.bench.crew import Crew, CrewError
from dp_compile.bench.machine import Environment, Watch, environment
from dp_compile.bench.progress import Progress
from dp_compile.bench.reference import Compared
from dp_compile.bench.results import FAILED, MEASURED, SKIPPED, Cell, ModeResult, Probe, Results, load, save
from dp_compile.bench.selfcheck import SelfCheck, worst
from dp_compile.bench.suite import COLD, WARM, Suite
from dp_compile.errors import ConfigError

_CHECK_ATTEMPTS: Final = 3
_CHECK_TIMEOUT_S: Final = 300.0
_LAST_WORDS_TIMEOUT_S: Final = 60.0


def run(suite: Suite, path: Path, *, fresh: bool = False, show_progress: bool = True) -> Results:
    """Measure what is missing in the file at `path`, or everything.

    Raises:
        ConfigError: the file is of another suite, machine or commit, and `fresh` is not given; a suite's name is
            unknown.
    """
    results = _begin(suite, path, fresh)
    save(results, path)
    _remove_stale_scratch()
    with (
        tempfile.TemporaryDirectory(prefix=f"dpbench_{os.getpid()}_") as scratch,
        Progress(show=show_progress) as progress,
    ):
        bench = _Bench(suite, Path(scratch), progress)
        for _, _, heat in results.missing:
            bench.expect(len(suite.heats()[heat]), 1)
        for name in suite.workloads:
            missing = [key for key in results.missing if key[0] == name]
            for cell, probe in bench.workload(name, missing, results):
                results = results.with_probe(probe) if probe is not None else results
                results = results.with_cell(cell)
                save(results, path)
    return results


def _remove_stale_scratch() -> None:
    """Directories of runs that were killed: gradients of a large model are large."""
    for directory in Path(tempfile.gettempdir()).glob("dpbench_*_*"):
        pid = directory.name.split("_")[1]
        if pid.isdecimal() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(directory, ignore_errors=True)


def _begin(suite: Suite, path: Path, fresh: bool) -> Results:
    here = environment()
    if fresh or not path.exists():
        return Results(suite, here, _now())
    before = load(path)
    if before.suite != suite:
        raise ConfigError(f"{path} is of other settings than this suite. Name another --out, or start anew: --fresh.")
    changed = _changed(before.environment, here)
    if changed:
        raise ConfigError(f"{path} cannot be continued: {changed}. Name another --out, or start anew: --fresh.")
    return before


def _changed(before: Environment, here: Environment) -> str:
    old, new = ({"torch": each.torch, "commit": each.commit} | each.machine for each in (before, here))
    return ", ".join(f"{name} was {old[name]!r} and is {new[name]!r}" for name in old if old[name] != new[name])


@dataclass(frozen=True, slots=True)
class _Turn:
    step_s: float
    others: float
    left_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all measurements of a run share."""

    suite: Suite
    scratch: Path
    progress: Progress

    def expect(self, modes: int, sign: int) -> None:
        self.progress.expect("preparation", sign * modes * self._starts())
        self.progress.expect("turn", sign * modes * self.suite.repetitions)

    def workload(
        self, name: str, missing: Sequence[tuple[str, str, int]], results: Results
    ) -> Iterator[tuple[Cell, Probe | None]]:
        """Each missing cell of a workload as soon as it is finished, and what was learned of the workload itself."""
        if not missing:
            return
        probe = next((old for old in results.probes if old.workload == name), None)
        failure = ""
        try:
            probe = self._probe(name, probe)
        except CrewError as error:
            failure = f"the workload itself fails: {error}"
        for key in missing:
            link = next(each for each in self.suite.links if each.name == key[1])
            if failure or probe is None:
                self.expect(len(self.suite.heats()[key[2]]), -1)
                yield Cell(*key, skipped=failure), None
            else:
                yield self._cell(name, link, key[2], probe), probe
        self._expected(name).unlink(missing_ok=True)

    def _probe(self, name: str, before: Probe | None) -> Probe:
        """The gradients that all modes have to have, and the compute time if a link's rate hangs on it."""
        self.progress.say(f"{name}: gradients of one process")
        with open_bed(Link("loopback"), ranks=self.suite.ranks, rate_mbit=None) as bed:
            with self._crew(f"workload {name}", bed) as crew:
                crew.start()
                crew.started(self.suite.start_timeout_s)
                (nbytes,) = crew.ask(
                    "average_gradients",
                    name,
                    str(self._expected(name)),
                    timeout_s=self.suite.start_timeout_s,
                    ranks=[0],
                )
                if before is not None:
                    return before
                compute_s = 0.0
                if any(link.comm_over_compute is not None for link in self.suite.links):
                    compute_s = self._compute_s(crew, name)
        return Probe(name, compute_s, nbytes)

    def _compute_s(self, crew: Crew, name: str) -> float:
        self.progress.say(f"{name}: compute alone")
        crew.ask("prepare_compute", name, timeout_s=self.suite.start_timeout_s)
        crew.ask("steps", max(1, self.suite.warmup_steps), timeout_s=self.suite.start_timeout_s)
        turns, set_aside = [], 0
        for _ in range(self.suite.repetitions):
            turn, again = self._turn(crew, set_aside)
            turns.append(turn.step_s)
            set_aside += again
        return statistics.median(turns)

    def _cell(self, name: str, link: Link, heat: int, probe: Probe) -> Cell:
        where = f"{probe.workload}, {link.name}"
        modes = self.suite.heats()[heat]
        cell = Cell(probe.workload, link.name, heat, load=round(os.getloadavg()[0], 2))
        try:
            rate_mbit = self._rate_mbit(link, probe)
            with open_bed(link, ranks=self.suite.ranks, rate_mbit=rate_mbit) as bed:
                self.progress.say(f"{where}: self-check")
                check = self._self_check(bed)
                outcomes = self._heat(bed, name, modes, where)
        except (NoBedError, CrewError) as error:
            self.expect(len(modes), -1)
            return replace(cell, skipped=f"link {link.name}: {error}", date=_now())
        return replace(cell, rate_mbit=rate_mbit, self_check=check, modes=outcomes, date=_now())

    def _rate_mbit(self, link: Link, probe: Probe) -> float | None:
        return rate_of(
            link,
            compute_s=probe.compute_s,
            gradient_nbytes=probe.gradient_nbytes,
            ranks=self.suite.ranks,
        )

    def _self_check(self, bed: Bed) -> SelfCheck:
        """On a busy machine it may fail without reason: the best of three attempts, the first that passes."""
        with self._crew("self-check", bed) as crew:
            crew.start()
            crew.started(self.suite.start_timeout_s)
            crew.meet(_CHECK_TIMEOUT_S)
            checks = []
            for _ in range(_CHECK_ATTEMPTS):
                checks.append(worst(crew.ask("self_check", timeout_s=_CHECK_TIMEOUT_S)))
                if checks[-1].passed or not bed.asynchronous:
                    break
        return min(checks, key=lambda check: (not check.passed, check.matmul_slowdown))

    def _heat(self, bed: Bed, name: str, modes: Sequence[str], where: str) -> tuple[ModeResult, ...]:
        found: dict[str, ModeResult] = {}
        seconds: dict[str, list[float]] = {mode: [] for mode in modes}
        crews: dict[str, Crew] = {}
        starts = self._starts()
        with ExitStack() as stack:
            for number in range(starts):
                for mode in modes if number == 0 else [mode for mode in modes if found[mode].status == MEASURED]:
                    self.progress.say(f"{where}: {mode} compiles")
                    since = time.monotonic()
                    with ExitStack() as start:
                        crew = start.enter_context(self._crew(f"mode {mode}", bed, self._cache(name, mode)))
                        found[mode] = self._prepared(crew, name, mode)
                        if found[mode].status != MEASURED:
                            self.progress.expect("preparation", number - starts)
                            self.progress.expect("turn", -self.suite.repetitions)
                            continue
                        self.progress.did("preparation", since)
                        seconds[mode].append(found[mode].last_start_s)
                        if number == starts - 1:
                            crews[mode] = crew
                            stack.push(start.pop_all())
            self.progress.say(where)
            timed = {mode: tuple(seconds[mode][-self.suite.starts :]) for mode in crews}
            found |= self._turns(crews, {mode: replace(found[mode], starts_s=timed[mode]) for mode in crews})
        return tuple(found.values())

    def _starts(self) -> int:
        """Of each mode, with the one that fills its cache."""
        return self.suite.starts + (self.suite.caches == WARM)

    def _cache(self, name: str, mode: str) -> Path | None:
        """Where a start of a mode keeps compiled code; `None`: where the machine does."""
        if self.suite.caches == WARM:
            return self.scratch / _file_name(f"cache {name} {mode}")
        return Path(tempfile.mkdtemp(prefix="cache_", dir=self.scratch)) if self.suite.caches == COLD else None

    def _prepared(self, crew: Crew, name: str, mode: str) -> ModeResult:
        """Start a mode's ranks, compare its gradients, warm it up. Not measured yet, if the status says `measured`."""
        result = ModeResult(mode, False, FAILED)
        timeout_s = self.suite.start_timeout_s
        try:
            made = catalogue.mode(mode)
            result = replace(result, is_bound=made.is_bound)
            if why_not := made.why_not():
                return replace(result, status=SKIPPED, reason=why_not)
            crew.start()
            crew.started(timeout_s)
            crew.meet(timeout_s)
            result = replace(result, prepare_s=max(crew.ask("prepare", name, mode, timeout_s=timeout_s)))
            if not made.is_bound:
                compared = crew.ask("gradients", name, str(self._expected(name)), timeout_s=timeout_s)
                worst_rank = max(compared, key=lambda each: each.error if each.error == each.error else float("inf"))
                result = replace(result, first_backward_s=max(each.wall_s for each in compared))
                if not worst_rank.error <= worst_rank.allowed:
                    return replace(result, reason=_wrong(worst_rank))
                result = replace(result, gradient_error=worst_rank.error, gradient_of=worst_rank.parameter)
            if self.suite.warmup_steps:
                warm = crew.ask("steps", self.suite.warmup_steps, timeout_s=timeout_s)
                result = replace(result, warmup_s=max(each.wall_s for each in warm) * self.suite.warmup_steps)
            crew.ask("forget_peak", timeout_s=timeout_s)
        except Exception as error:  # of the mode's own code too: the other modes go on
            return replace(result, reason=_text(error))
        return replace(result, status=MEASURED)

    def _turns(self, crews: Mapping[str, Crew], prepared: Mapping[str, ModeResult]) -> dict[str, ModeResult]:
        """A B C A B C ..., and at the end each mode's peak of memory and what it says of itself."""
        active, turns = dict(crews), {mode: list[_Turn]() for mode in crews}
        set_aside, failed = dict.fromkeys(crews, 0), dict[str, str]()
        for number in range(self.suite.repetitions):
            for mode, crew in list(active.items()):
                since = time.monotonic()
                try:
                    turn, again = self._turn(crew, set_aside[mode])
                    set_aside[mode] += again
                    turns[mode].append(turn)
                    self.progress.did("turn", since)
                except CrewError as error:
                    failed[mode] = _text(error)
                    self.progress.expect("turn", number - self.suite.repetitions)
                    active.pop(mode).stop()
        done = {}
        for mode, result in ((mode, prepared[mode]) for mode in crews):
            try:
                peak, facts = _last_words(crews[mode]) if mode in active else (0, Facts())
            except CrewError as error:
                failed[mode], peak, facts = _text(error), 0, Facts()
            done[mode] = replace(
                result,
                status=FAILED if mode in failed else MEASURED,
                reason=failed.get(mode, ""),
                step_s=tuple(turn.step_s for turn in turns[mode]),
                others=tuple(round(turn.others, 4) for turn in turns[mode]),
                set_aside=set_aside[mode],
                peak_nbytes=peak,
                facts=facts,
                left_nbytes=_median([each.left_nbytes for each in turns[mode] if each.left_nbytes is not None]),
            )
        return done

    def _turn(self, crew: Crew, set_aside: int) -> tuple[_Turn, int]:
        """One turn, and how many were set aside for it because others kept the machine busy."""
        suite, again = self.suite, 0
        while True:
            watch = Watch.start()
            stepped = crew.ask("steps", suite.steps_per_turn, timeout_s=suite.turn_timeout_s)
            others = watch.others(sum(each.cpu_s for each in stepped))
            if others <= suite.others_limit or set_aside + again >= suite.repeat_limit * suite.repetitions:
                left = [each.left_nbytes for each in stepped if each.left_nbytes is not None]
                return _Turn(max(each.wall_s for each in stepped), others, max(left, default=None)), again
            again += 1

    def _crew(self, title: str, bed: Bed, cache: Path | None = None) -> Crew:
        directory = self.scratch / _file_name(title)
        # One compiler process each: a rank's own pool would sit in memory beside every other mode's.
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1")
        if cache is not None:
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        return Crew(
            title,
            bed,
            threads=self.suite.threads,
            timeout_s=self.suite.start_timeout_s,
            environment=variables,
            directory=directory,
        )

    def _expected(self, name: str) -> Path:
        return self.scratch / _file_name(f"gradients {name}.pt")


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end a run as Ctrl-C does: ranks stopped, links taken down."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _median(values: Sequence[int]) -> int | None:
    return round(statistics.median(values)) if values else None


def _last_words(crew: Crew) -> tuple[int, Facts]:
    peak_nbytes = max(crew.ask("peak_nbytes", timeout_s=_LAST_WORDS_TIMEOUT_S))
    (facts,) = crew.ask("facts", timeout_s=_LAST_WORDS_TIMEOUT_S, ranks=[0])
    return peak_nbytes, facts


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.]", "-", text)


def _wrong(found: Compared) -> str:
    return (
        f"wrong gradients: that of {found.parameter} is {found.error:.2g} of its norm away from the average of one "
        f"process (allowed {found.allowed:.2g}); not timed."
    )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, (CrewError, ConfigError)) else f"{type(error).__name__}: {error}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
