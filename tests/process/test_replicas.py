"""Replicas that agree, in real processes: to the bit in all-reduce steps, around outer parameters in inner steps."""

from __future__ import annotations

import itertools
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agora_protocol.manifest import Manifest

from agora.replica.shard_codec import INT8_ROUNDS
from tests.oracle import relative_difference, run_plain_loop
from tests.process.harness import (
    Daemon,
    Swarm,
    checkpoint_at,
    drained,
    drawn_by,
    fired,
    last_step,
    microbatches_of_a_step,
    newest_common,
    nothing_lost,
    oracle_manifest,
    sampler_of,
    steps_of,
    swarm,
    tiny,
    weights_of,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

STEPS = 10


def replicated(**sections: object) -> Manifest:
    base = oracle_manifest(2, kind="synchronous", activations="keep").model_dump()
    base["schedule"] |= {"least_replicas": 3}
    for section, values in sections.items():
        base[section] |= values
    return Manifest.model_validate(base)


def shares_of(origin: Daemon) -> list[int]:
    """How many microbatches it opened for each step: it opens the next when its own stage 0 has taken the one before.

    Usually that is a third of eight; a peer that is slow to open its own lets another one top the step up.
    """
    shares = [0]
    for event in origin.events():
        if event["event"] == "StepTaken" and event["stage"] == 0:
            shares.append(0)
        elif event["event"] == "MicrobatchStarted" and event["purpose"] == "train":
            shares[-1] += 1
    return shares


def test_two_stages_of_three_replicas_equal_a_plain_loop_over_all_their_batches(tmp_path: Path) -> None:
    """Eight microbatches for three origins: unequal shares.

    The origins are drained before the weights are read: a checkpoint of one replica may be of a step after another's.
    """
    manifest = replicated()
    per = microbatches_of_a_step(manifest)
    with swarm(tmp_path, manifest) as made:
        peers = [[made.start(f"stage-{k}-{n}", str(k)) for n in range(3)] for k in range(2)]
        everyone = [peer for replicas in peers for peer in replicas]
        made.until(lambda: min(map(last_step, everyone)) >= STEPS, f"{STEPS} steps")
        drained(made, *peers[0])
        steps = sum(origin.ask("report")["microbatches"]["completed"] for origin in peers[0]) // per
        made.until(lambda: {last_step(peer) for peer in everyone} == {steps}, "the last whole step of everyone")
        found = [[weights_of(peer, k) for peer in replicas] for k, replicas in enumerate(peers)]
        parts = [steps_of(peer, 1) for peer in peers[1]]
        shares = {origin.peer: shares_of(origin)[:steps] for origin in peers[0]}
        assert all(sum(of_a_step) == per for of_a_step in zip(*shares.values(), strict=True))
        assert not [event for peer in everyone for event in peer.events("PartFailed") + peer.events("StepsSkipped")]
        made.stop()
    sampler = sampler_of(manifest, made.corpus)
    drawn = [drawn_by(manifest, sampler, origin, share) for origin, share in shares.items()]
    batches = [list(itertools.chain(*of_a_step)) for of_a_step in zip(*drawn, strict=True)]
    plain = run_plain_loop(manifest, batches)
    for step in range(steps):
        told = [(event[step]["loss"], event[step]["tokens"]) for event in parts if event[step]["tokens"]]
        loss = sum(loss * tokens for loss, tokens in told) / sum(tokens for _, tokens in told)
        assert loss == pytest.approx(plain.losses[step], rel=1e-4), step
    for stage, replicas in enumerate(found):
        for weights in replicas:
            for name, expected in plain.weights[stage].items():
                assert relative_difference(weights[name], expected) < 1e-4, f"stage {stage} {name}"


def test_an_asynchronous_run_begins_with_all_reduce_steps_and_goes_on_with_inner_steps(tmp_path: Path) -> None:
    """Replicas are equal to the bit until `exact_steps`, though their pipelines do not wait; then each is its own.

    What they have agreed on after that is the same bits again: their history hashes say so.
    """
    exact, later = 12, 24
    base = averaging(1).model_dump()
    base["averaging"] |= {"exact_steps": exact, "round_s": 20.0}
    base["checkpoint"] |= {"every": 1, "keep": 1000}
    with swarm(tmp_path, Manifest.model_validate(base)) as made:
        both = [made.start("a", "0"), made.start("b", "0")]

        def common() -> set[int]:
            """Steps of which both have written their state: not each, since steps are taken while one is written."""
            one, two = ({event["step"] for event in daemon.events("CheckpointWritten")} for daemon in both)
            return one & two

        def common_agreed() -> set[int]:
            """Steps after the exact ones whose history hash is in a state of both."""
            one, two = (agreed_in_checkpoints(daemon).keys() for daemon in both)
            return {agreed for agreed in one & two if agreed > exact}

        made.until(lambda: max(common(), default=0) >= later, "states of both after the all-reduce steps")
        made.until(common_agreed, "states of both that have agreed on a slice")
        steps = common()
        made.stop()
        equal, apart = (
            [checkpoint_at(daemon, 0, step) for daemon in both]
            for step in (max(step for step in steps if step <= exact), max(steps))
        )
        for daemon in both:
            rounds = [event["round"] for event in daemon.events("RoundDone", what="gradient")]
            assert sorted(set(rounds)) == list(range(exact)), "a round for each of the first steps, none after"
            slices = [event["round"] for event in daemon.events("RoundDone", what="slice")]
            assert slices and min(slices) > exact, "then rounds of slices; a late one may only be asked for"
            assert not daemon.events("TaskFailed") and not daemon.events("StageDiverged")
        agreed_on = [agreed_in_checkpoints(daemon) for daemon in both]
        assert all(agreed_on[0][agreed] == agreed_on[1][agreed] != 0 for agreed in common_agreed())
    assert all(np.array_equal(equal[0][name], equal[1][name]) for name in equal[0])
    assert max(relative_difference(apart[0][name], apart[1][name]) for name in apart[0]) > 1e-4


def agreed_in_checkpoints(daemon: Daemon) -> dict[int, int]:
    """The history hashes in a daemon's checkpoints, by the step agreed on."""
    found = [json.loads(path.read_text()) for path in daemon.root.rglob("checkpoints/stage-0/step-*/checkpoint.json")]
    return {about["agreed"]: about["lineage"] for about in found}


@pytest.mark.parametrize(("wire", "most"), [("normal2", 0.28), ("normal4", 0.53)])
def test_replicas_whose_gradients_travel_in_few_bits_are_the_same_bits_after_a_kill_and_a_join(
    wire: str, most: float, tmp_path: Path
) -> None:
    """After 50 steps, of which the first INT8_ROUNDS are in int8: weights of three replicas, one of which came late.

    One that had to step without the others finds out, and fetches their state. most: bytes of an element.
    """
    killed, joined, last = INT8_ROUNDS + 3, INT8_ROUNDS + 6, 50
    base = averaging(1).model_dump()
    base["averaging"] = {"gradient_wire": wire}
    base["checkpoint"] |= {"every": 1, "keep": 1000}
    with swarm(tmp_path, Manifest.model_validate(base)) as made:
        peers = [made.start(name, "0") for name in ("a", "b", "c")]
        made.until(lambda: min(map(last_step, peers)) >= killed, "steps of three in two bits")
        peers.pop().kill()
        made.until(lambda: min(map(last_step, peers)) >= joined, "steps of two")
        peers.append(made.start("d", "0"))
        made.until(lambda: min(map(last_step, peers)) >= last, "steps of three again")

        def are_equal() -> bool:
            step = newest_common(peers)
            if step < last:
                return False
            first, *others = (checkpoint_at(daemon, 0, step) for daemon in peers)
            return all(np.array_equal(first.get(name), other[name]) for other in others for name in other)

        made.until(are_equal, "the same bits in a state of all")
        rounds = [event for daemon in peers for event in rounds_of(daemon, "gradient") if event["round"] >= INT8_ROUNDS]
        numel = sum(weights.size for weights in checkpoint_at(peers[0], 0, newest_common(peers)).values())
        sent = [event["bytes_out"] / numel for event in rounds if event["bytes_out"]]
        assert statistics.median(sent) < most, "its bits for each element, and eight for each block of 64"
        assert not [event for daemon in peers for event in daemon.events("TaskFailed", task="averaging")]
        made.stop()


def tokens_lost(daemons: list[Daemon]) -> float:
    """Tokens that living daemons have counted for stage 0, and that went into no step and wait for none."""
    late = sum(event["lost"] for daemon in daemons for event in rounds_of(daemon, "gradient"))
    return late + sum(daemon.ask("report")["accounts"]["0"]["tokens_lost"] for daemon in daemons)


@pytest.mark.slow
def test_a_join_and_a_death_each_cost_an_asynchronous_stage_less_than_half_a_step(tmp_path: Path) -> None:
    """Of three replicas one dies, and loses what it had counted; then one of two, whose part of a step is half of it.

    The last one takes its next step within three steps' duration, and waits for nobody any more. The fast tier claims
    the same in virtual time (tests/replica/test_stage_replicas.py).
    """
    target = 32_768
    base = averaging(2, tokens=target).model_dump()
    base["averaging"] |= {"exact_steps": 10**6, "round_s": 20.0}
    base["schedule"] |= {"least_replicas": 1}
    with swarm(tmp_path, Manifest.model_validate(base)) as made:
        made.start("tail", "1")
        peers = [made.start("a", "0"), made.start("b", "0")]
        made.until(lambda: min(map(last_step, peers)) >= 6, "steps of two")
        before = tokens_lost(peers)
        peers.append(made.start("late", "0"))
        made.until(lambda: len([e for e in steps_of(peers[2], 0) if e["tokens"]]) >= 6, "steps of three")
        assert tokens_lost(peers) - before < 0.5 * target, "the join"
        while len(peers) > 1:
            before, dying = tokens_lost(peers[:-1]), peers.pop()
            dying.kill()
            died_at = max(map(last_step, peers))
            made.until(lambda at=died_at: min(map(last_step, peers)) >= at + 5, "steps of those left")
            counted = sum(event["tokens"] for event in dying.events("MicrobatchCounted"))
            own = counted - sum(event["tokens"] for event in steps_of(dying, 0))
            most = 0.5 * target if len(peers) == 2 else 0.6 * target
            assert own + tokens_lost(peers) - before < most, f"the death of {dying.name}"
        steps = [event["at_unix"] for event in steps_of(peers[0], 0)]
        usual_s = statistics.median(after - before for before, after in itertools.pairwise(steps[:8]))
        assert max(after - before for before, after in itertools.pairwise(steps[8:])) < 3 * usual_s + 2.0
        drained(made, *peers)
        made.stop()


@pytest.mark.slow
def test_a_synchronous_replica_that_joins_later_becomes_exactly_what_the_others_are(tmp_path: Path) -> None:
    """And goes on being it when one of them is killed."""
    base = oracle_manifest(1, kind="synchronous", activations="keep").model_dump()
    base["averaging"] |= {"round_s": 3.0}
    base["checkpoint"] |= {"every": 1, "keep": 1000}
    with swarm(tmp_path, Manifest.model_validate(base)) as made:
        peers = [made.start("first", "0"), made.start("second", "0")]
        made.until(lambda: all(len(steps_of(d, 0)) >= 4 for d in peers), "four steps of both")
        peers.append(made.start("third", "0"))
        made.until(lambda: peers[2].events("MicrobatchCounted"), "the third to train")
        peers[0].kill()
        joined = last_step(peers[0])

        def newest_common() -> int:
            written = [{event["step"] for event in daemon.events("CheckpointWritten")} for daemon in peers[1:]]
            return max(set.intersection(*written), default=0)

        step = made.until(lambda: found if (found := newest_common()) >= joined + 12 else 0, "a state 12 steps later")
        second, third = (checkpoint_at(d, 0, step) for d in peers[1:])
        made.stop()
    for name, weights in second.items():
        assert relative_difference(third[name], weights) < 1e-4, name


def rounds_of(daemon: Daemon, what: str = "slice") -> list[dict[str, Any]]:
    return daemon.events("RoundDone", what=what)


def averaging(stages: int, tokens: int = 4096) -> Manifest:
    settings = {"exact_steps": 0, "fraction": 0.25, "round_s": 3.0}
    schedule = {"microbatch": 2, "max_in_flight": 6, "least_replicas": 2}
    return tiny(stages, averaging=settings, schedule=schedule, optimizer={"target_tokens": tokens})


LATEST = 8
"""Rounds of each peer, and steps of a stage, that must be as they are when no process is held up."""


def tokens_of_latest_steps(replicas: list[Daemon]) -> float:
    """The tokens of the latest steps that all replicas have taken, whoever counted them, on average; 0 too early."""
    last = min(map(last_step, replicas))
    steps = [event for daemon in replicas for event in steps_of(daemon, 0) if last - LATEST < event["step"] <= last]
    return sum(event["tokens"] for event in steps) / LATEST if last >= 2 * LATEST else 0.0


def test_replicas_with_inner_steps_step_together_and_agree_on_fragments(tmp_path: Path) -> None:
    """Sooner or later: a process that stands still for some seconds misses rounds, and is followed up by later ones."""
    target = 8192
    with swarm(tmp_path, averaging(2, target).with_values(averaging={"round_s": 20.0})) as made:
        origins = [made.start("a", "0"), made.start("b", "0")]
        others = [made.start("c", "1"), made.start("d", "1")]

        def are_whole() -> bool:
            latest = [rounds_of(daemon)[-LATEST:] for daemon in (*origins, *others)]
            return all(len(rounds) == LATEST and all(map(whole, rounds)) for rounds in latest)

        made.until(are_whole, f"{LATEST} rounds of each peer in which both have a part")
        for one, two in (origins, others):
            made.until(lambda a=one, b=two: abs(last_step(a) - last_step(b)) <= 4, "replicas to be at about one step")
        made.until(
            lambda: 0.5 * target <= tokens_of_latest_steps(origins) <= 1.1 * target,
            "steps that have no more than their target's tokens, whoever counted them",
        )
        everybody_knows_what_became_of_the_tokens(made, others[0], origins, target)
        drained(made, *origins)
        made.stop()
        nothing_lost(made, *origins)


def everybody_knows_what_became_of_the_tokens(
    made: Swarm, observer: Daemon, origins: list[Daemon], target: int
) -> None:
    """The status of a peer of stage 1 has the accounts of stage 0, whose replicas publish them."""
    computed = sum(daemon.ask("report")["accounts"]["0"]["tokens_computed"] for daemon in origins)

    def stage_0() -> dict[str, Any]:
        row: dict[str, Any] = observer.ask("status")["stages"][0]
        return row

    def are_near_the_target(seen: dict[str, Any]) -> bool:
        is_whole = 0.8 * target <= seen["tokens_per_step"] <= 1.25 * target and 0.9 <= seen["share_counted"] <= 1
        return is_whole and 0 <= seen["staleness"] < 2

    made.until(lambda: stage_0()["tokens_computed"] >= computed, "the accounts of stage 0 at stage 1")
    seen = made.until(
        lambda: row if are_near_the_target(row := stage_0()) and row["waits_for"] else None,
        "accounts of whole steps of which next to nothing is lost",
    )
    assert seen["target_tokens"] == target


def rounds_after(daemons: list[Daemon], counts: list[int], what: str) -> list[list[dict[str, Any]]]:
    """The rounds of each that came after so many."""
    return [rounds_of(daemon, what)[count:] for daemon, count in zip(daemons, counts, strict=True)]


def whole(event: dict[str, Any]) -> bool:
    return bool(event["failed_parts"] == 0 and event["contributors"] >= 2)


FAULTS = (
    "averaging.answered:kill:2",
    "averaging.received:hang:3",
    "averaging.sending:kill:3",
    "averaging.received:kill:3",
)


@pytest.mark.parametrize("what", ["slice", "gradient"])
def test_members_that_die_or_hang_in_a_round_stall_nobody(
    what: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A reducer killed in the middle, a sender in the middle of its shards, a member that hangs: rounds still end.

    Those of slices, and those of the all-reduce steps that a run begins with. `--slow` injects all faults into both,
    and a reducer killed before it has averaged anything.
    """
    quick = FAULTS[:2] if what == "gradient" else FAULTS[1:3]
    faults = FAULTS if request.config.getoption("--slow") else quick
    begun, tokens = (0, 8192) if what == "slice" else (10**9, 2048)
    with swarm(tmp_path, averaging(1, tokens).with_values(averaging={"exact_steps": begun})) as made:
        living = [made.start("a", "0"), made.start("b", "0")]
        for number, fault in enumerate(faults):
            victim = made.start(f"victim-{number}", "0", faults=fault)
            made.until(partial(fired, victim), f"{fault} to fire")
            at = [len(rounds_of(daemon, what)) for daemon in living]
            after = partial(rounds_after, living, at, what)
            made.until(lambda after=after: all(any(map(whole, it)) for it in after()), f"agreement after {fault}")
            assert [entry[1] for entry in fired(victim)] == [fault.split(":")[0]]
            if "hang" in fault:
                victim.kill()
            victim.end_is_intended = True
        assert all(rounds_of(daemon, what) for daemon in living)
        for event in [event for daemon in living for event in rounds_of(daemon, what)]:
            done = 1 - event["failed_parts"] / event["parts"]
            least = min(2, event["members"])
            assert event["contributors"] >= least * done, "over at least those who live, or left alone"
        drained(made, *living)
        made.kill_all()
        nothing_lost(made, *living)
