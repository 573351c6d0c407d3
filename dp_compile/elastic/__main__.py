"""Start a script in several processes, and serve the key-value store in which its ranks meet.

    python -m dp_compile.elastic --ranks 3 --restarts 2 script.py its arguments

A process that ends with an error is replaced by one that joins, at most `--restarts` times; the others go on. One that
the others have left out, as it was suspended, has `--kill-after` seconds to end.
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
    """Returns 0 if some process has trained to the end."""
    parser = argparse.ArgumentParser("python -m dp_compile.elastic", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="processes to start with")
    parser.add_argument("--restarts", type=int, default=0, help="processes to start in place of lost ones, at most")
    parser.add_argument("--kill-after", type=float, default=10.0, help="seconds, for a process that was left out")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a Python script and its arguments")
    options = parser.parse_args(arguments)
    if options.ranks < 1 or not options.script:
        parser.error("give --ranks of at least 1, and a script")
    launcher = _Launcher(options.script, options.ranks, options.restarts, options.kill_after)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left
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
    """The processes, by name, and the store."""

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
            # Who is dead the launcher sees at once: no rank has to ask the others for three seconds.
            MONITOR_VARIABLE: os.environ.get(MONITOR_VARIABLE, "off"),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ranks: dict[str, int] = {}
        """The rank that each started with, or that the one had in whose place it was started."""
        self._left_out_s: dict[str, float] = {}
        self.is_well = False  # some process has trained to the end

    def start(self, name: str, rank: int, **environment: str) -> None:
        command, self._ranks[name] = [sys.executable, *self._script], rank
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        self.running[name] = subprocess.Popen(command, env={**os.environ, **self._environment, **own, **environment})

    def look(self) -> None:
        """Note which processes have ended, and replace them."""
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
        print(f"process {name} ended with code {code}, {len(self.running)} go on", file=sys.stderr, flush=True)
        if self._joined < self._restarts and self.running:
            self._joined += 1
            joining = f"joined {self._joined}"
            self.start(joining, self._ranks[name], **{JOIN_VARIABLE: joining})


if __name__ == "__main__":
    sys.exit(main())
