"""Measure what `docs/results` holds, on this machine: `python docs/make_results.py [SUITE ...]`.

Without names all of `SUITES` are measured, about an hour on two quiet cores; an interrupted run goes on with the same
command. For each suite the result file, its tables and its picture lie in a directory named after the machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dp_compile.bench.machine import environment
from dp_compile.bench.suite import packaged

RESULTS = Path(__file__).parent / "results"
SUITES = ("full", "models", "one-rank", "cold")


def directory() -> Path:
    """Of this kind of machine: `amd-epyc-2-cores`."""
    here = environment()
    kind = here.cpu if here.accelerator == "none" else here.accelerator
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", f"{kind} {here.cores} cores".lower())


def bench(*arguments: str | Path) -> int:
    return subprocess.run([sys.executable, "-m", "dp_compile", "bench", *map(str, arguments)]).returncode


def main(suites: list[str]) -> int:
    unknown = [name for name in suites if name not in packaged()]
    if unknown:
        raise SystemExit(f"no suite {', '.join(unknown)}. Packaged: {', '.join(packaged())}.")
    place, failed = directory(), False
    place.mkdir(parents=True, exist_ok=True)
    for name in suites or SUITES:
        result = place / f"{name}.json"
        failed |= bench("run", name, "--out", result) != 0
        if result.exists():
            bench("report", result, "--out", place / f"{name}.md", "--picture", place / f"{name}.svg")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
