"""What lasts, in real processes: joining with state, resuming after everybody was killed, damage that is noticed."""

from __future__ import annotations

import itertools
import shutil
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from agora.state.chunk_fetch import MAX_SOURCE_FAILURES, WINDOW
from tests.process.harness import WAIT_S, Daemon, drained, fired, last_step, nothing_lost, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

EVERY = 5


def written(daemon: Daemon) -> int:
    return max((event["step"] for event in daemon.events("CheckpointWritten")), default=0)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def kept(daemon: Daemon, stage: int) -> list[Path]:
    """The checkpoints on its disk, the newest last.

    A daemon may be killed between a checkpoint and its event, or in the middle of one, which is then not among these.
    """
    return sorted(daemon.root.glob(f"runs/*/checkpoints/stage-{stage}/step-*"), key=step_of)


def known_step(daemon: Daemon, *of: Daemon) -> int:
    """The least step that these peers have published of themselves, -1 if one is not known: nobody fetches step 0."""
    known = {peer["peer"]: int(peer["step"]) for peer in daemon.ask("status")["peers"]}
    return min(known.get(other.peer, -1) for other in of)


def said_of_state(daemon: Daemon) -> str:
    """How the newest start of this daemon filled its stages."""
    return str(daemon.events("StartStep", name="state")[-1]["note"])


def steps_of_this_life(daemon: Daemon) -> list[int]:
    """The steps since the newest start."""
    told = daemon.events()
    begun = max(index for index, event in enumerate(told) if event["event"] == "PeerStarted")
    return [event["step"] for event in told[begun:] if event["event"] == "StepTaken"]


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_every_process_killed_at_once_the_run_goes_on_from_the_last_checkpoints(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2, checkpoint={"every": EVERY, "keep": 3})) as made:
        before = [made.start("a", "0"), made.start("b", "1")]
        made.until(lambda: all(written(d) >= 2 * EVERY for d in before), "two checkpoints of each stage")
        for daemon in before:
            daemon.kill()
        reached = [last_step(daemon) for daemon in before]
        (*_, intact), (*_, older, newest) = kept(before[0], 0), kept(before[1], 1)
        flip_a_byte(newest / "weights.safetensors")
        made.invite = ""
        after = [made.start("a", "0"), made.start("b", "1")]
        made.until(lambda: all(last_step(d) > r for d, r in zip(after, reached, strict=True)), "steps beyond the kill")
        for daemon, step in zip(after, map(step_of, (intact, older)), strict=True):
            assert f"own checkpoint of step {step}" in said_of_state(daemon)
            assert steps_of_this_life(daemon)[0] == step + 1
        damaged = after[1].events("CheckpointDamaged")
        assert len(damaged) == 1 and str(newest) in damaged[0]["text"] and "SHA-256" in damaged[0]["text"]
        made.stop()


@pytest.mark.slow
def test_a_synchronous_run_whose_stages_kept_different_steps_goes_on(tmp_path: Path) -> None:
    manifest = tiny(2, checkpoint={"every": EVERY, "keep": 3}, schedule={"kind": "synchronous"})
    with swarm(tmp_path, manifest) as made:
        before = [made.start("a", "0"), made.start("b", "1")]
        made.until(lambda: all(written(d) >= 2 * EVERY for d in before), "two checkpoints of each stage")
        for daemon in before:
            daemon.kill()
        reached = max(last_step(daemon) for daemon in before)
        *_, older, newest = kept(before[1], 1)
        shutil.rmtree(newest)
        made.invite = ""
        after = [made.start("a", "0"), made.start("b", "1")]
        made.until(lambda: all(last_step(d) > reached + EVERY for d in after), "steps beyond the kill")
        steps = steps_of_this_life(after[1])
        assert any(b > a + 1 for a, b in pairwise([step_of(older), *steps])), "it went with the other"
        made.stop()


