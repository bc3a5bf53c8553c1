"""The report of a simulation: its figures as one JSON object, as lines of text, and as SVG pictures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from agora.planning.simulator.measurements import Measurements, Sample
from agora.planning.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """Means are of the samples after the warm-up; counters are of the whole time."""

    scenario: Scenario
    measured: Measurements

    @property
    def samples(self) -> Sequence[Sample]:
        return [sample for sample in self.measured.samples if sample.time > self.scenario.warmup_s]

    def mean(self, what: Callable[[Sample], float]) -> float:
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


WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 36, 40
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49")
TICKS = 5
FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class Plot:
    """A line plot: `lines` by name, each with a value in `unit` for every time of `times` (seconds)."""

    title: str
    unit: str
    times: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def plots_of(samples: Sequence[Sample]) -> dict[str, Plot]:
    times = [sample.time for sample in samples]
    throughput = {
        "best placement": [sample.best for sample in samples],
        "bound of spans": [sample.bound for sample in samples],
        "completed": [sample.rate for sample in samples],
    }
    peers = {
        "up": [float(sample.peers) for sample in samples],
        "serving": [float(sample.serving) for sample in samples],
    }
    messages = {"messages": [sample.messages for sample in samples]}
    return {
        "throughput": Plot("Throughput", "microbatches/s", times, throughput),
        "peers": Plot("Machines", "machines", times, peers),
        "messages": Plot("Messages per machine", "messages/s", times, messages),
    }


def to_svg(plot: Plot) -> str:
    end = max(plot.times, default=0.0) or 1.0
    top = 1.05 * max((max(values, default=0.0) for values in plot.lines.values()), default=0.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{escape(plot.title)}, {escape(plot.unit)}</text>',
        *_axes(end, top),
    ]
    for number, (name, values) in enumerate(plot.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{_x(time, end):.1f},{_y(value, top):.1f}" for time, value in zip(plot.times, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        height = TOP + 16 * (number + 1)
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{height}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(end: float, top: float) -> list[str]:
    parts = []
    for tick in range(TICKS + 1):
        value, time = top * tick / TICKS, end * tick / TICKS
        y, x = _y(value, top), _x(time, end)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 16}" text-anchor="middle">{time / 60.0:.3g} min</text>')
    return parts


def _x(time: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time / end


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
