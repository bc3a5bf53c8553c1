"""Draws a plan: a table of machines, and a picture of who holds which stages, for a terminal and as SVG. Pure.

Machines that are equal except for their names and hold the same stages share one row. Knows: plans, text, SVG. Must not
know: how a plan is found, files, terminals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final

from agora.plan.assignment import Assignment, Plan
from agora.plan.cost import RunCost

HEADINGS: Final = ("MACHINES", "STAGES", "SHARE", "TOK/S", "LIMIT", "MEMORY", "OF")
MAX_COLUMNS: Final = 64
"""Maximum number of columns of stages in a terminal picture; with more stages, each column stands for several."""
LABEL_WIDTH: Final = 28
STAGE_PIXELS, ROW_PIXELS, LABEL_PIXELS, PICTURE_PIXELS = 24, 26, 210, 960
COLOURS: Final = {"compute": "#4878a8", "upload": "#c87137", "download": "#8a6bb0", "memory": "#999999"}
"""Colour of a machine's bar, by the resource that limits its rate."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Equal machines with equal assignments, which share a row; immutable.

    label: their names in short. one: the assignment of the first of them.
    """

    label: str
    count: int
    one: Assignment


def plan_rows(plan: Plan) -> list[PlanRow]:
    """Returns one row for each group of equal machines of a plan, in the order of their stages; idle ones last."""
    groups: dict[object, list[Assignment]] = {}
    for assignment in plan.assignments:
        key = (replace(assignment.machine, name=""), assignment.span, assignment.rate, round(assignment.share, 3))
        groups.setdefault(key, []).append(assignment)
    rows = [PlanRow(_label([each.machine.name for each in group]), len(group), group[0]) for group in groups.values()]
    return sorted(rows, key=_place)


def plan_table(cost: RunCost, plan: Plan) -> list[str]:
    """Returns the table as lines: a header, then one line for each group of equal machines; columns as in HEADINGS."""
    cells = [list(HEADINGS), *(_cells(cost, row) for row in plan_rows(plan))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def picture_lines(cost: RunCost, plan: Plan, *, sign: str = "#") -> list[str]:
    """Returns the terminal picture as lines: a ruler of stages, a bar of `sign` for each row, marks of the slowest."""
    count, columns = cost.stage_count, min(cost.stage_count, MAX_COLUMNS)

    def column_of(stage: int) -> int:
        """Returns the column in which a stage is drawn."""
        return stage * columns // count

    def bar(first: int, last: int, mark: str) -> str:
        """Returns all columns as text: those of stages `first` to `last` are `mark`, the others dots."""
        begin, end = column_of(first), column_of(last)
        return "." * begin + mark * (end - begin + 1) + "." * (columns - end - 1)

    ruler = f"0{str(count - 1).rjust(columns - 1)}" if columns > 1 and count > 1 else "0"
    lines = [f"{'stages':<{LABEL_WIDTH}}  {ruler}"]
    for row in plan_rows(plan):
        span = row.one.span
        drawn = "." * columns if span is None else bar(span.first, span.last, sign)
        tail = "idle" if span is None else row.one.rate.limit
        lines.append(f"{_truncate_label(row.label):<{LABEL_WIDTH}}  {drawn}  {tail}")
    slowest = plan.bottleneck.stages
    lines.append(f"{'slowest':<{LABEL_WIDTH}}  {bar(slowest.first, slowest.last, '^').replace('.', ' ').rstrip()}")
    return lines


def picture_svg(cost: RunCost, plan: Plan, title: str) -> str:
    """Returns the picture as the text of an SVG file: bars coloured by what limits them, the slowest stages shaded.

    title: its heading. Names are escaped: they come from a file.
    """
    rows, count = plan_rows(plan), cost.stage_count
    pixels = min(float(STAGE_PIXELS), PICTURE_PIXELS / count)
    width, top = LABEL_PIXELS + pixels * count + 190, 56
    height = top + ROW_PIXELS * len(rows) + 40
    slowest = plan.bottleneck.stages
    body = [
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        _text(10, 22, title, size=15),
        f'<rect x="{LABEL_PIXELS + pixels * slowest.first:.1f}" y="{top - 8}" width="{pixels * len(slowest):.1f}" '
        f'height="{ROW_PIXELS * len(rows) + 12}" fill="#f8dcdc"/>',
        _text(LABEL_PIXELS, top - 14, f"stage 0 to {count - 1}; shaded: the slowest, {slowest}"),
    ]
    for number, row in enumerate(rows):
        body += _svg_row(cost, row, top + ROW_PIXELS * number, pixels)
    legend = "bar colours: " + ", ".join(f"{limit} {colour}" for limit, colour in COLOURS.items() if limit != "memory")
    body.append(_text(10, height - 12, legend))
    inside = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif">\n{inside}\n</svg>\n'
    )


def _svg_row(cost: RunCost, row: PlanRow, y: float, pixels: float) -> list[str]:
    """Returns the SVG elements of one row of machines. y: its top, in pixels. pixels: width of one stage."""
    elements, span = [_text(10, y + 15, _truncate_label(row.label))], row.one.span
    right = LABEL_PIXELS + pixels * cost.stage_count + 10
    if span is None:
        return [*elements, _text(right, y + 15, "idle")]
    elements.append(
        f'<rect x="{LABEL_PIXELS + pixels * span.first:.1f}" y="{y:.1f}" width="{pixels * len(span):.1f}" '
        f'height="{ROW_PIXELS - 8}" rx="3" fill="{COLOURS[row.one.rate.limit]}"/>'
    )
    speed = f"{row.one.rate.microbatches * cost.tokens * row.count:,.0f} tok/s, {row.one.rate.limit}"
    return [*elements, _text(right, y + 15, speed)]


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    """Returns an SVG text element; characters that XML does not allow are replaced."""
    allowed = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(allowed)}</text>'


def _cells(cost: RunCost, row: PlanRow) -> list[str]:
    """Returns the cells of one table row, one for each of HEADINGS."""
    one, machine = row.one, row.one.machine
    if one.span is None:
        return [row.label, "idle", "", "", "", "", f"{machine.memory / 1e9:,.1f} GB"]
    need = cost.memory(one.span, one.rate.activations, in_host=one.rate.in_host)
    beside = f" + {need.host / 1e9:,.1f} host" if one.rate.in_host else ""
    return [
        row.label,
        str(one.span),
        f"{100 * one.share:.1f} %" + (" each" if row.count > 1 else ""),
        f"{one.rate.microbatches * cost.tokens * row.count:,.0f}",
        one.rate.limit,
        f"{need.device / 1e9:,.2f} GB{beside}",
        f"{machine.memory / 1e9:,.1f} GB",
    ]


def _label(names: Sequence[str]) -> str:
    """Returns the names of equal machines as one label; of more than two, the first, the last, and their number."""
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _truncate_label(label: str) -> str:
    """Returns a label; a longer one is cut to LABEL_WIDTH characters, the last three of them dots."""
    return label if len(label) <= LABEL_WIDTH else f"{label[: LABEL_WIDTH - 3]}..."


def _place(row: PlanRow) -> tuple[int, int, str]:
    """Returns the sort key of a row: its first and last stage; idle machines come after all others."""
    span = row.one.span
    return (1 << 30, 0, row.label) if span is None else (span.first, span.last, row.label)
