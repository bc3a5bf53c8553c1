"""A report's three faces, and the renewal of its section of the page."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from benchmarks import machine
from benchmarks.report import Ratio, Report, paired_ratio, print_tables, renew, section, show, write_section

COMMAND = "./scripts/bench pipeline --quick --write"


def a_report() -> Report:
    return Report(
        "pipeline",
        "Pipeline",
        machine.describe(),
        rows=[{"name": "single", "median": 2000.0, "threads": 2}, {"name": "swarm2", "median": 2100.0, "load|": None}],
        ratios={
            "swarm2_vs_single": Ratio(1.05, ">= 1.0", "tokens/s"),
            "stream_vs_bare": Ratio(math.nan, ">= 0.9", "MB/s"),
        },
        notes=["the same work for all"],
    )


def test_json_has_the_shape_of_the_contract() -> None:
    value = json.loads(json.dumps(a_report().to_json(), allow_nan=False))
    assert value["schema"] == 1 and value["bench"] == "pipeline"
    assert value["ratios"] == {"swarm2_vs_single": 1.05, "stream_vs_bare": None}
    assert value["rows"][0] == {"name": "single", "median": 2000.0, "threads": 2}
    assert {"processor", "cores", "memory_gib", "python", "versions"} <= set(value["machine"])
    assert set(value["machine"]["versions"]) >= {"torch", "hivemind"}


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    # The machine halves its speed in the second round; both sides feel it, so the ratio does not.
    assert paired_ratio([100.0, 55.0, 120.0], [100.0, 50.0, 100.0]) == pytest.approx(1.1)
    assert paired_ratio([3.0, 5.0], [2.0, 2.0]) == pytest.approx(2.0)
    assert math.isnan(paired_ratio([], []))
    assert math.isnan(paired_ratio([1.0], [0.0]))


def test_rounds_must_pair_up() -> None:
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (math.inf, "-"),
        (2417.4, "2,417"),
        (1.0449, "1.04"),
        (0.04321, "0.0432"),
        (7, "7"),
        ("x", "x"),
        (0.0, "0.00"),
    ],
)
def test_cells_are_shown_for_people(value: str | float | None, shown: str) -> None:
    assert show(value) == shown


def test_the_table_is_plain_where_there_is_no_terminal() -> None:
    out = io.StringIO()
    print_tables(a_report(), out)
    text = out.getvalue()
    assert "swarm2_vs_single" in text and "1.05" in text and "\x1b[" not in text


def test_a_section_names_machine_versions_command_and_date() -> None:
    text = section(a_report(), COMMAND, "2026-01-31")
    assert COMMAND in text and "2026-01-31" in text and machine.processor() in text and "torch " in text
    assert "| `swarm2_vs_single` | 1.05 | >= 1.0 | tokens/s |" in text
    assert "load\\|" in text


def test_renewing_touches_only_the_benchs_own_section() -> None:
    page = renew(renew("# Benchmarks\n\nwords\n", "pipeline", "first"), "averaging", "other")
    again = renew(page, "pipeline", "second\n")
    assert again == page.replace("first", "second")
    assert again.startswith("# Benchmarks\n\nwords\n") and again.count("<!-- bench pipeline: begin") == 1
    assert renew(again, "pipeline", "second") == again


def test_a_page_may_begin_empty() -> None:
    assert renew("", "plan", "body").splitlines()[1] == "body"


@pytest.mark.parametrize("damage", ["<!-- bench plan: end -->", "begin"])
def test_broken_markers_are_refused(damage: str) -> None:
    page = renew("", "plan", "body")
    broken = page.replace(damage, "") if damage != "begin" else page + page
    with pytest.raises(ValueError, match="markers of bench plan"):
        renew(broken, "plan", "new")


def test_writing_creates_the_page_and_renews_it(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    write_section(page, a_report(), COMMAND, "2026-01-31")
    write_section(page, a_report(), COMMAND, "2026-02-01")
    text = page.read_text()
    assert text.startswith("# Benchmarks") and "2026-02-01" in text and "2026-01-31" not in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["benchmarks.md"]
