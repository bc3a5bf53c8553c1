"""SendWindow over long and slow links, in virtual time: enough in flight to hide them, and no more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from agora.net.shaping.link import LinkSpec
from agora.pipeline.flow_control import SQUARE_ROOT_FACTOR
from agora.pipeline.load_balancer import ACCEPTANCE_WAITS, PeerStats
from agora.pipeline.origin import Origin
from tests.pipeline.test_load_balancer import A, sent, table_of
from tests.pipeline.world import World
from tests.virtual_time import run

STAGES, SERVICE_S = 4, 0.1
WARM, MEASURED = 60, 50
WIRE_BYTES = 44 + 32  # a boundary with its tokens, and a gradient
FAST = 1e9


@dataclass
class Result:
    """Microbatches per second after the first WARM, and what the origin allowed itself at the end."""

    rate: float
    send_window: int
    latency_s: float


def trained(rtts: Sequence[float], *, wire_s: float = 0.0, ceiling: int = 128) -> Result:
    """A swarm with a peer for each stage; what peer i sends takes rtts[i] / 2, and wire_s for each microbatch."""
    rate = WIRE_BYTES / wire_s if wire_s else FAST

    async def work() -> Result:
        world = World(len(rtts))
        nodes = [world.add(f"peer{i}", str(i), SERVICE_S, 128, link=LinkSpec(rate, rtt)) for i, rtt in enumerate(rtts)]
        origin = world.origin(nodes[0], ceiling=ceiling)
        running = asyncio.create_task(origin.run())
        begin = await completed(origin, WARM)
        end = await completed(origin, WARM + MEASURED)
        result = Result(MEASURED / (end - begin), origin.window.limit, nodes[0].hop.latency_s() or 0.0)
        await origin.leave(1e6)
        await running
        return result

    return run(work())


async def completed(origin: Origin, count: int) -> float:
    """When the origin has its `count`-th microbatch back."""
    while origin.completed < count:
        await asyncio.sleep(0.05)
    return asyncio.get_running_loop().time()


def enough(latency_s: float, period_s: float) -> int:
    load = latency_s / period_s
    return math.ceil(load + SQUARE_ROOT_FACTOR * math.sqrt(load))


@pytest.mark.parametrize("rtt", [0.0, 0.05, 0.1, 0.2])
def test_throughput_is_flat_over_latency_and_send_window_is_what_the_way_needs(rtt: float) -> None:
    found = trained([rtt] * STAGES)
    latency_s = STAGES * SERVICE_S + (STAGES - 1) * rtt
    assert found.rate * SERVICE_S >= 0.97
    assert found.latency_s == pytest.approx(latency_s, rel=0.02), "a round trip for each link, and no queue"
    assert found.send_window == pytest.approx(enough(latency_s, SERVICE_S), abs=1)


def test_what_lies_behind_the_next_peer_counts_too() -> None:
    found = trained([0.0, 0.0, 0.4, 0.4])  # the first link is short, the two after it are not
    assert found.latency_s == pytest.approx(STAGES * SERVICE_S + 0.2 + 0.4, rel=0.02)
    assert found.rate * SERVICE_S >= 0.97


def test_transfers_are_part_of_the_way() -> None:
    found = trained([0.05] * STAGES, wire_s=0.09)
    assert found.rate * SERVICE_S >= 0.97, "sending is hidden behind computing"
    latency_s = STAGES * SERVICE_S + (STAGES - 1) * (0.05 + 0.09)
    assert found.latency_s == pytest.approx(latency_s, rel=0.1)


def test_a_saturated_link_is_kept_busy_and_its_queue_asks_for_no_more_send_window() -> None:
    wire_s = 3 * SERVICE_S
    found = trained([0.05] * STAGES, wire_s=wire_s)
    assert found.rate * wire_s >= 0.97
    longest_s = STAGES * SERVICE_S + (STAGES - 1) * (0.05 + wire_s)
    assert found.send_window <= enough(longest_s, wire_s) + 1


def test_memory_bounds_what_a_long_link_asks_for() -> None:
    found = trained([0.4] * STAGES, ceiling=8)
    assert found.send_window == 8 and found.rate == pytest.approx(8 / 1.6, rel=0.05)


def test_a_link_is_known_by_its_shortest_waits() -> None:
    made = table_of({A: PeerStats()})
    cost = made.callees(1)[A]
    assert PeerStats(round_trip_s=0.2).crossing_s(1000, 500, 1.0) == 0.2, "nothing seen yet"
    for waited in (0.30, 0.15, 0.90):
        made.record_accepted(100.0 + waited, sent(made), 0, 0.05)
    assert cost.crossing_s(1000, 500, math.inf) == pytest.approx(0.05 + 0.10 + 0.05)
    assert cost.crossing_s(1000, 500, 0.08) == pytest.approx(0.05 + 0.08), "one microbatch at a time is on a link"
    for _ in range(ACCEPTANCE_WAITS - 2):
        made.record_accepted(100.9, sent(made), 0, 0.05)
    assert cost.crossing_s(1000, 500, math.inf) == pytest.approx(0.05 + 0.10 + 0.05), "the shortest is still remembered"
    made.record_accepted(100.9, sent(made), 0, 0.05)
    assert cost.crossing_s(1000, 500, math.inf) == pytest.approx(0.05 + 0.85 * 1.5), "and is forgotten"
