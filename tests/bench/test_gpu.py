"""`./scripts/bench gpu` runs on a machine without a GPU, in small sizes, and keeps what it has found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from agora_protocol.errors import InputError
from benchmarks import gpu
from benchmarks.gpu import TARGETS, run_parts, run_with_options

# Those that start daemons of a run.
PROCESS_PARTS = ("emulated", "swarm", "tuning")


def test_every_part_measures_and_the_counts_are_the_contracts_ratios() -> None:
    parts = tuple(part for part in gpu.PARTS if part not in PROCESS_PARTS)
    report = run_parts(True, parts)
    assert not [row for row in report.rows if str(row["what"]).startswith("failed")]
    assert {row["part"] for row in report.rows} == set(parts)
    assert all(isinstance(row["value"], (int, float)) for row in report.rows)
    may_be_nothing = [row for row in report.rows if row["part"] == "oom" or row["what"] == "syncs_per_job"]
    assert all(row["value"] > 0 for row in report.rows if row not in may_be_nothing)
    counted = {"syncs_per_job", "copies_per_hop", "kernels_per_layer_eager"}
    counted |= {"bytes_moved_per_parameter", "bytes_kept_per_parameter", "compiled_frames", "peak_vs_plan"}
    assert counted <= report.ratios.keys() <= TARGETS.keys()
    assert report.ratios["peak_vs_plan"].value <= 1.15
    values = {str(row["what"]): row["value"] for row in report.rows if row["part"] == "oom"}
    assert values["times that memory was freed"], "memory was too small for all graphs"
    assert values["microbatches dropped"] == 0
    assert values["difference of the weights from those with enough memory, by their norm"] == 0


@pytest.mark.process
@pytest.mark.parametrize("part", ["swarm", "tuning"])
def test_plain_loops_and_daemons_train_beside_each_other(part: str) -> None:
    if part == "tuning":
        pytest.importorskip("bitsandbytes")
    rows = run_parts(True, (part,)).rows
    speeds = {str(row["what"]): row["value"] for row in rows if row["unit"] == "tokens/s"}
    assert len(speeds) == 2 and all(isinstance(speed, float) and speed > 0 for speed in speeds.values()), rows


@pytest.mark.process
def test_emulated_accelerators_are_busy_and_take_what_they_are_set_to() -> None:
    report = run_parts(True, ("emulated",))
    values = {str(row["what"]): row["value"] for row in report.rows}
    assert report.ratios["emulated_busy"].value > 0.5, values
    jobs = values["seconds of jobs by those that were set"]
    assert isinstance(jobs, float) and jobs > 0.9, "no job is shorter than it is set to"


def test_a_part_that_fails_or_hangs_becomes_a_row_and_the_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(part: str, quick: bool) -> dict[str, object]:
        if part == "stage":
            raise subprocess.TimeoutExpired("stage", 180)
        if part == "codec":
            raise ValueError("CUDA error: out of memory")
        return {"figures": [{"what": part, "value": 1.0, "unit": ""}], "ratios": {}}

    monkeypatch.setattr(gpu, "run_part", fake)
    rows = run_parts(False, ("machine", "stage", "codec", "counts")).rows
    assert [row["what"] for row in rows if row["value"]] == ["machine", "counts"]
    assert "timed out" in str(rows[1]["what"]) and "out of memory" in str(rows[2]["what"])


def test_an_interrupt_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fake(part: str, quick: bool) -> dict[str, object]:
        if part == "stage":
            raise KeyboardInterrupt
        return {"figures": [{"what": part, "value": 1.0, "unit": "s"}], "ratios": {}}

    monkeypatch.setattr(gpu, "run_part", fake)
    rows = run_parts(False, ("machine", "stage", "codec")).rows
    assert [(row["part"], row["what"]) for row in rows] == [("machine", "machine"), ("stage", "interrupted")]
    assert "machine: machine 1.00 s" in capsys.readouterr().err, "said when the part had ended"


def test_parts_are_chosen_by_name(tmp_path: Path) -> None:
    assert {row["part"] for row in run_with_options(True, tmp_path, ["--part", "codec"]).rows} == {"codec"}
    for options, reason in (
        (["--part", "codek"], "no part 'codek'"),
        (["--parts"], "takes --part"),
        ([], "takes --part"),
    ):
        with pytest.raises(InputError, match=reason):
            run_with_options(True, tmp_path, options)
