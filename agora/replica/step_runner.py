"""What a stage does once `decide` has decided it: a step together, the replay of a step, the fetch of a state."""

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
from agora.replica.all_reduce import AllReduce, RoundResult, off_loop
from agora.replica.reducers import Members
from agora.replica.shard_codec import Shard, cut_into_shards
from agora.replica.stage_worker import StageWorker
from agora.train.gradients import GradientShare

FETCH_RETRY_DELAY_S: Final = 1.0  # seconds of pause after a failed fetch of a state
# After this many failed fetches of a state the member with the least id takes the step itself.
FETCH_TRIES: Final = 3


# Fetches a stage's state of at least some steps from sources and replaces the stage's state with it; returns a
# description. Raises Unavailable when no source has such a state.
FetchState = Callable[[int, Sequence[PeerId], int], Awaitable[object]]


class StepRunner:
    """Takes one stage's steps along mean gradients, and fetches its state where a mean cannot be had.

    A mean that did not come is recalled from the replicas that keep it. If nobody has it, an asynchronous step takes 0
    for that shard and keeps the own values for the next round; a synchronous stage fetches a state.
    """

    def __init__(
        self,
        stage: int,
        me: PeerId,
        worker: StageWorker,
        all_reduce: AllReduce,
        *,
        synchronous: bool,
        members: Callable[[], Members],
        live: Callable[[], Collection[PeerId]],
        record_step: Callable[[float, GradientShare | None], None],
        stop_syncs: Callable[[], Awaitable[None]],
        fetch_state: FetchState,
        report: events.Report,
    ) -> None:
        """members: of the next round, this peer included. live: the other replicas that can be asked for a state.

        record_step: called with the tokens of a step that all shards' means came for, as its reducers told, and this
        replica's share of it if that is one reducer's word alone; None if others confirm it, or the step was replayed.
        """
        self._stage = stage
        self._me = me
        self._worker = worker
        self._all_reduce = all_reduce
        self._synchronous = synchronous
        self._members = members
        self._live = live
        self._record_step = record_step
        self._stop_syncs = stop_syncs
        self._fetch_state = fetch_state
        self._report = report

    async def step_together(self, step: int) -> None:
        """Takes step `step` along the mean gradient of all replicas; for a mean that nobody has, see the class."""
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
            return  # the fetched state has taken the step; without any other replica it is taken along the own gradient
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
                self._record_step(result.weight, None if result.is_weight_confirmed else share)

    async def _fill_failed_shards(self, share: GradientShare, result: RoundResult) -> float:
        # Returns the fraction of all shards whose mean is not 0.
        failed = [index for index, is_averaged in enumerate(result.averaged) if not is_averaged]
        shard_0, codec = Shard(self._stage, "gradient", share.step, 0), self._all_reduce.codec
        await self._all_reduce.recall_repeatedly(shard_0, result)
        if len(self._members()) == 1:  # no other replica could have another mean: the own values are it
            return 1.0
        cuts = cut_into_shards(len(result.mean))
        zeros = 0
        for index in failed:
            shard, cut = shard_0._replace(position=index), cuts[index]
            own, mean = share.values[cut], result.mean[cut]
            if not result.averaged[index]:  # nobody keeps one: it is 0 for everybody, also for others that ask later
                zero_mean = await off_loop(partial(codec.make_zero_mean, shard, len(own)))
                self._all_reduce.keep_mean(shard, zero_mean)
                await off_loop(partial(mean.copy_, zero_mean.values))
            if not await off_loop(mean.any):
                zeros += 1
                codec.carry_over(shard, own, float(share.tokens))
        return 1 - zeros / len(cuts)

    async def replay(self, step: int) -> None:
        """Takes step `step` along the mean that the other replicas have taken already, or fetches a state."""
        # The tokens in this replica's open share stay there, for a later step.
        stage = self._stage
        zeros = await off_loop(partial(torch.zeros, self._worker.layout(stage).numel))
        result = RoundResult.of_failed_shards(zeros, ALL_REDUCE)
        await self._all_reduce.recall_failed_shards(Shard(stage, "gradient", step, 0), result)
        if result.failed_shards:
            await self.fetch_or_catch_up(step + 1, step + 1)
            return
        tokens = max(1, round(result.weight)) if await off_loop(result.mean.any) else 0
        await self._worker.step_with_gradient(stage, step, result.mean, tokens, result.wanted_fragments)
        self._record_step(result.weight, None)

    async def fetch_or_catch_up(self, at_least: int, reached: int, sources: Collection[PeerId] = ()) -> None:
        """Fetches a state of at least `at_least` steps from `sources`, by default from any live replica.

        If none has one, an asynchronous run only counts up to `reached`.
        """
        try:
            await self.fetch_state(sorted(sources or self._live()), at_least)
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
                await self.fetch_state(others, at_least)
                return True
            except Unavailable as error:
                self._report(events.TaskFailed("fetch state", str(error)))
            if tries >= FETCH_TRIES and self._me < others[0]:
                return False
            await asyncio.sleep(FETCH_RETRY_DELAY_S)
        return False

    async def fetch_state(self, sources: Sequence[PeerId], at_least: int) -> None:
        """Stops the fragment syncs and replaces the state by a source's.

        Raises Unavailable if none has `at_least` steps.
        """
        await self._stop_syncs()
        await self._fetch_state(self._stage, sources, at_least)
        self._all_reduce.codec.drop_stage(self._stage)
