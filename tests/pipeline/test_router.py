"""The router among real hops: retries, waiting for a peer, full peers, shares, newcomers, hints."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from agora_protocol.errors import PeerFailed, Unavailable
from agora_protocol.ids import microbatch_id
from agora_protocol.messages import CallProgress, Pong, Process, Processed

from agora.core.calls import ConnectionBroken
from agora.observe.events import MicrobatchRerouted, RouteChanged
from agora.pipeline.load_balancer import RouteHint
from agora.pipeline.process_call import HopAnswer, ProcessCall
from agora.pipeline.router import MAX_PROGRESS_PER_STAGE, RoutedCall
from agora.swarm.peer_score import POINTS_TO_SUSPEND, SUSPENSION_S, Violation
from tests.pipeline.world import (
    NetworkFaults,
    Node,
    World,
    boundary_of,
    gradient_of,
    peer_id,
    started,
    tokens_of,
    train,
    violations_of,
)
from tests.virtual_time import run

MB = microbatch_id(b"session0", 1)


async def send(node: Node, microbatch=MB, *, within_s: float = 60.0, hint=(), purpose="train") -> HopAnswer:
    stage = node.span.last + 1
    process = Process(microbatch, peer_id("origin"), stage, purpose, 60_000, tuple(hint))
    deadline = asyncio.get_running_loop().time() + within_s
    tensors = [boundary_of(microbatch, stage), tokens_of(1)]
    return await node.router.send(ProcessCall(process, tensors, deadline, lambda a: None))


def rerouted(node: Node) -> list[MicrobatchRerouted]:
    return [e for e in node.events if isinstance(e, MicrobatchRerouted)]


def test_a_killed_callee_costs_a_retry_not_a_microbatch() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        callees = [world.add(name, "1", service_s=2.0) for name in ("x", "y")]
        task = asyncio.create_task(send(node))
        await asyncio.sleep(1.0)
        victim = next(c for c in callees if c.calls_in)
        world.network.kill(victim.peer)
        await asyncio.sleep(0.0)
        answer = await task
        survivor = next(c for c in callees if c is not victim)
        assert answer.peer == survivor.peer
        assert survivor.calls_in == 1
        assert [e.from_peer for e in rerouted(node)] == [victim.peer]
        assert "broken" in rerouted(node)[0].reason

    run(work())


def test_a_hung_callee_is_left_at_its_attempt_deadline() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        callees = [world.add(name, "1") for name in ("x", "y")]
        for callee in callees:
            world.network.hang(callee.peer)
        started_at = asyncio.get_running_loop().time()
        task = asyncio.create_task(send(node, within_s=40.0))
        await asyncio.sleep(19.0)
        assert not rerouted(node)
        await asyncio.sleep(2.0)
        assert len(rerouted(node)) == 1, "left after half of the time: one stage, one other replica"
        with pytest.raises(Unavailable):
            await task
        assert asyncio.get_running_loop().time() - started_at == pytest.approx(40.0, abs=0.1)

    run(work())


def test_the_only_callee_of_a_stage_gets_all_the_time() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        world.add("only", "1", service_s=35.0)
        answer = await send(node, within_s=40.0)
        assert answer.message.tokens == 2
        assert not rerouted(node)

    run(work())


def test_a_stage_without_a_peer_waits_and_goes_on_the_moment_one_comes() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        task = asyncio.create_task(send(node, within_s=500.0))
        await asyncio.sleep(321.0)
        world.add("late", "1")
        before = asyncio.get_running_loop().time()
        await task
        assert asyncio.get_running_loop().time() - before < 0.1
        changes = [e for e in node.events if isinstance(e, RouteChanged)]
        assert [e.is_empty for e in changes] == [True, False]
        assert changes[0].reason == "no live peer holds stage 1"

    run(work())


def test_a_stage_whose_only_peer_comes_back_busy_is_reported_as_not_empty_although_no_peer_is_chosen() -> None:
    async def work() -> None:
        world = World(2)
        node, only = world.add("first", "0"), world.add("only", "1", service_s=30.0)
        first = asyncio.create_task(send(node))
        await asyncio.sleep(1.0)  # its cost is kept while this call is open
        node.router.balancer.callees(1)[only.peer].busy_until = asyncio.get_running_loop().time() + 5.0
        world.hide(only)
        second = asyncio.create_task(send(node, microbatch_id(b"session0", 2)))
        await asyncio.sleep(1.0)
        world.show(only)
        await asyncio.gather(first, second)
        changes = [e for e in node.events if isinstance(e, RouteChanged)]
        assert [(e.is_empty, e.peer) for e in changes] == [(True, ""), (False, "")], changes
        assert "not ready" in changes[1].reason

    run(work())


def test_a_killed_peer_that_still_claims_is_tried_again_and_found_when_it_is_back() -> None:
    async def work() -> None:
        world = World(2)
        node, only = world.add("first", "0"), world.add("only", "1")
        world.network.kill(only.peer)
        task = asyncio.create_task(send(node, within_s=500.0))
        await asyncio.sleep(100.0)
        assert 20 <= world.network.calls[node.peer, only.peer] <= 40, "every 4 s, being the only replica"
        again = world.add("only", "1")
        again.incarnation = 2
        world.show(again)
        await task
        assert again.calls_in == 1

    run(work())


def test_full_peers_are_neither_banned_nor_flooded() -> None:
    async def work() -> None:
        world = World(2)
        node, only = world.add("first", "0"), world.add("only", "1", service_s=1.0, slots=2)
        answers = await asyncio.gather(*(send(node, microbatch_id(b"session0", i), within_s=500.0) for i in range(40)))
        assert len(answers) == 40
        assert not rerouted(node)
        assert only.calls_in <= 40 + 50, "a microbatch is sent again only when there is reason to hope"
        assert asyncio.get_running_loop().time() - 1000.0 < 45.0

    run(work())


def test_shares_follow_measured_speeds_and_nobody_idles() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0", service_s=0.001)
        fast, slow = world.add("fast", "1", service_s=0.1), world.add("slow", "1", service_s=0.2)
        origin = world.origin(node, max_in_flight=12)
        begun = asyncio.get_running_loop().time()
        await train(origin, 200)
        took = asyncio.get_running_loop().time() - begun
        assert 1.7 <= fast.calls_in / slow.calls_in <= 2.3
        assert origin.completed / took > 0.9 * 15.0

    run(work())


def test_a_newcomer_gets_work_at_once_but_no_flood() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0", service_s=0.001)
        for name in ("x", "y"):
            world.add(name, "1", service_s=0.1)
        origin = world.origin(node, max_in_flight=12)
        running = asyncio.create_task(origin.run())
        await asyncio.sleep(20.0)
        newcomer = world.add("z", "1", service_s=0.1)
        await asyncio.sleep(1.0)
        assert 1 <= newcomer.calls_in <= 14
        await asyncio.sleep(19.0)
        total = sum(world.network.calls[node.peer, peer] for peer in world.nodes)
        assert total > 0
        assert 0.25 <= newcomer.calls_in / (20.0 * 30.0) <= 0.4
        await origin.leave(60.0)
        await running

    run(work())


def test_a_replica_that_is_called_by_others_too_is_called_less() -> None:
    async def work() -> None:
        world = World(2)
        node, other = world.add("first", "0", service_s=0.001), world.add("other", "0", service_s=0.001)
        shared = world.add("shared", "1", service_s=0.1)
        origin = world.origin(other, max_in_flight=12)
        elsewhere = asyncio.create_task(origin.run())
        await asyncio.sleep(5.0)
        mine = world.add("mine", "1", service_s=0.1, seen=False)
        world.claimed[mine.peer] = mine
        other.current_view = lambda: world.view.without(mine.peer)
        world.look()
        ours = world.origin(node, max_in_flight=4)
        await train(ours, 80)
        assert world.network.calls[node.peer, mine.peer] > 2 * world.network.calls[node.peer, shared.peer]
        other.current_view = lambda: world.view
        await origin.leave(60.0)
        await elsewhere

    run(work())


def test_a_retry_reaches_the_peers_that_already_did_their_part() -> None:
    async def work() -> None:
        world = World(3)
        first = world.add("first", "0")
        middles = [world.add(name, "1") for name in ("m1", "m2")]
        lasts = [world.add(f"l{i}", "2", service_s=1.0) for i in range(6)]
        task = asyncio.create_task(send(first))
        await asyncio.sleep(0.5)
        world.network.kill(next(m for m in middles if m.calls_in).peer)
        await task
        await asyncio.sleep(30.0)
        assert sum(last.calls_in for last in lasts) == 2, "the same peer was asked again"
        assert sorted(sum(last.device.counted.values()) for last in lasts) == [0, 0, 0, 0, 0, 1]

    run(work())


def test_a_lost_answer_is_fetched_from_the_peer_that_has_it() -> None:
    async def work() -> None:
        world = World(2, faults=NetworkFaults(lost_answer=1.0))
        node = world.add("first", "0")
        callees = [world.add(name, "1") for name in ("x", "y", "z")]
        task = asyncio.create_task(send(node))
        await asyncio.sleep(0.2)
        world.faults.lost_answer = 0.0
        await task
        assert world.faults.fired["lost"] == 1
        assert sorted(c.calls_in for c in callees) == [0, 0, 2]
        assert sum(sum(c.device.counted.values()) for c in callees) == 1

    run(work())


def test_a_peer_that_was_busy_keeps_its_hint_at_its_first_failure() -> None:
    holder = peer_id("holder")
    process = Process(MB, peer_id("origin"), 1, "train", 60_000, ())
    routed = RoutedCall(ProcessCall(process, [], 60.0, lambda news: None), RouteHint({1: holder}, {holder}))
    routed.reasons[holder] = "busy"
    routed.record_failure(holder, "the stream ended")
    assert routed.hint == RouteHint({1: holder}, {holder})
    routed.record_failure(holder, "the stream ended")
    assert routed.hint == RouteHint({}, set())


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (HopAnswer(Processed(1.0, 2, 1.0), []), "bad-message"),
        (HopAnswer(Processed(1.0, 2, 1.0), [tokens_of(1)]), "bad-tensor"),
        (HopAnswer(Processed(1.0, 99, 1.0), [gradient_of(MB, 1)]), "bad-message"),
        (HopAnswer(Processed(1.0, 2, 1.0, log_probabilities=(-1.0,)), [gradient_of(MB, 1)]), "bad-message"),
        (HopAnswer(Processed(1.0, 2, 1.0, metrics=(1.0,)), [gradient_of(MB, 1)]), "bad-message"),
        (HopAnswer(Pong(), []), "bad-message"),
    ],
)
def test_an_answer_that_is_none_is_a_violation_and_the_next_peer_is_asked(answer: HopAnswer, code: str) -> None:
    async def work() -> None:
        world = World(2)
        node, liar = world.add("first", "0"), world.add("liar", "1")

        async def lie(*args) -> HopAnswer:
            return answer

        liar.hop.process = lie
        task = asyncio.create_task(send(node))
        await asyncio.sleep(1.0)
        honest = world.add("honest", "1")
        assert (await task).peer == honest.peer
        violations = {(peer, violation, text.split(":")[0]) for peer, violation, text in violations_of(node)}
        assert violations == {(liar.peer, "bad-answer", code)}

    run(work())


def test_of_a_flood_of_news_little_is_passed_on_and_nothing_kept_and_the_answer_still_counts() -> None:
    flood, stages = 2_000, 3

    async def work() -> None:
        world, hints, passed = World(stages), [], []
        node, talker = world.add("first", "0"), world.add("talker", "1")
        names = [world.add(f"last {number}", "2").peer for number in range(flood // 100)]
        choose, answer = node.router.balancer.choose, talker.hop.process

        def spy(*args):
            hints.append(args[-1])
            return choose(*args)

        async def talk(call: ProcessCall) -> HopAnswer:
            for number in range(flood):
                for what in ("accepted", "finished"):
                    call.on_progress(CallProgress(number % stages, names[number % len(names)], what, 0))
            return await answer(call)

        node.router.balancer.choose, talker.hop.process = spy, talk
        process = Process(MB, peer_id("origin"), 1, "train", 60_000)
        deadline = asyncio.get_running_loop().time() + 60.0
        reply = await node.router.send(
            ProcessCall(process, [boundary_of(MB, 1), tokens_of(1)], deadline, passed.append)
        )
        assert reply.peer == talker.peer
        told = Counter((news.stage, news.event) for news in passed if news.peer != talker.peer)
        assert told == {(2, "accepted"): MAX_PROGRESS_PER_STAGE * (stages - 1) // stages}, (
            "every third is of a stage after ours"
        )
        assert hints[-1].finished <= {talker.peer}
        assert hints[-1].peer_by_stage.keys() <= set(range(stages))

    run(work())


def test_a_callee_names_only_peers_that_serve_a_stage_as_those_that_hold_the_microbatch_there() -> None:
    """Others are preferred when it must be sent again: a liar would steer it to whom it likes."""

    async def work() -> None:
        world, hints, passed = World(3), [], []
        node, liar = world.add("first", "0"), world.add("liar", "1")
        last, elsewhere = world.add("last", "2"), world.add("elsewhere", "1")
        choose, answer = node.router.balancer.choose, liar.hop.process

        def spy(*args):
            hints.append(args[-1])
            return choose(*args)

        async def talk(call: ProcessCall) -> HopAnswer:
            for named in (last.peer, peer_id("friend"), elsewhere.peer, liar.peer):
                call.on_progress(CallProgress(2, named, "accepted", 0))
            return await answer(call)

        node.router.balancer.choose, liar.hop.process = spy, talk
        process = Process(MB, peer_id("origin"), 1, "train", 60_000, ((1, liar.peer),))
        deadline = asyncio.get_running_loop().time() + 60.0
        await node.router.send(ProcessCall(process, [boundary_of(MB, 1), tokens_of(1)], deadline, passed.append))
        assert {news.peer for news in passed if news.stage == 2} == {last.peer}
        assert hints[-1].peer_by_stage == {1: liar.peer, 2: last.peer}

    run(work())


def test_a_peer_that_cannot_get_further_is_left_for_one_that_can() -> None:
    async def work() -> None:
        world = World(3)
        first = world.add("first", "0")
        cut_off, connected = world.add("cut-off", "1"), world.add("connected", "1")
        last = world.add("last", "2")

        async def nowhere(*args, **kwargs):
            raise ConnectionBroken("no way")

        cut_off.caller.call = nowhere
        for i in range(20):
            await send(first, microbatch_id(b"session0", i))
        assert last.calls_in == 20
        assert connected.calls_in == 20

    run(work())


def test_unavailable_names_the_stage_and_why_each_peer_failed() -> None:
    async def work() -> None:
        world = World(2)
        node = world.add("first", "0")
        for name in ("x", "y"):
            peer = world.add(name, "1")

            async def broken(*args) -> HopAnswer:
                raise PeerFailed("the peer could not finish (device)")

            peer.hop.process = broken
        with pytest.raises(Unavailable) as refusal:
            await send(node, within_s=5.0)
        assert refusal.value.stage == 1
        assert len(refusal.value.reasons) == 2
        assert "the peer could not finish (device)" in str(refusal.value)

    run(work())


def test_cancelling_a_send_leaves_no_trace_in_the_costs() -> None:
    async def work() -> None:
        world = World(2)
        node, only = world.add("first", "0"), world.add("only", "1", service_s=50.0)
        task = asyncio.create_task(send(node, purpose="evaluate"))
        await asyncio.sleep(1.0)
        assert node.router.balancer.callees(1)[only.peer].open_calls == 1
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.1)
        cost = node.router.balancer.callees(1)[only.peer]
        assert (cost.open_calls, cost.failures, cost.virtual_s) == (0, 0, 0.0)
        assert only.ledger.taken == 0, "the cancel went downstream"

    run(work())


def test_peers_that_left_the_view_are_forgotten_and_enter_as_new() -> None:
    async def work() -> None:
        world = World(2)
        node, only = world.add("first", "0"), world.add("only", "1")
        await send(node)
        world.hide(only)
        with pytest.raises(Unavailable):
            await send(node, microbatch_id(b"session0", 2), within_s=1.0)
        assert node.router.balancer.callees(1) == {}
        world.show(only)
        await send(node, microbatch_id(b"session0", 3))
        assert node.router.balancer.callees(1)[only.peer].answers == 1

    run(work())


def test_the_path_is_estimated_without_queues() -> None:
    async def work() -> None:
        world = World(4, faults=NetworkFaults(latency_s=(0.1, 0.1)))
        nodes = [world.add(f"peer{i}", str(i), service_s=0.2) for i in range(4)]
        assert nodes[0].hop.latency_s() is None
        origin = world.origin(nodes[0], max_in_flight=16)
        await train(origin, 40)
        assert nodes[0].hop.latency_s() == pytest.approx(4 * 0.2 + 3 * 0.1, rel=0.05)
        assert started(nodes[0].events)

    run(work())


def test_measured_costs_are_about_what_they_measure() -> None:
    async def work() -> None:
        world = World(2, faults=NetworkFaults(latency_s=(0.01, 0.01)))
        node = world.add("first", "0")
        peers = {s: world.add(f"s{s}", "1", service_s=s) for s in (0.05, 0.2)}
        await train(world.origin(node, max_in_flight=6), 60)
        costs = node.router.balancer.callees(1)
        for service, peer in peers.items():
            assert costs[peer.peer].service_s == pytest.approx(service, rel=0.01)
            assert costs[peer.peer].round_trip_s == pytest.approx(0.01, rel=0.01)
        assert Counter(c.failures for c in costs.values()) == {0: 2}

    run(work())


def test_a_microbatch_that_finds_only_peers_that_are_suspended_is_sent_when_the_first_is_suspended_no_more() -> None:
    async def work() -> None:
        world = World(2)
        node, only = world.add("first", "0"), world.add("only", "1")
        for _ in range(POINTS_TO_SUSPEND):
            node.peer_score.report_violation(only.peer, Violation.BAD_FRAME, "nothing that is a frame")
        began = asyncio.get_running_loop().time()
        assert (await send(node, within_s=3600.0)).peer == only.peer, "no view has changed, and no other call has ended"
        assert asyncio.get_running_loop().time() - began == pytest.approx(SUSPENSION_S, abs=1.0)

    run(work())
