"""Takes one stage's steps along the mean gradients of its replicas.

In the order of a step: the share is closed, the all-reduce runs, failed shards are recalled, the step is taken and its
tokens recorded. docs/understand/averaging.md describes what follows when a mean does not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Final

import torch
from agora_protocol.errors import ProtocolError, Unavailable
from agora_protocol.ids import PeerId

from agora.core.step_schedule import ALL_REDUCE
from agora.observe import events
from agora.replica.all_reduce import AllReduce
from agora.replica.background import off_loop
from agora.replica.pacing import StepPacing
from agora.replica.reducers import Members
from agora.replica.rounds import RoundResult
from agora.replica.shard_codec import Shard, cut_into_shards
from agora.replica.stage_view import KnownReplicas
from agora.replica.step_worker import StepWorker
from agora.train.gradients import GradientShare

FETCH_RETRY_DELAY_S: Final = 1.0  # seconds of pause after a failed fetch of a state
# After this many failed fetches of a state the member with the least id takes the step itself.
FETCH_TRIES: Final = 3


class GradientSteps:
    """The steps of one stage along mean gradients, and the fetches of a state where a mean is not to be had."""

    def __init__(
        self,
        stage: int,
        me: PeerId,
        *,
        synchronous: bool,
        worker: StepWorker,
        all_reduce: AllReduce,
        pacing: StepPacing,
        members: Callable[[], Members],
        live_progress: Callable[[], KnownReplicas],
        fetch_state: Callable[[Sequence[PeerId], int], Awaitable[None]],
        report: events.Report,
    ) -> None:
        """members: returns those of the stage's next round, this peer included.

        live_progress: returns the progress of the other live replicas. fetch_state: replaces the stage's state by one
        of at least so many steps from one of the sources; raises Unavailable when none has one.
        """
        self._stage = stage
        self._me = me
        self._synchronous = synchronous
        self._worker = worker
        self._all_reduce = all_reduce
        self._pacing = pacing
        self._members = members
        self._live_progress = live_progress
        self._fetch_state = fetch_state
        self._report = report

    async def step_together(self, step: int) -> None:
        """Averages this replica's share of step `step` with those of the others, and takes the step along the mean.

        A mean that did not come is recalled from the replicas that keep it. If nobody has it, an asynchronous step
        takes 0 for that shard and keeps the own values for the next round; a synchronous stage fetches a state.
        """
        stage = self._stage
        share = await self._worker.close_share(stage)
        if share.step != step:
            return
        result = await self._all_reduce.run(stage, "gradient", step, share.values, float(share.tokens))
        nonzero_fraction = 1.0
        if result.failed_shards and not self._synchronous:
            # It steps along the mean that another replica keeps, or along 0.
            nonzero_fraction = await self._fill_failed_shards(share, result)
        elif result.failed_shards and await self._fetch_until_taken(step + 1):
            # The fetched state has taken the step. Otherwise no other replica is left, or this one has the least id
            # after FETCH_TRIES: it steps along the means that it has, and along its own values in the failed shards.
            return
        tokens = round(nonzero_fraction * max(share.tokens, result.weight))
        try:
            await self._worker.step_with_gradient(stage, step, result.mean, tokens, result.wanted_fragments)
        except ProtocolError:
            if self._synchronous:
                raise
            # The step counts, but changes nothing.
            await self._worker.step_with_gradient(stage, step, share.values, 0, ALL_REDUCE)
        else:
            if not result.failed_shards:
                self._record_tokens(share, result)

    async def _fill_failed_shards(self, share: GradientShare, result: RoundResult) -> float:
        # Returns the fraction of all shards whose mean is not 0.
        failed = [index for index, is_averaged in enumerate(result.averaged) if not is_averaged]
        first_shard, codec = Shard(self._stage, "gradient", share.step, 0), self._all_reduce.codec
        await self._all_reduce.kept_means.recall_repeatedly(first_shard, result)
        if len(self._members()) == 1:  # no other replica could have another mean: the own values are it
            return 1.0
        cuts = cut_into_shards(len(result.mean))
        zeros = 0
        for index in failed:
            shard, cut = first_shard._replace(position=index), cuts[index]
            own, mean = share.values[cut], result.mean[cut]
            if not result.averaged[index]:  # nobody keeps one: it is 0 for everybody, also for others that ask later
                zero_mean = await off_loop(partial(codec.make_zero_mean, shard, len(own)))
                self._all_reduce.kept_means.keep(shard, zero_mean)
                await off_loop(partial(mean.copy_, zero_mean.values))
            if not await off_loop(mean.any):
                zeros += 1
                codec.carry_over(shard, own, float(share.tokens))
        return 1 - zeros / len(cuts)

    async def replay(self, step: int) -> None:
        """Takes step `step`, which the other replicas have taken, along the mean that they keep.

        The tokens in this replica's open share stay there, for a later step.
        """
        stage = self._stage
        zeros = await off_loop(partial(torch.zeros, self._worker.layout(stage).numel))
        result = RoundResult.of_failed_shards(zeros, ALL_REDUCE)
        await self._all_reduce.kept_means.recall_failed_shards(Shard(stage, "gradient", step, 0), result)
        if result.failed_shards:
            await self.fetch_or_catch_up(step + 1, step + 1)
            return
        tokens = max(1, round(result.weight)) if await off_loop(result.mean.any) else 0
        await self._worker.step_with_gradient(stage, step, result.mean, tokens, result.wanted_fragments)
        self._pacing.record_step(result.weight)

    async def fetch_or_catch_up(self, at_least: int, reached: int, sources: Collection[PeerId] = ()) -> None:
        """Fetches a state of at least `at_least` steps from one of `sources`; without `sources` from any live replica.

        If none has such a state, an asynchronous run raises its step count to `reached` without one.
        """
        try:
            await self._fetch_state(sorted(sources or self._live_progress()), at_least)
        except Unavailable as error:
            self._report(events.TaskFailed("fetch state", str(error)))
            await asyncio.sleep(FETCH_RETRY_DELAY_S)
            if not self._synchronous:
                await self._worker.catch_up(self._stage, reached)

    async def _fetch_until_taken(self, at_least: int) -> bool:
        # Tries until a member gives a state; False when no other member is left, or when FETCH_TRIES have failed and
        # this peer has the least id of all: then it takes the step itself, and the other members fetch its state.
        tries = 0
        while others := sorted(self._members().keys() - {self._me}):
            tries += 1
            try:
                await self._fetch_state(others, at_least)
                return True
            except Unavailable as error:
                self._report(events.TaskFailed("fetch state", str(error)))
            if tries >= FETCH_TRIES and self._me < others[0]:
                return False
            await asyncio.sleep(FETCH_RETRY_DELAY_S)
        return False

    def _record_tokens(self, share: GradientShare, result: RoundResult) -> None:
        if self._synchronous or result.is_weight_confirmed:
            self._pacing.record_step(result.weight)
            return
        # Only one reducer reported that number: it is believed as far as it fits what the replicas themselves reported.
        reported = {peer: progress.tokens_of(share.step) for peer, progress in self._live_progress().items()}
        self._pacing.record_reported_step(result.weight, share.tokens, reported)