def test_a_newcomer_gets_the_state_of_its_stage_and_goes_on_when_a_source_dies(tmp_path: Path) -> None:
    """Some 38 MB of state in ten chunks; one of two sources is killed when a chunk is asked of it.

    The other takes a second over each answer, or it could have given everything before the victim was asked. Where it
    has done so all the same, since the victim's process was held up, the next newcomer asks the victim.
    """
    wide = {"width": 512, "heads": 8, "key_value_heads": 2, "feed_forward": 1024, "subspace": 512}
    with swarm(tmp_path, tiny(2, model=wide, checkpoint={"every": 1000})) as made:
        sibling = made.start("sibling", "1", faults="state.giving:sleep=1:1+")
        victim = made.start("victim", "1", faults="state.giving:kill:2")
        made.serving()  # before there is an origin: neither has a step that the other must fetch
        origin = made.start("origin", "0")
        made.until(lambda: min(last_step(victim), last_step(sibling)) >= 3, "steps of both replicas")
        made.until(lambda: known_step(origin, victim, sibling) >= 3, "the steps of both to be known")
        newcomers = itertools.count()
        while not fired(victim):
            late = made.start(f"late-{next(newcomers)}", "1")
            fetched = made.until(partial(late.events, "StateFetched"), "the newcomer to have its state")[0]
        assert [entry[1:3] for entry in fired(victim)] == [["state.giving", "kill"]]
        assert victim.process.wait(WAIT_S) == -signal.SIGKILL
        assert fetched["step"] >= 3 and fetched["bytes"] > 25e6
        assert fetched["fetched_again"] <= 4, "only what was asked of the victim was asked for again"
        made.until(lambda: late.events("MicrobatchCounted") and late.events("StepTaken"), "the newcomer to train")
        assert min(event["step"] for event in late.events("StepTaken")) > fetched["step"]
        made.stop()


@pytest.mark.slow
def test_a_newcomer_whose_only_source_dies_goes_on_with_the_next(tmp_path: Path) -> None:
    wide = {"width": 512, "heads": 8, "key_value_heads": 2, "feed_forward": 1024, "subspace": 512}
    with swarm(tmp_path, tiny(2, model=wide, checkpoint={"every": 2})) as made:
        origin = made.start("origin", "0")
        only = made.start("only", "1", faults="state.giving:kill:5")
        made.until(lambda: written(only) >= 2 and known_step(origin, only) >= 2, "a checkpoint of the only replica")
        late = made.start("late", "1")
        made.until(lambda: fired(only), "the only source to die")
        made.until(lambda: late.events("TaskFailed", task="fetch state"), "the newcomer to notice")
        again = made.start("only", "1")
        fetched = made.until(lambda: late.events("StateFetched"), "the newcomer to have its state")[0]
        asked_of_the_dead = (
            WINDOW + MAX_SOURCE_FAILURES - 1
        )  # open calls at its death, then one by one until it is given up
        assert fetched["step"] >= 2 and fetched["fetched_again"] <= asked_of_the_dead
        made.until(lambda: late.events("MicrobatchCounted") and again.is_serving, "one to train, and both to serve")
        made.stop()


def test_who_leaves_writes_a_checkpoint_and_starts_from_it(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(1, checkpoint={"every": 1000})) as made:
        alone = made.start("alone", "0")
        made.until(lambda: last_step(alone) >= 3, "a few steps")
        assert made.stop() == {"alone": 0}
        step = written(alone)
        assert step == last_step(alone) > 0
        made.invite = ""
        again = made.start("alone", "0")
        made.until(lambda: last_step(again) > step, "steps of the second life")
        assert f"own checkpoint of step {step}" in said_of_state(again)
        taken = [event["step"] for event in again.events("StepTaken")]
        assert taken == list(range(1, len(taken) + 1)), "no step is missing"
        made.stop()


def test_who_leaves_hands_over_and_who_starts_again_replaces_its_own_ghost(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2, checkpoint={"every": 1000})) as made:
        origin = made.start("origin", "0")
        leaver, ghost = made.start("leaver", "1"), made.start("ghost", "1")
        made.until(lambda: min(last_step(leaver), last_step(ghost)) >= 2, "both to train")
        leaver.kill(signal.SIGTERM)
        made.until(lambda: leaver.process.poll() is not None, "the leaver to be gone")
        assert leaver.process.returncode == 0 and written(leaver) == last_step(leaver) > 0
        left = [event["reason"] for event in origin.events("MicrobatchRerouted", from_peer=leaver.peer)]
        assert not [reason for reason in left if "the stream ended" in reason], "it finished what it held"
        ghost.kill()
        again = made.start("ghost", "1")
        made.until(lambda: again.is_serving, "the same peer again")
        served = again.events("StateChanged", state="serving")[-1]["at_unix"]
        went_on = made.until(
            lambda: next((e for e in origin.events("MicrobatchCompleted") if e["at_unix"] > served), None),
            "the origin to go on with it",
        )
        gone = [event["at_unix"] for event in origin.events("PeerGone", peer=again.peer)]
        assert not [at for at in gone if at > went_on["at_unix"]], "the end of its old claim is not its own end"
        drained(made, origin)
        made.stop()
        nothing_lost(made, origin)
