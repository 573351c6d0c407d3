"""One rank of one mode, in a process of its own: does what the runner asks over a pipe.

Dynamo, Inductor and DDP keep so much state in a process that two modes in one would disturb each other.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from dp_compile.bench import catalogue, reference, selfcheck
from dp_compile.bench.beds import INTERFACE
from dp_compile.bench.contract import Batch, Coarse, Crossing, Explained, Facts, Trainer

_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of which group.

    `ranks` are processes; the group has as many, unless `group_ranks` says that the rest of it is played.
    """

    rank: int
    ranks: int
    threads: int
    backend: str
    host: str
    timeout_s: float
    imports: tuple[str, ...] = ()
    group_ranks: int | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """`wall_s` a step; `cpu_s` of the process for the whole request, batches included.

    `left_nbytes`: a step, of all that left this rank's node, as its interface counts: headers and answers too, and what
    other ranks of the node send. `None`: the node has no interface of its own.
    """

    wall_s: float
    cpu_s: float
    left_nbytes: int | None = None


@dataclass(slots=True)
class Rank:
    """What a process knows between requests. The runner calls the public methods by name."""

    place: Place
    store: Any = None
    trainer: Trainer | None = None
    batches: Iterator[Batch] = field(default_factory=lambda: iter(()))

    def open_store(self) -> int:
        """On rank 0. Returns the port that the others come to."""
        self.store = self._store(0, is_master=True)
        return int(self.store.port)

    def meet(self, port: int) -> None:
        for module in self.place.imports:
            importlib.import_module(module)
        store = self.store if self.store is not None else self._store(port, is_master=False)
        place = self.place
        dist.init_process_group(
            place.backend,
            store=store,
            rank=place.rank,
            world_size=place.group_ranks or place.ranks,
            timeout=timedelta(seconds=place.timeout_s),
        )
        dist.barrier()

    def self_check(self) -> selfcheck.SelfCheck:
        return selfcheck.measure()

    def prepare(self, workload: str, mode: str) -> float:
        """Build the mode's trainer. Seconds."""
        found = reference.with_fixed_weights(catalogue.workload(workload))
        start = time.perf_counter()
        self.trainer = catalogue.mode(mode).prepare(found)
        _synchronize()
        self.batches = reference.batches(found, self.place.rank)
        return time.perf_counter() - start

    def prepare_compute(self, workload: str) -> None:
        """The compiled model alone, without any group, so on the CPU."""
        self.prepare(workload, "compute")

    def gradients(self, workload: str, expected: str) -> reference.Compared:
        """Of the first batch, compared with what `average_gradients` wrote of as many processes."""
        assert self.trainer is not None
        batch = next(reference.batches(catalogue.workload(workload), self.place.rank))
        start = time.perf_counter()
        gradients = self.trainer.gradients(batch)
        _synchronize()
        wall_s = time.perf_counter() - start
        average = reference.Average(**torch.load(expected, mmap=True)[self.place.ranks])
        parameter, error = reference.compare(gradients, average.gradients)
        allowed = reference.allowed_error(average.rounding)
        if isinstance(self.trainer, Coarse):
            allowed = max(allowed, self.trainer.tolerance)
        return reference.Compared(wall_s, error, parameter, allowed)

    def average_gradients(self, workload: str, path: str) -> int:
        """Of the first batches, by this process alone, eagerly, for `gradients`. Returns the bytes of one set."""
        averages = reference.averages(catalogue.workload(workload), self.place.ranks)
        written = {ranks: {"gradients": each.gradients, "rounding": each.rounding} for ranks, each in averages.items()}
        torch.save(written, path)
        return sum(gradient.nbytes for gradient in averages[1].gradients.values())

    def steps(self, count: int) -> Stepped:
        """Seconds a step, of `count` that are timed as one; ranks start together, batches are ready."""
        assert self.trainer is not None
        crosses = isinstance(self.trainer, Crossing)
        cpu = time.process_time()
        batches = [next(self.batches) for _ in range(count + crosses)]
        if dist.is_initialized():
            dist.barrier()
        if crosses:
            self.trainer.step(batches.pop())
            _synchronize_compute()
        left_before = _left_nbytes()
        start = time.perf_counter()
        for batch in batches:
            self.trainer.step(batch)
        if crosses:
            _synchronize_compute()
        else:
            _synchronize()
        wall_s = time.perf_counter() - start
        left = _left_nbytes()  # as much is on its way as was at the start
        if isinstance(self.trainer, Crossing):
            self.trainer.arrive()
        left_nbytes = None if left is None or left_before is None else (left - left_before) // count
        return Stepped(wall_s / count, time.process_time() - cpu, left_nbytes)

    def forget_peak(self) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # then the peak of the compilation counts too
                Path("/proc/self/clear_refs").write_text("5")

    def facts(self) -> Facts:
        return self.trainer.facts() if isinstance(self.trainer, Explained) else Facts()

    def peak_nbytes(self) -> int:
        if torch.accelerator.is_available():
            return int(torch.accelerator.max_memory_allocated())
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def _store(self, port: int, *, is_master: bool) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            self.place.host,
            port,
            self.place.ranks,
            is_master,
            timedelta(seconds=self.place.timeout_s),
            wait_for_workers=False,
        )


def _left_nbytes() -> int | None:
    """Bytes that have left this process's node, as the interface of a shaped link counts."""
    interface = os.environ.get(INTERFACE)
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])  # eight columns are of what came in; proc(5)
    return None


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _synchronize_compute() -> None:
    """What is on the wire stays there."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


def main(handle: int) -> None:
    """Serve requests `(method, arguments)` until the pipe closes; answer `(True, value)` or `(False, traceback)`."""
    # A runner that was killed cannot end its ranks.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(handle)
    place: Place = connection.recv()
    torch.set_num_threads(place.threads)
    rank = Rank(place)
    connection.send((True, os.getpid()))
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(rank, method)(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send(answer)
