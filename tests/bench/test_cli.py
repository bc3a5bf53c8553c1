"""`swarm bench`: names, exit codes, one JSON object on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks import cli
from benchmarks.children import BenchFailed
from benchmarks.report import Ratio, Report

FOLDERS: list[Path] = []


def fake(quick: bool, folder: Path) -> Report:
    FOLDERS.append(folder)
    return Report("fake", "Fake", {"versions": {}}, [{"name": "a", "quick": str(quick)}], {"r": Ratio(2.0, "> 1", "x")})


def failing(quick: bool, folder: Path) -> Report:
    raise BenchFailed("the trainer ended by itself; the end of its log:\n  boom")


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "BENCHES", {"fake": f"{__name__}:fake", "failing": f"{__name__}:failing"})
    monkeypatch.setattr(cli, "_function", lambda name: {"fake": fake, "failing": failing}[name])


def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("fake", True, True, False) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["ratios"] == {"r": 2.0} and value["rows"][0]["quick"] == "True"
    assert not FOLDERS[-1].exists()


def test_the_table_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("fake", False, False, False) == 0
    assert "Fake" in capsys.readouterr().out


def test_an_unknown_name_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("fakes", False, False, False) == 2
    said = capsys.readouterr()
    assert "did you mean 'fake'" in said.err and not said.out


def test_a_failure_is_said_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("failing", False, True, False) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: the trainer ended by itself") and not said.out


def test_write_renews_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "benchmarks.md"
    monkeypatch.setattr(cli, "find_page", lambda: page)
    monkeypatch.setattr(
        cli, "_function", lambda name: lambda quick, folder: Report("fake", "Fake", cli_machine(), [{"name": "a"}])
    )
    assert cli.run("fake", True, True, True) == 0
    assert "swarm bench fake --quick --write" in page.read_text()


def cli_machine() -> dict[str, object]:
    from benchmarks.machine import describe

    return describe()


def test_a_page_that_would_lack_its_figures_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def function(name: str) -> Callable[[bool, Path], Report]:
        measured.append(name)
        return fake

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(cli, "BENCHES", {"wan": "nowhere:run", "fake": "nowhere:run"})
    monkeypatch.setattr(cli, "find_page", lambda: tmp_path / "benchmarks.md")
    monkeypatch.setattr(cli, "_function", function)
    monkeypatch.setattr(cli, "write_section", lambda *given: None)
    assert cli.run("wan", False, True, True) == 1
    said = capsys.readouterr()
    assert "pip install 'agora-swarm[bench]'" in said.err and not said.out
    assert not measured
    assert cli.run("wan", False, True, False) == 0 and cli.run("fake", False, True, True) == 0
    assert measured == ["wan", "fake"]


def test_the_page_is_the_checkouts_own() -> None:
    assert cli.find_page() == Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
