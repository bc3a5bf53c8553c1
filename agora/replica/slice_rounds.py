"""Runs the slice rounds of runs with local steps: replicas average their slice's difference to the common anchor.

Round r begins after local step r * every, over slice r mod the number of slices. Its mean difference moves anchor and
weights (train.outer_step). Up to MAX_RUNNING_SLICE_ROUNDS rounds run while training goes on; their means are applied in
the order of their numbers. A failed part whose mean no replica keeps changes nothing: the slice's next round averages
that difference.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from torch import Tensor

from agora.observe import events
from agora.replica.background_tasks import start_reported
from agora.replica.part_averager import Part
from agora.replica.partition import MAX_RUNNING_SLICE_ROUNDS, cut_into_parts
from agora.replica.recall import recall_failed_parts, recall_repeatedly
from agora.replica.replicated_stages import ReplicatedStages
from agora.replica.rounds import RoundGroup, RoundResult

# In a round that begins this many rounds late or more, a replica first asks for the means, and then takes part.
RECALL_FIRST: Final = 2


class SliceRounds:
    """Runs the slice rounds of one stage, several concurrently, as background tasks; used on the event loop only."""

    def __init__(
        self,
        stage: int,
        every: int,
        most_slices: int,
        stages: ReplicatedStages,
        rounds: RoundGroup,
        report: events.Report,
    ) -> None:
        """every: optimizer steps from one round to the next. most_slices: how many the stage may have."""
        self._stage = stage
        self._every = every
        self._stages = stages
        self._rounds = rounds
        self._report = report
        self._step_tokens: deque[int] = deque(maxlen=most_slices * every)
        self._last_begun = -1
        self._last_contributed = -1
        self._running: dict[int, asyncio.Task[None]] = {}

    def record_local_step(self, tokens: int) -> None:
        """Records the tokens of a local step; a round's weight is the sum over the last slices * every steps."""
        self._step_tokens.append(tokens)

    def forget_tokens(self) -> None:
        """Forgets the recorded steps, because exact ones came after them: what they learnt is in no difference."""
        self._step_tokens.clear()

    def next_due(self, step: int, agreed: int) -> int | None:
        """Returns the number of the round to begin now, after `step` steps; None if none is due or no more may run.

        agreed: the step of the last round whose mean was applied. At most MAX_RUNNING_SLICE_ROUNDS run at the same
        time, and never two over the same weights: neither two of one slice, nor two of other numbers of slices.
        """
        number = max(self._last_begun, agreed // self._every) + 1
        if number > step // self._every:
            return None
        count = self._count_at(number)
        is_of_running = all(self._count_at(running) == count for running in self._running)
        return number if is_of_running and len(self._running) < min(MAX_RUNNING_SLICE_ROUNDS, count) else None

    def _count_at(self, number: int) -> int:
        return self._rounds.slices(self._stage, number).count

    def begin(self, number: int, step: int) -> None:
        """Starts round `number` as a background task, and reports an error in it as TaskFailed.

        step: steps taken here by now, which show how late the round begins.
        """
        self._last_begun = number
        previous = self._running.get(number - 1)
        rounds_late = step // self._every - number
        work = self._run(number, previous, rounds_late)
        task = self._running[number] = start_reported(work, self._report, f"slice round {number}")
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def stop(self) -> None:
        """Cancels the running rounds and waits for their end, because the state is replaced or the peer leaves.

        Rounds whose means were not applied become due again. A cancelled round that begins again only asks other
        replicas for its means, because this peer may have contributed some parts.
        """
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._last_contributed = max(self._last_contributed, self._last_begun)
        self._last_begun = -1

    async def _run(self, number: int, previous: asyncio.Task[None] | None, rounds_late: int) -> None:
        # First waits for the end of the `previous` round, so that means are applied in order.
        slices = self._rounds.slices(self._stage, number)
        blocks = slices.blocks(number)
        found = await self._stages.difference_to_anchor(self._stage, blocks)
        if found is None:
            return
        difference, snapshot = found
        result = None
        if len(self._rounds.members(self._stage)) > 1:
            result = await self._average(number, slices.count, difference, rounds_late)
        if previous is not None:
            await asyncio.wait([previous])
        averaged = None if result is None else (result.mean, tuple(result.averaged))
        wanted = slices.count if result is None else result.wanted_slices
        await self._stages.step_anchor(self._stage, number * self._every, blocks, snapshot, averaged, wanted)

    async def _average(self, number: int, slices: int, difference: Tensor, rounds_late: int) -> RoundResult:
        # Averages `difference` with those of the other members in slice round `number`; failed parts have the mean 0.
        # slices: how many the stage has. | rounds_late | the means come from | |---|---| | below RECALL_FIRST | the
        # round; for failed parts, replicas that keep their means | | RECALL_FIRST or more | replicas that keep them; if
        # a part is missing then, as above | | `slices` or more, and contributions wait here | as for RECALL_FIRST or
        # more | | `slices` or more otherwise | replicas that keep them, which are asked once | The waiting
        # contributions show which rounds the others are in: without that, replicas that are all late might take part in
        # different rounds forever.
        first_part = Part(self._stage, "slice", number, 0, slices)
        cuts = cut_into_parts(len(difference))
        result = RoundResult.of_failed_parts(difference.clone(), slices)
        is_superseded = rounds_late >= slices and not self._rounds.reducer.has_waiting_contributions(first_part)
        if rounds_late >= min(RECALL_FIRST, slices):
            await recall_failed_parts(self._rounds, first_part, result)
        if result.failed_parts and number > self._last_contributed and not is_superseded:
            weight = float(sum(list(self._step_tokens)[-slices * self._every :]))
            recalled = result
            result = await self._rounds.run_round(self._stage, "slice", number, difference, weight, slices)
            for index, cut in enumerate(cuts):
                if recalled.averaged[index]:  # the mean that others have taken in, whatever this round gave
                    result.mean[cut] = recalled.mean[cut]
                    result.averaged[index], result.wanted[index] = True, recalled.wanted[index]
        is_slice_due = self._stages.step_of(self._stage) // self._every - number >= slices
        if result.failed_parts and not is_slice_due:
            await recall_repeatedly(self._rounds, first_part, result)
        for cut, is_averaged in zip(cuts, result.averaged, strict=True):
            if not is_averaged:
                result.mean[cut] = 0.0
        return result
