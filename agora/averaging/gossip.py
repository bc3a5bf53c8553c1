"""Replicas tell each other how far they are, over the streams they have, and each learns when its stages are due.

Knows: GossipSteps and GossipedSteps, when to tell whom, the agreement's rules. Must not know: how a step is taken.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from agora_protocol.errors import AgoraError, NotMyStage
from agora_protocol.ids import PeerId, Span
from agora_protocol.messages import GossipedSteps, GossipSteps

from agora.averaging import agreement
from agora.averaging.agreement import KnownReplicas
from agora.calls import Caller
from agora.clock import loop_time

TELL_S: Final = 0.25
SOON_S: Final = 0.02
"""In synchronous runs everybody waits for the step, so news are told at once; many at a time."""
HEARTBEAT_S: Final = 1.5
CALL_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """For a stage that is at `step` here: `reached`, where the stage is; `complete`, the step's tokens are there."""

    stage: int
    step: int
    reached: int
    complete: bool


@dataclass(slots=True)
class _Stage:
    known: KnownReplicas = field(default_factory=dict)
    told: tuple[int, int] = (-1, -1)
    told_at: float = -1e9
    judged: Judgement | None = None


Counts = Callable[[], Mapping[int, tuple[int, int]]]
"""Of each stage held: optimizer steps taken, and the tokens counted here since. Cheap, and never blocks."""

Members = Callable[[int], Collection[PeerId]]
"""A stage's replicas in the view."""


class StepGossip:
    """One for each daemon. `run` until cancelled; `act` hears, on the loop, each new judgement that asks for work."""

    def __init__(
        self,
        me: PeerId,
        span: Span,
        target_tokens: int,
        caller: Caller,
        members: Members,
        counts: Counts,
        *,
        soon: bool,
        rng: random.Random | None = None,
    ) -> None:
        self._me = me
        self._span = span
        self._target = target_tokens
        self._caller = caller
        self._members = members
        self._counts = counts
        self._interval = SOON_S if soon else TELL_S
        self._rng = rng or random.Random()
        self._stages = {stage: _Stage() for stage in span.stages}
        self._to_go = dict.fromkeys(span.stages, (-1, target_tokens))
        self._asking: dict[tuple[int, PeerId], asyncio.Task[None]] = {}
        self.act: Callable[[Judgement], None] = lambda judgement: None
        self.changed: Callable[[int, int], None] = lambda stage, step: None
        """Is called with a stage and its step after each look at what its replicas have counted."""

    async def run(self) -> None:
        """Tells and judges until cancelled."""
        try:
            while True:
                self.tell()
                await asyncio.sleep(self._interval)
        finally:
            for task in self._asking.values():
                task.cancel()
            await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def tokens_to_go(self, stage: int, step: int) -> int:
        """What this peer must have counted since `step` for the stage to step."""
        at, tokens = self._to_go[stage]
        return tokens if at == step else self._target

    def alone(self, stage: int) -> bool:
        """Whether nobody else holds the stage, as far as the view knows."""
        return not set(self._members(stage)) - {self._me}

    def missing(self, stage: int) -> int:
        """Tokens that the stage's replicas together still lack for the step this peer is at."""
        step, tokens = self._counts()[stage]
        return max(0, self._target - tokens - agreement.counted_by(self._others(stage), step))

    def heard(self, stage: int) -> Collection[PeerId]:
        """The other replicas that were heard lately."""
        return self._others(stage).keys()

    def present(self, stage: int) -> set[PeerId]:
        """The stage's replicas in the view, this one included, without those that have fallen silent."""
        members = set(self._members(stage)) | {self._me}
        return members - agreement.absent(self._stages[stage].known, members, loop_time())

    def judge_again(self, stage: int) -> None:
        """`act` hears the present judgement once more: what it asked for could not be done, or is done."""
        self._stages[stage].judged = None

    def tell(self) -> None:
        """Tells what is new to whom it concerns, and judges."""
        now, counts = loop_time(), self._counts()
        for stage, it in self._stages.items():
            own = counts[stage]
            if it.told != own or now - it.told_at > HEARTBEAT_S:
                peers = agreement.whom_to_tell(self._members(stage), self._me, self._rng)
                if peers and self._ask(stage, peers, own, now):
                    it.told, it.told_at = own, now
            self._judge(stage, own)

    def answer(self, peer: PeerId, message: GossipSteps) -> GossipedSteps:
        """A replica's news, and ours back. Raises NotMyStage."""
        if message.stage not in self._span:
            raise NotMyStage(f"this peer holds stages {self._span}, not {message.stage}")
        own = self._counts()[message.stage]
        self._take(message.stage, message.replicas, peer)
        known = self._stages[message.stage].known
        return GossipedSteps(agreement.tale(known, (self._me, *own), self._members(message.stage), loop_time()))

    # --- calls

    def _ask(self, stage: int, peers: Collection[PeerId], own: tuple[int, int], now: float) -> bool:
        """Tells those who are not being told already; whether that was everyone."""
        news = agreement.tale(self._stages[stage].known, (self._me, *own), self._members(stage), now)
        free = [peer for peer in peers if (stage, peer) not in self._asking]
        for peer in free:
            task = asyncio.get_running_loop().create_task(self._exchange(stage, peer, GossipSteps(stage, news)))
            self._asking[stage, peer] = task
            task.add_done_callback(partial(self._asked, stage, peer))
        return len(free) == len(peers)

    def _asked(self, stage: int, peer: PeerId, _: object) -> None:
        self._asking.pop((stage, peer), None)

    async def _exchange(self, stage: int, peer: PeerId, message: GossipSteps) -> None:
        try:
            reply = await self._caller.call(peer, message, (), deadline=loop_time() + CALL_S)
        except AgoraError:
            it = self._stages[stage]
            it.known = agreement.lost(it.known, peer, loop_time())
            return
        if isinstance(reply.message, GossipedSteps):
            self._take(stage, reply.message.replicas, peer)

    def _take(self, stage: int, news: Collection[agreement.News], sender: PeerId) -> None:
        """Strangers speak for themselves alone, and nothing is kept of those who have left the view and are silent."""
        it, members, now = self._stages[stage], set(self._members(stage)), loop_time()
        news = [about for about in news if about[0] == sender or {about[0], sender} <= members]
        known = agreement.heard(it.known, news, sender, self._me, now)
        it.known = {peer: last for peer, last in known.items() if peer in members or last.present(now)}
        self._judge(stage, self._counts()[stage])

    # --- judging

    def _others(self, stage: int) -> KnownReplicas:
        return agreement.fresh(self._stages[stage].known, self._members(stage), loop_time())

    def _judge(self, stage: int, own: tuple[int, int]) -> None:
        (step, tokens), others = own, self._others(stage)
        to_go = agreement.tokens_to_go(others, step, self._target)
        self._to_go[stage] = (step, to_go)
        self.changed(stage, step)
        live = len(self.present(stage)) - 1
        reached = agreement.step_to_follow(others, live, step, tokens, self._target)
        complete = tokens + agreement.counted_by(others, step) >= self._target
        judgement = Judgement(stage, step, reached, complete)
        if (complete or reached > step) and judgement != self._stages[stage].judged:
            self._stages[stage].judged = judgement
            self.act(judgement)
