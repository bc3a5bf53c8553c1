"""Computes each stage's number of peers and microbatches per second, and where one more machine helps most.

Knows: claims of the view, the work of each stage. Pure; a StageSupply changes only itself, and only by the calls to it.
Must not know: who asks, clocks, the directory. Rates add up: a stage's rate is the sum of the rates of its holders, and
the swarm's rate is that of its slowest stage (Petals, arXiv 2312.08361, appendix, places servers by the same sums).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median

from agora_protocol.ids import Span

from agora.swarm.view import PeerView, View

ENOUGH_HOLDERS = 2
"""A stage with fewer holders is thin: the next death could stop the swarm."""
MAX_TIMES_USUAL = 64.0
"""A peer's claimed speed counts as at most this many times the median: one claim must not hide that a stage is slow."""
MAX_COMPARED = 256
"""Maximum number of spans compared by the rates of all stages, among those that raise the swarm's rate equally."""


@dataclass(frozen=True, slots=True)
class StageDemands:
    """What the stages of a run ask of a machine. Immutable.

    work: computation of one microbatch in each stage, as a multiple of the mean over stages. boundary_bytes: size of
    one microbatch's boundary, in the larger direction. state_bytes: what a newcomer to each stage fetches.
    """

    work: tuple[float, ...]
    boundary_bytes: float
    state_bytes: tuple[float, ...]

    @property
    def stage_count(self) -> int:
        """Number of stages of the run."""
        return len(self.work)


def equal_demands(stage_count: int) -> StageDemands:
    """Returns the demands of equal stages whose boundaries and states have no size."""
    return StageDemands((1.0,) * stage_count, 0.0, (0.0,) * stage_count)


@dataclass(frozen=True, slots=True)
class Ability:
    """What one machine can do. Immutable.

    speed: stages of mean work per second; 0 for unknown, then the median of others is used. bandwidth: bytes per
    second, the lesser of up and down; 0 for unknown, then taken as unbounded. longest: for each first stage, how many
    stages from it on fit into memory.
    """

    speed: float
    bandwidth: float
    longest: tuple[int, ...]


