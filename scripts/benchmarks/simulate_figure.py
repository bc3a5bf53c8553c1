"""Draws what a machine sends and reads by the size of its fleet, as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 190, 40, 40
COLOURS: Final = ("#1b6ca8", "#d1495b", "#66a182", "#edae49")
TICKS: Final = 4
FONT: Final = 'font-family="sans-serif" font-size="12"'


def draw(title: str, lines: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Returns an SVG picture of lines by name, each of points (machines, value); at least one point in all."""
    sizes = sorted({size for points in lines.values() for size, _ in points})
    top = 1.1 * max((value for points in lines.values() for _, value in points), default=1.0) or 1.0
    span = math.log10(sizes[-1] / sizes[0]) or 1.0

    def x(size: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log10(size / sizes[0]) / span

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>',
    ]
    for value in (top * tick / TICKS for tick in range(TICKS + 1)):
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dddddd"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for size in sizes:
        parts.append(f'<text x="{x(size):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{size:,}</text>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = " ".join(f"{x(size):.1f},{y(value):.1f}" for size, value in points)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(s):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for s, v in points]
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 16 * (number + 1)}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
