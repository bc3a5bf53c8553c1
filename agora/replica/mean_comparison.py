"""Finds reducers that have sent the replicas of a stage different means."""

from __future__ import annotations

import asyncio
from typing import Final

from agora_protocol.ids import PeerId

from agora.observe import events
from agora.replica.background import start_reported
from agora.replica.kept_means import KeptMeans
from agora.replica.shard_codec import Shard
from agora.replica.stage_view import Membership
from agora.train.stage import StageProgress

COMPARED_GRADIENT_ROUNDS: Final = 3  # the latest ones: replicas compare soon after their histories have parted


class MeanComparison:
    """Compares the kept means of a stage's rounds with those of replicas whose history is another one."""

    def __init__(self, stage: int, every: int, kept_means: KeptMeans, report: events.Report) -> None:
        """every: inner steps from one fragment sync to the next, see the manifest's averaging."""
        self._stage = stage
        self._every = every
        self._kept_means = kept_means
        self._report = report
        # By replica: from which step its means are compared again, and the steps of the next pause.
        self._next: dict[PeerId, tuple[int, int]] = {}
        self._task: asyncio.Task[None] | None = None

    def compare_if_different(self, own: StageProgress, membership: Membership) -> None:
        """Starts a comparison with the first live replica whose history differs from `own`; one at a time."""
        if self._task is not None and not self._task.done():
            return
        for peer, progress in membership.listed_live.items():
            step, their_hash = progress.direct.agreed_step, progress.direct.history_hash
            differs = their_hash and own.history.get(step, 0) not in (0, their_hash)
            next_step, pause = self._next.get(peer, (1, 1))
            if differs and step >= next_step:
                # Each comparison transfers the bytes of a few rounds; the doubling pause keeps a peer that reports a
                # new history at every step from costing more.
                self._next = {each: at for each, at in self._next.items() if each in membership.known}
                self._next[peer] = step + pause, 2 * pause
                work = self._compare(peer, self._rounds_before(step, own))
                self._task = start_reported(work, self._report, "comparison of means")
                return

    def _rounds_before(self, step: int, own: StageProgress) -> list[Shard]:
        if own.sync_schedule.is_inner(step - 1):
            fragments = own.sync_schedule.fragments_at(step - 1)
            return [Shard(self._stage, "fragment", step // self._every, 0, fragments)]
        first = max(step - COMPARED_GRADIENT_ROUNDS, 0)
        return [Shard(self._stage, "gradient", number, 0) for number in range(first, step)]

    async def _compare(self, peer: PeerId, first_shards: list[Shard]) -> None:
        for first_shard in first_shards:
            if await self._kept_means.expose_equivocation(peer, first_shard):
                return

    async def stop(self) -> None:
        """Cancels the running comparison, if there is one."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
