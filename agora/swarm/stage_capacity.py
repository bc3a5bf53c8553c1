"""Computes each stage's number of peers and microbatches per second, and where one more machine helps most.

Rates add up: a stage's rate is the sum of the rates of its holders, and the swarm's rate is that of its slowest stage
(Petals, arXiv 2312.08361, appendix, places servers by the same sums).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median

from agora_protocol.ids import Span

from agora.swarm.view import PeerView, View

ENOUGH_HOLDERS = 2  # A stage with fewer holders is thin: the next death could stop the swarm
# A peer's claimed speed counts as at most this many times the median: one claim must not hide that a stage is slow.
MAX_TIMES_USUAL = 4.0
# Maximum number of spans compared by the rates of all stages, among those that raise the swarm's rate equally.
MAX_COMPARED = 256


@dataclass(frozen=True, slots=True)
class StageNeeds:
    """What the stages of a run need of a machine."""

    work: tuple[float, ...]  # for each stage, the computation of one microbatch, as a multiple of the mean over stages
    # Bytes of one microbatch's boundary (what one stage sends to the next) or of its gradient, whichever is more.
    boundary_bytes: float
    state_bytes: tuple[float, ...]  # for each stage, the bytes that a newcomer fetches from a replica

    @property
    def stage_count(self) -> int:
        return len(self.work)


def equal_needs(stage_count: int) -> StageNeeds:
    """Returns the needs of `stage_count` stages of equal work whose boundaries and states have 0 bytes."""
    return StageNeeds((1.0,) * stage_count, 0.0, (0.0,) * stage_count)


@dataclass(frozen=True, slots=True)
class MachineCapacity:
    """What one machine can do."""

    # Microbatches per second for one stage of mean work; 0 for unknown: then the median of other peers counts.
    speed: float
    bandwidth: float  # bytes per second of the uplink; 0 for unknown: then it bounds nothing
    # For each stage of the run, how many consecutive stages, from this one on, fit into memory; 0 for none.
    max_span_lengths: tuple[int, ...]


class StageCapacity:
    """The holders of each stage (peers that serve it or are joining), and their summed rate in microbatches per second.

    Counted from a view, and then changed by `add` and `remove` to compare placements. A peer's speed is its
    microbatches per second for one stage of mean work.
    """

    def __init__(self, view: View, needs: StageNeeds, own_speed: float = 0.0) -> None:
        """own_speed: the asking peer's, 0 if unknown. It counts only where the view has no known speed."""
        self.needs = needs
        self.stage_count = needs.stage_count
        self._work = list(accumulate(needs.work, initial=0.0))
        holders = [p for p in view.peers.values() if p.state != "leaving" and p.span.first < self.stage_count]
        known = [p.capacity * self.work_of(p.span) for p in holders if p.capacity > 0]
        # Whether some speed is known, so that rates are microbatches per second.
        self.is_measured = bool(known) or own_speed > 0
        # The median of the known speeds; without any, own_speed; without that, 1, so that rates count holders.
        self.usual_speed = median(known) if known else own_speed or 1.0
        self.rates = [0.0] * self.stage_count
        # Rates and holders by stage; if only some of a stage's peers are read, scaled up to its estimated size.
        self.holders = [0] * self.stage_count
        self.speed = 0.0  # the sum of the holders' speeds
        for peer in sorted(holders, key=lambda p: p.peer):
            speed = self.speed_of(peer)
            self.add(peer.span, self.rate_at(peer.span, speed, peer.bandwidth))
            self.speed += speed
        self._scale_samples(view)

    def _scale_samples(self, view: View) -> None:
        # Where only n of a stage's N peers are known, its rate and holders are scaled up. `uncertainty` is the relative
        # error that this may cause: three standard deviations, at the stage where it is greatest.
        self.uncertainty = 0.0
        rates = sum(self.rates)
        for stage, known in enumerate(self.holders):
            count = view.claimant_count(stage)
            if 0 < known < count:
                self.rates[stage] *= count / known
                self.holders[stage] = count
                self.uncertainty = max(self.uncertainty, 3.0 * math.sqrt((1.0 - known / count) / known))
        if rates > 0.0:
            self.speed *= sum(self.rates) / rates

    def work_of(self, span: Span) -> float:
        """Returns the work of one microbatch in `span`, as a multiple of that in a stage of mean work; at least 1e-9.

        The span's first stage must be in the run; later ones that are not are left out.
        """
        return max(self._work[min(span.last + 1, self.stage_count)] - self._work[span.first], 1e-9)

    def speed_of(self, peer: PeerView) -> float:
        """Returns the peer's claimed speed, within what is plausible. Its span must begin in the run."""
        return self.plausible_speed(peer.capacity * self.work_of(peer.span))

    def plausible_speed(self, claimed: float) -> float:
        """Returns the claimed speed, at most MAX_TIMES_USUAL * usual_speed; usual_speed for 0 (unknown)."""
        return min(claimed, MAX_TIMES_USUAL * self.usual_speed) if claimed > 0 else self.usual_speed

    def rate_of(self, peer: PeerView) -> float:
        """Returns the peer's microbatches per second at the span that it claims, by its claimed speed and bandwidth."""
        return self.rate_at(peer.span, self.speed_of(peer), peer.bandwidth)

    def rate_at(self, span: Span, speed: float, bandwidth: float) -> float:
        """Returns the microbatches per second of a machine at `span`: the lesser of what it can compute and can send.

        For each microbatch it sends a boundary on unless it holds the last stage, and a gradient back unless it holds
        the first. bandwidth: bytes per second; without effect for 0 (unknown), and if no peer's speed is known.
        """
        computed = speed / self.work_of(span)
        sent = ((span.first > 0) + (span.last < self.stage_count - 1)) * self.needs.boundary_bytes
        return min(computed, bandwidth / sent) if self.is_measured and bandwidth > 0 and sent > 0 else computed

    def add(self, span: Span, rate: float, holders: int = 1) -> None:
        """Adds `holders` holders, which together do `rate` microbatches per second, to the stages of `span`."""
        for stage in range(span.first, min(span.last + 1, self.stage_count)):
            self.rates[stage] += rate
            self.holders[stage] += holders

    def remove(self, span: Span, rate: float) -> None:
        self.add(span, -rate, -1)

    def without(self, span: Span, rate: float) -> StageCapacity:
        """Returns a copy after `remove`."""
        copied = copy.copy(self)
        copied.rates, copied.holders = list(self.rates), list(self.holders)
        copied.remove(span, rate)
        return copied

    @property
    def rate(self) -> float:
        return max(0.0, min(self.rates))

    @property
    def even_rate(self) -> float:
        # The rate of every stage if all speed could be divided freely.
        return self.speed / self._work[-1]

    @property
    def thin_stages(self) -> list[int]:
        return [stage for stage, count in enumerate(self.holders) if count < ENOUGH_HOLDERS]

    # --- comparing

    def thinness(self, max_length: int, added: Span | None = None) -> tuple[int, ...]:
        """Returns a key of how thin the run would be with one more holder of `added`; the lesser tuple is better.

        Four numbers, all 0 at best: two for the stages without a holder, then the same two for those with fewer than
        two. The first is how many newcomers it takes to fill them, if each takes at most `max_length` stages in a row,
        the second how many such stages there are.
        """
        thinness: list[int] = []
        for least in range(1, ENOUGH_HOLDERS + 1):
            held = [count + (added is not None and s in added) >= least for s, count in enumerate(self.holders)]
            gaps = [len(list(group)) for is_held, group in groupby(held) if not is_held]
            thinness += [sum(-(-gap // max_length) for gap in gaps), sum(gaps)]
        return tuple(thinness)

    def balance_key(self, added: Span | None = None, rate: float = 0.0) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Returns a key of how well the slowest stages do with one more holder of `added`; the greater one is better.

        The key is (rates of all stages, numbers of holders of all stages), each in ascending order; rates are in units
        of the usual speed, rounded to a millionth.
        """
        rates = [r + rate * (added is not None and s in added) for s, r in enumerate(self.rates)]
        holders = [count + (added is not None and s in added) for s, count in enumerate(self.holders)]
        return tuple(sorted(round(r / self.usual_speed, 6) for r in rates)), tuple(sorted(holders))

    def best_spans(self, spans: Sequence[Span], speed: float, bandwidth: float) -> list[Span]:
        """Returns those of `spans` where one more machine of this speed and bandwidth helps most, with all ties.

        It compares them by the least `thinness` if a stage is thin; then by the greatest rate of the slowest stage;
        then by the fewest stages that stay at that rate; then by the greatest `balance_key`, of MAX_COMPARED spans at
        most, evenly spaced.
        """
        if self.thin_stages:
            max_length = max(len(span) for span in spans)
            thinness = {span: self.thinness(max_length, span) for span in spans}
            least = min(thinness.values())
            spans = [span for span in spans if thinness[span] == least]
        rates = {span: self.rate_at(span, speed, bandwidth) for span in spans}
        slowest = self._slowest_with(rates)
        highest = max(slowest.values()) - 1e-6 * self.usual_speed
        raised = self._spans_that_leave_least_behind([span for span in spans if slowest[span] >= highest], rates)
        raised = raised[:: -(-len(raised) // MAX_COMPARED)]
        keys = {span: self.balance_key(span, rates[span]) for span in raised}
        best = max(keys.values())
        return [span for span in raised if keys[span] == best]

    def _spans_that_leave_least_behind(self, spans: list[Span], rates: dict[Span, float]) -> list[Span]:
        # This decides most cases before the rates of all stages have to be compared. The slowest stage must have the
        # same rate with each of the spans.
        if len(spans) < 2:
            return spans
        slow = max(self._slowest_with({span: rates[span] for span in spans}).values()) + 1e-6 * self.usual_speed
        behind = list(accumulate((rate <= slow for rate in self.rates), initial=0))
        behind_with = {
            span: behind[span.first]
            + (behind[-1] - behind[span.last + 1])
            + sum(self.rates[stage] + rates[span] <= slow for stage in span.stages)
            for span in spans
        }
        least = min(behind_with.values())
        return [span for span in spans if behind_with[span] == least]

    def _slowest_with(self, rates: dict[Span, float]) -> dict[Span, float]:
        before = list(accumulate(self.rates, min, initial=float("inf")))
        after = list(accumulate(reversed(self.rates), min, initial=float("inf")))[::-1]
        return {
            span: min(before[span.first], after[span.last + 1], rate + min(self.rates[span.first : span.last + 1]))
            for span, rate in rates.items()
        }


def spans_of_length(length: int, stage_count: int) -> list[Span]:
    """Returns all spans of `length` stages in a run of `stage_count`, by first stage; at least that of all stages."""
    length = min(length, stage_count)
    return [Span(first, first + length - 1) for first in range(stage_count - length + 1)]


def spans_that_fit(max_lengths: Sequence[int]) -> list[Span]:
    """Returns spans that fit into a machine's memory, to choose from; [] if no stage fits.

    From each first stage on, all lengths up to 8, then lengths each about a quarter greater, and the greatest that
    fits. max_lengths: see MachineCapacity.max_span_lengths.
    """
    stage_count = len(max_lengths)
    spans = []
    for first, max_length in enumerate(max_lengths):
        max_length = min(max_length, stage_count - first)
        spans += [Span(first, first + length - 1) for length in _lengths_to_try(max_length)]
    return spans


def _lengths_to_try(max_length: int) -> Iterable[int]:
    lengths, length = [], 1
    while length < max_length:
        lengths.append(length)
        length = max(length + 1, length * 5 // 4)
    return [*lengths, max_length] if max_length > 0 else []
