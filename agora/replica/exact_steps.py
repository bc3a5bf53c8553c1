"""Takes exact steps, along the mean gradient of all replicas: by a round, by a replay, or by fetching a state."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final, Protocol

import torch
from agora_protocol.errors import ProtocolError, Unavailable
from agora_protocol.ids import PeerId
from torch import Tensor

from agora.core.sync_mode import EXACT
from agora.observe import events
from agora.replica.part_averager import Part
from agora.replica.partition import cut_into_parts
from agora.replica.recall import recall_failed_parts, recall_repeatedly
from agora.replica.replicated_stages import ReplicatedStages
from agora.replica.rounds import RoundGroup, RoundResult

FETCH_AGAIN_S: Final = 1.0  # seconds of pause after a failed fetch of a state
# Failed fetches of a state after which, if no replica has taken the step, the peer with the least id takes it.
FETCH_TRIES: Final = 3


class ExactStepGroup(Protocol):
    """Protocol: what an exact step changes besides the stage's weights; implemented by ReplicaGroup."""

    def record_exact_step(self, stage: int, tokens: float) -> None:
        """Records that the stage took a step along a mean gradient of which no part failed.

        tokens: number of tokens, of all replicas, behind the mean; they decide how many tokens the next steps have.
        """

    async def fetch_state(self, stage: int, sources: Sequence[PeerId], at_least: int) -> object:
        """Replaces the stage's state by a source's of at least `at_least` steps; the result has no meaning here.

        Raises Unavailable if no source has such a state.
        """


class ExactSteps:
    """Takes exact steps of the stages of a span: steps along the mean gradient of all replicas.

    Every public method returns when the step is taken or given up. ReplicaGroup calls each when next_action decides so,
    and again after a step that was given up.
    """

    def __init__(
        self,
        me: PeerId,
        synchronous: bool,
        stages: ReplicatedStages,
        rounds: RoundGroup,
        group: ExactStepGroup,
        report: events.Report,
    ) -> None:
        self._me = me
        self._synchronous = synchronous
        self._stages = stages
        self._rounds = rounds
        self._group = group
        self._report = report

    async def step_together(self, stage: int, step: int) -> None:
        """Averages the gradient of step `step` with the other replicas in one round, and takes the step along the mean.

        First closes this replica's share (its own gradient for the step) if it is open.

        | a part failed here, and | asynchronous run | synchronous run |
        |---|---|---|
        | another replica keeps its mean | step along it | fetch the state of one that has taken the step |
        | there is no other replica | step along this peer's gradient | the same |
        | no other replica keeps it | step along 0, see _fill_failed_parts | see _fetch_until_taken |

        If the closed share belongs to another step than `step`, returns without a round. A mean that is 0 everywhere or
        cannot be used only counts the step and leaves the weights as they are; in a synchronous run one that cannot be
        used raises ProtocolError. A step without failed parts is passed to record_exact_step.
        """
        share = await self._stages.take_gradient_share(stage)
        if share.step != step:
            return
        result = await self._rounds.run_round(stage, "gradient", step, share.values, float(share.tokens))
        nonzero_fraction = 1.0
        if result.failed_parts and not self._synchronous:
            first_part = Part(stage, "gradient", step, 0)
            nonzero_fraction = await self._fill_failed_parts(first_part, share.values, share.tokens, result)
        elif result.failed_parts and await self._fetch_until_taken(stage, step + 1):
            return
        tokens = round(nonzero_fraction * max(share.tokens, result.weight))
        try:
            await self._stages.step_with_gradient(stage, step, result.mean, tokens, result.wanted_slices)
        except ProtocolError:
            if self._synchronous:
                raise
            # The step counts, but changes nothing.
            await self._stages.step_with_gradient(stage, step, share.values, tokens=0, wanted_slices=EXACT)
        else:
            if not result.failed_parts:
                self._group.record_exact_step(stage, result.weight)

    async def _fill_failed_parts(self, first_part: Part, values: Tensor, tokens: int, result: RoundResult) -> float:
        failed = [index for index, is_averaged in enumerate(result.averaged) if not is_averaged]
        await recall_repeatedly(self._rounds, first_part, result)
        if len(self._rounds.members(first_part.stage)) == 1:
            return 1.0
        cuts = cut_into_parts(len(result.mean))
        zeros = 0
        for index in failed:
            part, cut = first_part._replace(position=index), cuts[index]
            if not result.averaged[index]:
                zero_mean = self._rounds.reducer.averager.encode_zero_mean(part, len(values[cut]))
                self._rounds.reducer.keep_mean(part, zero_mean)
                result.mean[cut] = zero_mean.values
            if not result.mean[cut].any():
                zeros += 1
                self._rounds.reducer.averager.contributions.carry_over(part, values[cut], float(tokens))
        return 1 - zeros / len(cuts)

    async def replay(self, stage: int, step: int) -> None:
        """Asks other replicas for the mean gradient of the past step `step`, takes the step, calls record_exact_step.

        If a part of the mean is not found, replaces the state instead, by fetch_or_catch_up. The tokens in this
        replica's open share stay there, for a later step.
        """
        result = RoundResult.of_failed_parts(torch.zeros(self._stages.layout(stage).numel), EXACT)
        await recall_failed_parts(self._rounds, Part(stage, "gradient", step, 0), result)
        if result.failed_parts:
            await self.fetch_or_catch_up(stage, step + 1, step + 1)
            return
        tokens = max(1, round(result.weight)) if result.mean.any() else 0
        await self._stages.step_with_gradient(stage, step, result.mean, tokens, result.wanted_slices)
        self._group.record_exact_step(stage, result.weight)

    async def fetch_or_catch_up(
        self, stage: int, at_least: int, reached: int, sources: Collection[PeerId] = ()
    ) -> None:
        """Replaces the stage's state by one of at least `at_least` steps from `sources`, by default any live replica.

        If no source gives one, reports TaskFailed and waits FETCH_AGAIN_S; in an asynchronous run it then sets the
        stage's step count to `reached` without a state, see ReplicatedStages.catch_up.
        """
        try:
            await self._group.fetch_state(stage, sorted(sources or self._rounds.live_others(stage)), at_least)
        except Unavailable as error:
            self._report(events.TaskFailed("fetch state", str(error)))
            await asyncio.sleep(FETCH_AGAIN_S)
            if not self._synchronous:
                await self._stages.catch_up(stage, reached)

    async def _fetch_until_taken(self, stage: int, at_least: int) -> bool:
        tries = 0
        while others := sorted(self._rounds.members(stage).keys() - {self._me}):
            tries += 1
            try:
                await self._group.fetch_state(stage, others, at_least)
                return True
            except Unavailable as error:
                self._report(events.TaskFailed("fetch state", str(error)))
            if tries >= FETCH_TRIES and self._me < others[0]:
                return False
            await asyncio.sleep(FETCH_AGAIN_S)
        return False
