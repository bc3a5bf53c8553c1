"""Real daemons whose wall clocks are wrong: they train together, and the owner of a wrong clock is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.harness import fired, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


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
            lambda: all(len(d.events("StepTaken")) > begun[d.name] + 8 for d in everybody), "all to go on stepping", 30
        )
        for daemon in everybody:
            peers = daemon.ask("status")["peers"]
            assert len(peers) == 4 and {peer["state"] for peer in peers} == {"training"}, peers
            assert abs(daemon.ask("status")["unix"] - right.ask("status")["unix"]) < 2.0
            assert not daemon.events("PeerGone")
        made.until(lambda: ahead.events("OwnerTold") and behind.events("OwnerTold"), "both owners to be told", 30)
        (told,) = ahead.events("OwnerTold")
        assert "300 s ahead of the swarm's" in told["text"] and "timedatectl" in told["text"]
        (told,) = behind.events("OwnerTold")
        assert "15 s behind the swarm's" in told["text"]

        def notes() -> dict[str, str]:
            return {peer["peer"]: peer["note"] for peer in right.ask("status")["peers"]}

        made.until(lambda: "300 s ahead" in notes()[ahead.peer], "the others to hear of the clock that is ahead", 30)
        assert "clock" not in notes()[back.peer]
        assert [len(fired(daemon)) for daemon in everybody] == [0, 1, 1, 1]
