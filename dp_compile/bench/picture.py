"""A run as one picture: for each workload and link a row of dots, a mode each, at step over reference. SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Final

from dp_compile.bench.ratios import Ratio, ratios
from dp_compile.bench.results import Results

_WIDTH, _LEFT, _RIGHT = 900, 260, 70
_ROW, _HEAD, _FOOT = 18, 40, 44
_STEPS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_OURS, _THEIRS, _BOUND = "#c2410c", "#334155", "#94a3b8"


@dataclass(frozen=True, slots=True)
class _Dot:
    mode: str
    value: Ratio
    is_bound: bool


def svg(results: Results) -> str:
    """Ratios with 95% whiskers, fastest first; modes of this package in orange, bounds in grey."""
    panels = [(f"{workload}, {link}", dots) for (workload, link), dots in _dots(results).items()]
    values = [dot.value.value for _, dots in panels for dot in dots] or [1.0]
    scale = _Scale.around(min(*values, 1.0), max(*values, 1.0))
    height = _HEAD + sum(30 + _ROW * len(dots) for _, dots in panels) + _FOOT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _label(
            10,
            22,
            f"step / {results.suite.reference}: {results.suite.name}, {results.environment.cpu}, "
            f"{results.started[:10]}, {results.environment.commit}",
            "start",
            "#0f172a",
            bold=True,
        ),
    ]
    lines += scale.grid(_HEAD, height - _FOOT)
    top = _HEAD
    for title, dots in panels:
        lines.append(_label(10, top + 20, title, "start", "#0f172a", bold=True))
        top += 30
        for dot in dots:
            lines += _row(dot, scale, top)
            top += _ROW
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    step: float

    @staticmethod
    def around(low: float, high: float) -> _Scale:
        span = max(high - low, 0.05)
        step = next((step for step in _STEPS if span / step <= 10), _STEPS[-1])
        return _Scale((low - 1e-9) // step * step, -(-(high + 1e-9) // step) * step, step)

    def x(self, value: float) -> float:
        return _LEFT + (value - self.low) / (self.high - self.low) * (_WIDTH - _LEFT - _RIGHT)

    def grid(self, top: float, bottom: float) -> Iterator[str]:
        for number in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + number * self.step
            colour = "#0f172a" if abs(value - 1) < self.step / 100 else "#e2e8f0"
            x = self.x(value)
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{colour}"/>'
            yield _label(x, bottom + 16, f"{value:.2f}", "middle", "#475569")


def _dots(results: Results) -> dict[tuple[str, str], list[_Dot]]:
    panels: dict[tuple[str, str], list[_Dot]] = {}
    for cell in results.cells:
        bounds = {mode.name for mode in cell.modes if mode.is_bound}
        for name, value in ratios(cell, results.suite.reference).items():
            panels.setdefault((cell.workload, cell.link), []).append(_Dot(name, value, name in bounds))
    for dots in panels.values():
        dots.sort(key=lambda dot: dot.value.value)
    return panels


def _row(dot: _Dot, scale: _Scale, top: float) -> Iterator[str]:
    middle = top + _ROW / 2
    colour = _BOUND if dot.is_bound else _OURS if dot.mode.partition(":")[0] == "ours" else _THEIRS
    low, high = (min(max(dot.value.value + sign * dot.value.plus_minus, scale.low), scale.high) for sign in (-1, 1))
    x = scale.x(dot.value.value)
    yield _label(_LEFT - 10, middle + 4, dot.mode, "end", colour)
    yield (
        f'<line x1="{scale.x(low):.1f}" x2="{scale.x(high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
        f'stroke="{colour}" stroke-width="2"/>'
    )
    yield f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="4" fill="{colour}"/>'
    yield _label(_WIDTH - _RIGHT + 10, middle + 4, f"{dot.value.value:.3f}", "start", colour)


def _label(x: float, y: float, text: str, anchor: str, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'
