"""Takes the steps along which all replicas of a stage stay equal: by a round, by a replay, or by fetching a state.

Knows: rounds of gradients, who keeps the mean of a step. Must not know: when a step is due (next_action), the view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final, Protocol

import torch
from agora_protocol.errors import ProtocolError, Unavailable
from agora_protocol.ids import PeerId
from torch import Tensor

from agora.averaging.exchange import Part
from agora.averaging.owner import Owner
from agora.averaging.partition import cut_into_parts
from agora.averaging.recall import ReplicasAsked, recall_failed, recall_until_found
from agora.averaging.replicated_stages import ReplicatedStages
from agora.averaging.rounds import RoundResult
from agora.observe import events

FETCH_AGAIN_S: Final = 1.0
FETCH_TRIES: Final = 3
"""After so many failed fetches of a step that nobody has, the least peer id takes it with the parts that it has."""


class StepTakers(ReplicasAsked, Protocol):
    """The replicas that take exact steps together, as this peer sees them; ReplicaGroup has the methods."""

    async def run_round(self, stage: int, what: str, number: int, values: Tensor, weight: float) -> RoundResult:
        """Takes part in one round, with those who are members now."""

    def note_exact_step(self, stage: int, tokens: float) -> None:
        """Notes that a step was taken along the whole mean of all replicas, which had counted `tokens` for it."""

    async def fetch(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Replaces the stage's state by a source's of at least `at_least` steps. Raises Unavailable without one."""


class ExactSteps:
    """Takes exact steps of the stages of a span; every method ends when the step is taken or given up."""

    def __init__(
        self,
        me: PeerId,
        synchronous: bool,
        stages: ReplicatedStages,
        owner: Owner,
        takers: StepTakers,
        report: events.Report,
    ) -> None:
        self._me = me
        self._synchronous = synchronous
        self._held = stages
        self._owner = owner
        self._takers = takers
        self._report = report

    async def step_together(self, stage: int, step: int) -> None:
        """Takes step `step` along the mean gradient of a round; closes this replica's part of it if it is open.

        | a part failed | asynchronous run | synchronous run |
        |---|---|---|
        | others have its mean | step along it | fetch the state of one that has taken the step |
        | nobody has, and nobody else is left | step along the own gradient | the same |
        | nobody has | along 0, which others are given too; the gradient goes into the next step | see _fetch_step |

        An asynchronous run only counts a step whose gradient is unusable, or 0 everywhere.
        """
        share = await self._held.take_mean_gradient(stage)
        if share.step != step:
            return
        result, has_mean = await self._takers.run_round(stage, "gradient", step, share.values, float(share.tokens)), 1.0
        if result.failed_parts and not self._synchronous:
            first = Part(stage, "gradient", step, 0)
            has_mean = await self._find_missing_parts(first, share.values, share.tokens, result)
        elif result.failed_parts and await self._fetch_step(stage, step + 1):
            return
        tokens = round(has_mean * max(share.tokens, result.weight))
        try:
            await self._held.step_with_gradient(stage, step, result.mean, tokens)
        except ProtocolError:
            if self._synchronous:
                raise
            # The step counts, but changes nothing.
            await self._held.step_with_gradient(stage, step, share.values, tokens=0)
        else:
            if not result.failed_parts:
                self._takers.note_exact_step(stage, result.weight)

    async def _find_missing_parts(self, first: Part, values: Tensor, tokens: int, result: RoundResult) -> float:
        """Asks the others for the means of parts that failed; of one that nobody has, the mean becomes 0.

        values, tokens: this replica's gradient; where the mean is 0 it goes into the part's next one. If others do have
        a mean, the replicas are no longer equal, and find that out by their lineages. Where nobody else is left, this
        replica's own values are the mean. Returns the share of the parts that have one.
        """
        missing = [index for index, done in enumerate(result.done) if not done]
        await recall_until_found(self._owner, self._takers, first, result)
        if len(self._takers.members(first.stage)) == 1:
            return 1.0
        cuts, empty = cut_into_parts(len(result.mean)), 0
        for index in missing:
            part, cut = first._replace(part=index), cuts[index]
            if not result.done[index]:
                nothing = self._owner.exchange.mean_of_nobody(part, len(values[cut]))
                self._owner.keep(part, nothing)
                result.mean[cut] = nothing.values
            if not result.mean[cut].any():
                empty += 1
                self._owner.exchange.carry_over(part, values[cut], float(tokens))
        return 1 - empty / len(cuts)

    async def replay(self, stage: int, step: int) -> None:
        """Takes step `step` along the mean gradient that others keep of it; if nobody does, fetches their state.

        What this replica has counted stays in its part, for the step that it comes to.
        """
        nothing = torch.zeros(self._held.layout(stage).numel)
        result = RoundResult(nothing, [False for _ in cut_into_parts(len(nothing))])
        await recall_failed(self._owner, self._takers, Part(stage, "gradient", step, 0), result)
        if result.failed_parts:
            await self.recover(stage, step + 1, step + 1)
            return
        tokens = max(1, round(result.weight)) if result.mean.any() else 0
        await self._held.step_with_gradient(stage, step, result.mean, tokens)
        self._takers.note_exact_step(stage, result.weight)

    async def recover(self, stage: int, at_least: int, reached: int, sources: Collection[PeerId] = ()) -> None:
        """Fetches a state of `at_least` steps from `sources`, by default from all others.

        If nobody gives it, the stage waits a second; in an asynchronous run it then goes on at `reached` as it is.
        """
        try:
            await self._takers.fetch(stage, sorted(sources or self._takers.others(stage)), at_least)
        except Unavailable as error:
            self._report(events.TaskFailed("fetch state", str(error)))
            await asyncio.sleep(FETCH_AGAIN_S)
            if not self._synchronous:
                await self._held.catch_up(stage, reached)

    async def _fetch_step(self, stage: int, at_least: int) -> bool:
        """Fetches the state of a replica that has taken `at_least` steps, trying again; returns whether one gave it.

        False when all others are silent or have left, or when none has taken the step after FETCH_TRIES and this peer
        has the least id: then it takes the step, and the others fetch it.
        """
        tries = 0
        while others := sorted(self._takers.members(stage).keys() - {self._me}):
            tries += 1
            try:
                await self._takers.fetch(stage, others, at_least)
                return True
            except Unavailable as error:
                self._report(events.TaskFailed("fetch state", str(error)))
            if tries >= FETCH_TRIES and self._me < others[0]:
                return False
            await asyncio.sleep(FETCH_AGAIN_S)
        return False
