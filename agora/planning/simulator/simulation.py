"""Runs a scenario: puts the parts together, adds and removes machines, and takes samples."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agora_protocol.ids import Span

from agora.planning.simulator.churn import FleetEvent, fleet_events
from agora.planning.simulator.directory_model import DirectoryModel
from agora.planning.simulator.event_queue import EventQueue
from agora.planning.simulator.fleet_simulation import DaemonPlacement, FleetSimulation
from agora.planning.simulator.flow_bound import best_whole_placement, flow_bound
from agora.planning.simulator.measurements import Measurements, Sample
from agora.planning.simulator.pipeline_simulation import OriginRules, OriginSimulation
from agora.planning.simulator.scenario import MachineGroup, Scenario
from agora.planning.simulator.simulated_machine import SimulatedLink, Workload
from agora.planning.simulator.simulated_peer import Equipment, Presence

# Seconds within which the machines of the start begin to work, each at a random moment.
#
# All claims are stored and read before: a machine that knew no peer of its next stage would fail its first calls.
LATEST_START_S = 1.0

# How many times as many new objects as usual there are between two searches for unreachable cycles.
COLLECTED_EVERY = 1000


class Simulation:
    """Runs one scenario once. Everything drawn at random comes from the scenario's seed."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.events = EventQueue()
        self.measurements = Measurements()
        model = scenario.model
        seed = scenario.seed
        self._rng = random.Random(f"{seed} fleet")
        self.directory = DirectoryModel(model.work, random.Random(f"{seed} directory"))
        workload = Workload(model.work, model.boundary_bytes, model.gradient_bytes, model.forward_share, model.slots)
        origin_rules = OriginRules(
            model.stages,
            model.slots,
            model.max_in_flight,
            model.staleness,
            model.target_microbatches,
            traffic=scenario.traffic,
        )
        origins = OriginSimulation(
            self.events,
            workload,
            origin_rules,
            self.measurements,
            lambda peer: self.fleet.find(peer),
            random.Random(f"{seed} links"),
            lambda: self.directory.server_count(0),
        )
        self.fleet = FleetSimulation(
            self.events,
            self.directory,
            DaemonPlacement(model, scenario.rebalancing, random.Random(f"{seed} placement")),
            self.measurements,
            random.Random(f"{seed} choices"),
            origins,
            state_bytes=model.state_bytes,
            startup_s=scenario.startup_s,
        )
        self._last: tuple[float, int, int, float, int, int] = (0.0, 0, 0, 0.0, 0, 0)
        self._empty_since: dict[int, float] = {}
        self._prepare()

    def run(self, progress: Callable[[float], None] = lambda time: None) -> Measurements:
        """progress: called after every sample with the simulated seconds."""
        scenario = self.scenario
        time = 0.0
        with _rare_cycle_collection():
            while time < scenario.seconds:
                time = min(time + scenario.sample_s, scenario.seconds)
                self.events.run(time)
                self._take_sample()
                progress(time)
        return self.measurements

    # --- the machines

    def _prepare(self) -> None:
        groups = [group for group in self.scenario.machines for _ in range(group.count)]
        self._rng.shuffle(groups)
        spans = iter(balanced_spans([group for group in groups if group.span is None], self.scenario.model.work))
        peers = [self.fleet.add(self._equipment(group)) for group in groups]
        for peer, group in zip(peers, groups, strict=True):
            self.fleet.place(peer, group.span or next(spans))
        for peer in peers:
            self.fleet.start_after(peer, self._rng.uniform(0.0, LATEST_START_S))
        for event in fleet_events(self.scenario.churn, len(groups), self.scenario.seconds, self._rng):
            self.events.at(event.time, self._apply, event)

    def _equipment(self, group: MachineGroup) -> Equipment:
        stages = self.scenario.model.stages
        max_span_lengths = tuple(min(group.holds, stages - stage) for stage in range(stages))
        return Equipment(group.kind, group.speed, SimulatedLink(group.link), max_span_lengths)

    def _apply(self, event: FleetEvent) -> None:
        if event.kind == "join":
            for _ in range(event.count):
                weights = [group.count for group in self.scenario.machines]
                (group,) = self._rng.choices(self.scenario.machines, weights)
                self.fleet.join(self._equipment(group))
            return
        endings = {"kill": self.fleet.kill, "leave": self.fleet.leave, "hang": self.fleet.hang}
        for peer in self.fleet.pick(event.count):
            endings[event.kind](peer)

    # --- the samples

    def _take_sample(self) -> None:
        # Adds a sample of the time since the last one to the measurements, and counts the seconds of empty stages.
        measured = self.measurements
        model = self.scenario.model
        now = self.events.now
        peers = [peer for peer in self.fleet.peers.values() if peer.is_up]
        serving = [p for p in peers if p.presence is Presence.SERVING and p.span is not None]
        speeds = [peer.equipment.speed for peer in peers]
        time, completed, messages, stored, read, keys = self._last
        seconds = now - time
        per_peer = 1.0 / (seconds * max(1, len(peers)))
        empty = self._count_empty(now, seconds)
        measured.samples.append(
            Sample(
                time=now,
                peers=len(peers),
                serving=len(serving),
                rate=(measured.completed - completed) / seconds,
                bound=flow_bound([(p.span, p.equipment.speed) for p in serving if p.span is not None], model.work),
                best=best_whole_placement(speeds, model.work),
                messages=(measured.messages - messages) * per_peer,
                stored=(measured.directory_stored - stored) * per_peer,
                read=(measured.directory_read - read) * per_peer,
                keys=(measured.directory_keys - keys) * per_peer,
                empty_stages=empty,
            )
        )
        counted = measured.directory_stored, measured.directory_read, measured.directory_keys
        self._last = (now, measured.completed, measured.messages, *counted)

    def _count_empty(self, now: float, seconds: float) -> int:
        # Adds `seconds`, those since the last sample, to empty_s of every stage that no machine serves now.
        held = {
            stage
            for peer in self.fleet.peers.values()
            if peer.presence is Presence.SERVING and peer.span is not None
            for stage in peer.span.stages
        }
        empty = [stage for stage in range(self.scenario.model.stages) if stage not in held]
        self._empty_since = {stage: self._empty_since.get(stage, now - seconds) for stage in empty}
        for stage, since in self._empty_since.items():
            self.measurements.empty_s[stage] = self.measurements.empty_s.get(stage, 0.0) + seconds
            self.measurements.longest_empty_s = max(self.measurements.longest_empty_s, now - since)
        return len(empty)


@contextmanager
def _rare_cycle_collection() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(thresholds[0] * COLLECTED_EVERY, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def balanced_spans(groups: list[MachineGroup], work: tuple[float, ...]) -> list[Span]:
    """For a fleet that starts together, so that all stages get about equal speed: the fastest machine first, each at
    the stages whose rates are lowest.
    """
    stages = len(work)
    rates = [0.0] * stages
    spans: dict[int, Span] = {}
    for index in sorted(range(len(groups)), key=lambda i: -groups[i].speed):
        length = min(groups[index].holds, stages)
        starts = range(stages - length + 1)
        first = min(starts, key=lambda start: (sum(rates[start : start + length]), start))
        span = spans[index] = Span(first, first + length - 1)
        amount = sum(work[stage] for stage in span.stages)
        for stage in span.stages:
            rates[stage] += groups[index].speed / amount
    return [spans[index] for index in range(len(groups))]
