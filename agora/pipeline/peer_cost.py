"""What one caller has learnt about one peer: how fast it is, how far, how busy, how reliable. Pure.

Knows: arithmetic on measured times. Must not know: a clock (`now` is an argument), stages, or how peers are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from agora.moving_average import MovingAverage

UNMEASURED_SERVICE_S = 0.25
"""Assumed device time per microbatch before any peer of the stage was measured."""
AVERAGE_WEIGHT = 0.1
BACKOFF_S = 0.25
MAX_BACKOFF_S = 60.0
MAX_BACKOFF_WITHOUT_SIBLING_S = 4.0
MIN_BUSY_S, MAX_BUSY_S = 0.01, 5.0
MINIMUM_WINDOW = 64


@dataclass(frozen=True, slots=True)
class RecentMinimum:
    """The minimum of the last MINIMUM_WINDOW to 2 * MINIMUM_WINDOW samples; infinite before the first."""

    value: float = math.inf
    recent: float = math.inf
    samples: int = 0

    def updated(self, sample: float) -> RecentMinimum:
        """Returns the minimum after one more sample. Every MINIMUM_WINDOW samples the older half is forgotten."""
        recent = min(self.recent, sample)
        if (self.samples + 1) % MINIMUM_WINDOW == 0:
            return RecentMinimum(recent, math.inf, self.samples + 1)
        return RecentMinimum(min(self.value, sample), recent, self.samples + 1)


@dataclass(frozen=True, slots=True)
class PeerCost:
    """What a caller knows about one peer of a later stage. Every update returns a new PeerCost.

    virtual_s: seconds of work charged to the peer so far. service_s: its device time per microbatch. round_trip_s,
    bytes_per_s: of the link, as far as they can be told apart. call_s: length of a whole call, everything downstream
    included. answers, seats: how often the peer has answered, and has taken a seat. open_calls: our calls that are
    open; call_limit: how many the peer lets us have, learnt from BUSY. queue: microbatches at its device at time
    `queue_at`; sent_since: ours that followed. failures: failed calls in a row, the last at failed_at; wasted_s: the
    longest time one of them took. seat_wait_s: time from sending a microbatch to hearing that it has a seat.
    """

    virtual_s: float = 0.0
    service_s: float = UNMEASURED_SERVICE_S
    round_trip_s: float = 0.0
    bytes_per_s: float = math.inf
    call_s: float = 0.0
    answers: int = 0
    seats: int = 0
    open_calls: int = 0
    call_limit: float = math.inf
    queue: int = 0
    queue_at: float = 0.0
    sent_since: int = 0
    failures: int = 0
    failed_at: float = 0.0
    wasted_s: float = 0.0
    busy_until: float = 0.0
    incarnation: int = 0
    seat_wait_s: RecentMinimum = RecentMinimum()

    # --- estimates

    def queue_now(self, now: float) -> float:
        """Returns the expected number of microbatches before ours: the reported queue, fading, plus what we sent since.

        It fades at a quarter of the peer's speed. At full speed a queue that other callers keep filling would be
        believed empty between any two of our calls.
        """
        served = 0.25 * (now - self.queue_at) / max(self.service_s, 1e-6)
        return max(0.0, self.queue - served) + self.sent_since

    def occupies_s(self, payload_bytes: int) -> float:
        """Returns the seconds for which a microbatch occupies the peer: its device or its link, whichever is slower."""
        return max(self.service_s, payload_bytes / self.bytes_per_s)

    def idle_finish_s(self, payload_bytes: int) -> float:
        """Returns the seconds from sending a microbatch to the end of its service when nothing else waits there."""
        return self.round_trip_s + payload_bytes / self.bytes_per_s + self.service_s

    def crossing_s(self, bytes_there: int, bytes_back: int, period_s: float) -> float:
        """Returns a microbatch's seconds on the link, both ways, without waiting: a round trip and two transfers.

        The transfers count as at most `period_s`, the time between two microbatches on this link: it carries them in
        that time, so anything longer in the shortest waits is a queue that never emptied.
        """
        if math.isinf(self.seat_wait_s.value):
            return self.round_trip_s
        round_trip = min(self.round_trip_s, self.seat_wait_s.value)
        transfer = (self.seat_wait_s.value - round_trip) * (1.0 + bytes_back / max(1, bytes_there))
        return round_trip + min(transfer, period_s)

    def backoff_s(self, healthy_siblings: bool) -> float:
        """Returns for how long to leave the peer alone: max(BACKOFF_S, wasted_s) * 2^(failures - 1), bounded.

        A peer that hangs until our deadline costs more than one that breaks at once, so it is asked more rarely.
        """
        longest = MAX_BACKOFF_S if healthy_siblings else MAX_BACKOFF_WITHOUT_SIBLING_S
        return min(longest, max(BACKOFF_S, self.wasted_s) * 2.0 ** min(self.failures - 1, 30))

    # --- updates

    def after_sending(self, floor_s: float, charge_s: float) -> PeerCost:
        """Returns the cost after a microbatch was sent, charged at once: max(virtual_s, floor_s) + charge_s."""
        virtual = max(self.virtual_s, floor_s) + charge_s
        return replace(self, virtual_s=virtual, open_calls=self.open_calls + 1, sent_since=self.sent_since + 1)

    def after_seat(
        self, now: float, queue: int, waited_s: float, payload_bytes: int, ping_s: float | None = None
    ) -> PeerCost:
        """Returns the cost after the peer took a seat `waited_s` after sending, with a queue of `queue` microbatches.

        The wait is split into `ping_s`, the round trip of an idle link, and the transfer of `payload_bytes`; without a
        measured ping all of it counts as round trip.
        """
        round_trip = waited_s if ping_s is None else min(waited_s, ping_s)
        transfer, rate = waited_s - round_trip, self.bytes_per_s
        if transfer > 0 and payload_bytes > 0:
            known = 0.0 if math.isinf(rate) else 1.0 / rate
            rate = 1.0 / _average(known, transfer / payload_bytes, self.seats)
        return replace(
            self,
            round_trip_s=_average(self.round_trip_s, round_trip, self.seats),
            bytes_per_s=rate,
            queue=queue,
            queue_at=now,
            sent_since=0,
            seats=self.seats + 1,
            seat_wait_s=self.seat_wait_s.updated(waited_s),
        )

    def after_answer(self, service_s: float, call_s: float) -> PeerCost:
        """Returns the cost after an answer that took `call_s`, of which the device by its own word took `service_s`."""
        return replace(
            self,
            service_s=_average(self.service_s, max(1e-6, min(service_s, call_s)), self.answers),
            call_s=_average(self.call_s, call_s, self.answers),
            answers=self.answers + 1,
            open_calls=self.open_calls - 1,
            failures=0,
            wasted_s=0.0,
            call_limit=self.call_limit + 0.5 / max(1.0, self.call_limit),
        )

    def after_no_work(self, charge_s: float) -> PeerCost:
        """Returns the cost after a call that ended without work, or that we left: the charge is taken back."""
        sent_since = max(0, self.sent_since - 1)
        return replace(self, virtual_s=self.virtual_s - charge_s, open_calls=self.open_calls - 1, sent_since=sent_since)

    def after_busy(self, now: float, charge_s: float, retry_after_s: float) -> PeerCost:
        """Returns the cost after BUSY: a short wait, and no more calls at a time than the peer has of ours now."""
        refunded = self.after_no_work(charge_s)
        busy_until = max(self.busy_until, now + min(max(retry_after_s, MIN_BUSY_S), MAX_BUSY_S))
        return replace(refunded, call_limit=float(max(1, refunded.open_calls)), busy_until=busy_until)

    def after_failure(self, now: float, wasted_s: float = 0.0, max_failures: int = 64) -> PeerCost:
        """Returns the cost after a call that failed after `wasted_s`; `failures` grows to at most `max_failures`.

        Failures within BACKOFF_S count once, because one broken connection fails all calls on it.
        """
        wasted = max(self.wasted_s, wasted_s)
        if self.failures and now < self.failed_at + BACKOFF_S:
            return replace(self, wasted_s=wasted)
        failures = min(self.failures + 1, max(max_failures, self.failures))
        return replace(self, failures=failures, failed_at=now, wasted_s=wasted)

    def after_restart(self, incarnation: int) -> PeerCost:
        """Returns the cost after the peer's daemon was restarted: failures are forgotten, its speed is kept."""
        return replace(
            self,
            incarnation=incarnation,
            failures=0,
            wasted_s=0.0,
            busy_until=0.0,
            call_limit=math.inf,
            queue=0,
            sent_since=0,
        )


def newcomer(siblings: Iterable[PeerCost], incarnation: int, capacity: float = 0.0) -> PeerCost:
    """Returns the first estimate of a peer: the median of its siblings in charged time, speed and distance.

    capacity: microbatches per second that the peer claims, 0 for unknown. It may only lower the expected speed, so that
    nobody gets more work by claiming more.
    """
    siblings = list(siblings)
    measured = [cost for cost in siblings if cost.answers]
    service = median(cost.service_s for cost in measured) if measured else UNMEASURED_SERVICE_S
    if capacity > 0:
        service = max(service, 1.0 / capacity) if measured else 1.0 / capacity
    return PeerCost(
        virtual_s=median(cost.virtual_s for cost in siblings) if siblings else 0.0,
        service_s=service,
        round_trip_s=median(cost.round_trip_s for cost in measured) if measured else 0.0,
        call_s=median(cost.call_s for cost in measured) if measured else 0.0,
        incarnation=incarnation,
    )


def _average(value: float, sample: float, samples: int) -> float:
    """Returns the moving average `value` of `samples` samples after one more; the first replaces an assumed value."""
    return MovingAverage(AVERAGE_WEIGHT, value, samples).updated(sample).value or 0.0
