"""Real daemons whose wall clocks are wrong: they train together, and the owner of a wrong clock is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.process.harness import Daemon, fired, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def agree(one: Daemon, other: Daemon) -> bool:
    """Whether two daemons have the same swarm time within 2 s; one is asked before and after the other."""
    before, between, after = (float(daemon.ask("status")["unix"]) for daemon in (one, other, one))
    return before - 2.0 < between < after + 2.0


def seconds_told(daemon: Daemon, sense: str) -> list[int]:
    """By how many seconds its owner was told that the clock is ahead or behind, each time; with the remedy."""
    told = [str(event["text"]) for event in daemon.events("OwnerTold")]
    assert all("timedatectl" in text for text in told)
    found = [re.search(rf"(\d+) s {sense} the swarm's", text) for text in told]
    return [int(match[1]) for match in found if match]


def test_clocks_five_minutes_ahead_fifteen_seconds_behind_and_set_back_an_hour_train_together(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        right = made.start("right", "0")
        ahead = made.start("ahead", "1", faults="daemon.started:shift=300")
        behind = made.start("behind", "1", faults="daemon.started:shift=-15")
        back = made.start("back", "0", faults="clock.asked:shift=-3600")
        made.serving()
        made.until(lambda: fired(back), "the clock of one to be set back an hour")
        everybody = [right, ahead, behind, back]
        begun = {daemon.name: len(daemon.events("StepTaken")) for daemon in everybody}
        made.until(
            lambda: all(len(d.events("StepTaken")) > begun[d.name] + 8 for d in everybody), "all to go on stepping"
        )

        def sees_all(daemon: Daemon) -> bool:
            return [peer["state"] for peer in daemon.ask("status")["peers"]] == ["training"] * 4

        for daemon in everybody:
            made.until(lambda seen_by=daemon: sees_all(seen_by), f"{daemon.name} to see all four train")
            made.until(lambda other=daemon: agree(right, other), f"the time of {daemon.name} to be right")
            gone = {event["reason"] for event in daemon.events("PeerGone")}
            assert "its claim ended" not in gone, "a wrong clock ends nobody's claim"
        made.until(lambda: ahead.events("OwnerTold") and behind.events("OwnerTold"), "both owners to be told")
        assert all(abs(seconds - 300) <= 2 for seconds in seconds_told(ahead, "ahead of") or [0])
        assert all(abs(seconds - 15) <= 2 for seconds in seconds_told(behind, "behind") or [0])

        def notes() -> dict[str, str]:
            return {peer["peer"]: peer["note"] for peer in right.ask("status")["peers"]}

        made.until(lambda: " s ahead" in notes().get(ahead.peer, ""), "the others to hear of the clock that is ahead")
        made.until(lambda: back.peer in notes(), "the clock that was set back to be seen")
        assert "clock" not in notes().get(back.peer, "")
        assert [len(fired(daemon)) for daemon in everybody] == [0, 1, 1, 1]
