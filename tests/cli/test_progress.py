"""Claims about the progress display where there is no terminal; a terminal's bar is rich's."""

from __future__ import annotations

import pytest

from agora.cli import console
from agora.cli.console import ProgressDisplay


def test_without_a_terminal_there_is_a_line_for_the_work_and_one_for_each_news(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PROGRESS_LINE_INTERVAL_S", 0.0)
    with ProgressDisplay("training", 40) as display:
        display.show(1, "step 1")
        display.show(1, "step 1")
        display.note("something happened")
        display.show(2, "step 2")
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["training", "step 1  0 s", "something happened", "step 2  0 s"]
    assert printed.out == "", "standard output is for results"


def test_lines_come_every_two_seconds_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay("training", 40) as display:
        for step in range(40):
            display.show(step, f"step {step}")
    assert capsys.readouterr().err.splitlines() == ["training"]


@pytest.mark.parametrize(("total", "line"), [(4_000_000, "writing  3 of 4 MB  0 s"), (None, "writing  3 MB  0 s")])
def test_bytes_are_shown_in_megabytes_of_the_total_where_it_is_known(
    total: int | None, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "PROGRESS_LINE_INTERVAL_S", 0.0)
    with ProgressDisplay("writing", total) as display:
        display.advance(1_000_000)
        display.advance(2_000_000)
    assert capsys.readouterr().err.splitlines()[-1] == line
