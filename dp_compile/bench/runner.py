"""Measure a suite: one process per rank and mode, the modes in turns, the slowest rank counts."""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from dp_compile.bench.machine import environment
from dp_compile.bench.modes import mode
from dp_compile.bench.networks import Network, NetworkError, Placement, open_network
from dp_compile.bench.results import FAILED, MEASURED, SKIPPED, Cell, ModeResult, Results, save
from dp_compile.bench.selfcheck import SelfCheck, worst
from dp_compile.bench.suites import COLD, WARM, Suite
from dp_compile.bench.workers import WorkerError, Workers
from dp_compile.bench.workloads import workload

_CHECK_ATTEMPTS: Final = 3
_TURN_TIMEOUT_S: Final = 120.0


def run(suite: Suite, path: Path) -> Results:
    """Measure a suite. The file at `path` is replaced after each cell."""
    results = Results(suite, environment(), datetime.now(UTC).isoformat(timespec="minutes"))
    with tempfile.TemporaryDirectory(prefix=f"dpbench_{os.getpid()}_") as scratch:
        runner = Runner(suite, Path(scratch))
        for name in suite.workloads:
            probe = runner.probe(name)
            for network in suite.networks:
                cell = replace(probe, network=network.name)
                results = replace(results, cells=(*results.cells, runner.cell(cell, network)))
                save(results, path)
    return results


