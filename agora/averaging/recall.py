"""Asks the other replicas for the means of a round that they keep: of parts that failed here, or of a whole round.

Knows: who may keep a mean, deadlines. Must not know: why a part failed, what becomes of its mean.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import Final, Protocol

from agora_protocol.errors import PeerFailed
from agora_protocol.ids import PeerId
from torch import Tensor

from agora.averaging.aggregate import Average
from agora.averaging.exchange import Part
from agora.averaging.owner import Owner
from agora.averaging.partition import Members, cut_into_parts
from agora.averaging.rounds import PARTS_AT_ONCE, RoundResult
from agora.clock import loop_time

RECALL_PAUSE: Final = 0.0625
RECALLS: Final = 8
"""Failed parts may yet be averaged: they are asked for so often, RECALL_PAUSE of a round's time apart."""


class ReplicasAsked(Protocol):
    """The replicas of a stage, as this peer sees them; ReplicaGroup has the methods.

    others: the other live ones. members: those of its rounds, this peer included, with bandwidths. round_s: the seconds
    that one of its rounds may take.
    """

    def others(self, stage: int) -> Collection[PeerId]: ...
    def members(self, stage: int) -> Members: ...
    def round_s(self, stage: int) -> float: ...


async def recall_until_found(owner: Owner, replicas: ReplicasAsked, first: Part, result: RoundResult) -> None:
    """Does as `recall_failed` up to RECALLS times, until no part is missing or no other replica is left."""
    for attempt in range(RECALLS):
        if attempt:
            await asyncio.sleep(RECALL_PAUSE * replicas.round_s(first.stage))
        await recall_failed(owner, replicas, first, result)
        if not result.failed_parts or len(replicas.members(first.stage)) == 1:
            return


async def recall_failed(owner: Owner, replicas: ReplicasAsked, first: Part, result: RoundResult) -> None:
    """Puts the means that others keep of a round's failed parts into its result, which is changed in place.

    first: part 0 of the round. A mean that is implausible beside this replica's values in `result` is not taken.
    """
    sources, cuts = sorted(replicas.others(first.stage)), cut_into_parts(len(result.mean))
    deadline = loop_time() + replicas.round_s(first.stage)
    free_calls = asyncio.Semaphore(PARTS_AT_ONCE)

    async def recall(index: int) -> None:
        """Asks one source after another for a part, beginning with another one for each part."""
        part, own = first._replace(part=index), result.mean[cuts[index]]
        async with free_calls:
            for turn in range(len(sources)):
                source = sources[(index + turn) % len(sources)]
                average = await owner.recall_from(source, part, len(own), deadline)
                if average is not None and _is_plausible(owner, part, own, average):
                    result.mean[cuts[index]], result.done[index] = average.values, True
                    result.weight = average.message.weight
                    return

    await asyncio.gather(*(recall(index) for index, done in enumerate(result.done) if not done))


def _is_plausible(owner: Owner, part: Part, own: Tensor, average: Average) -> bool:
    """Returns whether a mean is not too large to be believed."""
    with contextlib.suppress(PeerFailed):
        owner.exchange.check_and_record(part, own, average.values)
        return True
    return False
