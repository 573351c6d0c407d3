"""The processes of one mode, a rank each, seen from the runner: asked all at once, and never waited for without end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from dp_compile.bench.beds import Bed
from dp_compile.bench.worker import Place
from dp_compile.errors import DPCompileError

_COMMAND: Final = "import sys; from dp_compile.bench.worker import main; main(int(sys.argv[1]))"
_AFTER_AN_ERROR_S: Final = 2.0
_LOG_LINES: Final = 5


class CrewError(DPCompileError):
    """A rank failed, died, or did not answer in time. The text says which, and what it said."""


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    is_death: bool


class Crew:
    """One process per rank. `with` ends them all, whatever happened.

    Args:
        title: who they are, for errors: `mode ddp`.
        bed: where they run, and how many.
        threads: of each, for its kernels.
        timeout_s: of their process group.
        environment: beside the bed's and this process's own.
        directory: for what they print, a file each.
    """

    def __init__(
        self,
        title: str,
        bed: Bed,
        *,
        threads: int,
        timeout_s: float,
        environment: Mapping[str, str],
        directory: Path,
    ) -> None:
        self.title = title
        self._bed = bed
        self._environment = {**os.environ, **environment, **bed.environment, "OMP_NUM_THREADS": str(threads)}
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._places = [
            Place(rank, bed.processes, threads, bed.backend, bed.host, timeout_s, bed.imports, bed.group_ranks)
            for rank in range(bed.processes)
        ]

    def start(self) -> None:
        """Start the processes; `started` waits for them."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for place in self._places:
            ours, theirs = Pipe()
            with theirs, self._log(place.rank).open("wb") as log:
                # A session of its own: Ctrl-C is for the runner, and what a rank started is ended with it.
                process = subprocess.Popen(
                    [*self._bed.prefixes[place.rank], sys.executable, "-c", _COMMAND, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)
            self._connections.append(ours)
            with suppress(BrokenPipeError):  # it died already, which the first answer shows
                ours.send(place)

    def started(self, timeout_s: float) -> None:
        self._answers("start", range(len(self._places)), timeout_s)

    def meet(self, timeout_s: float) -> None:
        """Make the process group."""
        (port,) = self.ask("open_store", timeout_s=timeout_s, ranks=[0])
        self.ask("meet", port, timeout_s=timeout_s)

    def ask(self, method: str, *arguments: Any, timeout_s: float, ranks: Sequence[int] | None = None) -> list[Any]:
        """Call a method of `worker.Rank` on all ranks, or on some, at the same time; the values by rank.

        Raises:
            CrewError: a rank raised, died, or did not answer within `timeout_s`.
        """
        asked = range(len(self._places)) if ranks is None else ranks
        for rank in asked:
            with suppress(BrokenPipeError):
                self._connections[rank].send((method, arguments))
        return self._answers(method, asked, timeout_s)

    def _answers(self, method: str, asked: Sequence[int], timeout_s: float) -> list[Any]:
        values: dict[int, Any] = {}
        errors: dict[int, _Failure] = {}
        deadline = time.monotonic() + timeout_s
        while len(values) + len(errors) < len(asked) and (left := deadline - time.monotonic()) > 0:
            waiting = {self._connections[rank]: rank for rank in asked if rank not in values and rank not in errors}
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                answer = self._receive(waiting[connection])
                if isinstance(answer, _Failure):  # the others wait for it in vain
                    errors[waiting[connection]] = answer
                    deadline = min(deadline, time.monotonic() + _AFTER_AN_ERROR_S)
                else:
                    values[waiting[connection]] = answer
        if errors:
            # Of several a death, else the first: the others lost their connection to it.
            rank = min(errors, key=lambda each: not errors[each].is_death)
            raise CrewError(f"{self.title}: rank {rank} failed in {method!r}: {errors[rank].text}")
        late = [rank for rank in asked if rank not in values]
        if late:
            came = f"; {_ranks(sorted(values))} did" if values else ""
            raise CrewError(f"{self.title}: {_ranks(late)} did not answer to {method!r} within {timeout_s:g} s{came}.")
        return [values[rank] for rank in asked]

    def _receive(self, rank: int) -> Any:
        """What a rank answered, or a `_Failure`."""
        try:
            ok, value = self._connections[rank].recv()
        except (EOFError, OSError):
            return _Failure(self._epitaph(rank), is_death=True)
        return value if ok else _Failure(value.rstrip(), is_death=False)

    def _epitaph(self, rank: int) -> str:
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

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
