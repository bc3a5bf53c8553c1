"""What a device's time is spent on: its jobs, and what it waits for when it has none. Deterministic."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

RECENT_WINDOW_S: Final = 60.0
LEAST_APART_S: Final = 1.0  # between two accounts that are kept to tell the recent part, however often it is asked for
WORDS: Final = {
    "microbatches": "microbatches",
    "mean": "a mean gradient",
    "peer": "the stages after it",
    "wire": "the wire to them",
}


class DeviceTime(NamedTuple):
    """Seconds of one device. The fields between `seconds` and `queued` add up to `seconds`.

    | field | the device |
    |---|---|
    | busy | runs a job |
    | microbatches | has no job, and this machine no microbatch: those before it send none |
    | mean | has no job: microbatches are held, or the origin opens none, until a mean gradient is applied |
    | peer | has no job: all microbatches here are computed, or wait, at the stages after it |
    | wire | the same, for the part of that time that they are on their way there or back |

    queued: how long jobs waited for the device, summed over all jobs.
    """

    seconds: float = 0.0
    busy: float = 0.0
    microbatches: float = 0.0
    mean: float = 0.0
    peer: float = 0.0
    wire: float = 0.0
    queued: float = 0.0

    def since(self, earlier: DeviceTime) -> DeviceTime:
        """Returns what came after `earlier`, an account of the same device."""
        return DeviceTime(*(max(0.0, new - old) for new, old in zip(self, earlier, strict=True)))

    def describe(self, least: float = 0.05) -> str:
        """Returns what the device waits for, in words, with its share of the time; "" if no share is `least`."""
        shares = {cause: getattr(self, cause) / self.seconds for cause in WORDS} if self.seconds else {}
        return ", ".join(f"{share:.0%} for {WORDS[cause]}" for cause, share in shares.items() if share >= least)


class DeviceTimeAccount:
    """Adds up, change by change, what a device without a job waits for. All times are on one clock."""

    def __init__(self, now: float) -> None:
        self._began = self._changed_at = now
        self._jobs = self._held = self._away = 0
        self._awaits_mean = False
        self._idle = {"microbatches": 0.0, "mean": 0.0, "away": 0.0}
        self._away_s = self._wire_s = 0.0  # of all microbatches that have come back
        self._recent: deque[tuple[float, DeviceTime]] = deque([(now, DeviceTime())])

    def change(self, now: float, *, jobs: int = 0, held: int = 0, away: int = 0) -> None:
        """Notes that there are so many more, or fewer, microbatches.

        jobs: those at the device or in its queue. held: until a mean is applied. away: at the stages after this one.
        """
        self._settle(now)
        self._jobs, self._held, self._away = self._jobs + jobs, self._held + held, self._away + away

    def set_awaits_mean(self, now: float, awaits_mean: bool) -> None:
        """Notes whether the origin opens no microbatch before a mean is applied."""
        self._settle(now)
        self._awaits_mean = awaits_mean

    def record_return(self, away_s: float, wire_s: float) -> None:
        """Notes that a microbatch came back from the stages after this one, which took `wire_s` on the link."""
        self._away_s += away_s
        self._wire_s += min(wire_s, away_s)

    def total(self, now: float, busy_s: float, queued_s: float) -> DeviceTime:
        """Returns the account since the start. busy_s, queued_s: of the device since then.

        The measured idle time is divided among the causes in the proportions that this account has seen.
        """
        self._settle(now)
        seconds = now - self._began
        busy_s = min(busy_s, seconds)
        known_s = sum(self._idle.values())
        factor = (seconds - busy_s) / known_s if known_s else 0.0
        away = self._idle["away"] * factor
        wire = away * self._wire_s / self._away_s if self._away_s else 0.0
        mean = self._idle["mean"] * factor
        return DeviceTime(
            seconds, busy_s, max(0.0, seconds - busy_s - mean - away), mean, max(0.0, away - wire), wire, queued_s
        )

    def recent(self, now: float, total: DeviceTime) -> DeviceTime:
        """Returns the part of `total`, the account since the start, of about the last RECENT_WINDOW_S."""
        if now - self._recent[-1][0] >= LEAST_APART_S:
            self._recent.append((now, total))
        while len(self._recent) > 2 and now - self._recent[0][0] > RECENT_WINDOW_S:
            self._recent.popleft()
        return total.since(self._recent[0][1])

    def _settle(self, now: float) -> None:
        if not self._jobs:
            cause = "mean" if self._held or self._awaits_mean else "away" if self._away else "microbatches"
            self._idle[cause] += now - self._changed_at
        self._changed_at = now
