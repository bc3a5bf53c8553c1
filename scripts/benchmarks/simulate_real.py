"""Eight real daemons beside the same eight in the simulator: what each has measured goes in, throughput is compared.

Each daemon's device is made slower on purpose (AGORA_SLOWDOWN), so that two cores carry all of them; the simulator
gets the device seconds that a microbatch has really taken at each peer and the links, but nothing about the
throughput.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest

from agora.cli.local_swarm import LocalDaemon, LocalSwarm
from agora.net.shaping.link import LinkSpec
from agora.planning.simulator.scenario import MachineGroup, Scenario, SimulatedModel
from agora.planning.simulator.simulation import Simulation
from agora.planning.simulator.simulation_report import SimulationReport

STAGES = 4
# Large enough that steps, whose waits are not simulated, are rare while a swarm is observed.
MICROBATCHES_PER_STEP = 1024
IN_FLIGHT = 16
LOOPBACK = "10Gbit,0.4ms"  # what stands for the network of one machine, where a case shapes no link
SIMULATED_S = 400.0
START_S = 240.0  # seconds within which slowed daemons serve, and fill their pipeline


@dataclass(frozen=True, slots=True)
class RealPeer:
    """One daemon of a case: its span, how much slower its device computes, its link or "" for loopback as it is."""

    stages: str
    slowdown: float
    link: str = ""


Case = Sequence[RealPeer]
CASES: Mapping[str, Case] = {
    "equal peers": [RealPeer(str(number % STAGES), 12.0) for number in range(8)],
    "replicas of 1x, 2x, 4x, 10x": [
        *(RealPeer("0-1", 8.0) for _ in range(4)),
        *(RealPeer("2-3", 4.0 * factor) for factor in (1.0, 2.0, 4.0, 10.0)),
    ],
    "long links": [RealPeer(str(number % STAGES), 12.0, "20Mbit,300ms") for number in range(8)],
    "uneven spans": [
        RealPeer("0", 12.0),
        RealPeer("0-1", 12.0),
        RealPeer("1-3", 12.0),
        RealPeer("2", 12.0),
        RealPeer("2-3", 12.0),
        RealPeer("3", 12.0),
        RealPeer("0", 24.0),
        RealPeer("1", 12.0),
    ],
}


@dataclass(frozen=True, slots=True)
class Observation:
    """What a real swarm did. rate: microbatches per second. device_s: of each peer, for one microbatch that it got.

    boundary_bytes: of one crossing. spans, links: of each peer, in the same order.
    """

    rate: float
    device_s: tuple[float, ...]
    spans: tuple[Span, ...]
    links: tuple[str, ...]
    boundary_bytes: float


def manifest() -> Manifest:
    """Returns a decoder whose stages take some milliseconds for a microbatch on one core, in four stages."""
    base = Manifest(name="beside-the-simulator").model_dump()
    base["model"] |= {"width": 128, "subspace": 128, "layers": STAGES, "heads": 4, "key_value_heads": 2}
    base["model"] |= {"feed_forward": 352, "context": 64}
    base["stages"] = {"count": STAGES}
    base["schedule"] |= {"kind": "asynchronous", "microbatch": 4, "max_in_flight": IN_FLIGHT}
    base["optimizer"] |= {"target_tokens": MICROBATCHES_PER_STEP * 4 * 64}
    return Manifest.model_validate(base)


def observe(swarm: LocalSwarm, case: Case, seconds: float, warm: int | None = None) -> Observation:
    """Starts the daemons of a case, lets them fill their pipeline, and observes them for so many seconds.

    warm: the microbatches that come first; None: three times those in flight. Raises SwarmFailed when a daemon ends by
    itself or nothing happens in time. Leaves the daemons running.
    """
    for number, peer in enumerate(case):
        flags = ["--stages", peer.stages, *(["--link", peer.link] if peer.link else [])]
        swarm.start(f"peer-{number}", flags=flags, environment={"AGORA_SLOWDOWN": str(peer.slowdown)})
    daemons = [swarm.daemons[f"peer-{number}"] for number in range(len(case))]
    swarm.until(lambda: all(daemon.is_serving for daemon in daemons), "all daemons to serve", START_S)
    if warm is None:
        warm = 3 * IN_FLIGHT * sum(peer.stages.startswith("0") for peer in case)
    swarm.until(lambda: sum(_count_completed(daemon) for daemon in daemons) >= warm, "the pipeline to fill", START_S)
    before = [_look(daemon) for daemon in daemons]
    end = time.monotonic() + seconds
    swarm.until(lambda: time.monotonic() >= end, "the window to pass", seconds + 60.0)
    after = [_look(daemon) for daemon in daemons]
    looks = list(zip(before, after, strict=True))
    hops = sum(new.counted - old.counted for old, new in looks)
    completed = sum(new.completed - old.completed for old, new in looks)
    sent = sum(new.boundary_bytes - old.boundary_bytes for old, new in looks)
    crossings = 2.0 * max(1, hops - completed)
    return Observation(
        completed / (looks[0][1].time - looks[0][0].time),
        tuple((new.busy_s - old.busy_s) / max(1, new.counted - old.counted) for old, new in looks),
        tuple(Span.parse(peer.stages) for peer in case),
        tuple(peer.link or LOOPBACK for peer in case),
        sent / crossings,
    )


def simulate(seen: Observation) -> SimulationReport:
    """Simulates the peers of an observation and returns what came of it.

    A peer's speed is the number of its stages / its device seconds, since a stage has work 1 here.
    """
    groups = tuple(
        MachineGroup(f"peer-{number}", 1, len(span) / device_s, LinkSpec.parse(link), len(span), span)
        for number, (span, device_s, link) in enumerate(zip(seen.spans, seen.device_s, seen.links, strict=True))
    )
    model = SimulatedModel(
        (1.0,) * STAGES, seen.boundary_bytes, seen.boundary_bytes, (0.0,) * STAGES, max_in_flight=IN_FLIGHT
    )
    scenario = Scenario("beside real daemons", groups, model, seconds=SIMULATED_S, warmup_s=SIMULATED_S / 4)
    return SimulationReport(scenario, Simulation(scenario).run())


def observe_case(folder: Path, case: Case, seconds: float) -> Observation:
    """Runs a case in a folder of its own, and ends its daemons whatever happens."""
    swarm = LocalSwarm(folder, manifest().to_toml(), corpus=folder.parent / "corpus", flags=["--allow-files"])
    try:
        return observe(swarm, case, seconds)
    finally:
        swarm.stop()


@dataclass(frozen=True, slots=True)
class _Look:
    """One daemon at one time. busy_s: of its device. counted: microbatches at its first stage. time: monotonic."""

    time: float
    busy_s: float
    counted: int
    completed: int
    boundary_bytes: float


def _look(daemon: LocalDaemon) -> _Look:
    report = daemon.ask("report")
    now, now_unix = time.monotonic(), time.time()
    born = float(daemon.events("StateChanged", state="serving")[0]["at_unix"])
    counted = max((int(count) for count in report["counted"].values()), default=0)
    busy_s = float(report["busy_fraction"]) * (now_unix - born)
    return _Look(now, busy_s, counted, _completed_in(report), float(report["bytes"]["boundary"]))


def _count_completed(daemon: LocalDaemon) -> int:
    report = daemon.try_ask("report")
    return 0 if report is None else _completed_in(report)


def _completed_in(report: Mapping[str, Any]) -> int:
    return int(report["microbatches"]["completed"])
