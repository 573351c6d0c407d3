"""The machine of a result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Final

import torch

MACHINE: Final = ("cpu", "cores", "accelerator", "malloc")
"""Of `environment`, what has to be equal for times to be comparable."""
_OF_MALLOC: Final = re.compile(r"MALLOC_\w*_=|GLIBC_TUNABLES=.*malloc|LD_PRELOAD=.*malloc")


def environment() -> dict[str, str]:
    """What a figure depends on, besides the code that is measured.

    `malloc`: its settings in the environment, or a preloaded one; page faults are a part of a step.
    """
    cpus = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "malloc": " ".join(sorted(each for each in map("=".join, os.environ.items()) if _OF_MALLOC.match(each))),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _commit() -> str:
    """The checkout's commit, `+changes` if files differ from it; without a checkout the version."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return f"version {importlib.metadata.version('dp_compile')}"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
