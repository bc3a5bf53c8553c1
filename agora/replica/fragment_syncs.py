"""The fragment syncs of a stage with inner steps: which one is due, which run, in what order means are applied."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from torch import Tensor

from agora.observe import events
from agora.replica.all_reduce import MAX_RUNNING_SYNCS, AllReduce
from agora.replica.background import off_loop, start_reported
from agora.replica.reducers import FragmentDivision
from agora.replica.rounds import RoundResult
from agora.replica.shard_codec import Shard, cut_into_shards
from agora.replica.step_worker import StepWorker

# In a fragment sync that begins this many rounds late or more, a replica first asks for the means, then takes part.
RECALL_FIRST: Final = 2


class FragmentSyncs:
    """The fragment syncs of one stage with inner steps (DiLoCo): replicas average differences to the outer parameters.

    Sync r begins after r * every steps, over fragment r mod the number of fragments. Up to MAX_RUNNING_SYNCS run while
    training goes on; their means are applied in the order of their numbers. A failed shard whose mean no replica keeps
    changes nothing: the fragment's next sync averages that difference.
    """

    def __init__(
        self,
        stage: int,
        every: int,
        most_fragments: Callable[[], int],
        worker: StepWorker,
        all_reduce: AllReduce,
        division_of: Callable[[int], FragmentDivision],
        report: events.Report,
    ) -> None:
        """every: optimizer steps from one sync to the next. most_fragments: returns how many there may be.

        division_of: returns the division into fragments that a sync uses; the sync averages one of them.
        """
        self._stage = stage
        self._every = every
        self._worker = worker
        self._all_reduce = all_reduce
        self._division_of = division_of
        self._report = report
        self._most_fragments = most_fragments
        self._step_tokens: deque[int] = deque()
        self._last_begun_sync = -1
        self._last_contributed = -1
        self._running: dict[int, asyncio.Task[None]] = {}

    def record_inner_step(self, tokens: int) -> None:
        """Records the tokens of an inner step; a sync's weight is the sum over the last fragments * every steps."""
        self._step_tokens.append(tokens)
        while len(self._step_tokens) > self._most_fragments() * self._every:
            self._step_tokens.popleft()

    def forget_tokens(self) -> None:
        """Forgets the recorded steps, because all-reduces came after them: no difference contains what they learnt."""
        self._step_tokens.clear()

    def next_due(self, step: int, agreed_step: int) -> int | None:
        """Returns the number of the sync to begin now, after `step` steps; None if none is due or no more may run.

        agreed_step: the step of the last sync whose mean was applied.
        """
        number = max(self._last_begun_sync, agreed_step // self._every) + 1
        if number > step // self._every:
            return None
        count = self._division_of(number).count
        # Two syncs never run over the same weights: neither two of one fragment, nor two with unlike fragment counts.
        has_division_of_running = all(self._division_of(running).count == count for running in self._running)
        return number if has_division_of_running and len(self._running) < min(MAX_RUNNING_SYNCS, count) else None

    def begin(self, number: int, step: int) -> None:
        """Starts sync `number` as a background task. step: steps taken here by now; they show how late it begins."""
        self._last_begun_sync = number
        previous = self._running.get(number - 1)
        work = self._sync(number, previous, rounds_late=step // self._every - number)
        task = self._running[number] = start_reported(work, self._report, f"fragment sync {number}")
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def stop(self) -> None:
        """Cancels the running syncs, because the state is replaced or the peer leaves; they become due again."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # One that begins again only asks others for its means: this peer may have contributed some shards.
        self._last_contributed = max(self._last_contributed, self._last_begun_sync)
        self._last_begun_sync = -1

    async def _sync(self, number: int, previous: asyncio.Task[None] | None, rounds_late: int) -> None:
        division = self._division_of(number)
        blocks = division.blocks(number)
        found = await self._worker.outer_gradient(self._stage, blocks)
        if found is None:
            return
        difference, snapshot = found
        result = None
        first_shard = Shard(self._stage, "fragment", number, 0, division.count)
        if len(self._all_reduce.context_of(first_shard).members) > 1:
            result = await self._average(first_shard, difference, rounds_late)
        if previous is not None:  # means are applied in order
            await asyncio.wait([previous])
        averaged = None if result is None else (result.mean, tuple(result.averaged))
        wanted = division.count if result is None else result.wanted_fragments
        await self._worker.outer_step(self._stage, number * self._every, blocks, snapshot, averaged, wanted)

    async def _average(self, first_shard: Shard, difference: Tensor, rounds_late: int) -> RoundResult:
        number, fragments = first_shard.round, first_shard.fragments
        cuts = cut_into_shards(len(difference))
        result = RoundResult.of_failed_shards(await off_loop(difference.clone), fragments)
        # A sync whose fragment is due again takes part only if contributions wait here: they show which rounds the
        # others are in. Without that, replicas that are all late might take part in different rounds forever.
        skips_round = rounds_late >= fragments and not self._all_reduce.has_waiting_contributions(first_shard)
        # The others may be done with a late round, and keep its means.
        if rounds_late >= min(RECALL_FIRST, fragments):
            await self._all_reduce.kept_means.recall_failed_shards(first_shard, result)
        if result.failed_shards and number > self._last_contributed and not skips_round:
            weight = float(sum(list(self._step_tokens)[-fragments * self._every :]))
            recalled = result
            result = await self._all_reduce.run(self._stage, "fragment", number, difference, weight, fragments)
            for index, cut in enumerate(cuts):
                if recalled.averaged[index]:  # the mean that others have taken in, whatever this round gave
                    await off_loop(partial(result.mean[cut].copy_, recalled.mean[cut]))
                    result.averaged[index], result.wanted_fragments_by_shard[index] = (
                        True,
                        recalled.wanted_fragments_by_shard[index],
                    )
        # When the fragment is due again, a failed sync must end at once: else this replica comes late to all later
        # ones.
        is_due_again = self._worker.step_of(self._stage) // self._every - number >= fragments
        if result.failed_shards and not is_due_again:
            await self._all_reduce.kept_means.recall_repeatedly(first_shard, result)
        # A failed shard changes nothing.
        for cut, is_averaged in zip(cuts, result.averaged, strict=True):
            if not is_averaged:
                await off_loop(result.mean[cut].zero_)
        return result
