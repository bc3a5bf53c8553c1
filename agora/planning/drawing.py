"""Draws a plan: a table of machines, and a picture of which hold which stages, for a terminal and as SVG. Pure.

Machines that are equal except for their names and hold the same stages share one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final

from agora.cost.run_cost import RunCost
from agora.planning.plan import Assignment, Plan

HEADINGS: Final = ("MACHINES", "STAGES", "SHARE", "TOK/S", "LIMIT", "MEMORY", "AVAILABLE")
# Maximum number of columns of stages in a terminal picture; with more stages, each column stands for several.
MAX_COLUMNS: Final = 64
LABEL_WIDTH: Final = 28
STAGE_PIXELS, ROW_PIXELS, LABEL_PIXELS, PICTURE_PIXELS = 24, 26, 210, 960
# Colour of a machine's bar, by the resource that limits its rate.
COLOURS: Final = {"compute": "#4878a8", "upload": "#c87137", "download": "#8a6bb0", "memory": "#999999"}


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Equal machines with equal assignments. label: their names in short. assignment: that of the first."""

    label: str
    machine_count: int
    assignment: Assignment


def plan_rows(plan: Plan) -> list[PlanRow]:
    """Sorted by first stage, last stage and label, idle machines last. Machines share a row if they differ only in
    names, and in shares by less than 0.001.
    """
    groups: dict[object, list[Assignment]] = {}
    for assignment in plan.assignments:
        key = (replace(assignment.machine, name=""), assignment.span, assignment.rate, round(assignment.share, 3))
        groups.setdefault(key, []).append(assignment)
    rows = [
        PlanRow(_join_names([each.machine.name for each in group]), len(group), group[0]) for group in groups.values()
    ]
    return sorted(rows, key=_sort_key)


def plan_table(cost: RunCost, plan: Plan) -> list[str]:
    """Returns the plan's table as lines: a header, then a line for each row of `plan_rows`; columns as in HEADINGS."""
    cells = [list(HEADINGS), *(_table_cells(cost, row) for row in plan_rows(plan))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def picture_lines(cost: RunCost, plan: Plan, *, fill: str = "#") -> list[str]:
    """For a terminal: a row has its label, a bar of `fill` at its stages, and what limits its rate; ^ under the slowest
    stages. With more than MAX_COLUMNS stages, several share a column.
    """
    count, columns = cost.stage_count, min(cost.stage_count, MAX_COLUMNS)

    def column_of(stage: int) -> int:
        return stage * columns // count

    def bar(first: int, last: int, mark: str) -> str:
        begin, end = column_of(first), column_of(last)
        return "." * begin + mark * (end - begin + 1) + "." * (columns - end - 1)

    ruler = f"0{str(count - 1).rjust(columns - 1)}" if columns > 1 and count > 1 else "0"
    lines = [f"{'stages':<{LABEL_WIDTH}}  {ruler}"]
    for row in plan_rows(plan):
        span = row.assignment.span
        drawn = "." * columns if span is None else bar(span.first, span.last, fill)
        tail = "idle" if span is None else row.assignment.rate.limit
        lines.append(f"{_truncate_label(row.label):<{LABEL_WIDTH}}  {drawn}  {tail}")
    slowest = plan.bottleneck.stages
    lines.append(f"{'slowest':<{LABEL_WIDTH}}  {bar(slowest.first, slowest.last, '^').replace('.', ' ').rstrip()}")
    return lines


def picture_svg(cost: RunCost, plan: Plan, title: str) -> str:
    """A bar for each row, its colour what limits the rate; slowest stages shaded. Names are escaped: they come from a
    file.
    """
    rows = plan_rows(plan)
    count = cost.stage_count
    pixels = min(float(STAGE_PIXELS), PICTURE_PIXELS / count)
    width = LABEL_PIXELS + pixels * count + 190
    top = 56
    height = top + ROW_PIXELS * len(rows) + 40
    slowest = plan.bottleneck.stages
    body = [
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        _text_element(10, 22, title, size=15),
        f'<rect x="{LABEL_PIXELS + pixels * slowest.first:.1f}" y="{top - 8}" width="{pixels * len(slowest):.1f}" '
        f'height="{ROW_PIXELS * len(rows) + 12}" fill="#f8dcdc"/>',
        _text_element(LABEL_PIXELS, top - 14, f"stage 0 to {count - 1}; shaded: the slowest, {slowest}"),
    ]
    for number, row in enumerate(rows):
        body += _svg_row(cost, row, top + ROW_PIXELS * number, pixels)
    legend = "bar colours: " + ", ".join(f"{limit} {colour}" for limit, colour in COLOURS.items() if limit != "memory")
    body.append(_text_element(10, height - 12, legend))
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif">\n{inside}\n</svg>\n'
    )


def _svg_row(cost: RunCost, row: PlanRow, y: float, pixels: float) -> list[str]:
    elements = [_text_element(10, y + 15, _truncate_label(row.label))]
    span = row.assignment.span
    right = LABEL_PIXELS + pixels * cost.stage_count + 10
    if span is None:
        return [*elements, _text_element(right, y + 15, "idle")]
    elements.append(
        f'<rect x="{LABEL_PIXELS + pixels * span.first:.1f}" y="{y:.1f}" width="{pixels * len(span):.1f}" '
        f'height="{ROW_PIXELS - 8}" rx="3" fill="{COLOURS[row.assignment.rate.limit]}"/>'
    )
    rate = row.assignment.rate
    speed = f"{rate.microbatches * cost.tokens * row.machine_count:,.0f} tok/s, {rate.limit}"
    return [*elements, _text_element(right, y + 15, speed)]


def _text_element(x: float, y: float, text: str, size: int = 12) -> str:
    allowed = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(allowed)}</text>'


def _table_cells(cost: RunCost, row: PlanRow) -> list[str]:
    assignment, machine, rate = row.assignment, row.assignment.machine, row.assignment.rate
    if assignment.span is None:
        return [row.label, "idle", "", "", "", "", f"{machine.memory / 1e9:,.1f} GB"]
    need = cost.memory(assignment.span, rate.activations, in_host=rate.in_host)
    host_memory = f" + {need.host / 1e9:,.1f} host" if rate.in_host else ""
    return [
        row.label,
        str(assignment.span),
        f"{100 * assignment.share:.1f} %" + (" each" if row.machine_count > 1 else ""),
        f"{rate.microbatches * cost.tokens * row.machine_count:,.0f}",
        rate.limit,
        f"{need.device / 1e9:,.2f} GB{host_memory}",
        f"{machine.memory / 1e9:,.1f} GB",
    ]


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _truncate_label(label: str) -> str:
    return label if len(label) <= LABEL_WIDTH else f"{label[: LABEL_WIDTH - 3]}..."


def _sort_key(row: PlanRow) -> tuple[int, int, str]:
    span = row.assignment.span
    return (1 << 30, 0, row.label) if span is None else (span.first, span.last, row.label)
