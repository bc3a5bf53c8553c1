"""What is kept of the epochs beside checkpoints: that of the right step, a few of them, and none that is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from agora.observe.events import DiskTrouble, Event
from agora.tuning.epochs.batches import KEPT, REMEMBERED, EpochFile


def record_in(folder: Path, events: list[Event] | None = None) -> EpochFile:
    return EpochFile(folder / "epochs.json", (events if events is not None else []).append)


def test_a_restart_goes_on_from_the_state_at_the_checkpoint(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    for step in range(10):
        record.remember(step, (step, 2**62))
    record.write(3)
    record.write(6)
    again = record_in(tmp_path)
    assert again.latest_up_to(6) == (6, 2**62)
    assert again.latest_up_to(100) == (6, 2**62)
    assert again.latest_up_to(5) == (3, 2**62), "a swarm that resumes an older checkpoint has not seen what came later"
    assert again.latest_up_to(2) is None


def test_a_checkpoint_that_was_faster_than_the_news_of_its_step_is_written_then(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.write(4)
    assert record_in(tmp_path).latest_up_to(4) is None
    record.remember(3, (3,))
    assert record_in(tmp_path).latest_up_to(4) is None
    record.remember(4, (4,))
    assert record_in(tmp_path).latest_up_to(4) == (4,)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    for step in range(REMEMBERED + 10):
        record.remember(step, (step,))
        if step % 10 == 0:
            record.write(step)
    record.write(1)  # forgotten long ago
    kept = [step for step in range(REMEMBERED + 10) if record_in(tmp_path).latest_up_to(step) == (step,)]
    assert len(kept) == KEPT
    assert kept[-1] == (REMEMBERED + 9) // 10 * 10


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"epochs": 3}', '{"epochs": [[1, ["x"]]]}', '{"epochs": [[1.5, [2]]]}', "[" * 100_000]
)
def test_a_damaged_file_is_as_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "epochs.json").write_text(content)
    record = record_in(tmp_path)
    assert record.latest_up_to(10**9) is None
    record.remember(1, (5,))
    record.write(1)
    assert record_in(tmp_path).latest_up_to(1) == (5,)


def test_a_full_disk_is_reported_and_costs_nothing_else(tmp_path: Path) -> None:
    events: list[Event] = []
    record = EpochFile(tmp_path / "missing" / "epochs.json", events.append)
    record.remember(1, (5,))
    record.write(1)
    assert [type(event) for event in events] == [DiskTrouble]


def test_a_state_that_could_not_be_written_is_written_with_the_next_one(tmp_path: Path) -> None:
    events: list[Event] = []
    folder = tmp_path / "later"
    record = record_in(folder, events)
    record.remember(1, (5,))
    record.write(1)
    assert [type(event) for event in events] == [DiskTrouble]
    assert record.latest_up_to(1) == (5,)
    folder.mkdir()
    record.remember(2, (6,))
    record.write(2)
    assert record_in(folder).latest_up_to(1) == (5,)


def test_states_of_a_history_that_was_lost_do_not_come_back(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    for step in (100, 200, 300, 400):
        record.remember(step, (step,))
        record.write(step)
    again = record_in(tmp_path)  # its newest checkpoints were lost, and it goes on from step 150
    again.remember(160, (160,))
    again.write(160)
    assert record_in(tmp_path).latest_up_to(10**9) == (160,)


def test_a_step_that_was_awaited_before_a_later_checkpoint_drops_nothing(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.write(4)
    record.remember(5, (5,))
    record.write(5)
    record.remember(4, (4,))
    assert record_in(tmp_path).latest_up_to(5) == (5,)
