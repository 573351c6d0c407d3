"""The machine that a result is from, and how busy others keep it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch

_PACKAGE: Final = Path(__file__).parents[1]
_CGROUP_USAGE_NS: Final = Path("/sys/fs/cgroup/cpuacct/cpuacct.usage")
_OF_MALLOC: Final = re.compile(r"MALLOC_\w*_=|GLIBC_TUNABLES=.*malloc|LD_PRELOAD=.*malloc")
_TICK_S: Final = 0.01  # of /proc/stat: USER_HZ is 100 in every Linux that torch runs on


@dataclass(frozen=True, slots=True)
class Environment:
    """What a figure depends on, besides the code that is measured."""

    cpu: str
    cores: int
    memory_gib: int
    accelerator: str
    system: str
    python: str
    torch: str
    commit: str
    malloc: str = ""
    """What malloc was told by the environment, or which other one was preloaded: page faults are a part of a step."""

    @property
    def machine(self) -> dict[str, object]:
        """What has to be equal for times to be comparable."""
        return {name: getattr(self, name) for name in ("cpu", "cores", "accelerator", "malloc")}

    def __str__(self) -> str:
        parts = [
            f"{self.cpu}, {self.cores} cores, {self.memory_gib} GiB",
            f"torch {self.torch}",
            f"Python {self.python}",
        ]
        parts += [self.accelerator] if self.accelerator != "none" else []
        parts += [self.malloc] if self.malloc else []
        return ", ".join(parts)


def environment() -> Environment:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Environment(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(pages / 2**30),
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        commit=_commit(),
        malloc=_malloc(),
    )


def _malloc() -> str:
    given = sorted(f"{name}={value}" for name, value in os.environ.items())
    return " ".join(each for each in given if _OF_MALLOC.match(each))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """The checkout's commit, `+changes` if files differ from it; the version where there is no checkout."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return f"version {importlib.metadata.version('dp_compile')}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def machine_cpu_s() -> float:
    """Processor time that all processes of the machine have had since it started, stolen time included."""
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = _ticks()
    if _cgroup_counts_everything():
        return int(_CGROUP_USAGE_NS.read_text()) * 1e-9 + steal * _TICK_S
    return (user + nice + system + steal) * _TICK_S


@dataclass(frozen=True, slots=True)
class Watch:
    """Started now: what share of the machine others will have had."""

    wall_s: float
    machine_s: float
    own_s: float

    @staticmethod
    def start() -> Watch:
        return Watch(time.perf_counter(), machine_cpu_s(), time.process_time())

    def others(self, ranks_cpu_s: float) -> float:
        """Share of all cores since the start that went to neither this process nor the ranks.

        /proc/stat counts in ticks of 10 ms, and what it says of a time may be two of them off; those are forgiven.
        """
        wall_s = time.perf_counter() - self.wall_s
        others_s = machine_cpu_s() - self.machine_s - ranks_cpu_s - (time.process_time() - self.own_s)
        if not _cgroup_counts_everything():
            others_s -= 2 * _TICK_S
        return max(0.0, others_s / (wall_s * len(os.sched_getaffinity(0))))


def _ticks() -> tuple[int, ...]:
    return tuple(int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])


@cache
def _cgroup_counts_everything() -> bool:
    """Whether the first version of control groups is there, with nanoseconds, and not only a container's own."""
    if not _CGROUP_USAGE_NS.exists():
        return False
    user, nice, system, *_ = _ticks()
    return int(_CGROUP_USAGE_NS.read_text()) * 1e-9 > 0.8 * (user + nice + system) * _TICK_S
