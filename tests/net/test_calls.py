"""Calls between peers over real libp2p streams: concurrency, cancellation, deadlines, refusals, who may ask what."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agora_protocol import errors
from agora_protocol.ids import peer_name
from agora_protocol.limits import PROTOCOL_VERSION
from agora_protocol.messages import (
    CallProgress,
    GetStatus,
    Ping,
    Pong,
    Process,
    Processed,
    StatusAnswer,
)
from agora_protocol.tickets import MEMBER, READER

from agora.core.calls import ConnectionBroken, DeadlinePassed, Reply
from agora.net.p2pd.host import SimultaneousOpen
from agora.net.rpc.budgets import NetLimits
from agora.net.rpc.connection import IncomingCall
from tests.net.helpers import MEGABYTE, Peer, after, boundary, echo, introduce, make_peer, peers, process, run, until


class Gate:
    """A handler that waits for `open`, and tells what became of its calls."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = 0
        self.cancelled = 0
        self.finished = 0
        self.calls: list[IncomingCall] = []

    async def __call__(self, call: IncomingCall) -> Reply:
        self.entered += 1
        self.calls.append(call)
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.finished += 1
        return Reply(Processed(0.0, 1, 0.0))


def test_three_peers_call_each_other_all_at_once_and_every_answer_is_the_right_one() -> None:
    async def main() -> None:
        async with peers(echo, echo, echo) as made:

            async def one(number: int) -> None:
                caller, callee = made[number % 3], made[(number + 1 + number // 3 % 2) % 3]
                tensors = boundary((1 + number % 7) * 50_000, number)
                reply = await caller.network.call(callee.id, process(caller.id), tensors, deadline=after(20))
                assert isinstance(reply.message, Processed)
                assert reply.tensors[0].data == tensors[0].data

            await asyncio.gather(*(one(number) for number in range(90)))
            assert made[0].network.budget.used == 0
            assert not any(peer.violations for peer in made)
            assert set(made[0].network.paths) == {made[1].id, made[2].id}
            assert made[0].network.carried_bytes[0] > 60 * 50_000

    run(main)


def test_32_megabytes_arrive_intact_in_both_directions() -> None:
    async def main() -> None:
        async with peers(echo, echo) as (a, b):
            for caller, callee in ((a, b), (b, a)):
                tensors = boundary(32 * MEGABYTE)
                reply = await caller.network.call(callee.id, process(caller.id), tensors, deadline=after(20))
                assert reply.tensors[0].shape == tensors[0].shape
                assert reply.tensors[0].data == tensors[0].data

    run(main)


def test_one_dial_serves_all_who_wait_for_it_and_the_callee_calls_back_on_the_same_stream() -> None:
    async def main() -> None:
        async with peers(echo, echo) as (a, b):
            opened = []
            open_stream = a.host.open_stream
            a.host.open_stream = lambda *args: opened.append(args) or open_stream(*args)
            b.host.open_stream = None
            calls = [a.network.call(b.id, GetStatus(), deadline=after(10)) for _ in range(20)]
            assert len(await asyncio.gather(*calls)) == 20
            assert len(opened) == 1
            await b.network.call(a.id, GetStatus(), deadline=after(10))

    run(main)


def test_two_peers_that_dial_each_other_at_once_agree_on_one_of_the_streams() -> None:
    async def main() -> None:
        async with peers(echo, echo) as (a, b):
            asked = [x.network.call(y.id, GetStatus(), deadline=after(20)) for x, y in ((a, b), (b, a))]
            await asyncio.gather(*asked)
            chosen = [a.network.connection_to(b.id), b.network.connection_to(a.id)]
            assert chosen[0] is not None and chosen[1] is not None
            assert chosen[0].is_initiator is not chosen[1].is_initiator
            await a.network.call(b.id, GetStatus(), deadline=after(10))
            await b.network.call(a.id, GetStatus(), deadline=after(10))

    run(main)


class Crossing:
    """A host's `reach` that fails `times` times as when both peers dialled in the same instant."""

    def __init__(self, peer: Peer, times: int) -> None:
        self.left = times
        self.dials = 0
        self._reach = peer.host.reach
        peer.host.reach = self

    async def __call__(self, *args: Any) -> None:
        self.dials += 1
        self.left -= 1
        if self.left >= 0:
            raise SimultaneousOpen("noise: message is too short")
        await self._reach(*args)


def test_after_a_simultaneous_open_the_lower_peer_dials_again_and_the_other_takes_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agora.net.rpc.dialling.REDIAL_DELAY_S", 0.1)
    monkeypatch.setattr("agora.net.rpc.dialling.HIGHER_ID_DELAY_S", 5.0)

    async def main() -> None:
        async with peers(echo, echo) as made:
            lower, higher = sorted(made, key=lambda peer: peer.id)
            dials = [Crossing(peer, 1) for peer in (lower, higher)]
            asked = [
                x.network.call(y.id, GetStatus(), deadline=after(20)) for x, y in ((lower, higher), (higher, lower))
            ]
            await asyncio.gather(*asked)
            assert [crossing.dials for crossing in dials] == [2, 1]
            assert not any(peer.network._dialler._awaited_peers for peer in made)
            await higher.network.call(lower.id, GetStatus(), deadline=after(10))
            assert [len(peer.network._connections) for peer in made] == [1, 1]

    run(main)


def test_repeated_simultaneous_opens_end_with_the_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agora.net.rpc.dialling.REDIAL_DELAY_S", 0.1)

    async def main() -> None:
        async with peers(echo, echo, limits=NetLimits(dial_s=2.0)) as (a, b):
            crossing = Crossing(a, 1000)
            with pytest.raises(ConnectionBroken, match="within 2 s"):
                await a.network.call(b.id, GetStatus(), deadline=after(10))
            assert 2 <= crossing.dials <= 20

    run(main)


def test_a_peer_that_is_gone_when_dialled_again_fails_the_call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agora.net.rpc.dialling.REDIAL_DELAY_S", 0.1)

    async def main() -> None:
        async with peers(echo, echo) as (a, b):
            crossing = Crossing(a, 1)
            await b.close()
            with pytest.raises(ConnectionBroken, match="could not be reached: failed to dial"):
                await a.network.call(b.id, GetStatus(), deadline=after(60))
            assert crossing.dials == 2

    run(main)


def test_progress_arrives_in_order_and_before_the_answer() -> None:
    async def handler(call: IncomingCall) -> Reply:
        for number in range(5):
            call.progress(CallProgress(number, call.peer, "accepted", number))
        return Reply(Processed(0.0, 1, 0.0))

    async def main() -> None:
        async with peers(handler, handler) as (a, b):
            seen: list[int] = []
            await a.network.call(
                b.id, process(a.id), boundary(64), deadline=after(10), on_progress=lambda it: seen.append(it.stage)
            )
            assert seen == [0, 1, 2, 3, 4]

    run(main)


def test_a_cancelled_call_and_one_past_its_deadline_stop_the_handler() -> None:
    async def main() -> None:
        gate = Gate()
        async with peers(echo, gate) as (a, b):
            task = asyncio.create_task(a.network.call(b.id, process(a.id), boundary(64), deadline=after(20)))
            await until(lambda: gate.entered == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: gate.cancelled == 1)
            assert gate.calls[0].is_requester_gone

            started = time.monotonic()
            with pytest.raises(DeadlinePassed):
                await a.network.call(b.id, process(a.id), boundary(64), deadline=after(1.0))
            assert 0.95 < time.monotonic() - started
            await until(lambda: gate.cancelled == 2)
            await until(lambda: b.network.budget.used == 0)  # once the task has ended, a turn of the loop later
            assert not a.violations
            assert not b.violations

    run(main)


RAISED = [
    errors.Busy("no slot", retry_after_ms=120),
    errors.NotMyStage("not mine"),
    errors.NotAdmitted("not listed"),
    errors.Unavailable(3, ["a: dead", "b: busy"]),
    errors.ProtocolError("bad-tensor", "wrong shape"),
    errors.DiskError("/secret/path is full"),
    ZeroDivisionError("a bug"),
    TimeoutError("of something inside the handler, not of the call"),
]


def test_what_a_handler_raises_arrives_typed_and_bugs_are_reported_where_they_are() -> None:
    async def handler(call: IncomingCall) -> Reply:
        assert isinstance(call.message, Process)
        raise RAISED[call.message.stage]

    async def main() -> None:
        async with peers(echo, handler) as (a, b):
            caught = []
            for stage in range(len(RAISED)):
                request = Process(b"m" * 16, a.id, stage, "train", 9_000, ())
                with pytest.raises(errors.AgoraError) as error:
                    await a.network.call(b.id, request, boundary(64), deadline=after(10))
                caught.append(error.value)
            kinds = [*map(type, RAISED[:5]), *3 * [errors.PeerFailed]]
            assert [type(error) for error in caught] == kinds
            assert [error.code for error in caught[:2]] == ["busy", "not-my-stage"]
            busy, _, _, unavailable, *_ = caught
            assert isinstance(busy, errors.Busy) and busy.retry_after_ms == 120
            assert isinstance(unavailable, errors.Unavailable) and unavailable.stage == 3
            assert caught[4].code == "bad-tensor"
            assert not any("secret" in str(error) for error in caught)
            assert "an error inside" in str(caught[-1]), "its deadline has not passed"
            assert len(b.failures) == 2 and not b.violations, (
                "what a handler refuses is not a violation of the protocol"
            )

    run(main)


def test_a_reader_may_ask_and_nothing_else() -> None:
    async def main() -> None:
        async with peers(echo, echo, reader=0) as (a, b):
            assert (await a.network.call(b.id, Ping(), deadline=after(10))).message == Pong()
            assert (await a.network.call(b.id, GetStatus(), deadline=after(10))).message == StatusAnswer(b"{}")
            with pytest.raises(errors.NotAdmitted):
                await a.network.call(b.id, process(a.id), boundary(MEGABYTE), deadline=after(10))
            assert b.network.budget.peak == 0
            assert (await a.network.call(b.id, Ping(), deadline=after(10))).message == Pong()
            assert not b.violations

    run(main)


def test_peers_of_another_run_or_version_refuse_each_other_by_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with peers(echo) as (a,):
            stranger = await make_peer(tmp_path, "stranger", run_id="cd" * 32)
            future = await make_peer(tmp_path, "future", version=9, oldest_version=8)
            try:
                introduce(a, stranger, future)
                for caller, callee in ((a, stranger), (stranger, a)):
                    with pytest.raises(errors.WrongRun):
                        await caller.network.call(callee.id, GetStatus(), deadline=after(10))
                for caller, callee in ((a, future), (future, a)):
                    with pytest.raises(errors.ProtocolError) as caught:
                        await caller.network.call(callee.id, GetStatus(), deadline=after(10))
                    assert caught.value.code == "wrong-version"
                    assert f"{peer_name(a.id)} has the older agora" in str(caught.value), "both sides name the same"
                assert not a.violations
                assert not stranger.violations
                assert not future.violations
                await until(lambda: not a.network.paths)
            finally:
                await stranger.close()
                await future.close()

    run(main)


def test_a_version_that_the_run_leaves_out_is_met_no_more_and_its_connection_ends(tmp_path: Path) -> None:
    """Readers may still look: a member whose version is too old learns from the status what to do."""
    left_out: list[str] = []
    why = "the run asks for a later one"

    async def main() -> None:
        strict = await make_peer(
            tmp_path, "strict", gate={"refusal_of_version": lambda software: why if software in left_out else ""}
        )
        async with peers(echo) as (a,):
            try:
                introduce(a, strict)
                await a.network.call(strict.id, Ping(), deadline=after(10))
                assert strict.network.software == {a.id: "test"}
                gate = strict.network.gate
                assert gate.find_new_refusal(a.id, b"", "test", MEMBER) is None
                left_out.append("test")
                refusal = gate.find_new_refusal(a.id, b"", "test", MEMBER)
                assert isinstance(refusal, errors.NotAdmitted) and str(refusal) == why
                assert gate.find_new_refusal(a.id, b"", "test", READER) is None
                hello = a.network.gate.hello_to(strict.id)
                with pytest.raises(errors.NotAdmitted, match=why):
                    gate.admit(a.id, hello)
                assert gate.admit(a.id, replace(hello, role=READER)) == READER
            finally:
                await strict.close()

    run(main)


def test_a_peer_of_a_newer_version_that_still_speaks_this_one_takes_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with peers(echo) as (a,):
            newer = await make_peer(tmp_path, "newer", version=9, oldest_version=PROTOCOL_VERSION)
            try:
                introduce(a, newer)
                for caller, callee in ((a, newer), (newer, a)):
                    reply = await caller.network.call(callee.id, Ping(), deadline=after(10))
                    assert isinstance(reply.message, Pong)
                assert not a.violations and not newer.violations
            finally:
                await newer.close()

    run(main)


def test_payloads_in_progress_stay_within_the_bound_and_what_does_not_fit_is_busy() -> None:
    limits = NetLimits(max_payload_bytes=MEGABYTE + 8, max_held_bytes=4 * MEGABYTE + 32, payload_wait_s=0.05)

    async def main() -> None:
        gate = Gate()
        async with peers(echo, gate, limits=limits) as (a, b):

            async def one() -> type[object]:
                try:
                    reply = await a.network.call(b.id, process(a.id), boundary(MEGABYTE), deadline=after(20))
                except errors.Busy as busy:
                    assert busy.retry_after_ms == 50
                    return errors.Busy
                return type(reply.message)

            calls = [asyncio.create_task(one()) for _ in range(20)]
            await until(lambda: sum(call.done() for call in calls) == 16)
            assert gate.entered == 4
            assert b.network.budget.used == b.network.budget.peak == 4 * (MEGABYTE + 8)
            # small payloads still get through, answers too, and what is let go is used again
            gate.open.set()
            results = await asyncio.gather(*calls)
            assert results.count(Processed) == 4
            assert results.count(errors.Busy) == 16
            assert b.network.budget.used == 0
            assert await one() is Processed

    run(main)


def test_a_request_waits_a_moment_for_bytes_that_are_let_go() -> None:
    limits = NetLimits(max_payload_bytes=MEGABYTE + 8, max_held_bytes=MEGABYTE + 8, payload_wait_s=10.0)

    async def main() -> None:
        gate = Gate()
        async with peers(echo, gate, limits=limits) as (a, b):
            calls = [
                asyncio.create_task(a.network.call(b.id, process(a.id), boundary(MEGABYTE), deadline=after(20)))
                for _ in range(4)
            ]
            await until(lambda: gate.entered == 1)
            await asyncio.sleep(0.1)
            assert gate.entered == 1
            gate.open.set()
            assert len(await asyncio.gather(*calls)) == 4
            assert b.network.budget.peak == MEGABYTE + 8

    run(main)


def test_a_peer_that_nobody_knows_is_reported_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with peers(echo) as (a,):
            stranger = await make_peer(tmp_path, "stranger")
            await stranger.close()
            with pytest.raises(ConnectionBroken, match="could not be reached"):
                await a.network.call(stranger.id, GetStatus(), deadline=after(60))
            a.network.address_book.learn(stranger.id, stranger.addresses)
            with pytest.raises(ConnectionBroken):
                await a.network.call(stranger.id, GetStatus(), deadline=after(60))

    run(main)


def test_closing_ends_the_calls_of_others_at_once() -> None:
    async def main() -> None:
        gate = Gate()
        async with peers(echo, gate) as (a, b):
            open_call = asyncio.create_task(a.network.call(b.id, process(a.id), boundary(64), deadline=after(60)))
            await until(lambda: gate.entered == 1)
            await b.network.close()
            with pytest.raises(ConnectionBroken, match="left"):
                await open_call
            assert gate.cancelled == 1
            with pytest.raises(ConnectionBroken, match="leaving"):
                await b.network.call(a.id, GetStatus(), deadline=after(10))

    run(main)
