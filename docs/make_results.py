"""Measure what `docs/results` holds, on this machine: `python docs/make_results.py [SUITE ...]`.

Without names all of `SUITES` are measured, which takes a quiet machine for long (`full` alone half an hour on two
cores); an interrupted run goes on with the same command. For each suite the result file, its tables and its picture
lie in a directory named after the machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dp_compile.bench import report
from dp_compile.bench.machine import environment
from dp_compile.bench.results import Results, load
from dp_compile.bench.suite import packaged

RESULTS = Path(__file__).parent / "results"
SUITES = ("full", "models", "one-rank", "cold", "warm")

OTHER_TRAINING = {"decent_dp"}
"""It averages parameters while the next step computes: that is another training, and the oracle is no bound of it."""


def directory() -> Path:
    """Of this kind of machine: `amd-epyc-2-cores`."""
    here = environment()
    kind = here.cpu if here.accelerator == "none" else here.accelerator
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", f"{kind} {here.cores} cores".lower())


def summary(found: Results) -> str:
    """The table of the README: this package's default beside the best of its peers on each link."""
    links = [link.name for link in found.suite.links]
    figures = _figures(found)
    peers = {name for of_link in figures.values() for name in of_link if not name.startswith("ours")} - OTHER_TRAINING
    defaults = {name for name in peers if ":" not in name}
    lines = [["step / oracle", *links], ["**`ours`, the default**"]]
    lines[1] += [f"**{figures[link]['ours']:.3f}**" if "ours" in figures[link] else "-" for link in links]
    for title, names in (("best default of a peer", defaults), ("best peer, 1 and 5 MiB tried too", peers)):
        lines.append([title, *(_best(figures[link], names) for link in links)])
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def _figures(found: Results) -> dict[str, dict[str, float]]:
    """Step over oracle by link and mode, bounds left out."""
    figures: dict[str, dict[str, float]] = {link.name: {} for link in found.suite.links}
    for row in report.rows(found):
        if "ratio" in row and not row["is_bound"]:
            figures[row["link"]][row["mode"]] = row["ratio"]
    return figures


def _best(figures: dict[str, float], names: set[str]) -> str:
    best = min(names & set(figures), key=lambda name: figures[name])
    return f"{figures[best]:.3f} (`{best}`)"


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
    if (place / "full.json").exists():
        print(f"for the README:\n\n{summary(load(place / 'full.json'))}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
