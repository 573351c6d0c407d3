"""How well a decentralized training converges beside a synchronous one: `python docs/make_convergence.py`.

Trains the main job on four ranks, for each of `PANELS` once synchronously and once with ranks that mix parameters over
`TOPOLOGY`: forty minutes on two cores. Held-out losses lie in `docs/decentralized/convergence.json`, with the commands,
the picture beside it. `--picture` only draws it anew.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from dp_compile.insight.timelines import svg

DATA: Final = Path(__file__).parent / "decentralized" / "convergence.json"
TOPOLOGY: Final = "one-peer-exp"
ALWAYS: Final = ("--ranks", "4", "--steps", "300", "--evaluate-every", "25")
PANELS: Final = {
    "AdamW, learning rate 0.002": (),
    "AdamW, learning rate 0.003": ("--lr", "3e-3"),
    "AdamW, learning rate 0.004": ("--lr", "4e-3"),
    "SGD, momentum 0.9, learning rate 0.1": ("--momentum", "0.9", "--lr", "0.1"),
}
SYNCHRONOUS: Final = "synchronous"
_GRID: Final = "#e2e8f0"
_COLOURS: Final = {SYNCHRONOUS: "#334155", TOPOLOGY: "#c2410c"}
_LOSS: Final = re.compile(r"^step +(\d+) +held-out loss (\d+\.\d+)", re.MULTILINE)

Panel = dict[str, Any]
"""`title`, and for each way to train its `command` and its `losses`: pairs of steps and held-out losses."""


def command_of(options: tuple[str, ...], way: str) -> str:
    """What is run, as a reader would."""
    topology = () if way == SYNCHRONOUS else ("--topology", TOPOLOGY)
    return " ".join(("dp-compile", "train", *ALWAYS, *options, *topology))


def losses_in(output: str) -> list[list[float]]:
    """Steps and held-out losses that a training says."""
    return [[int(step), float(loss)] for step, loss in _LOSS.findall(output)]


def trained(command: str) -> list[list[float]]:
    words = command.split()
    done = subprocess.run(
        [sys.executable, "-m", "dp_compile", *words[1:]], stdout=subprocess.PIPE, text=True, check=True
    )
    return losses_in(done.stdout)


def measured() -> dict[str, Any]:
    panels = [
        {"title": title}
        | {way: {"command": (said := command_of(options, way)), "losses": trained(said)} for way in _COLOURS}
        for title, options in PANELS.items()
    ]
    return {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "panels": panels}


# --- what is shown --------------------------------------------------------------------------------------------------


def table(panels: list[Panel]) -> str:
    """Held-out losses at the end, in Markdown."""
    lines = ["| held-out loss after 300 steps | synchronous | `one-peer-exp` | difference |", "|---|---|---|---|"]
    for panel in panels:
        one, other = (panel[way]["losses"][-1][1] for way in _COLOURS)
        lines.append(f"| {panel['title']} | {one:.3f} | {other:.3f} | {other / one - 1:+.1%} |")
    return "\n".join(lines)


_WIDTH, _HEIGHT, _LEFT, _TOP, _FOOT, _GAP = 300, 220, 44, 40, 40, 16


def picture(panels: list[Panel]) -> str:
    """A panel for each optimizer, on one scale; SVG."""
    losses = [loss for panel in panels for way in _COLOURS for _, loss in panel[way]["losses"][1:]]
    low, high = math.floor(min(losses) * 5) / 5, math.ceil(max(losses) * 5) / 5
    steps = max(step for panel in panels for way in _COLOURS for step, _ in panel[way]["losses"])
    width, height = _LEFT + len(panels) * (_WIDTH + _GAP), _TOP + _HEIGHT + _FOOT

    def y(loss: float) -> float:
        return _TOP + (high - loss) / (high - low) * _HEIGHT

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number in range(round((high - low) * 5) + 1):
        at = low + number / 5
        lines.append(svg.line(_LEFT, y(at), width - _GAP, y(at), _GRID))
        lines.append(svg.text(_LEFT - 6, y(at) + 4, f"{at:.1f}", anchor="end"))
    for place, panel in enumerate(panels):
        left = _LEFT + place * (_WIDTH + _GAP)
        lines += _panel(panel, left, steps, y)
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _panel(panel: Panel, left: float, steps: int, y: Any) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    yield svg.text(left + 4, 16, panel["title"], bold=True)
    for step in range(0, steps + 1, 100):
        x = left + step / steps * _WIDTH
        yield svg.line(x, _TOP, x, bottom, _GRID)
        yield svg.text(x, bottom + 16, str(step), anchor="" if step == 0 else "end" if step == steps else "middle")
    yield svg.text(left + _WIDTH / 2, bottom + 32, "steps", anchor="middle")
    for row, (way, colour) in enumerate(_COLOURS.items()):
        seen = [(left + step / steps * _WIDTH, y(loss)) for step, loss in panel[way]["losses"][1:]]
        points = " ".join(f"{x:.1f},{at:.1f}" for x, at in seen)
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        last = panel[way]["losses"][-1][1]
        yield svg.text(left + _WIDTH - 6, _TOP + 16 + 16 * row, f"{way}: {last:.3f}", colour=colour, anchor="end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", action="store_true", help="only draw what was measured")
    if not parser.parse_args().picture:
        DATA.write_text(json.dumps(measured(), indent=1) + "\n")
    panels = json.loads(DATA.read_text())["panels"]
    DATA.with_suffix(".svg").write_text(picture(panels))
    print(table(panels))


if __name__ == "__main__":
    main()