class StageSupply:
    """Counts the holders of each stage (peers that serve it or are joining) and their rate in microbatches per second.

    usual_speed: the median speed of the peers whose speed is known, in stages of mean work per second; 1 when no speed
    is known, so that rates count heads. is_measured: some speed is known, so that rates are microbatches per second.
    Of a stage of which only a part of the peers is read, the rate is that part's, scaled up to the stage's size.
    """

    def __init__(self, view: View, demands: StageDemands, own_speed: float = 0.0) -> None:
        """own_speed: of the peer that asks, 0 if unknown; used as the usual speed if the view has no known speed."""
        self.demands = demands
        self.stage_count = demands.stage_count
        self._work = list(accumulate(demands.work, initial=0.0))
        holders = [p for p in view.peers.values() if p.state != "leaving" and p.span.first < self.stage_count]
        known = [p.capacity * self.work_of(p.span) for p in holders if p.capacity > 0]
        self.is_measured = bool(known) or own_speed > 0
        self.usual_speed = median(known) if known else own_speed or 1.0
        self.rates = [0.0] * self.stage_count
        self.holders = [0] * self.stage_count
        self.speed = 0.0
        """The sum of the holders' speeds."""
        for peer in sorted(holders, key=lambda p: p.peer):
            speed = self.speed_of(peer)
            self.add(peer.span, self.rate_at(peer.span, speed, peer.bandwidth))
            self.speed += speed
        self._scale_samples(view)

    def _scale_samples(self, view: View) -> None:
        """Scales rates and holders of each stage up to its estimated size, where only some of its peers are known.

        Sets `uncertainty`: three standard deviations of a stage's estimated rate, as a share of it, at the stage of
        which the least is known; n known peers of N stand for all of them to within about sqrt((1 - n / N) / n).
        """
        self.uncertainty, rates = 0.0, sum(self.rates)
        for stage, known in enumerate(self.holders):
            count = view.claimant_count(stage)
            if 0 < known < count:
                self.rates[stage] *= count / known
                self.holders[stage] = count
                self.uncertainty = max(self.uncertainty, 3.0 * math.sqrt((1.0 - known / count) / known))
        if rates > 0.0:
            self.speed *= sum(self.rates) / rates

    def work_of(self, span: Span) -> float:
        """Returns the work of one microbatch in the stages of `span` that the run has, in stages of mean work."""
        return max(self._work[min(span.last + 1, self.stage_count)] - self._work[span.first], 1e-9)

    def speed_of(self, peer: PeerView) -> float:
        """Returns the speed that the peer claims, in stages of mean work per second, as `believed_speed` bounds it."""
        known = peer.capacity * self.work_of(peer.span)
        return self.believed_speed(known)

    def believed_speed(self, claimed: float) -> float:
        """Returns the claimed speed, at most MAX_TIMES_USUAL times the usual one; the usual one if 0 is claimed."""
        return min(claimed, MAX_TIMES_USUAL * self.usual_speed) if claimed > 0 else self.usual_speed

    def rate_of(self, peer: PeerView) -> float:
        """Returns the peer's microbatches per second at its span."""
        return self.rate_at(peer.span, self.speed_of(peer), peer.bandwidth)

    def rate_at(self, span: Span, speed: float, bandwidth: float) -> float:
        """Returns the microbatches per second of a machine at `span`: the lesser of what it can compute and can send.

        It sends a boundary on unless it holds the last stage, and a gradient back unless it holds the first.
        """
        computed = speed / self.work_of(span)
        sent = ((span.first > 0) + (span.last < self.stage_count - 1)) * self.demands.boundary_bytes
        return min(computed, bandwidth / sent) if self.is_measured and bandwidth > 0 and sent > 0 else computed

    def add(self, span: Span, rate: float, holders: int = 1) -> None:
        """Adds `holders` holders of `span`, which together do `rate` microbatches per second."""
        for stage in range(span.first, min(span.last + 1, self.stage_count)):
            self.rates[stage] += rate
            self.holders[stage] += holders

    def remove(self, span: Span, rate: float) -> None:
        """Removes one holder of `span`, which does `rate` microbatches per second."""
        self.add(span, -rate, -1)

    @property
    def rate(self) -> float:
        """The microbatches per second of the slowest stage."""
        return max(0.0, min(self.rates))

    @property
    def even_rate(self) -> float:
        """The microbatches per second of every stage if the sum of all speeds could be divided among them freely."""
        return self.speed / self._work[-1]

    @property
    def thin_stages(self) -> list[int]:
        """The stages with fewer than ENOUGH_HOLDERS holders."""
        return [stage for stage, count in enumerate(self.holders) if count < ENOUGH_HOLDERS]

    # --- comparing

    def thinness(self, most: int, added: Span | None = None) -> tuple[int, ...]:
        """Returns how thin the run would be with one more holder of `added`; the lesser tuple is better, all 0 is best.

        Two numbers for the stages without a holder, then the same two for those with fewer than two holders: how many
        newcomers it takes to fill them, if each takes at most `most` stages in a row, and how many stages there are.
        """
        thinness: list[int] = []
        for least in range(1, ENOUGH_HOLDERS + 1):
            held = [count + (added is not None and s in added) >= least for s, count in enumerate(self.holders)]
            gaps = [len(list(run)) for is_held, run in groupby(held) if not is_held]
            thinness += [sum(-(-gap // most) for gap in gaps), sum(gaps)]
        return tuple(thinness)

    def levels(self, added: Span | None = None, rate: float = 0.0) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Returns (rates of the stages, numbers of holders), each in ascending order; the greater tuple is better.

        added, rate: one more holder, of this span with this rate, is counted. Rates are in units of the usual speed,
        rounded to a millionth.
        """
        rates = [r + rate * (added is not None and s in added) for s, r in enumerate(self.rates)]
        holders = [count + (added is not None and s in added) for s, count in enumerate(self.holders)]
        return tuple(sorted(round(r / self.usual_speed, 6) for r in rates)), tuple(sorted(holders))

    def best_spans(self, spans: Sequence[Span], speed: float, bandwidth: float) -> list[Span]:
        """Returns those of `spans` where one more machine of this speed and bandwidth helps most, with all ties.

        The least `thinness` comes first, then the greatest rate of the slowest stage, of the next slowest, and so on.
        Of many spans about MAX_COMPARED, evenly spaced, take part in the last comparison. spans: must not be empty.
        """
        if self.thin_stages:
            most = max(len(span) for span in spans)
            thinness = {span: self.thinness(most, span) for span in spans}
            least = min(thinness.values())
            spans = [span for span in spans if thinness[span] == least]
        rates = {span: self.rate_at(span, speed, bandwidth) for span in spans}
        slowest = self._slowest_with(rates)
        highest = max(slowest.values()) - 1e-6 * self.usual_speed
        raised = self._spans_that_leave_least_behind([span for span in spans if slowest[span] >= highest], rates)
        raised = raised[:: -(-len(raised) // MAX_COMPARED)]
        levels = {span: self.levels(span, rates[span]) for span in raised}
        best = max(levels.values())
        return [span for span in raised if levels[span] == best]

    def _spans_that_leave_least_behind(self, spans: list[Span], rates: dict[Span, float]) -> list[Span]:
        """Returns those of `spans` with which the fewest stages stay at the slowest rate; all of them if it is one.

        The slowest rate must be the same with each of them. This decides most cases before the rates of all stages
        have to be compared.
        """
        if len(spans) < 2:
            return spans
        slow = max(self._slowest_with({span: rates[span] for span in spans}).values()) + 1e-6 * self.usual_speed
        behind = list(accumulate((rate <= slow for rate in self.rates), initial=0))
        left = {
            span: behind[span.first]
            + (behind[-1] - behind[span.last + 1])
            + sum(self.rates[stage] + rates[span] <= slow for stage in span.stages)
            for span in spans
        }
        least = min(left.values())
        return [span for span in spans if left[span] == least]

    def _slowest_with(self, rates: dict[Span, float]) -> dict[Span, float]:
        """Returns, by span, the rate of the slowest stage if the span had one more holder, of the rate in `rates`."""
        before = list(accumulate(self.rates, min, initial=float("inf")))
        after = list(accumulate(reversed(self.rates), min, initial=float("inf")))[::-1]
        return {
            span: min(before[span.first], after[span.last + 1], rate + min(self.rates[span.first : span.last + 1]))
            for span, rate in rates.items()
        }


def spans_of_length(length: int, stage_count: int) -> list[Span]:
    """Returns all spans of `length` stages; of `stage_count` stages if `length` is greater."""
    length = min(length, stage_count)
    return [Span(first, first + length - 1) for first in range(stage_count - length + 1)]


def spans_that_fit(longest: Sequence[int]) -> list[Span]:
    """Returns spans that fit into a machine's memory, to choose from; [] if no stage fits. longest: as in Ability.

    From each first stage on: all lengths up to 8, then each about a quarter longer, and the longest.
    """
    stage_count = len(longest)
    spans = []
    for first, most in enumerate(longest):
        most = min(most, stage_count - first)
        spans += [Span(first, first + length - 1) for length in _lengths_to_try(most)]
    return spans


def _lengths_to_try(most: int) -> Iterable[int]:
    """Returns lengths from 1 to `most`: all up to 8, then each about a quarter longer, and `most`."""
    lengths, length = [], 1
    while length < most:
        lengths.append(length)
        length = max(length + 1, length * 5 // 4)
    return [*lengths, most] if most > 0 else []
