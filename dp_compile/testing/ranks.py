"""A pool of gloo processes for tests. After a rank failed or hung in `run`, the next call starts new processes."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

from dp_compile._torch import distributed

AFTER_FIRST_ERROR_S: Final = 15.0


def in_gloo_group(rank: int, world_size: int, directory: str) -> None:
    """Join all ranks of a test to one gloo group, and make compiling many small models cheap."""
    from dp_compile._torch import dynamo  # loads Dynamo: only in the ranks

    dynamo.measure_no_guards()  # a seventh of the time of compiling a small model
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    store = dist.FileStore(str(Path(directory, "store")), world_size)  # type: ignore[attr-defined]
    timeout = timedelta(minutes=1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


class RankError(AssertionError):
    """A function failed on a rank, or did not end in time."""


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """`world_size` processes in one group. The first call of `run` starts them; they end with the thread that made it.

    Args:
        method: start method of `multiprocessing`. `forkserver` can preload torch: a pool for every test is then cheap.
        begin: `begin(rank, world_size, directory)` is called on each rank before anything else. The file `rankN.log`
            of the directory is shown when the rank dies or hangs.
        environment: variables of spawned processes, in addition to this one's.
        ends_groups: after each call, destroy process groups that were made: each gloo group has a thread that polls.
    """

    def __init__(
        self,
        world_size: int,
        method: str = "spawn",
        *,
        begin: Callable[[int, int, str], None] = in_gloo_group,
        environment: Mapping[str, str] = MappingProxyType({}),
        ends_groups: bool = True,
    ) -> None:
        self.world_size, self.method = world_size, method
        self._begin, self._environment, self._ends_groups = begin, environment, ends_groups
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
        """Return the result of `function(*args)` on each rank. Function, arguments and results are pickled.

        Raises:
            RankError: on some rank `function` raised or took over `timeout_s`, or the rank died; the pool is stopped.
        """
        results = self._call(function, args, timeout_s)
        if all(ok for ok, _ in results.values()):
            return [results[rank][1] for rank in range(self.world_size)]
        raise RankError(self._describe_and_stop(results))

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[tuple[bool, Any]]:
        """Like `run`, but return for each rank whether it succeeded, and its result or error text. Raises on a hang."""
        results = self._call(function, args, timeout_s)
        return [results[rank] for rank in range(self.world_size)]

    def _call(self, function: Callable[..., Any], args: Any, timeout_s: float) -> dict[int, tuple[bool, Any]]:
        try:
            if not self._processes:
                directory = self._start()
                calls = [(self._begin, (rank, self.world_size, directory)) for rank in range(self.world_size)]
                begun = self._exchange(calls, timeout_s)
                if not all(ok for ok, _ in begun.values()):
                    return begun
            return self._exchange([(function, args)] * self.world_size, timeout_s)
        except BaseException:  # a test's time-out, Ctrl-C, an argument that cannot be pickled
            self.stop()  # else a late answer of the ranks would be taken for the answer to the next call
            raise

    def _exchange(self, calls: Sequence[Any], timeout_s: float) -> dict[int, tuple[bool, Any]]:
        results: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        for connection, call in zip(self._connections, calls, strict=True):
            with contextlib.suppress(BrokenPipeError):  # the process died, which `recv()` reports
                connection.send(call)
        deadline = time.monotonic() + timeout_s
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    results[rank] = ready.recv()
                except (EOFError, ConnectionResetError):
                    results[rank] = False, "the process died"
                if not results[rank][0]:
                    deadline = min(deadline, time.monotonic() + AFTER_FIRST_ERROR_S)
        if waiting:
            raise RankError(self._describe_and_stop(results))
        return results

    def _start(self) -> str:
        context: Any = multiprocessing.get_context(self.method)
        self._directory = tempfile.TemporaryDirectory(prefix="dp_compile_ranks_")
        variables = {"OMP_NUM_THREADS": "1", **self._environment}  # torch reads it on import
        with mock.patch.dict(os.environ, variables), contextlib.ExitStack() as exits:
            if threading.current_thread() is threading.main_thread():
                # While they import, processes ignore Ctrl-C, to print no traceback: the parent stops them.
                exits.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                arguments = rank, self._directory.name, theirs, self._ends_groups
                self._processes.append(context.Process(target=_serve, args=arguments, daemon=True))
                self._processes[-1].start()
                self._connections.append(ours)
                theirs.close()  # so that the pipe closes when the process ends
        return self._directory.name

    def _describe_and_stop(self, results: dict[int, tuple[bool, Any]]) -> str:
        """Stop the pool. Return a line per rank, then all details. The first rank to fail is usually the cause."""
        assert self._directory is not None
        lines, details = [], []
        for rank in [*results, *(rank for rank in range(self.world_size) if rank not in results)]:
            process, log = self._processes[rank], Path(self._directory.name, f"rank{rank}.log")
            process.join(0.1)
            if process.is_alive() and rank not in results and log.exists():  # no file: no signal handler yet
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.3)
            known = log.read_text(errors="replace") if log.exists() else ""
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
        return "\n".join(["ranks, in the order of their end:", *lines, *details])

    def stop(self) -> None:
        """Kill the processes and their children. A later call starts new ones."""
        processes, connections, directory = self._processes, self._connections, self._directory
        self._processes, self._connections, self._directory = [], [], None  # also if what follows is interrupted
        with contextlib.ExitStack() as exits:
            if directory is not None:
                exits.callback(directory.cleanup)
            for connection in connections:
                exits.callback(connection.close)
            for process in processes:
                if process.pid is not None:
                    with contextlib.suppress(ProcessLookupError):  # it has not called setsid() yet
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()
                process.close()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _serve(rank: int, directory: str, connection: Connection, ends_groups: bool) -> None:
    os.setsid()  # its children can be killed with it, and Ctrl-C reaches only the parent
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: a parent that was killed cannot stop this process
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # The default start method has unnamed semaphores. A named one, as of tqdm, stays in /dev/shm after a kill.
    multiprocessing.set_start_method(None, force=True)
    log = open(Path(directory, f"rank{rank}.log"), "a")
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    faulthandler.enable(log, all_threads=True)  # the stack of a rank that crashes in native code
    torch.set_num_threads(1)
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(call)  # fails if the function's module cannot be imported
            result = function(*args)
            if ends_groups:
                distributed.end_other_groups()
            connection.send((True, result))
        except SystemExit:
            raise
        except BaseException:
            connection.send((False, traceback.format_exc()))
