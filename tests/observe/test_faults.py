"""Claims about fault points: they fire where and when they were told to, and every firing is on record."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agora_protocol.errors import InputError

from agora.observe import faults


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    yield
    faults.set_active_faults(None)


def test_without_a_plan_a_point_does_nothing() -> None:
    asyncio.run(faults.inject_fault("hop.accepted"))
    faults.inject_fault_blocking("device.job")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("hop.acepted:kill:1", "known are hop.accepted"),
        ("hop.accepted:explode:1", "known are kill, hang, stop, fail, exit, sleep"),
        ("hop.accepted:sleep=soon:1", "malformed number"),
        ("hop.accepted:kill:often", "malformed number"),
        ("hop.accepted:kill:0", "malformed number"),
        ("hop.accepted:kill:-3", "malformed number"),
        ("hop.accepted:kill:2++", "malformed number"),
        ("hop.accepted:kill=9", "malformed number"),
        ("hop.accepted:kill=", "malformed number"),
        ("hop.accepted:kill:", "malformed number"),
        ("device.job:say=3:1", "say is for gossip.step, averaging.scale, and they have only say"),
        ("gossip.step:sleep=3:1", "say is for gossip.step, averaging.scale, and they have only say"),
        ("device.job:sleep", "malformed number"),
        ("device.job:sleep=nan", "malformed number"),
        ("device.job:sleep=-1", "malformed number"),
    ],
)
def test_a_malformed_plan_says_what_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        faults.parse(text)


def test_a_plan_reads_as_written() -> None:
    first, second, third = faults.parse("hop.accepted:kill:3, device.job:sleep=0.5:2+,hop.forwarded:hang")
    assert (first.nth, first.repeats, first.action) == (3, False, "kill")
    assert (second.number, second.nth, second.repeats) == (0.5, 2, True)
    assert (third.action, third.nth) == ("hang", 1)


def test_faults_fire_at_their_turn_and_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "faults.log"
    faults.set_active_faults(faults.Faults(faults.parse("device.job:sleep=0.05:2+"), str(log)))
    faults.inject_fault_blocking("device.job")
    assert not log.exists() or not log.read_text()
    for _ in range(2):
        faults.inject_fault_blocking("device.job")
    asyncio.run(faults.inject_fault("hop.accepted"))
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [(point, action, count) for _, point, action, count, _ in lines] == [
        ("device.job", "sleep", "2"),
        ("device.job", "sleep", "3"),
    ]


def test_a_false_number_is_told_from_its_turn_on_and_is_on_record(tmp_path: Path) -> None:
    log = tmp_path / "faults.log"
    assert faults.falsify("gossip.step", 7) == 7
    faults.set_active_faults(
        faults.Faults(faults.parse("gossip.step:say=1000000000:2+,averaging.scale:say=1e30"), str(log))
    )
    assert [faults.falsify("gossip.step", 7) for _ in range(3)] == [7, 10**9, 10**9]
    assert [faults.falsify("averaging.scale", 1.0) for _ in range(2)] == [1e30, 1.0]
    assert [line.split()[1:4:2] for line in log.read_text().splitlines()] == [
        ["gossip.step", "2"],
        ["gossip.step", "3"],
        ["averaging.scale", "1"],
    ]


def test_a_hang_holds_the_task_and_not_the_process(tmp_path: Path) -> None:
    faults.set_active_faults(faults.Faults(faults.parse("hop.forwarded:hang:1"), str(tmp_path / "log")))

    async def scenario() -> None:
        stuck = asyncio.create_task(faults.inject_fault("hop.forwarded"))
        await asyncio.sleep(0.05)
        assert not stuck.done()
        await faults.inject_fault("hop.forwarded")
        stuck.cancel()

    asyncio.run(scenario())


def test_a_kill_is_on_record_before_it_acts(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "from agora.observe import faults\n"
        "faults.set_active_faults(faults.from_environment())\n"
        "faults.inject_fault_blocking('device.job'); faults.inject_fault_blocking('device.job'); print('survived')"
    )
    environment = {**os.environ, "AGORA_FAULTS": "device.job:kill:2", "AGORA_FAULTS_LOG": str(log)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "survived" not in done.stdout
    assert log.read_text().split()[1:4] == ["device.job", "kill", "2"]
