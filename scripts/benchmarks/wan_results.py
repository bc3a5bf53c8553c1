"""The results of the benchmark of slow links: times to a target loss, rows, ratios, notes.

Knows: curves, speeds, how a target is chosen. Must not know: torch, processes, how anything was measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.report import Cell, Ratio
from benchmarks.wan_curves import Curve, final, steps_to, until
from benchmarks.wan_settings import (
    CHOSEN,
    DENSE,
    DENSE_LEARNT,
    LEARNING_RATE,
    PUBLISHED,
    RTT_MS,
    SWARM_MICROBATCHES,
    SWARM_SEQUENCES,
    Effort,
    Setting,
)

SAME_SPEED: Final[Mapping[Setting, Setting]] = {DENSE_LEARNT: DENSE}
"""Settings that send the same bytes and compute the same: measured once."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second of a swarm at one width.

    `unshaped`: of dense bf16 without a link. `link`: what was computed from it. `shaped`: over that link, by setting.
    `chosen_unshaped`: of the chosen setting without a link. `others`: the most cores that the rest of the machine used.
    """

    unshaped: float
    link: str
    shaped: Mapping[Setting, float]
    chosen_unshaped: float
    others: float

    def of(self, setting: Setting) -> float | None:
        """Returns the speed of a setting over the link; None where it was not measured."""
        return self.shaped.get(SAME_SPEED.get(setting, setting))

    @property
    def kept(self) -> float:
        """Throughput of the chosen setting over the link / without a link."""
        return (self.of(CHOSEN) or math.nan) / self.chosen_unshaped


@dataclass(frozen=True, slots=True)
class Results:
    """Of one width: held-out losses of each setting's runs, in the order of the seeds, and the speeds."""

    effort: Effort
    width: int
    curves: Mapping[Setting, Sequence[Curve]]
    speeds: Speeds

    def target(self, number: int) -> float:
        """Returns the loss that the published recipe has at the end of its run with the numbered seed, or NaN."""
        return final(self.curves[PUBLISHED][number])

    def steps(self, setting: Setting) -> list[float]:
        """Returns the steps to the target for each seed; infinite where it was not reached."""
        counts = [steps_to(curve, self.target(number)) for number, curve in enumerate(self.curves[setting])]
        return [math.inf if count is None else count for count in counts]

    def dense_steps(self) -> list[float]:
        """Returns the same for dense bf16, with the embedding that is better at each seed."""
        return list(map(min, self.steps(DENSE), self.steps(DENSE_LEARNT)))

    def step_s(self, setting: Setting) -> float | None:
        """Returns the seconds of a step over the link; None where the speed was not measured."""
        rate = self.speeds.of(setting)
        return None if rate is None else self.effort.tokens_per_step / rate

    def times(self, setting: Setting) -> list[float]:
        """Returns the seconds to the target for each seed; infinite where it was not reached."""
        step_s = self.step_s(setting)
        return [math.inf if step_s is None else steps * step_s for steps in self.steps(setting)]

    def equal_loss(self, setting: Setting) -> float:
        """Returns the loss after the steps that all settings have, the mean over seeds; NaN without a finite loss."""
        return statistics.fmean(final(until(curve, self.effort.steps)) for curve in self.curves[setting])

    def against_published(self) -> float:
        """Returns time to loss of the chosen setting / that of the published recipe; NaN where one has none."""
        return _median_ratio(self.times(CHOSEN), self.times(PUBLISHED))

    def against_dense(self) -> float:
        """Returns time to loss of the chosen setting / that of dense bf16; NaN where one has none."""
        step_s = self.step_s(DENSE) or math.nan
        return _median_ratio(self.times(CHOSEN), [steps * step_s for steps in self.dense_steps()])


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median over seeds of ours / theirs; NaN when a time is not finite."""
    if not all(map(math.isfinite, (*ours, *theirs))):
        return math.nan
    return statistics.median(own / their for own, their in zip(ours, theirs, strict=True))


def row(results: Results, setting: Setting) -> dict[str, Cell]:
    """Returns one line of the table."""
    steps, times, rate = results.steps(setting), results.times(setting), results.speeds.of(setting)
    forward, backward = setting.bytes_per_token(results.width)
    reached = [value for value in steps if math.isfinite(value)]
    return {
        "width": results.width,
        "boundary": setting.name + (" (chosen)" if setting == CHOSEN else ""),
        "k": setting.subspace(results.width),
        "bytes_forward": forward,
        "bytes_backward": backward,
        "seeds": len(steps),
        "equal_loss": round(results.equal_loss(setting), 4),
        "steps": _whole(statistics.median(steps)),
        "low": _whole(min(steps)),
        "high": _whole(max(steps)) if len(reached) == len(steps) else None,
        "tokens_per_s": rate,
        "step_s": results.step_s(setting),
        "T_s": _whole(statistics.median(times)),
    }


def ratios(found: Sequence[Results]) -> dict[str, Ratio]:
    """Returns the ratios by their fixed names, each of the worse width."""
    subspace = worst([results.against_published() for results in found], max)
    dense = worst([results.against_dense() for results in found], max)
    kept = worst([results.speeds.kept for results in found], min)
    what = f"time to the target loss, {CHOSEN.name}, against"
    return {
        "time_to_loss_vs_subspace_reference": Ratio(subspace, "<= 0.5", f"{what} {PUBLISHED.name}"),
        "time_to_loss_vs_dense_bf16": Ratio(dense, "<= 0.2", f"{what} dense bf16, the better embedding"),
        "throughput_kept_50ms": Ratio(kept, ">= 0.95", f"tokens/s of {CHOSEN.name}, over the link against without it"),
    }


def worst(values: Sequence[float], which: Callable[[Sequence[float]], float]) -> float:
    """Returns the worst of the values; NaN when one is NaN or there is none."""
    return math.nan if not values or any(map(math.isnan, values)) else which(values)


def notes(found: Sequence[Results]) -> list[str]:
    """Returns what makes the comparison fair, and the speeds, for the published page."""
    return [*_speeds(found), *_rules(found[0].effort)]


def _speeds(found: Sequence[Results]) -> list[str]:
    return [
        f"Width {results.width}: {results.speeds.unshaped:,.0f} tokens/s without a link in dense bf16, from which the "
        f"link is {results.speeds.link}; dense bf16 takes {_slower(results):.2f} times as long over it, the "
        f"chosen boundary keeps {results.speeds.kept:.3f} of its {results.speeds.chosen_unshaped:,.0f} tokens/s. "
        f"Others used up to {results.speeds.others:.2f} cores, the swarm that was at rest among them."
        for results in found
    ]


def _slower(results: Results) -> float:
    return results.speeds.unshaped / (results.speeds.of(DENSE) or math.nan)


def _rules(effort: Effort) -> list[str]:
    most = " and ".join(f"{effort.most_at(width):,} steps at width {width}" for width in effort.widths)
    return [
        "T = steps to the target x seconds of a step, as the public record of Protocol NanoGPT defines it. The target, "
        f"for each seed, is the loss of the published recipe ({PUBLISHED.name}) after "
        f"{most}, which all others may have as well. Loss is on held-out text, the mean of up to "
        "five evaluations in a row; between two a straight line. A ratio is the median over seeds of the ratios "
        "within a seed, and the worse of the widths; steps, low and high are the median, the least and the most of the "
        "seeds; - was not reached, or not measured. equal_loss: after the steps that all have.",
        f"Loss runs: {effort.stages} stages of one layer each, boundaries crossing by the daemons' codecs within one "
        f"process, {effort.tokens_per_step} bytes of the source of Python's standard library in each step, float32, "
        f"AdamW. The learning rate ({LEARNING_RATE:g}) is the same for all, and constant after its warm-up: so one "
        "curve has the steps to every target. The asynchronous pipeline's delay is left out, as if it were the same "
        "for all.",
        f"Speeds: {effort.stages} daemons, one for each stage, each behind a link of its own with a round trip of "
        f"{RTT_MS} ms, and {SWARM_MICROBATCHES} microbatches of {SWARM_SEQUENCES} sequences (loss runs: one of "
        f"{effort.sequences}) in an optimizer step. A machine's speed drifts, so each "
        f"swarm takes {effort.turns} turns with the pace, a swarm of the chosen boundary without a link (twice as many "
        "where it is the chosen boundary over the link, or dense without it); tokens_per_s is the median of its shares "
        "of the pace, times the median of all windows of the pace. A link's rate is such that the bytes of dense bf16 "
        "alone, forward and backward sharing a peer's uplink, take 1 / 0.15 of a step without a link, by its share of "
        "the pace and by the latest turns of the pace: 85 % of the step is then the wire's "
        "doing. Dense with a learnt embedding sends the same bytes, and is taken to be as fast.",
    ]


def _whole(value: float) -> Cell:
    return round(value) if math.isfinite(value) else None
