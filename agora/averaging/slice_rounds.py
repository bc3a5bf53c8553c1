"""Rounds of slices, for runs whose links carry no gradients: replicas step alone, and agree on a common anchor.

Knows: rounds, which slice is when, what a replica has taken in so far. Must not know: when a round is due
(next_action), optimizers, the view.

After each `every`-th local step n begins round n / every, over one slice. Its mean difference to the anchor moves
anchor and weights (train.outer_step). Up to SLICES_AT_ONCE rounds run beside training; they are taken in by their
numbers. A round that failed here and that nobody keeps changes nothing: what was learnt waits for the slice's next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from agora_protocol.errors import AgoraError
from torch import Tensor

from agora.averaging.exchange import Part
from agora.averaging.owner import Owner
from agora.averaging.partition import SLICES_AT_ONCE, Slices, cut_into_parts
from agora.averaging.recall import ReplicasAsked, recall_failed, recall_until_found
from agora.averaging.replicated_stages import ReplicatedStages
from agora.averaging.rounds import RoundResult
from agora.observe import events

RECALLED_BEHIND: Final = 2
"""A round that begins here so many rounds after it was due is recalled before it is taken part in."""


class RoundTakers(ReplicasAsked, Protocol):
    """The replicas that agree, as this peer sees them; ReplicaGroup has the methods."""

    async def run_round(self, stage: int, what: str, number: int, values: Tensor, weight: float) -> RoundResult:
        """Takes part in one round, with those who are members now."""


class SliceRounds:
    """The rounds of slices of one stage. Used on the loop."""

    def __init__(
        self,
        stage: int,
        slices: Slices,
        every: int,
        stages: ReplicatedStages,
        owner: Owner,
        takers: RoundTakers,
        report: events.Report,
    ) -> None:
        """every: optimizer steps from one round to the next."""
        self._stage = stage
        self._slices = slices
        self._every = every
        self._held = stages
        self._owner = owner
        self._takers = takers
        self._report = report
        self._recent: deque[int] = deque(maxlen=slices.count * every)
        self._newest = -1
        self._contributed = -1
        self._running: dict[int, asyncio.Task[None]] = {}

    def note_step(self, tokens: int) -> None:
        """Notes the tokens of a local step: a slice weighs those of the steps since its last round."""
        self._recent.append(tokens)

    def due(self, step: int, agreed: int) -> int | None:
        """Returns the next round to begin after `step` steps; None when none is due, or as many run as may.

        Those are SLICES_AT_ONCE, and never two of one slice. agreed: the step of the last round taken in; every later
        one is to come.
        """
        following, most = max(self._newest, agreed // self._every) + 1, min(SLICES_AT_ONCE, self._slices.count)
        return following if following <= step // self._every and len(self._running) < most else None

    def begin(self, number: int, step: int) -> None:
        """Begins round `number` in the background. step: those taken here."""
        self._newest = number
        before = self._running.get(number - 1)
        behind = step // self._every - number
        task = self._running[number] = asyncio.create_task(self._run(number, before, behind))
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def stop(self) -> None:
        """Cancels the running rounds: the state is replaced, or the peer leaves.

        They may begin again, and are then recalled only: to some of their parts this peer has contributed.
        """
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._contributed, self._newest = max(self._contributed, self._newest), -1

    async def _run(self, number: int, before: asyncio.Task[None] | None, behind: int) -> None:
        """Runs a round that is `behind` the newest due one, and takes its mean in after that of the round `before`.

        Reports TaskFailed if it cannot.
        """
        try:
            blocks = self._slices.blocks(number)
            difference, snapshot = await self._held.difference_to_anchor(self._stage, blocks)
            averaged = None
            if len(self._takers.members(self._stage)) > 1:
                averaged = await self._agree(number, difference, behind)
            if before is not None:
                await asyncio.wait([before])
            await self._held.step_anchor(self._stage, number * self._every, blocks, snapshot, averaged)
        except AgoraError as error:
            self._report(events.TaskFailed("averaging", f"slice round {number}: {error}"))

    async def _agree(self, number: int, difference: Tensor, behind: int) -> tuple[Tensor, tuple[bool, ...]]:
        """Returns the mean difference, 0 in parts that failed, and which parts have one.

        Of a late round, and of failed parts, it is what the others keep; nothing else is tried once the slice's next
        round is due.
        """
        first = Part(self._stage, "slice", number, 0)
        result = RoundResult(difference, [False for _ in cut_into_parts(len(difference))])
        is_over = behind >= self._slices.count
        if behind >= min(RECALLED_BEHIND, self._slices.count):
            await recall_failed(self._owner, self._takers, first, result)
        if result.failed_parts and number > self._contributed and not is_over:
            result = await self._takers.run_round(self._stage, "slice", number, difference, float(sum(self._recent)))
        if result.failed_parts and not is_over:
            await recall_until_found(self._owner, self._takers, first, result)
        for cut, done in zip(cut_into_parts(len(difference)), result.done, strict=True):
            if not done:
                result.mean[cut] = 0.0
        return result.mean, tuple(result.done)