@dataclass(frozen=True, slots=True)
class Runner:
    suite: Suite
    scratch: Path

    def probe(self, name: str) -> Cell:
        """A cell without a network: the gradients of the workload are written, and its compute time is measured.

        All ranks compute at the same time, as in the cells.
        """
        self._say(f"{name}: gradients of one process")
        cell, compute_s = Cell(name, "-"), 0.0
        try:
            with open_network(Network("loopback"), ranks=self.suite.ranks) as place:
                with self._workers(f"workload {name}", place) as workers:
                    path = str(self._expected(name))
                    (nbytes,) = workers.ask("expect", name, path, ranks=[0])
                    if any(network.comm_over_compute is not None for network in self.suite.networks):
                        self._say(f"{name}: compute alone")
                        steps = max(1, self.suite.warmup_steps)
                        workers.ask("start", name, "compute", "", steps)
                        compute_s = statistics.median(self._turn(workers) for _ in range(self.suite.repetitions))
        except WorkerError as error:
            return replace(cell, skipped=f"the workload itself fails: {error}")
        return replace(cell, compute_s=compute_s, gradient_nbytes=nbytes)

    def cell(self, cell: Cell, network: Network) -> Cell:
        if cell.skipped:
            return cell
        where = f"{cell.workload}, {network.name}"
        rate_mbit = network.rate(compute_s=cell.compute_s, gradient_nbytes=cell.gradient_nbytes)
        try:
            with open_network(network, ranks=self.suite.ranks, rate_mbit=rate_mbit) as place:
                self._say(f"{where}: self-check")
                check = self._self_check(place)
                modes = self._modes(cell.workload, place, where)
        except (NetworkError, WorkerError) as error:
            return replace(cell, skipped=str(error))
        return replace(cell, rate_mbit=rate_mbit, self_check=check, modes=modes)

    def _self_check(self, place: Placement) -> SelfCheck:
        """On a busy machine it may fail without reason: the first that passes, else the best of three."""
        with self._workers("self-check", place) as workers:
            workers.meet()
            checks: list[SelfCheck] = []
            while len(checks) < (_CHECK_ATTEMPTS if place.frees_cpu else 1):
                checks.append(worst(workers.ask("self_check")))
                if checks[-1].passed:
                    break
        return min(checks, key=lambda check: (not check.passed, check.matmul_slowdown))

    def _modes(self, name: str, place: Placement, where: str) -> tuple[ModeResult, ...]:
        """Start every mode as often as the suite asks for, then time those of the last start."""
        found = {each: ModeResult(each, status=MEASURED) for each in self.suite.modes}
        running: dict[str, Workers] = {}
        starts = self.suite.starts + (self.suite.caches == WARM)  # that one fills the cache
        with ExitStack() as stack:
            for number in range(starts):
                for each in [each for each in found if found[each].status == MEASURED]:
                    self._say(f"{where}: {each} starts")
                    with ExitStack() as start:
                        try:
                            workers, found[each] = self._start(start, name, place, found[each])
                        except Exception as error:  # of the mode's code too: other modes go on
                            found[each] = _failed(found[each], error)
                            continue
                        if workers is not None and number == starts - 1:
                            running[each] = workers
                            stack.push(start.pop_all())
            self._say(f"{where}: {self.suite.repetitions} turns of each mode")
            found |= self._turns(running, found)
        last = -self.suite.starts
        return tuple(replace(each, starts_s=each.starts_s[last:]) for each in found.values())

    def _start(
        self, stack: ExitStack, name: str, place: Placement, result: ModeResult
    ) -> tuple[Workers | None, ModeResult]:
        """Start the ranks of a mode, compare its gradients, warm it up."""
        made = mode(result.name)
        result = replace(result, is_bound=made.is_bound)
        if reason := made.why_not():
            return None, replace(result, status=SKIPPED, reason=reason)
        workers = stack.enter_context(self._workers(f"mode {result.name}", place, self._cache(name, result.name)))
        workers.meet()
        expected = "" if made.is_bound else str(self._expected(name))
        ranks = workers.ask("start", name, result.name, expected, self.suite.warmup_steps)
        allowed = workload(name).tolerance
        for _, error, parameter in ranks:
            if not error <= allowed:
                reason = (
                    f"the gradient of {parameter} differs by {error:.2g} of its norm from the average of one process"
                )
                return None, replace(result, status=FAILED, reason=f"{reason} (allowed {allowed:g}).")
        starts_s = (*result.starts_s, max(seconds for seconds, _, _ in ranks))
        worst_error = None if made.is_bound else max(error for _, error, _ in ranks)
        return workers, replace(result, starts_s=starts_s, gradient_error=worst_error)

    def _turns(self, running: Mapping[str, Workers], found: Mapping[str, ModeResult]) -> dict[str, ModeResult]:
        """A B C A B C ..., and at the end of each mode its peak of memory and its counts."""
        results = {name: found[name] for name in running}
        for number in range(self.suite.repetitions + 1):
            for name, result in results.items():
                if result.status == FAILED:
                    continue
                try:
                    if number < self.suite.repetitions:
                        results[name] = replace(result, step_s=(*result.step_s, self._turn(running[name])))
                    else:
                        ended = running[name].ask("end", timeout_s=_TURN_TIMEOUT_S)
                        peak_nbytes = max(peak for peak, _ in ended)
                        results[name] = replace(result, peak_nbytes=peak_nbytes, counts=ended[0][1])
                except WorkerError as error:
                    results[name] = _failed(result, error)
                    running[name].stop()
        return results

    def _turn(self, workers: Workers) -> float:
        """Seconds a step of the slowest rank."""
        return float(max(workers.ask("steps", self.suite.steps_per_turn, timeout_s=_TURN_TIMEOUT_S)))

    def _cache(self, name: str, mode: str) -> Path | None:
        """The cache of compiled code of a start; `None`: that of the machine."""
        if self.suite.caches == WARM:
            return self.scratch / _file_name(f"cache {name} {mode}")
        return Path(tempfile.mkdtemp(prefix="cache_", dir=self.scratch)) if self.suite.caches == COLD else None

    def _workers(self, title: str, place: Placement, cache: Path | None = None) -> Workers:
        # One compiler process each: a pool of a rank would use memory during the turns of other modes.
        variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if cache is not None:
            variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        return Workers(title, place, variables, self.scratch / _file_name(title))

    def _expected(self, name: str) -> Path:
        return self.scratch / _file_name(f"gradients {name}.pt")

    def _say(self, text: str) -> None:
        print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr)


def _failed(result: ModeResult, error: Exception) -> ModeResult:
    reason = str(error) if isinstance(error, WorkerError) else f"{type(error).__name__}: {error}"
    return replace(result, status=FAILED, reason=reason)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.]", "-", text)
