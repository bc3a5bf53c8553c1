"""The figures of the benchmark of slow links, as SVG: the same bytes for the same numbers.

Knows: matplotlib, which only drawing needs. Must not know: what was measured, files.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.children import BenchFailed

STYLE: Final = {"svg.hashsalt": "agora", "svg.fonttype": "none", "font.size": 9.0, "axes.grid": True, "grid.alpha": 0.3}
SIZE_INCHES: Final = (7.2, 4.2)


@dataclass(frozen=True, slots=True)
class Line:
    """One curve, or with `marks` one set of points; `labels` are written beside them."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Axes:
    """What both axes show, and whether the first is logarithmic; `level` is a horizontal line, such as a target."""

    x: str
    y: str
    x_log: bool = False
    level: float | None = None


def require_matplotlib() -> None:
    """Raises BenchFailed where it is not installed, or cannot be imported: nothing could be drawn."""
    try:
        for name in ("matplotlib", "matplotlib.figure"):
            importlib.import_module(name)
    except ImportError as missing:
        raise BenchFailed(f"figures need matplotlib ({missing}): pip install 'agora-swarm[bench]'") from missing


def draw(lines: Sequence[Line], axes: Axes) -> bytes:
    """An SVG of these lines. Raises BenchFailed where matplotlib is not installed."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        plot = figure.add_subplot()
        for line in lines:
            _draw_line(plot, line)
        _draw_axes(plot, axes)
        room = io.BytesIO()
        figure.savefig(room, format="svg", metadata={"Date": None, "Creator": None})
    return room.getvalue()


def _draw_line(plot: Any, line: Line) -> None:
    across, up = [x for x, _ in line.points], [y for _, y in line.points]
    plot.plot(across, up, label=line.name, linewidth=1.3, **({"marker": "o", "linestyle": ""} if line.marks else {}))
    for label, at in zip(line.labels, line.points, strict=False):
        plot.annotate(label, at, xytext=(4, 4), textcoords="offset points", fontsize=7)


def _draw_axes(plot: Any, axes: Axes) -> None:
    plot.set_xlabel(axes.x)
    plot.set_ylabel(axes.y)
    if axes.x_log:
        plot.set_xscale("log")
    if axes.level is not None:
        plot.axhline(axes.level, color="black", linewidth=0.8, linestyle=":")
    plot.legend(fontsize=7)
