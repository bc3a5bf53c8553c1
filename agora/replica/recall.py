"""Asks the other replicas for the means that they keep of a round's parts, where those parts have no mean here."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from agora_protocol.errors import PeerFailed
from torch import Tensor

from agora.core.clock import loop_time
from agora.replica.aggregate import PartMean
from agora.replica.part_averager import Part
from agora.replica.partition import cut_into_parts
from agora.replica.reducer import PartReducer
from agora.replica.rounds import MAX_OPEN_PARTS, RoundGroup, RoundResult

RECALL_PAUSE: Final = 0.0625  # pause before failed parts are asked for again, as a fraction of round_s
MAX_RECALLS: Final = 8  # maximum number of times that failed parts are asked for: others may get the mean later


async def recall_repeatedly(rounds: RoundGroup, first_part: Part, result: RoundResult) -> None:
    """Asks the other members for the means of a round's failed parts, up to MAX_RECALLS times; see recall_failed_parts.

    Stops when no part is failed, or no other member is left. Sleeps RECALL_PAUSE * round_s before each further time.
    Changes `result` in place.
    """
    for attempt in range(MAX_RECALLS):
        if attempt:
            await asyncio.sleep(RECALL_PAUSE * rounds.round_s(first_part.stage))
        await recall_failed_parts(rounds, first_part, result)
        if not result.failed_parts or len(rounds.members(first_part.stage)) == 1:
            return


async def recall_failed_parts(rounds: RoundGroup, first_part: Part, result: RoundResult) -> None:
    """Asks live replicas for the means of a round's failed parts, and puts plausible ones into `result`, in place.

    Asks for several parts at the same time. Marks each part that got a mean as averaged, and sets the result's weight
    to that of the last mean that has contributions, at most RoundConfig.max_weight; the zero mean of a part that no
    owner could average has no contributions. Returns after at most one round_s, even if parts are still failed.
    first_part: part 0 of the round. result: its failed parts hold this replica's own values, and keep them if no mean
    is found.
    """
    sources = sorted(rounds.live_others(first_part.stage))
    cuts = cut_into_parts(len(result.mean))
    deadline = loop_time() + rounds.round_s(first_part.stage)
    free_calls = asyncio.Semaphore(MAX_OPEN_PARTS)

    async def recall(index: int) -> None:
        part = first_part._replace(position=index)
        own = result.mean[cuts[index]]
        async with free_calls:
            for attempt in range(len(sources)):
                source = sources[(index + attempt) % len(sources)]
                mean = await rounds.reducer.recall_from(source, part, len(own), deadline)
                if mean is not None and _is_plausible(rounds.reducer, part, own, mean):
                    result.mean[cuts[index]], result.averaged[index] = mean.values, True
                    result.wanted[index] = mean.message.wanted_slices
                    if mean.message.in_mean:
                        result.weight = min(mean.message.weight, rounds.reducer.config.max_weight)
                    return

    await asyncio.gather(*(recall(index) for index, is_averaged in enumerate(result.averaged) if not is_averaged))


def _is_plausible(reducer: PartReducer, part: Part, own: Tensor, mean: PartMean) -> bool:
    with contextlib.suppress(PeerFailed):
        reducer.averager.check_magnitude(part, own, mean.values)
        return True
    return False
