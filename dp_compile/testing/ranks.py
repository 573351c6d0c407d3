"""Processes for tests: a pool of gloo ranks. After a rank raised, died or hung, the next call starts a new pool."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from dp_compile._torch import distributed

AFTER_FIRST_ERROR_S: Final = 15.0
GLOO_TIMEOUT_S: Final = 60.0


class RankError(AssertionError):
    """A function failed on a rank, or did not end in time."""


class Ranks:
    """`world_size` processes in one gloo group, which start with the first call.

    `method`: how they start, as in `multiprocessing`. `forkserver` copies a process that has torch loaded: a pool for
    every test is then cheap.
    """

    def __init__(self, world_size: int, method: str = "spawn") -> None:
        self.world_size, self.method = world_size, method
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """Call `function(*args)` on every rank within `timeout_s`, and return the results by rank.

        Function, arguments and results are pickled. Process groups that it makes are destroyed after it.

        Raises:
            RankError: it raised, hung or died on some rank; the pool is stopped.
        """
        results = self._call(function, args, timeout_s)
        if all(ok for ok, _ in results.values()):
            return [results[rank][1] for rank in range(self.world_size)]
        raise RankError(self._describe_and_stop(results))

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[tuple[bool, Any]]:
        """As `run`, but by rank whether it returned, and its result, traceback or death."""
        results = self._call(function, args, timeout_s)
        return [results[rank] for rank in range(self.world_size)]

    def _call(self, function: Callable[..., Any], args: Any, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        results: dict[int, tuple[bool, Any]] = {}
        try:
            if not self._processes:
                self._start()
            for connection in self._connections:
                connection.send((function, args))
            deadline = time.monotonic() + timeout_s
            while len(results) < self.world_size and time.monotonic() < deadline:
                for rank, connection in enumerate(self._connections):
                    if rank not in results and connection.poll(0.02):
                        try:
                            results[rank] = connection.recv()
                        except EOFError:
                            results[rank] = False, "the process died"
                        if not results[rank][0]:
                            deadline = min(deadline, time.monotonic() + AFTER_FIRST_ERROR_S)
            if len(results) < self.world_size:
                raise RankError(self._describe_and_stop(results))
        except BaseException:  # a test's time-out, Ctrl-C, what cannot be pickled
            self.stop()  # else a late answer of the ranks would be taken for the answer to the next call
            raise
        return results

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self.method)
        self._directory = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self._directory.name, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):  # torch reads it when the process imports it
                process.start()
            self._processes.append(process)
            self._connections.append(ours)

    def _describe_and_stop(self, results: dict[int, tuple[bool, Any]]) -> str:
        """A line for each rank, then all that is known. The first one to fail is usually the cause."""
        assert self._directory is not None
        lines, details = [], []
        for rank in [*results, *(rank for rank in range(self.world_size) if rank not in results)]:
            process, stack = self._processes[rank], Path(self._directory.name, f"stack{rank}")
            process.join(0.1)
            if process.is_alive() and rank not in results and stack.exists():  # without the file it has no handler yet
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.3)
            known = stack.read_text() if stack.exists() else ""
            if not process.is_alive():
                detail = f"{(line := f'died with exit code {process.exitcode}')}\n{known}"
            elif rank not in results:
                line, detail = "hangs", f"hangs:\n{known or 'it is still starting'}"
            elif results[rank][0]:
                line = detail = "finished"
            else:
                detail = results[rank][1]
                line = detail.strip().splitlines()[-1]
            lines.append(f"rank {rank}: {line}")
            details.append(f"--- rank {rank}: {detail}")
        self.stop()
        return "\n".join(["in the order in which they ended:", *lines, *details])

    def stop(self) -> None:
        """Kill the processes. A later call starts new ones."""
        processes, connections, directory = self._processes, self._connections, self._directory
        self._processes, self._connections, self._directory = [], [], None  # also if what follows is interrupted
        with contextlib.ExitStack() as exits:
            if directory is not None:
                exits.callback(directory.cleanup)
            for connection in connections:
                exits.callback(connection.close)
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
                process.close()


def _serve(rank: int, world_size: int, directory: str, connection: Connection) -> None:
    stack = open(Path(directory, f"stack{rank}"), "w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.enable(stack, all_threads=True)  # the stack of a rank that native code kills
    torch.set_num_threads(1)
    from dp_compile._torch import dynamo  # loads Dynamo: only in the ranks

    # Tests compile many small models, where checks of each compile take a seventh of the time.
    dynamo.measure_no_guards()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    store = dist.FileStore(str(Path(directory, "store")), world_size)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=GLOO_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(call)  # fails where the function's module cannot be imported
            result = function(*args)
            # Each gloo group has a thread that polls a hundred times a second.
            distributed.end_other_groups()
            connection.send((True, result))
        except SystemExit:
            raise
        except BaseException:
            connection.send((False, traceback.format_exc()))
