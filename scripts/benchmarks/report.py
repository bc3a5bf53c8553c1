"""A benchmark's result and its three faces: JSON, tables on the terminal, a section of docs/reference/benchmarks.md."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio of the contract: its value, what it should be in words (`>= 0.95`), and what it divides by what."""

    value: float
    target: str
    meaning: str


@dataclass(slots=True)
class Report:
    """What a benchmark found. `rows` share their keys in their order; `notes` say what makes the comparison fair.

    pictures: SVG texts by the names of their files, which `--write` puts into docs/reference/figures.
    """

    bench: str
    title: str
    machine: Mapping[str, object]
    rows: list[dict[str, Cell]] = field(default_factory=list)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the one JSON object of `--json`; a number that is not finite is null."""
        return {
            "schema": 1,
            "bench": self.bench,
            "machine": dict(self.machine),
            "rows": [{key: _json_cell(value) for key, value in row.items()} for row in self.rows],
            "ratios": {name: _json_cell(ratio.value) for name, ratio in self.ratios.items()},
            "notes": list(self.notes),
        }


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median of ours[i] / theirs[i], so that slow drift of the machine hits both sides alike.

    `ours[i]` and `theirs[i]` were measured in the same round. NaN when nothing was measured.
    """
    pairs = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    return statistics.median(pairs) if pairs else math.nan


def columns(rows: Sequence[Mapping[str, Cell]]) -> list[str]:
    """Returns every key of the rows, in the order in which they first appear."""
    return list(dict.fromkeys(key for row in rows for key in row))


def show(value: Cell) -> str:
    """Returns a cell as text: three significant figures below a thousand, whole numbers above, "-" for no value."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def print_tables(report: Report, out: TextIO) -> None:
    """Prints rows and ratios as tables, without colour and wrapping where `out` is not a terminal."""
    from rich.console import Console

    console = Console(file=out, width=None if out.isatty() else 160, highlight=False)
    console.print(_rich_table(report.title, columns(report.rows), _lines(report.rows)))
    lines = [[name, show(r.value), r.target, r.meaning] for name, r in report.ratios.items()]
    console.print(_rich_table("ratios", ["ratio", "value", "target", "meaning"], lines))
    for note in report.notes:
        console.print(f"- {note}", soft_wrap=True, markup=False)


def section(report: Report, command: str, date: str) -> str:
    """Returns the benchmark's section of docs/reference/benchmarks.md, without its markers."""
    ratios = [[f"`{name}`", show(r.value), r.target, r.meaning] for name, r in report.ratios.items()]
    parts = [
        f"## {report.title}",
        f"`{command}`, {date}, on {_machine_sentence(report.machine)}.",
        _markdown_table(["ratio", "value", "target", "meaning"], ratios),
        _markdown_table(columns(report.rows), _lines(report.rows)),
        "\n".join(f"- {note}" for note in report.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def renew(text: str, bench: str, body: str) -> str:
    """Returns `text` with the section of `bench` replaced between its markers, or appended; the rest stays as it is.

    Raises ValueError when one marker stands without the other or before it.
    """
    begin, end = (
        f"<!-- bench {bench}: begin, written by `./scripts/bench {bench} --write` -->",
        f"<!-- bench {bench}: end -->",
    )
    block = f"{begin}\n{body.strip()}\n{end}"
    if begin not in text and end not in text:
        return f"{text.rstrip()}\n\n{block}\n" if text.strip() else f"{block}\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the markers of bench {bench} are broken: one begin before one end is needed")
    head, tail = text.split(begin, 1)[0], text.split(end, 1)[1]
    return f"{head}{block}{tail}"


def write_section(path: Path, report: Report, command: str, date: str) -> None:
    """Renews the report's own section of the file at `path`, atomically, and its pictures in `figures` beside it."""
    text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(renew(text, report.bench, section(report, command, date)), encoding="utf-8")
    fresh.replace(path)
    for name, picture in report.pictures.items():
        (path.parent / "figures").mkdir(exist_ok=True)
        (path.parent / "figures" / name).write_text(picture, encoding="utf-8")


def _lines(table: Sequence[Mapping[str, Cell]]) -> list[list[str]]:
    names = columns(table)
    return [[show(row.get(name)) for name in names] for row in table]


def _json_cell(value: Cell) -> Cell:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _machine_sentence(machine: Mapping[str, object]) -> str:
    versions = machine["versions"]
    listed = ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else str(versions)
    gpus = machine.get("gpus") or ()
    with_gpus = f" with {', '.join(map(str, gpus))}" if isinstance(gpus, Sequence) and gpus else ""
    return (
        f"{machine['cores']} cores of {machine['processor']}{with_gpus}, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}, {listed}"
    )


def _markdown_table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    rule = "|" + "|".join("---" for _ in names) + "|"
    return "\n".join([_markdown_line(names), rule, *(_markdown_line(line) for line in lines)])


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _rich_table(title: str, names: Sequence[str], lines: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return table
