"""The report of a simulation: its figures as one JSON object and as lines of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agora.planning.simulator.measurements import Measurements, Sample
from agora.planning.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Computes a simulation's figures from its measurements, and renders them as JSON and text.

    Means are of the samples after the warm-up; counters are of the whole time. measured: what Simulation.run returned.
    """

    scenario: Scenario
    measured: Measurements

    @property
    def samples(self) -> Sequence[Sample]:
        return [sample for sample in self.measured.samples if sample.time > self.scenario.warmup_s]

    def mean(self, what: Callable[[Sample], float]) -> float:
        """Returns the mean of `what(sample)` over the samples after the warm-up; NaN without such samples."""
        values = [what(sample) for sample in self.samples]
        return statistics.fmean(values) if values else math.nan

    @property
    def rate(self) -> float:
        return self.mean(lambda sample: sample.rate)

    @property
    def fraction_of_bound(self) -> float:
        return _ratio(self.rate, self.mean(lambda sample: sample.bound))

    @property
    def fraction_of_best_placement(self) -> float:
        return _ratio(self.rate, self.mean(lambda sample: sample.best))

    @property
    def bound_fraction_of_best_placement(self) -> float:
        return _ratio(self.mean(lambda sample: sample.bound), self.mean(lambda sample: sample.best))

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of `swarm simulate --json`: means to 6 significant digits, None without samples.

        It has the counters of the whole time, and under "timeline" every sample, those of the warm-up included.
        """
        scenario, measured = self.scenario, self.measured
        return {
            "schema": 1,
            "scenario": scenario.name,
            "seed": scenario.seed,
            "peers": scenario.peers,
            "stages": scenario.model.stages,
            "seconds": scenario.seconds,
            "microbatches_per_second": _round_significant(self.rate),
            "of_bound": _round_significant(self.fraction_of_bound),
            "of_best_placement": _round_significant(self.fraction_of_best_placement),
            "microbatches": {
                "completed": measured.completed,
                "rerouted": measured.rerouted,
                "dropped": measured.dropped,
                "lost_with_origin": measured.lost,
                "counted_twice": measured.counted_twice,
            },
            "messages_per_peer_per_second": _round_significant(self.mean(lambda sample: sample.messages)),
            "directory": {
                "records_stored_per_peer_per_second": _round_significant(self.mean(lambda sample: sample.stored)),
                "records_read_per_peer_per_second": _round_significant(self.mean(lambda sample: sample.read)),
                "keys_read_per_peer_per_second": _round_significant(self.mean(lambda sample: sample.keys)),
            },
            "fleet": {
                "joins": measured.joins,
                "kills": measured.kills,
                "leaves": measured.leaves,
                "hangs": measured.hangs,
                "moves": measured.moves,
            },
            "empty_stage_seconds": _round_significant(sum(measured.empty_s.values())),
            "longest_empty_stage_seconds": _round_significant(measured.longest_empty_s),
            "timeline": [_timeline_entry(sample) for sample in measured.samples],
        }

    def lines(self) -> list[str]:
        """Returns the report as the lines of text that `swarm simulate` prints: a name and its figures in each."""
        scenario, measured = self.scenario, self.measured
        least = min((sample.peers for sample in self.samples), default=0)
        most = max((sample.peers for sample in self.samples), default=0)
        empty_s = sum(measured.empty_s.values())
        of_bound, of_best = self.fraction_of_bound, self.fraction_of_best_placement
        rows = [
            ("machines", f"{scenario.peers} at the start, {least} to {most} later, on {scenario.model.stages} stages"),
            ("simulated", f"{scenario.seconds:.0f} s, of which the first {scenario.warmup_s:.0f} s are not measured"),
            ("throughput", f"{self.rate:.3f} microbatches/s, {of_bound:.1%} of what the spans held allow"),
            ("best placement", f"{of_best:.1%} of the best placement of all machines at each moment"),
            ("microbatches", f"{measured.completed} completed, {measured.rerouted} calls rerouted, "
             f"{measured.dropped} dropped, {measured.lost} lost with their origin, "
             f"{measured.counted_twice} counted twice"),
            ("fleet", f"{measured.joins} joined, {measured.kills} were killed, {measured.leaves} left, "
             f"{measured.hangs} hung, {measured.moves} moved"),
            ("empty stages", f"{empty_s:.0f} s in all, {measured.longest_empty_s:.0f} s at a stretch"),
            ("messages", f"{self.mean(lambda s: s.messages):.2f} per peer and second"),
            ("directory", f"{self.mean(lambda s: s.stored):.2f} records stored and "
             f"{self.mean(lambda s: s.read):.1f} read per peer and second"),
        ]  # fmt: skip
        return [f"{name:<15} {text}" for name, text in rows]


def _timeline_entry(sample: Sample) -> dict[str, Any]:
    return {
        "time": sample.time,
        "peers": sample.peers,
        "serving": sample.serving,
        "microbatches_per_second": _round_significant(sample.rate),
        "bound": _round_significant(sample.bound),
        "best_placement": _round_significant(sample.best),
    }


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0.0 else 0.0


def _round_significant(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
