"""Faults in real processes: what is injected is counted, and no microbatch of a living origin is lost."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.process.harness import ENOUGH, Daemon, counted_twice, drained, fired, nothing_lost, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_a_callee_killed_between_forward_and_backward_costs_a_retry_not_a_microbatch(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(3)) as made:
        origin = made.start("origin", "0")
        made.start("last", "2")
        made.start("sibling", "1")
        made.serving()
        victim = made.start("victim", "1", faults="hop.forwarded:kill:3")
        made.until(lambda: victim.process.poll() is not None, "the victim to die at its fault")
        assert [entry[1:3] for entry in fired(victim)] == [["hop.forwarded", "kill"]]
        assert victim.process.returncode == -signal.SIGKILL
        before = made.completed(origin)
        made.until(lambda: made.completed(origin) >= before + ENOUGH, "the swarm to go on without the victim")
        drained(made, origin)
        assert origin.events("MicrobatchRerouted", stage=1), "what the victim held came home by its sibling"
        made.stop()
        nothing_lost(made, origin)


def test_the_run_goes_on_when_its_first_peer_is_killed(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        first = made.start("first", "0")
        second = made.start("second", "0")
        third = made.start("third", "1")
        made.start("fourth", "1")
        made.serving()
        made.until(lambda: made.completed(second) >= 5, "microbatches before the fault")
        made.take_invite(third)
        first.kill()
        before = made.completed(second)
        late = made.start("late", "0")
        made.until(lambda: made.completed(second) >= before + ENOUGH, "the second origin to go on")
        made.until(lambda: made.completed(late) >= 5, "a peer invited by another than the first to train")
        drained(made, second, late)
        made.stop()
        nothing_lost(made, second, late)


def test_a_callee_that_hangs_without_dying_is_left_at_its_deadline(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        origin = made.start("origin", "0")
        made.start("sibling", "1")
        made.serving()  # it must not fetch its state from the one that hangs
        hung = made.start("hung", "1", faults="device.job:hang:40")
        made.until(lambda: fired(hung), "the fault to fire")
        before = made.completed(origin)
        made.until(lambda: made.completed(origin) >= before + ENOUGH, "the sibling to take over")
        made.until(lambda: origin.events("MicrobatchRerouted", from_peer=hung.peer), "the hung calls to be left")
        assert hung.process.poll() is None, "it hangs, it has not died"
        drained(made, origin)
        assert [entry[1:3] for entry in fired(hung)] == [["device.job", "hang"]]
        made.daemons["hung"].kill()
        made.stop()
        nothing_lost(made, origin)


@pytest.mark.slow
def test_a_frozen_process_is_left(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2)) as made:
        origin = made.start("origin", "0")
        frozen = made.start("frozen", "1")
        made.start("sibling", "1")
        made.serving()
        made.until(lambda: frozen.events("MicrobatchCounted"), "the victim to have worked")
        frozen.kill(signal.SIGSTOP)
        before = made.completed(origin)
        made.until(lambda: made.completed(origin) >= before + ENOUGH, "the sibling to take over")
        drained(made, origin)
        frozen.kill(signal.SIGCONT)
        frozen.kill()
        made.stop()
        nothing_lost(made, origin)


def test_a_stage_without_a_peer_stalls_the_swarm_says_which_and_goes_on_when_one_comes(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(3)) as made:
        origin = made.start("origin", "0-1")
        made.serving()
        stalled = made.until(
            lambda: (s := origin.try_ask("status")) and s["health"]["state"] == "STALLED" and s["health"], "STALLED"
        )
        assert "stage 2" in stalled["why"]
        assert stalled["do"]
        assert made.completed(origin) == 0
        made.start("rescue", "2")
        made.until(lambda: made.completed(origin) >= ENOUGH, "the swarm to go on")
        made.until(lambda: origin.ask("status")["health"]["state"] in ("OK", "DEGRADED"), "the health to recover")
        drained(made, origin)
        made.stop()
        nothing_lost(made, origin)


def test_a_random_replica_killed_again_and_again_loses_no_microbatch(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A fresh peer takes the killed one's place. Twice; with `--slow` every ten seconds for five minutes."""
    rng, (kills, between_s) = random.Random(7), (30, 10.0) if request.config.getoption("--slow") else (2, 0.0)
    with swarm(tmp_path, tiny(2)) as made:
        origins = [made.start("origin-0", "0"), made.start("origin-1", "0")]
        replicas = [made.start("replica-0", "1"), made.start("replica-1", "1")]
        made.serving()
        killed: list[Daemon] = []
        for number in range(kills):
            began = time.monotonic()
            alive = [d for d in replicas if not d.end_is_intended]
            made.until(lambda alive=alive: all(d.events("MicrobatchCounted") for d in alive), "two replicas at work")
            victim = rng.choice(alive)
            victim.kill()
            killed.append(victim)
            replicas.append(made.start(f"fresh-{number}", "1"))
            made.serving(f"fresh-{number}")
            replicas = [d for d in replicas if not d.end_is_intended]
            goal = [made.completed(origin) + 1 for origin in origins]
            made.until(
                lambda goal=goal: all(made.completed(o) >= g for o, g in zip(origins, goal, strict=True)), "progress"
            )
            made.until(lambda began=began: time.monotonic() - began >= between_s, "the next kill", 15)
        drained(made, *origins)
        assert len(killed) == kills
        assert all(d.process.returncode == -signal.SIGKILL for d in killed)
        made.stop()
        nothing_lost(made, *origins)
        survivors = [d for d in made.daemons.values() if d not in killed]
        assert len(survivors) == len(made.daemons) - kills
        assert not counted_twice(survivors), "a living peer's sums hold a microbatch that another living peer counted"


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("device.job:exit:20", "The device thread has ended"), ("device.job:fail:20+", "times in a row")],
)
def test_a_dead_device_ends_the_daemon_and_the_others_go_on(tmp_path: Path, fault: str, sentence: str) -> None:
    """It ends with exit code 1 and says why; its claim is withdrawn, and no microbatch is lost."""
    with swarm(tmp_path, tiny(2)) as made:
        origin = made.start("origin", "0")
        healthy = made.start("healthy", "1")
        made.serving()
        made.until(lambda: healthy.events("MicrobatchCounted"), "the healthy one to work")
        dying = made.start("dying", "1", faults=fault)
        dying.end_is_intended = True
        made.until(lambda: dying.process.poll() is not None, "the end of the daemon")
        assert dying.process.poll() == 1
        assert sentence in dying.last_words()
        assert fired(dying)
        assert dying.events("StateChanged", state="leaving")
        before = made.completed(origin)
        made.until(lambda: made.completed(origin) > before + ENOUGH, "microbatches through the other")
        drained(made, origin)
