"""A daemon that moves to other stages while the swarm trains: on the same connections, and without losing work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import InputError

from agora.cli.local_swarm import LocalDaemon
from agora.node.control.control_client import DaemonRefused
from tests.process.harness import (
    WAIT_S,
    Swarm,
    counted_twice,
    drained,
    fired,
    last_step,
    nothing_lost,
    p2pd_of,
    swarm,
    tiny,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

ENOUGH = 20


def trains_on(made: Swarm, origin: LocalDaemon, microbatches: int = ENOUGH) -> None:
    """Waits until the origin has brought home so many more microbatches."""
    goal = made.completed(origin) + microbatches
    made.until(lambda: made.completed(origin) >= goal, f"{microbatches} more microbatches of {origin.name}")


def counted_after(daemon: LocalDaemon, stage: int) -> list[dict[str, Any]]:
    """The microbatches that the daemon has counted for a stage since it last began to move."""
    events = daemon.events()
    moved = max(n for n, event in enumerate(events) if event["event"] == "StateChanged" and event["state"] == "moving")
    return [e for e in events[moved:] if e["event"] == "MicrobatchCounted" and stage in e["stages"]]


def test_a_daemon_moves_to_another_stage_and_back_without_losing_a_microbatch(tmp_path: Path) -> None:
    """An origin becomes a peer of stage 1 and an origin again, on the same connections, while two others train."""
    with swarm(tmp_path, tiny(2)) as made:
        stays, moves = made.start("stays", "0"), made.start("moves", "0")
        last = made.start("last", "1")
        made.serving()
        trains_on(made, moves)
        trains_on(made, stays)
        made.until(
            lambda: moves.ask("status")["stages"][1]["step"] > 0, "stage 1 to say in the directory how far it is"
        )
        network, peer = p2pd_of(moves).pid, moves.peer

        assert moves.ask("move", WAIT_S, stages="1")["span"] == [1, 1]
        assert moves.ask("report")["span"] == [1, 1]
        made.until(lambda: counted_after(moves, 1), "microbatches through its new stage")
        trains_on(made, stays)
        drawn = len(moves.events("MicrobatchStarted"))

        assert moves.ask("move", WAIT_S, stages="0")["span"] == [0, 0]
        made.until(lambda: counted_after(moves, 0), "microbatches through its old stage again")
        assert len(moves.events("MicrobatchStarted")) > drawn, "it originates again"

        assert (p2pd_of(moves).pid, moves.peer) == (network, peer)
        assert len(moves.events("PeerStarted")) == 1 and len(moves.events("StartStep", name="host")) == 1
        assert moves.events("StateFetched"), "the state of the new stages came from their replicas"
        assert moves.events("CheckpointWritten", stage=0) and moves.events("CheckpointWritten", stage=1)
        drained(made, stays, moves)
        made.stop()
        nothing_lost(made, stays, moves)
        assert not counted_twice([stays, moves, last])


def test_a_daemon_moves_to_a_stage_that_has_no_peer_and_the_swarm_goes_on(tmp_path: Path) -> None:
    """Its own microbatches could not come back: it gives them up soon, and says so.

    Soon: it would wait 30 s and more for them if that stage had a peer.
    """
    with swarm(tmp_path, tiny(2)) as made:
        stays, moves = made.start("stays", "0"), made.start("moves", "0")
        made.serving()
        made.until(lambda: moves.events("MicrobatchStarted") and stays.events("MicrobatchStarted"), "both to originate")
        assert moves.ask("move", WAIT_S, stages="1")["seconds"] < 30.0
        trains_on(made, stays)
        made.until(lambda: counted_after(moves, 1), "microbatches through its new stage")
        started = {event["microbatch"] for event in moves.events("MicrobatchStarted")}
        assert {event["microbatch"] for event in moves.events("MicrobatchDropped")} == started
        drained(made, stays)
        made.stop()
        nothing_lost(made, stays)


def test_a_daemon_that_cannot_load_the_wanted_stages_goes_back_to_its_own(tmp_path: Path) -> None:
    """Stage 0 needs a text that this machine does not have."""
    text = tmp_path / "text.txt"
    text.write_text("so much depends upon a red wheel barrow\n" * 400)
    with swarm(tmp_path, tiny(2, data={"corpus": [str(text)], "heldout": 0.1})) as made:
        origin, last = made.start("origin", "0"), made.start("last", "1")
        made.serving()
        trains_on(made, origin)
        with pytest.raises(DaemonRefused, match="--allow-files"):
            last.ask("move", WAIT_S, stages="0")
        assert last.ask("report")["span"] == [1, 1]
        trains_on(made, origin)
        drained(made, origin)


def test_a_move_that_cannot_begin_is_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        daemon = made.start("whole", "0-1", faults="state.giving:hang:1+")
        made.serving()
        for stages, text in (
            ("0-2", "beyond the run's last stage; give stages within 0-1"),
            ("0-1", "holds stages 0-1 already"),
            ("first", "is not a span of stages"),
        ):
            with pytest.raises(DaemonRefused, match=text) as refusal:
                daemon.ask("move", stages=stages)
            assert refusal.value.code in {"local", InputError.code}
        trains_on(made, daemon)
        made.until(lambda: last_step(daemon) > 0, "a state that a joiner must have")
        waiting = made.start("waiting", "1")
        made.until(lambda: fired(daemon), "the joiner to ask for the state, which it does not get")
        with pytest.raises(DaemonRefused, match="still starting"):
            waiting.ask("move", stages="0")
        assert not daemon.events("StateChanged", state="moving")
