"""A member of the swarm's rounds, as a child process.

It has its own libp2p host and its own reducer; rounds go over real streams.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import uvloop
from agora_protocol.errors import PeerFailed, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.manifest_sections import AveragingSection
from agora_protocol.messages import Contribute, Recall

from agora.core.calls import Reply
from agora.net.rpc.connection import IncomingCall
from agora.net.rpc.network import Network
from agora.replica.all_reduce import AllReduce, Round
from agora.replica.rounds import RoundContext
from agora.replica.shard_codec import INT8_ROUNDS, RoundConfig, Shard, ShardCodec, cut_into_shards
from agora.train.memory import keep_freed_memory
from benchmarks.averaging_values import Holding
from benchmarks.streams import join
from benchmarks.worker import Channel

RUN: Final = RunId("0" * 64)
MEET_S: Final = 30.0
WEIGHT: Final = 1.0


class CallbackTimes:
    """The longest callback of an asyncio loop of this process, in processor time of the loop's thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def start(self) -> None:
        run_callback = asyncio.Handle._run

        def run_timed(handle: asyncio.Handle) -> None:
            begin = time.thread_time()
            run_callback(handle)
            self.longest_s = max(self.longest_s, time.thread_time() - begin)

        asyncio.Handle._run = run_timed  # type: ignore[method-assign, assignment]


class Member:
    """One replica of stage 0, which has nothing but the values that are averaged."""

    def __init__(self, spec: dict[str, Any], callbacks: CallbackTimes) -> None:
        """spec: numel, offset, true_mean, wire (None: the manifest's default), folder, index."""
        self._spec = spec
        self._sizes: list[int] = [cut.stop - cut.start for cut in cut_into_shards(int(spec["numel"]))]
        self._holding = Holding(int(spec["numel"]), spec["offset"], spec["true_mean"])
        self._values = torch.empty(int(spec["numel"]))
        self._holding.put(self._values)
        self._members: dict[PeerId, float] = {}
        self._callbacks = callbacks
        self._reducer: AllReduce | None = None

    async def serve(self, channel: Channel) -> None:
        """{"meet": [[peer, addresses], ...]} connects the members, {"round": r} takes part in round r."""
        key = Path(self._spec["folder"]) / f"member-{self._spec['name']}.key"
        host, network = await join(key, self._answer)
        self._reducer = self._make_reducer(Identity.load(key), network)
        channel.say({"peer": host.peer, "addresses": list(await host.addresses())})
        orders = channel.orders()
        while (order := await asyncio.to_thread(next, orders, None)) is not None:
            if "meet" in order:
                await self._meet(host.peer, network, order["meet"])
                channel.say({"met": len(self._members)})
            else:
                channel.say(await self._round(self._reducer, int(order["round"])))
        await network.close()
        await host.close()

    def _make_reducer(self, identity: Identity, network: Network) -> AllReduce:
        defaults = AveragingSection()
        wire = self._spec["wire"] or defaults.gradient_wire
        config = RoundConfig(identity.peer, RUN, defaults.aggregation, defaults.round_s, WEIGHT, gradient_wire=wire)
        self._round_s = defaults.round_s
        return AllReduce(
            ShardCodec(config),
            network,
            self._look,
            lambda fragments: fragments,
            identity.sign,
            lambda event: None,
            lambda *violation: None,
        )

    def _look(self, shard: Shard) -> RoundContext:
        view = RoundContext(self._members, frozenset(self._members), frozenset(), self._round_s)
        if shard.position >= len(self._sizes):
            return replace(view, refusal=ProtocolError("bad-message", "No such shard."))
        return replace(view, numel=self._sizes[shard.position])

    async def _answer(self, call: IncomingCall) -> Reply:
        assert self._reducer is not None
        if isinstance(call.message, Recall):
            return self._reducer.kept_means.answer_recall(call.message)
        if not isinstance(call.message, Contribute):
            raise ProtocolError("bad-message", "Only rounds are answered here.")
        try:
            return await self._reducer.answer_contribution(call.peer, call.message, call.tensors, call.deadline)
        except TimeoutError:
            raise PeerFailed("the shard was not averaged before its deadline") from None

    async def _meet(self, me: PeerId, network: Network, members: list[tuple[str, list[str]]]) -> None:
        self._members = {PeerId(peer): 0.0 for peer, _ in members}
        deadline = asyncio.get_running_loop().time() + MEET_S
        for peer, addresses in members:
            network.address_book.learn(PeerId(peer), addresses)
        for peer in self._members:
            if peer > me:
                nothing = Recall(stage=0, what="gradient", round=0, part=0, slices=0)
                await network.call(peer, nothing, deadline=deadline)

    async def _round(self, reducer: AllReduce, number: int) -> dict[str, Any]:
        begin, busy = time.monotonic(), time.thread_time()
        self._callbacks.longest_s = 0.0
        deadline = asyncio.get_running_loop().time() + self._round_s
        number += INT8_ROUNDS  # a run's first rounds travel in more bits
        round_ = Round(reducer, 0, "gradient", number, WEIGHT, self._members, deadline)
        held = (await round_.run(self._values)).mean
        await asyncio.sleep(0)  # this callback is one of the round's
        end, loop_s = time.monotonic(), time.thread_time() - busy
        longest_s = self._callbacks.longest_s
        found = self._holding.found(held)
        self._values = torch.empty_like(held)
        self._holding.put(self._values)
        return {"begin": begin, "end": end, "returned": True, "loop_s": loop_s, "longest_s": longest_s, **found}


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """Serves one Member; see Member.serve for the orders, and Member for `spec`."""
    torch.set_num_threads(1)
    keep_freed_memory()
    callbacks = CallbackTimes()
    run = uvloop.run
    if spec.get("times_callbacks"):  # uvloop's are run by C, and cannot be timed
        callbacks.start()
        run = asyncio.run
    run(Member(spec, callbacks).serve(channel))
