"""Claims about `swarm track`: each row once over restarts and failures, from daemons' files or a peer's status."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agora.cli import status_command, trackers
from agora.cli.console import Failure
from agora.cli.track_command import RowSource, Sending, track
from agora.cli.trackers import TrackerFailed
from agora.node import daemon_registry, paths
from agora.observe.journal import LineFile
from agora.observe.metrics import FILE_NAME, Row

RUN = "ab" * 32
STATUS = {"schema": 1, "run_id": RUN, "name": "poems", "step": 7, "loss": 2.5, "tokens_per_second": 1.0, "peers": []}
STATUS |= {"health": {"state": "OK", "why": "", "do": None}, "stages": [{"stage": 0, "replicas": 2, "step": 7}]}


def row(unix: float, step: int) -> Row:
    return Row(unix, RUN, step, {"run_loss_nats": 3.0 - step / 10})


class Kept:
    """A tracker that keeps what it gets, until it fails."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.fails = False

    def send(self, row: Row) -> None:
        if self.fails:
            raise TrackerFailed("no answer")
        self.steps.append(row.step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_restart_sends_what_is_new_and_nothing_twice(tmp_path: Path) -> None:
    tracker, file = Kept(), tmp_path / "runs" / "r" / "tracked.json"
    assert Sending("kept", tracker, file).send([row(1.0, 1), row(2.0, 2)])
    again = Sending("kept", tracker, file)
    assert again.send([row(1.0, 1), row(2.0, 2), row(3.0, 3)]) and again.send([])
    assert tracker.steps == [1, 2, 3]
    other = Kept()
    Sending("other", other, file).send([row(1.0, 1)])
    Sending("kept", tracker, file).send([row(3.0, 3)])
    assert other.steps == [1] and tracker.steps == [1, 2, 3], "each tracker has a place of its own in the file"


def test_what_a_tracker_does_not_take_is_sent_again_in_order(tmp_path: Path) -> None:
    tracker = Kept()
    sending = Sending("kept", tracker, tmp_path / "tracked.json")
    assert sending.send([row(1.0, 1)])
    tracker.fails = True
    assert not sending.send([row(2.0, 2)]) and not sending.send([row(3.0, 3)])
    tracker.fails = False
    assert sending.send([row(4.0, 4)])
    assert tracker.steps == [1, 2, 3, 4]


def test_a_damaged_file_sends_all_again(tmp_path: Path) -> None:
    (tmp_path / "tracked.json").write_text("[1")
    tracker = Kept()
    Sending("kept", tracker, tmp_path / "tracked.json").send([row(1.0, 1)])
    assert tracker.steps == [1]


def test_rows_come_from_the_daemon_of_the_run_and_of_that_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "daemon"
    root.mkdir()
    entry = daemon_registry.DaemonEntry(RUN, "poems", "", "", os.getpid(), str(root), "/nowhere.sock")
    monkeypatch.setattr(daemon_registry, "find_running_daemons", lambda: [entry])
    file = LineFile(root / FILE_NAME, 10_000)
    for line in (row(1.0, 1).to_line(), Row(1.5, "cd" * 32, 9, {}).to_line(), b"torn{\n", row(2.0, 2).to_line()):
        file.append(line)
    source = RowSource.of(RUN, paths.Home(tmp_path / "home"))
    assert [one.step for one in source.new_rows()] == [1, 2]
    file.append(row(3.0, 3).to_line())
    assert [one.step for one in source.new_rows()] == [3]
    assert source.new_rows() == []


def test_without_a_daemon_a_peer_is_asked_once_for_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_registry, "find_running_daemons", list)
    monkeypatch.setattr(status_command, "fetch", lambda run, home: STATUS)
    source = RowSource.of(RUN, paths.Home(tmp_path))
    (asked,) = source.new_rows()
    assert (asked.step, asked.metrics["run_loss_nats"], asked.metrics["stage_replicas/stage_0"]) == (7, 2.5, 2)
    assert source.new_rows() == [], "not before QUESTION_INTERVAL_S have passed"


def test_what_a_peer_sends_in_place_of_numbers_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    false = {"loss": "<b>", "tuning": ["x"], "stages": [{"stage": "\x1b" * 99, "replicas": 1, "step": None}]}
    monkeypatch.setattr(daemon_registry, "find_running_daemons", list)
    monkeypatch.setattr(status_command, "fetch", lambda run, home: STATUS | false)
    (asked,) = RowSource.of(RUN, paths.Home(tmp_path)).new_rows()
    assert "run_loss_nats" not in asked.metrics
    assert "stage_replicas/stage_" + "_" * 64 in asked.metrics


@pytest.mark.parametrize("target", ["tensorbord:x", "tensorboard", "", "influx:x"])
def test_an_unknown_tracker_is_named_with_those_that_there_are(target: str) -> None:
    with pytest.raises(Failure, match="tensorboard:DIR, wandb, wandb:PROJECT, mlflow or mlflow:URI") as failed:
        trackers.open_tracker(target, RUN, "poems")
    assert failed.value.code == 2


def test_no_tracker_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="--to tensorboard:DIR"):
        track(RUN, (), tmp_path, once=True)


def test_tensorboard_gets_rows_with_their_times_and_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for one in (row(1000.0, 1), row(2000.0, 2)):
        tracker = trackers.open_tracker(f"tensorboard:{tmp_path}", RUN, "poems")
        tracker.send(one)
        tracker.flush()
        tracker.close()
    read = EventAccumulator(str(tmp_path / f"poems-{RUN[:12]}"))
    read.Reload()
    assert [(one.step, one.wall_time) for one in read.Tensors("run_loss_nats")] == [(1, 1000.0), (2, 2000.0)]


def test_mlflow_has_one_run_for_each_run_whoever_tracks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra is not installed: pip install 'agora-swarm[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store of files needs no server and no database
    uri = (tmp_path / "store").as_uri()
    for one in (row(1000.0, 1), row(2000.0, 2)):
        tracker = trackers.open_tracker(f"mlflow:{uri}", RUN, "poems")
        tracker.send(one)
        tracker.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("agora").experiment_id])
    history = client.get_metric_history(found.info.run_id, "run_loss_nats")
    assert [(one.step, one.timestamp) for one in history] == [(1, 1_000_000), (2, 2_000_000)]
    assert found.info.run_name == "poems" and found.info.status == "RUNNING"


def test_weights_and_biases_gets_one_run_under_the_run_s_own_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra is not installed: pip install 'agora-swarm[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = trackers.open_tracker("wandb:agora-tests", RUN, "poems")
    tracker.send(row(1000.0, 1))
    tracker.flush()
    tracker.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith(RUN[:32]) and list(folder.glob("*.wandb"))
