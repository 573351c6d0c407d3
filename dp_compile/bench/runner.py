"""Measurement of a suite: one process per rank and mode, modes in turns, times of the slowest rank."""

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

from dp_compile.bench.modes import mode
from dp_compile.bench.networks import Network, NetworkError, Placement, open_network
from dp_compile.bench.results import Cell, ModeResult, Results, environment, save
from dp_compile.bench.suites import COLD, WARM, Suite
from dp_compile.bench.workers import START_TIMEOUT_S, end, expect, link, ranks_of, start, steps
from dp_compile.bench.workloads import workload
from dp_compile.errors import DPCompileError
from dp_compile.testing.ranks import RankError, Ranks

_TURN_TIMEOUT_S: Final = 120.0


def run(suite: Suite, path: Path) -> Results:
    """Measure a suite. After each cell (workload over a network), write all results so far to `path`."""
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
        """Return a workload's cell, without network. Write expected gradients, time `compute` if a rate needs it."""
        say(f"{name}: gradients of one process")
        cell, compute_s = Cell(name, "-"), 0.0
        try:
            with open_network(Network("loopback"), ranks=self.suite.ranks) as place, ranks_of(place, {}) as ranks:
                nbytes = ranks.run(expect, name, self._file(f"gradients {name}.pt"), timeout_s=START_TIMEOUT_S)[0]
                if any(network.comm_over_compute is not None for network in self.suite.networks):
                    say(f"{name}: compute alone")
                    ranks.run(start, name, "compute", "", max(1, self.suite.warmup_steps), timeout_s=START_TIMEOUT_S)
                    compute_s = statistics.median(self._turn(ranks) for _ in range(self.suite.repetitions))
        except RankError as error:
            return replace(cell, skipped=f"the workload itself fails: {_cause(error)}")
        return replace(cell, compute_s=compute_s, gradient_nbytes=nbytes)

    def cell(self, cell: Cell, network: Network) -> Cell:
        if cell.skipped:
            return cell
        where = f"{cell.workload}, {network.name}"
        rate_mbit = network.rate_mbit
        if network.comm_over_compute is not None:  # in an all-reduce of two ranks, each sends all bytes once
            rate_mbit = 8e-6 * cell.gradient_nbytes / (network.comm_over_compute * cell.compute_s)
        try:
            with open_network(network, ranks=self.suite.ranks, rate_mbit=rate_mbit) as place:
                say(f"{where}: the link")
                with ranks_of(place, {}) as ranks:
                    alpha_us, mb_per_s = ranks.run(link, timeout_s=START_TIMEOUT_S)[0]
                modes = self._modes(cell.workload, place, where)
        except (NetworkError, RankError) as error:
            return replace(cell, skipped=_cause(error))
        return replace(cell, rate_mbit=rate_mbit, alpha_us=alpha_us, mb_per_s=mb_per_s, modes=modes)

    def _modes(self, name: str, place: Placement, where: str) -> tuple[ModeResult, ...]:
        """Start every mode `suite.starts` times, then time steps in the processes of the last start."""
        found = {each: ModeResult(each) for each in self.suite.modes}
        running: dict[str, Ranks] = {}
        starts = self.suite.starts + (self.suite.caches == WARM)  # an additional start fills the cache
        with ExitStack() as stack:
            for number in range(starts):
                for each in [each for each in found if not found[each].reason]:
                    say(f"{where}: {each} starts")
                    running[each] = stack.enter_context(ranks_of(place, self._cache(name, each)))
                    found[each] = self._start(running[each], name, found[each])
                    if number < starts - 1 or found[each].reason:
                        running.pop(each).stop()
            say(f"{where}: {self.suite.repetitions} turns of each mode")
            found |= self._turns(running, found)
        last = -self.suite.starts
        return tuple(replace(each, starts_s=each.starts_s[last:]) for each in found.values())

    def _start(self, ranks: Ranks, name: str, result: ModeResult) -> ModeResult:
        """Build the mode of `result` on the ranks, compare its gradients with the expected ones, and warm it up."""
        try:
            made = mode(result.name)
            expected = "" if made.is_bound else self._file(f"gradients {name}.pt")
            given = name, result.name, expected, self.suite.warmup_steps
            answers = ranks.run(start, *given, timeout_s=START_TIMEOUT_S)
        except Exception as error:  # any error of this mode: the other modes continue
            return replace(result, reason=_cause(error))
        allowed = workload(name).tolerance
        for _, off, parameter in answers:
            if not off <= allowed:
                far = f"the gradient of {parameter} is off by {off:.2g} of its norm"
                return replace(result, reason=f"{far} from the average computed in one process (allowed {allowed:g}).")
        starts_s = (*result.starts_s, max(seconds for seconds, _, _ in answers))
        return replace(result, is_bound=made.is_bound, starts_s=starts_s)

    def _turns(self, running: Mapping[str, Ranks], found: Mapping[str, ModeResult]) -> dict[str, ModeResult]:
        """Run the modes in turns (A B C A B C ...), then read the memory peak and the counts of each."""
        results = {name: found[name] for name in running}
        for number in range(self.suite.repetitions + 1):
            for name, result in results.items():
                if result.reason:
                    continue
                try:
                    if number < self.suite.repetitions:
                        results[name] = replace(result, step_s=(*result.step_s, self._turn(running[name])))
                    else:
                        ended = running[name].run(end, timeout_s=_TURN_TIMEOUT_S)
                        peak_nbytes = max(peak for peak, _ in ended)
                        results[name] = replace(result, peak_nbytes=peak_nbytes, counts=ended[0][1])
                except RankError as error:
                    results[name] = replace(result, reason=_cause(error))
        return results

    def _turn(self, ranks: Ranks) -> float:
        """Return the seconds per step of the slowest rank."""
        return float(max(ranks.run(steps, self.suite.steps_per_turn, timeout_s=_TURN_TIMEOUT_S)))

    def _cache(self, name: str, mode: str) -> dict[str, str]:
        """Return the variable that sets the directory of compiled code; `{}` for `shared`, the machine's directory."""
        if self.suite.caches == COLD:
            return {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(prefix="cache_", dir=self.scratch)}
        kept = self._file(f"cache {name} {mode}")
        return {"TORCHINDUCTOR_CACHE_DIR": kept} if self.suite.caches == WARM else {}

    def _file(self, text: str) -> str:
        return str(self.scratch / re.sub(r"[^\w.]", "-", text))


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", file=sys.stderr)


def _cause(error: Exception) -> str:
    """Return the error's text. For a `RankError`: the line of the first rank that did not finish, then all lines."""
    if not isinstance(error, RankError):
        return str(error) if isinstance(error, DPCompileError) else f"{type(error).__name__}: {error}"
    lines = str(error).splitlines()[1:]
    return "\n".join([next((line for line in lines if not line.endswith(": finished")), ""), *lines])
