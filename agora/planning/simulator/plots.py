"""Draws a simulation's samples as SVG pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from agora.planning.simulator.measurements import Sample

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 36, 40
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49")
TICKS = 5
FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Plot:
    """A line plot: `lines` by name, each with a value in `unit` for every time of `times` (seconds)."""

    title: str
    unit: str
    times: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def plots_of(samples: Sequence[Sample]) -> dict[str, Plot]:
    """Returns the plots of a simulation over time, by name: "throughput", "peers" and "messages"."""
    times = [sample.time for sample in samples]
    throughput = {
        "best placement": [sample.best for sample in samples],
        "bound of spans": [sample.bound for sample in samples],
        "completed": [sample.rate for sample in samples],
    }
    peers = {
        "up": [float(sample.peers) for sample in samples],
        "serving": [float(sample.serving) for sample in samples],
    }
    messages = {"messages": [sample.messages for sample in samples]}
    return {
        "throughput": Plot("Throughput", "microbatches/s", times, throughput),
        "peers": Plot("Machines", "machines", times, peers),
        "messages": Plot("Messages per machine", "messages/s", times, messages),
    }


def to_svg(plot: Plot) -> str:
    """Returns a plot as the text of an SVG file: title, axes, and each of `lines` with its name."""
    end = max(plot.times, default=0.0) or 1.0
    top = 1.05 * max((max(values, default=0.0) for values in plot.lines.values()), default=0.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(plot.title)}, {escape(plot.unit)}</text>',
        *_axes(end, top),
    ]
    for number, (name, values) in enumerate(plot.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{_x(time, end):.1f},{_y(value, top):.1f}" for time, value in zip(plot.times, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        height = TOP + 16 * (number + 1)
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{height}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(end: float, top: float) -> list[str]:
    parts = []
    for tick in range(TICKS + 1):
        value, time = top * tick / TICKS, end * tick / TICKS
        y, x = _y(value, top), _x(time, end)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{time / 60.0:.3g} min</text>')
    return parts


def _x(time: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time / end


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
