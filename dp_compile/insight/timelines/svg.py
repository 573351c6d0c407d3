"""Elements of SVG as text. Numbers are pixels, from the top left corner."""

from __future__ import annotations

from html import escape
from typing import Final

INK: Final = "#1b1f24"


def text(
    x: float, y: float, content: str, *, colour: str = INK, anchor: str = "", size: int = 0, bold: bool = False
) -> str:
    """A line of text whose base line is at `y`. `anchor`: `middle` or `end`, else `x` is where it starts."""
    more = f' text-anchor="{anchor}"' if anchor else ""
    more += f' font-size="{size}"' if size else ""
    more += ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{more}>{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, colour: str, edge: str = "") -> str:
    more = f' stroke="{edge}" stroke-width="0.8"' if edge else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"{more}/>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    more = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def polygon(points: list[tuple[float, float]], colour: str, edge: str = "") -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    more = f' stroke="{edge}" stroke-width="0.8"' if edge else ""
    return f'<polygon points="{corners}" fill="{colour}"{more}/>'
