"""Start a script in several processes, and serve the key-value store of their rendezvous.

    python -m dp_compile.elastic --ranks 3 --restarts 2 script.py its arguments

A process that exits with an error is replaced by a new one, which joins, at most `--restarts` times; others continue. A
process that the others have excluded, for example because it was suspended, is killed after `--kill-after` seconds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

from dp_compile._torch.distributed import TCPStore
from dp_compile.config import MONITOR_VARIABLE
from dp_compile.elastic.membership import Members, Registry
from dp_compile.elastic.training import JOIN_VARIABLE

POLL_S = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher. Return 0 if a process has completed the training, 1 otherwise."""
    parser = argparse.ArgumentParser("python -m dp_compile.elastic", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="number of processes at the start")
    parser.add_argument("--restarts", type=int, default=0, help="processes to start in place of lost ones, at most")
    parser.add_argument("--kill-after", type=float, default=10.0, help="seconds until an excluded process is killed")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python script and its arguments")
    options = parser.parse_args(arguments)
    if options.ranks < 1 or not options.script:
        parser.error("give --ranks of at least 1, and a script")
    launcher = _Launcher(options.script, options.ranks, options.restarts, options.kill_after)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the `finally` below, which kills all processes
    try:
        for rank in range(options.ranks):
            launcher.start(str(rank), rank)
        while launcher.running:
            launcher.look()
            time.sleep(POLL_S)
    finally:
        for process in launcher.running.values():
            process.kill()
            process.wait()
    return 0 if launcher.is_well else 1


class _Launcher:
    """The launched processes by name, and the key-value store."""

    def __init__(self, script: list[str], ranks: int, restarts: int, kill_after_s: float) -> None:
        self._script, self._restarts, self._kill_after_s = script, restarts, kill_after_s
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._registry, self._joined = Registry(store, "launcher", Members.initial(ranks)), 0
        self._environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            # The launcher detects a dead process immediately, so ranks need no monitor, which reads statuses for 3 s.
            MONITOR_VARIABLE: os.environ.get(MONITOR_VARIABLE, "off"),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: dict[str, int] = {}
        """The initial rank of each process; a replacement has that of the process it replaces."""
        self._left_out_s: dict[str, float] = {}
        self.is_well = False  # whether a process has completed the training

    def start(self, name: str, rank: int, **environment: str) -> None:
        command, self._ranks[name] = [sys.executable, *self._script], rank
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.running[name] = subprocess.Popen(command, env={**os.environ, **self._environment, **own, **environment})

    def look(self) -> None:
        """Record which processes have exited, replace them, and kill excluded ones."""
        for name, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                self._has_ended(name, code)
            elif self._registry.is_dead(name):
                since_s = self._left_out_s.setdefault(name, time.monotonic())
                if time.monotonic() > since_s + self._kill_after_s:
                    process.kill()

    def _has_ended(self, name: str, code: int) -> None:
        del self.running[name]
        self.is_well = self.is_well or code == 0
        self._registry.leave(name)
        if code == 0 or not any(each in self._registry.current().processes for each in self.running):
            self._registry.end()
        if code == 0:
            return
        print(f"process {name} ended with code {code}; {len(self.running)} still run", file=sys.stderr, flush=True)
        if self._joined < self._restarts and self.running:
            self._joined += 1
            joining = f"joined {self._joined}"
            self.start(joining, self._ranks[name], **{JOIN_VARIABLE: joining})


if __name__ == "__main__":
    sys.exit(main())
