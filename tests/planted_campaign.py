"""Does `dp-compile bench compare` find a planted regression, and let the same code pass five times in a row?

Needs root and `iproute2` for the shaped link, and a quiet machine for some ten minutes:

    python tests/planted_campaign.py DIRECTORY

Prints a table in Markdown and exits with 1 if anything was missed or found in vain; results stay in DIRECTORY.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from planted import PLANTS

HERE = Path(__file__).parent
RERUNS = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one run beside the baseline."""

    name: str
    wanted: int
    status: int
    text: str

    def row(self) -> str:
        lines = [line for line in self.text.splitlines() if "planted:ours" in line]
        timed = next(line.split("-> ")[1].split(", ")[1] for line in lines if ", step: " in line)
        counts = "; ".join(line.split("planted:ours: ")[1] for line in lines if line.startswith(("more:", "fewer:")))
        said = "regression" if self.status else "passes"
        return f"| {self.name} | {timed} | {counts or 'as before'} | {said} |"


def bench(*arguments: str, plant: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dp_compile", "bench", *arguments]
    return subprocess.run(command, env={**os.environ, "PLANT": plant}, capture_output=True, text=True)


def measured(path: Path, plant: str) -> Path:
    done = bench("run", str(HERE / "planted.toml"), "--out", str(path), plant=plant)
    if done.returncode != 0:
        raise SystemExit(f"{path.stem} failed:\n{done.stdout}\n{done.stderr}")
    print(f"measured: {path.stem}", file=sys.stderr)
    return path


def compared(name: str, baseline: Path, new: Path, wanted: int) -> Verdict:
    done = bench("compare", str(baseline), str(new))
    return Verdict(name, wanted, done.returncode, done.stdout)


def main(directory: Path) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    baseline = measured(directory / "baseline.json", "")
    verdicts = []
    for number in range(1, RERUNS + 1):
        path = measured(directory / f"rerun-{number}.json", "")
        verdicts.append(compared(f"the same code, run {number}", baseline, path, 0))
    for plant in filter(None, PLANTS):
        path = measured(directory / f"{plant.replace(' ', '-')}.json", plant)
        verdicts.append(compared(plant, baseline, path, 1))
    print("| run | step / oracle | counts | `compare` |\n|---|---|---|---|")
    print("\n".join(verdict.row() for verdict in verdicts))
    return int(any(verdict.status != verdict.wanted for verdict in verdicts))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    raise SystemExit(main(Path(sys.argv[1])))
