"""Runs two tasks of the local peer: publishing how fast this machine is, and moving to where the swarm is slowest.

Knows: when to decide, what was measured, how to ask for a move. Must not know: how that is decided
(swarm/rebalancing.py), how a move is carried out (lifecycle.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from agora_protocol.errors import AgoraError
from agora_protocol.ids import Span

from agora.node.loaded_span import LoadedSpan
from agora.node.local_peer import LocalPeer
from agora.observe import events
from agora.swarm.placement import Placement
from agora.swarm.rebalancing import judge_move, next_look_s

MEASURE_S = 4.0
"""Seconds between two measurements of how long microbatches take here."""
REST_AFTER_FAILURE_S = 120.0
"""Seconds for which a peer whose move has failed does not try again."""


async def publish_ability(local_peer: LocalPeer, serving: Callable[[], LoadedSpan | None]) -> None:
    """Every MEASURE_S, until cancelled, puts this machine's measured rate and uplink into its claim.

    serving: returns the span that is held, None while there is none.
    """
    while True:
        loaded = serving()
        service_s = loaded.hop.service_s if loaded is not None else None
        if loaded is not None and service_s is not None:
            capacity = local_peer.ability.measure(loaded.span, service_s, local_peer.uplink())
            local_peer.membership.update_ability(capacity, local_peer.ability.ability.bandwidth)
        await asyncio.sleep(MEASURE_S)


async def keep_balance(
    local_peer: LocalPeer, serving: Callable[[], LoadedSpan | None], move: Callable[[Span], Awaitable[None]]
) -> None:
    """At random moments, until cancelled, decides whether this peer should hold other stages, and if so moves there.

    serving: returns the span that is held, None while the peer should not move. After a failed move it rests for
    REST_AFTER_FAILURE_S. Each decision to move is reported as MoveChosen.
    """
    rng = random.Random()
    while True:
        await asyncio.sleep(next_look_s(rng))
        placement = await _judge(local_peer, rng) if serving() is not None else None
        if placement is None or placement.span is None or serving() is None:
            continue
        span = placement.span
        local_peer.startup.report_event(events.MoveChosen(span.first, span.last, placement.reason))
        try:
            await move(span)
        except AgoraError:  # reported by the move itself
            await asyncio.sleep(REST_AFTER_FAILURE_S)


async def _judge(local_peer: LocalPeer, rng: random.Random) -> Placement | None:
    """Returns where to move, None to stay: decided on the present view and, if that says move, again on a fresh one.

    Both decisions draw the same random numbers, so that the second does not make a move less likely.
    """
    seed, placement = rng.random(), None
    for is_fresh in (False, True):
        if is_fresh:
            await local_peer.membership.refresh()
        view, own = local_peer.membership.view, local_peer.ability
        placement = judge_move(view, local_peer.startup.me, own.demands, own.ability, random.Random(seed))
        if placement is None:
            return None
    return placement
