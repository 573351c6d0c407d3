"""The processes of one mode, one for each rank, and the runner's handle on them.

Each mode has separate processes: Dynamo, Inductor and DDP keep state for the whole process.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from dp_compile.bench import reference, selfcheck
from dp_compile.bench.contract import Batch, Trainer
from dp_compile.bench.modes import mode
from dp_compile.bench.networks import Placement
from dp_compile.bench.workloads import workload
from dp_compile.errors import DPCompileError

_COMMAND: Final = "import sys; from dp_compile.bench.workers import main; main(int(sys.argv[1]))"
START_TIMEOUT_S: Final = 900.0
"""For a process to start, for its first backward, which compiles, and for the warm-up."""
_AFTER_AN_ERROR_S: Final = 2.0
_LOG_LINES: Final = 5
_PR_SET_PDEATHSIG: Final = 1


class WorkerError(DPCompileError):
    """A rank raised, died, or did not answer in time. The text names the rank and its last output."""


@dataclass(slots=True)
class Rank:
    """One process. The runner calls the public methods by name."""

    rank: int
    processes: int
    trainer: Trainer = field(default_factory=Trainer)
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))

    def meet(self, backend: str, address: str, group_ranks: int | None) -> None:
        """Make the default process group. A simulated one has only this process, so no store for others."""
        place: dict[str, Any] = {"init_method": address} if group_ranks is None else {"store": HashStore()}
        timeout, ranks = timedelta(seconds=START_TIMEOUT_S), group_ranks or self.processes
        dist.init_process_group(backend, rank=self.rank, world_size=ranks, timeout=timeout, **place)
        dist.barrier()

    def self_check(self) -> selfcheck.SelfCheck:
        return selfcheck.measure()

    def expect(self, name: str, path: str) -> int:
        """Write the gradients that `start` compares with. Returns the bytes of one set."""
        averages = {ranks: reference.average_gradients(workload(name), ranks) for ranks in {1, self.processes}}
        torch.save(averages, path)
        return sum(gradient.nbytes for gradient in averages[1].values())

    def start(self, name: str, mode_name: str, expected: str, warmup_steps: int) -> tuple[float, float, str]:
        """Build the mode's trainer, compare its first gradients unless `expected` is empty, and warm it up.

        Returns the seconds of all but the comparison, the largest error of a gradient, and its parameter.
        """
        chosen = reference.with_fixed_weights(workload(name))
        self.batches = reference.batches(chosen, self.rank)
        begin = time.perf_counter()
        self.trainer = mode(mode_name).prepare(chosen)
        gradients = self.trainer.gradients(next(reference.batches(chosen, self.rank))) if expected else {}
        _synchronize()
        seconds, parameter, error = time.perf_counter() - begin, "", 0.0
        if expected:
            parameter, error = reference.compare(gradients, torch.load(expected, mmap=True)[self.processes])
            if not error <= chosen.tolerance:
                return seconds, error, parameter
        if warmup_steps:
            seconds += warmup_steps * self.steps(warmup_steps)
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # then the peak of the compilation counts too
                Path("/proc/self/clear_refs").write_text("5")
        return seconds, error, parameter

    def steps(self, count: int) -> float:
        """Seconds a step of `count` that are timed together. Batches are ready, and ranks start together."""
        trainer = self.trainer
        batches = [next(self.batches) for _ in range(count + trainer.defers)]
        if dist.is_initialized():
            dist.barrier()
        if trainer.defers:
            trainer.step(batches.pop())
            _synchronize(only_compute=True)
        begin = time.perf_counter()
        for batch in batches:
            trainer.step(batch)
        _synchronize(only_compute=trainer.defers)
        wall_s = time.perf_counter() - begin
        if trainer.defers:
            trainer.wait()
        return wall_s / count

    def end(self) -> tuple[int, Mapping[str, int]]:
        """The peak of memory since the start, and the counts of the mode."""
        counts = self.trainer.counts()
        if torch.accelerator.is_available():
            return int(torch.accelerator.max_memory_allocated()), counts
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(found[1]) * 1024 if found else 0, counts


def _synchronize(*, only_compute: bool = False) -> None:
    if torch.accelerator.is_available():
        stream = torch.accelerator.current_stream()
        stream.synchronize() if only_compute else torch.accelerator.synchronize()


def main(handle: int) -> None:
    """A process: serve requests `(method, arguments)` until the pipe closes; answer `(ok, value or traceback)`."""
    # A runner that was killed cannot end its ranks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(handle)
    rank: Rank = connection.recv()
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            try:
                answer = True, getattr(rank, method)(*arguments)
            except Exception:
                answer = False, traceback.format_exc().rstrip()
            connection.send(answer)


class Workers:
    """One process per rank, which start when this is made. `with` ends them, also after an error.

    `title` is for errors, such as `mode ddp`; `directory` gets a file of output for each.
    """

    def __init__(self, title: str, placement: Placement, environment: Mapping[str, str], directory: Path) -> None:
        self.title, self._placement, self._directory = title, placement, directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        variables = {**os.environ, **environment, **placement.environment, "OMP_NUM_THREADS": "1"}
        directory.mkdir(parents=True, exist_ok=True)
        for rank, prefix in enumerate(placement.prefixes):
            ours, theirs = Pipe()
            with theirs, self._log(rank).open("wb") as log:
                # A new session: Ctrl-C reaches the runner alone, and children of a rank end with it.
                process = subprocess.Popen(
                    [*prefix, sys.executable, "-c", _COMMAND, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)
            self._connections.append(ours)
            with suppress(BrokenPipeError):  # it died; the first answer shows that
                ours.send(Rank(rank, len(placement.prefixes)))

    def meet(self) -> None:
        """Make the process group."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"tcp://{self._placement.host}:{free.getsockname()[1]}"
        self.ask("meet", self._placement.backend, address, self._placement.group_ranks)

    def ask(
        self, method: str, *arguments: Any, timeout_s: float = START_TIMEOUT_S, ranks: Sequence[int] = ()
    ) -> list[Any]:
        """Call a method of `Rank` on all ranks, or on some, at the same time; the values by rank.

        Raises:
            WorkerError: a rank raised, died, or did not answer within `timeout_s`.
        """
        waiting = {self._connections[rank]: rank for rank in ranks or range(len(self._connections))}
        asked = list(waiting.values())
        for connection in waiting:
            with suppress(BrokenPipeError):
                connection.send((method, arguments))
        values: dict[int, Any] = {}
        errors: list[str] = []
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    ok, value = ready.recv()
                except (EOFError, OSError):  # a death is the cause of exceptions that other ranks raise
                    ok, value = False, self._death(rank)
                    errors.insert(0, f"rank {rank} failed in {method!r}: {value}")
                if ok:
                    values[rank] = value
                else:
                    errors.append(f"rank {rank} failed in {method!r}: {value}")
                    deadline = min(deadline, time.monotonic() + _AFTER_AN_ERROR_S)  # others may wait for it in vain
        if not errors and waiting:
            late, done = (", ".join(map(str, sorted(each))) or "none" for each in (waiting.values(), values))
            errors = [f"rank {late} did not answer to {method!r} within {timeout_s:g} s (answered: {done})"]
        if errors:
            raise WorkerError(f"{self.title}: {errors[0]}")
        return [values[rank] for rank in asked]

    def _death(self, rank: int) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(1.0)
        code = self._processes[rank].returncode
        how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        last = self._log(rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([f"the process ended ({how})", *last])

    def _log(self, rank: int) -> Path:
        return self._directory / f"rank{rank}.log"

    def stop(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
