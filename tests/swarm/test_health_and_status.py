"""Health judged by steps, and the status object of the contract."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from agora_protocol.ids import peer_name
from agora_protocol.records import StageAccount

from agora.swarm.health import Health, assess_health
from agora.swarm.status import RunIdentity, StageTokens, build_status, sum_accounts
from agora.swarm.view import StageEstimate, View
from tests.swarm.makers import peer_id, seen, view

NOW = 10_000.0


def two_each(stages: int, **rest) -> View:
    return view(*(seen(f"p{s}{r}", str(s), **rest) for s in range(stages) for r in range(2)))


def health(peers: View, stages: int = 2, *, since: float = 0.0) -> Health:
    return assess_health(peers, stages, NOW, since_unix=since)


def test_ok_when_every_stage_steps_and_has_two_replicas() -> None:
    found = health(two_each(2, stepped_unix=NOW - 3.0))
    assert found == Health("OK", "every stage has at least 2 replicas; last step 3 s ago", None)


def test_degraded_when_a_stage_hangs_on_one_peer() -> None:
    peers = view(*two_each(2, stepped_unix=NOW - 3.0).peers.values()).without(peer_id("p11"))
    found = health(peers)
    assert found.state == "DEGRADED" and "stage 1 has a single peer" in found.why
    assert found.advice is not None and "--stages 1" in found.advice


@pytest.mark.parametrize(
    ("rates", "names"),
    [
        ((900.0, 900.0, 900.0), ""),
        ((900.0, 500.0, 900.0), ""),
        ((900.0, 400.0, 900.0), "stage 1 limits the run, with 800 tokens/s to the others' 1,800"),
        ((900.0, 400.0, 150.0), "stage 2 limits the run, with 300 tokens/s to the others' 800"),
        ((0.0, 0.0, 0.0), ""),
    ],
)
def test_a_stage_that_is_slow_beside_the_others_is_named_in_the_runs_health(
    rates: tuple[float, ...], names: str
) -> None:
    peers = view(
        *(
            seen(f"p{stage}{replica}", str(stage), stepped_unix=NOW - 3.0, steps=(5,), tokens_per_second=rate)
            for stage, rate in enumerate(rates)
            for replica in range(2)
        )
    )
    found = health(peers, 3)
    told = build_status(peers, RunIdentity("ab", "poems", 3, 8192), found, NOW)["health"]
    assert told["state"] == "OK" and told["why"] == f"{found.why}; {names}".removesuffix("; ")
    assert told["do"] == (f"start another with `agora-node join RUN --stages {names[6]}`" if names else None)


def test_stalled_names_the_stage_that_has_no_peer() -> None:
    found = health(view(seen("a", "0", stepped_unix=NOW), seen("b", "2", stepped_unix=NOW)), 3)
    assert found.state == "STALLED" and found.why == "stage 1 has no peer"
    assert found.advice == "start one with `agora-node join RUN --stages 1`; the others wait for it"
    several = health(view(seen("a", "0", stepped_unix=NOW)), 4)
    assert several.why == "stages 1, 2, 3 have no peer"


def test_a_stage_whose_only_peer_joins_or_leaves_is_stalled_too() -> None:
    joining = health(view(seen("a", "0", stepped_unix=NOW), seen("b", "1", "joining")))
    assert (joining.state, joining.advice) == ("STALLED", "wait until it serves")
    leaving = health(view(seen("a", "0", stepped_unix=NOW), seen("b", "1", "leaving")))
    assert leaving.why == "stage 1 has no peer"


def test_a_sampled_stage_is_given_the_time_in_which_its_peers_are_read_again() -> None:
    peers = two_each(2, stepped_unix=NOW - 100.0)
    assert health(peers).state == "STALLED"
    sampled = replace(peers, estimates={0: StageEstimate(200.0, 25.0), 1: StageEstimate(90.0, 25.0)})
    found = health(sampled)
    assert (found.state, found.why) == ("OK", "every stage has at least 90 replicas; last step 100 s ago")
    assert health(sampled, since=NOW - 1e4).state == "OK"
    assert health(replace(peers, estimates={1: StageEstimate(90.0, 25.0)})).state == "STALLED"


def test_the_status_of_a_sampled_stage_is_an_estimate_and_says_of_how_many() -> None:
    peers = two_each(2, stepped_unix=NOW, tokens_per_second=50.0)
    run = RunIdentity("ab" * 32, "large", 2, 1000)
    whole, sampled = (
        build_status(known, run, health(known), NOW)["stages"]
        for known in (peers, replace(peers, estimates={0: StageEstimate(200.0, 25.0)}))
    )
    assert [(row["replicas"], row["replicas_known"], row["tokens_per_second"]) for row in sampled] == [
        (200, 2, 10_000.0),
        (2, 2, 100.0),
    ]
    assert (whole[0]["replicas"], whole[0]["tokens_per_second"]) == (2, 100.0)


def test_stalled_is_judged_by_steps_and_not_by_heartbeats() -> None:
    beating = two_each(2, seen_unix=NOW, stepped_unix=NOW - 61.0)
    found = health(beating)
    assert found.state == "STALLED" and "stage 0 took no step for 61 s" in found.why
    assert health(two_each(2, seen_unix=NOW, stepped_unix=NOW - 59.0)).state == "OK"


def test_one_stage_that_stands_still_stalls_the_swarm() -> None:
    peers = view(seen("a", "0", stepped_unix=NOW), seen("b", "1", stepped_unix=NOW - 100.0))
    assert "stage 1 took no step for 100 s" in health(peers).why


def test_slow_steps_are_given_ten_of_their_usual_time() -> None:
    assert health(two_each(2, stepped_unix=NOW - 900.0, step_s=100.0)).state == "OK"
    assert health(two_each(2, stepped_unix=NOW - 1001.0, step_s=100.0)).state == "STALLED"


def test_a_swarm_that_has_just_started_is_degraded_then_stalled() -> None:
    fresh = health(two_each(2), since=NOW - 5.0)
    assert (fresh.state, fresh.advice) == ("DEGRADED", "wait; the swarm has just started")
    assert health(two_each(2), since=NOW - 61.0).state == "STALLED"


def test_each_stage_has_its_own_health_and_the_run_has_that_of_the_worst() -> None:
    peers = view(
        *two_each(1, stepped_unix=NOW).peers.values(), seen("c", "1", stepped_unix=NOW - 100.0), seen("d", "2")
    )
    found = assess_health(peers, 4, NOW, since_unix=NOW - 1e3)
    assert [stage.state for stage in found.stages] == ["WAITING", "STALLED", "STALLED", "STALLED"]
    assert "; it waits, since stage 3 has no peer" in found.stages[0].why
    assert found.why == found.stages[3].why == "stage 3 has no peer"
    assert found.stages[1].why == "stage 1 took no step for 100 s; up to 60 s are usual"
    rows = build_status(peers, RunIdentity("ab" * 32, "demo", 4, 256), found, NOW)["stages"]
    assert rows[1]["health"] == {"state": "STALLED", "why": found.stages[1].why, "do": found.stages[1].advice}


def test_a_stage_that_stands_still_says_what_it_waits_for() -> None:
    waits = {"waits_for": "0 of the 512 tokens of its share are counted"}
    found = health(view(seen("a", "0", stepped_unix=NOW - 90.0, **waits), seen("b", "1", stepped_unix=NOW)))
    assert found.why.endswith("; a peer of it says: 0 of the 512 tokens of its share are counted")


def test_without_any_peer_in_sight_it_is_unreachable() -> None:
    assert health(View()).state == "UNREACHABLE" and health(View()).advice


@pytest.mark.parametrize("peers", [View(), two_each(2), two_each(2, stepped_unix=NOW)])
def test_every_state_but_ok_says_what_to_do(peers: View) -> None:
    found = health(peers)
    assert (found.advice is None) == (found.state == "OK")


# --- status

RUN_IDENTITY = RunIdentity("ab" * 32, "demo", 2, 256)
OK = Health("OK", "fine", None)


def test_status_has_exactly_the_fields_of_the_contract() -> None:
    found = build_status(two_each(2, stepped_unix=NOW, seen_unix=NOW - 1.2), RUN_IDENTITY, OK, NOW)
    first = ["schema", "run_id", "name", "step", "loss", "tokens_per_second", "health", "stages", "peers"]
    assert list(found) == [*first, "objective", "unix", "tuning", "samples", "loss_spread"]
    assert list(found["health"]) == ["state", "why", "do"]
    assert list(found["stages"][0])[:4] == ["stage", "replicas", "step", "tokens_per_second"]
    expected = ["peer", "name", "span", "state", "step", "tokens_per_second", "path", "seen_seconds", "note"]
    assert list(found["peers"][0])[:9] == expected and found["peers"][0]["capacity"] == 0.0
    assert found["peers"][0]["seen_seconds"] == 1.2 and found["peers"][0]["name"].count("-") == 1
    assert json.loads(json.dumps(found)) == found


def test_status_sums_replicas_and_the_slowest_stage_is_the_swarms_throughput() -> None:
    peers = view(
        seen("a", "0", steps=(10,), tokens_per_second=100.0, loss=4.0),
        seen("b", "0-1", steps=(12, 11), tokens_per_second=50.0, loss=1.0),
        seen("c", "1", "joining", steps=(0,), tokens_per_second=70.0),
    )
    found = build_status(peers, RUN_IDENTITY, OK, NOW)
    assert [s["replicas"] for s in found["stages"]] == [2, 1]
    assert [s["step"] for s in found["stages"]] == [12, 11] and found["step"] == 12
    assert [s["tokens_per_second"] for s in found["stages"]] == [150.0, 50.0] and found["tokens_per_second"] == 50.0
    assert found["loss"] == 3.0 and found["loss_spread"] == [1.0, 4.0], "weighted by throughput"
    assert {p["state"] for p in found["peers"]} == {"training", "joining"}
    assert [p["span"] for p in found["peers"]] == [[0, 0], [0, 1], [1, 1]]


def test_status_of_an_empty_view_is_still_a_status() -> None:
    found = build_status(View(), RUN_IDENTITY, health(View()), NOW)
    assert (found["loss"], found["step"], found["tokens_per_second"], found["peers"]) == (None, 0, 0.0, [])
    assert found["health"]["state"] == "UNREACHABLE"


def test_what_only_the_asked_peer_knows_is_added() -> None:
    peer = peer_id("p00")
    found = build_status(two_each(1), RUN_IDENTITY, OK, NOW, {peer: "relayed"})
    assert next(p["path"] for p in found["peers"] if p["peer"] == peer) == "relayed"


def test_a_stage_tells_what_became_of_the_tokens_of_its_replicas_and_what_the_last_of_them_waits_for() -> None:
    peers = view(
        seen(
            "a",
            "0",
            steps=(12,),
            accounts=(StageAccount(400, 100, 300, 0, 0, 2, 500, 0.5),),
            waits_for="tokens",
        ),
        seen(
            "b",
            "0",
            steps=(11,),
            accounts=(StageAccount(200, 0, 100, 0, 0, 1, 260, 0.1),),
            waits_for="peers",
            note="x",
        ),
    )
    peers = view(*peers.peers.values(), seen("c", "0", steps=(0,)))  # has told nothing yet
    first, second = build_status(peers, RUN_IDENTITY, OK, NOW)["stages"]
    assert (first["tokens_computed"], first["tokens_counted"], first["share_counted"]) == (600, 400, 0.8)
    assert (first["tokens_per_step"], first["target_tokens"], first["staleness"]) == (250.0, 256, 0.4)
    assert first["waits_for"] == f"{peer_name(peer_id('b'))}: peers"
    assert (second["tokens_per_step"], second["share_counted"], second["staleness"]) == (None, None, None)
    assert second["waits_for"] == "a peer that serves it"
    assert [peer["note"] for peer in build_status(peers, RUN_IDENTITY, OK, NOW)["peers"]].count("x") == 1


def test_decisions_of_the_swarm_know_neither_asyncio_nor_torch() -> None:
    package = Path(__file__).resolve().parents[2] / "agora" / "swarm"
    for name in ("view", "placement", "health", "status"):
        text = (package / f"{name}.py").read_text()
        assert "asyncio" not in text and "import torch" not in text and "import time" not in text


# --- the sums of what the replicas of a stage publish of their tokens


def test_tokens_that_wait_for_a_step_are_not_lost() -> None:
    found = sum_accounts([StageAccount(100, 40, 60), StageAccount(100, 20, 60)])
    assert (found.tokens_computed, found.tokens_counted, found.share_counted) == (200, 120, round(120 / 140, 4))


def test_a_step_holds_what_each_replica_stepped_along_on_its_own() -> None:
    both = [StageAccount(own_steps=4, along_own=300), StageAccount(own_steps=2, along_own=100)]
    assert sum_accounts(both).tokens_per_step == 100.0


def test_a_mean_of_all_is_one_step_whoever_tells_of_it_and_the_longest_memory_counts() -> None:
    both = [StageAccount(mean_steps=4, in_mean=400), StageAccount(mean_steps=2, in_mean=160)]
    assert sum_accounts(both).tokens_per_step == sum_accounts(both[::-1]).tokens_per_step == 100.0


def test_a_step_that_one_took_alone_before_others_came_is_one_more() -> None:
    first = StageAccount(own_steps=1, along_own=100, mean_steps=4, in_mean=400)
    assert sum_accounts([first, StageAccount(mean_steps=5, in_mean=500)]).tokens_per_step == 100.0


def test_staleness_is_weighted_by_the_tokens_counted() -> None:
    assert sum_accounts([StageAccount(counted=300, staleness=1.0), StageAccount(counted=100)]).staleness == 0.75


def test_a_stage_of_which_nothing_is_known_has_no_figures() -> None:
    assert sum_accounts([]) == sum_accounts([StageAccount()]) == StageTokens(0, 0, None, None, None)


@pytest.mark.parametrize("count", [3, 4, 7, 16])
@pytest.mark.parametrize(
    "lie",
    [
        {"loss": 0.0, "tokens_per_second": 1e12},
        {"loss": 1e30, "tokens_per_second": 1e300},
        {"loss": -1e30, "tokens_per_second": 50.0},
        {"loss": 3.0, "tokens_per_second": 1e12, "metrics": (1e30,) * 6},
        {"loss": 1e9, "tokens_per_second": 0.0},
    ],
)
def test_one_peers_claims_decide_neither_the_loss_nor_the_totals(count: int, lie: dict[str, float]) -> None:
    honest = [
        seen(f"p{n}", "0", tokens_per_second=100.0, loss=3.0 + 0.01 * n, metrics=(0.5,) * 6) for n in range(count - 1)
    ]
    run = RunIdentity("ab" * 32, "demo", 1, 256, "dpo")
    true, found = (build_status(view(*peers), run, OK, NOW) for peers in (honest, [*honest, seen("liar", "0", **lie)]))
    assert 3.0 <= found["loss"] <= 3.0 + 0.01 * count, "within what the honest ones report"
    low, high = found["loss_spread"]
    assert 3.0 <= low <= high <= 3.0 + 0.01 * count
    assert found["tuning"] == true["tuning"] or set(found["tuning"].values()) == {0.5}
    assert found["tokens_per_second"] <= true["tokens_per_second"] + 400.0


def test_the_claims_of_honest_peers_of_unlike_speed_count_as_they_are() -> None:
    peers = [seen(f"p{n}", "0", tokens_per_second=rate, loss=3.0) for n, rate in enumerate((50.0, 100.0, 130.0, 380.0))]
    assert build_status(view(*peers), RUN_IDENTITY, OK, NOW)["stages"][0]["tokens_per_second"] == 660.0


def test_a_run_that_has_taken_its_steps_is_completed_and_not_stalled() -> None:
    """Nobody steps any more: without an end that would be STALLED after a minute."""
    peers = two_each(2, steps=(40,), stepped_unix=NOW - 5_000.0)

    def at(total_steps: int, known: View = peers) -> Health:
        return assess_health(known, 2, NOW, since_unix=0.0, total_steps=total_steps)

    assert at(40).state == "COMPLETED" and "40 steps" in at(40).why
    assert at(40).advice is not None and "swarm export" in str(at(40).advice)
    assert at(41).state == "STALLED", "one step is lacking"
    assert at(0).state == "STALLED", "it goes on for ever"
    late = view(seen("a", "0", steps=(40,), stepped_unix=NOW), seen("b", "1", steps=(39,), stepped_unix=NOW))
    assert at(40, late).state == "DEGRADED", "every stage must have taken them"
    lone = late.without(peer_id("b"))
    assert at(40, lone).why == "stage 1 has no peer"
