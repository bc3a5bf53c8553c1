"""What a serving daemon does for the balance of the swarm: publishes its measured rate, moves to the slowest stage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from agora_protocol.errors import AgoraError
from agora_protocol.ids import Span

from agora.core.clock import loop_time
from agora.node.peer.local_peer import LocalPeer
from agora.node.span.loaded_span import LoadedSpan
from agora.observe import events
from agora.swarm.placement import Placement
from agora.swarm.rebalancing import judge_move, rebalance_interval_s

MEASURE_INTERVAL_S = 4.0  # seconds between two measurements of how long microbatches take here
FAILED_MOVE_PAUSE_S = 120.0  # seconds for which a peer whose move has failed does not try again


async def keep_claimed_capacity_current(local_peer: LocalPeer, held_span: Callable[[], LoadedSpan | None]) -> None:
    """Every MEASURE_INTERVAL_S, until cancelled, puts this machine's measured rate and uplink into its claim.

    The claim's next publication has them. Does nothing until a microbatch has been measured. held_span: returns the
    span that is held, None while none is.
    """
    while True:
        loaded = held_span()
        service_s = loaded.hop.service_s if loaded is not None else None
        if loaded is not None and service_s is not None:
            capacity = local_peer.capacity_probe.record_measurement(
                loaded.span, service_s, local_peer.uplink_bytes_per_s()
            )
            local_peer.membership.update_capacity(capacity, local_peer.capacity_probe.machine.bandwidth)
        await asyncio.sleep(MEASURE_INTERVAL_S)


async def rebalance_repeatedly(
    local_peer: LocalPeer, held_span: Callable[[], LoadedSpan | None], move: Callable[[Span], Awaitable[None]]
) -> None:
    """Decides at random moments, until cancelled, whether this peer should hold other stages, and if so moves there.

    Each decision to move is reported as MoveChosen; after a failed move decides nothing for FAILED_MOVE_PAUSE_S.
    held_span: returns the span that is held, None while the peer should not move. move: called to move; if that
    fails, reports the failure itself and raises AgoraError.
    """
    rng = random.Random()
    while True:
        await asyncio.sleep(rebalance_interval_s(rng))
        loaded = held_span()
        placement = await _choose_move(local_peer, rng, loaded.loaded_at) if loaded is not None else None
        if placement is None or placement.span is None or held_span() is None:
            continue
        span = placement.span
        local_peer.context.report_event(events.MoveChosen(span.first, span.last, placement.reason))
        try:
            await move(span)
        except AgoraError:  # reported by the move itself
            await asyncio.sleep(FAILED_MOVE_PAUSE_S)


async def _choose_move(local_peer: LocalPeer, rng: random.Random, loaded_at: float) -> Placement | None:
    # Both decisions draw the same random numbers, so that deciding twice does not make a move less likely.
    seed = rng.random()
    placement = None
    for is_fresh in (False, True):
        if is_fresh:
            await local_peer.membership.refresh()
        own = local_peer.capacity_probe
        view = local_peer.view
        served_s = loop_time() - loaded_at
        placement = judge_move(view, local_peer.context.me, own.needs, own.machine, random.Random(seed), served_s)
        if placement is None:
            return None
    return placement
