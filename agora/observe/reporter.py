"""Passes each event to every sink, from any thread and without ever failing, and counts it.

Knows: sinks, counters. Must not know: files, formats, the network.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agora.observe import events
from agora.observe.events import Event


class Sink(Protocol):
    """Takes events in the order in which they were reported. It is called under a lock, so it must be quick."""

    def take(self, event: Event, at_unix: float) -> None:
        """Takes one event. at_unix: the wall clock when it was reported, in seconds."""

    def close(self) -> None:
        """Ends the sink; nothing is given to it afterwards."""


class Reporter:
    """Passes the events of all rooms of a daemon to the sinks and the counters."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)
        self._lock = threading.Lock()
        self.counters = Counters()

    def report(self, event: Event) -> None:
        """Passes the event on. A sink that raises OSError is dropped, which is reported as DiskTrouble."""
        now = time.time()
        broken: list[tuple[Sink, OSError]] = []
        with self._lock:
            self.counters.take(event, now)
            for sink in self._sinks:
                try:
                    sink.take(event, now)
                except OSError as error:
                    broken.append((sink, error))
            for sink, _ in broken:
                self._sinks.remove(sink)
        for sink, reason in broken:
            self.report(events.DiskTrouble(str(getattr(sink, "path", "the log")), reason.strerror or str(reason)))

    def snapshot(self) -> Counters:
        """Returns a copy of the counters."""
        with self._lock:
            return copy.deepcopy(self.counters)

    def close(self) -> None:
        """Closes every sink. Events that are reported later are only counted."""
        with self._lock:
            sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()


SIGNS_OF_PROGRESS = (
    events.MicrobatchCompleted,
    events.MicrobatchCounted,
    events.MicrobatchRerouted,
    events.RepeatServed,
    events.StepTaken,
    events.StartStep,
)
"""The events that prove to the watchdog that the work makes progress."""


@dataclass
class OriginatedCounts:
    """Counts the microbatches that this peer originated for one purpose, "train" or "evaluate"."""

    started: int = 0
    completed: int = 0
    dropped: int = 0
    tokens: int = 0
    loss_sum: float = 0.0


@dataclass
class Counters:
    """Running totals of the events.

    counted: by stage, the microbatches whose gradient was added. steps: by stage, the newest step. stage_loss: the
    newest loss that the last stage reported, None before. last_sign_unix: time of the last sign of progress. failures:
    the newest 16 errors of tasks.
    """

    train: OriginatedCounts = field(default_factory=OriginatedCounts)
    evaluate: OriginatedCounts = field(default_factory=OriginatedCounts)
    rerouted: int = 0
    repeats: int = 0
    refused: int = 0
    counted: Counter[int] = field(default_factory=Counter)
    steps: dict[int, int] = field(default_factory=dict)
    last_step_unix: float | None = None
    counted_tokens: int = 0
    first_counted_unix: float | None = None
    last_sign_unix: float = 0.0
    stage_loss: float | None = None
    offences: Counter[str] = field(default_factory=Counter)
    start_steps: list[tuple[str, float]] = field(default_factory=list)
    first_hop_seconds: float | None = None
    failures: list[str] = field(default_factory=list)
    _started: dict[str, str] = field(default_factory=dict)

    def take(self, event: Event, at_unix: float) -> None:
        """Counts one event."""
        match event:
            case events.MicrobatchStarted(microbatch, purpose):
                self._started[microbatch] = purpose
                self._counts_for(purpose).started += 1
            case events.MicrobatchCompleted(microbatch, loss_sum, tokens, _, purpose):
                self._completed(microbatch, loss_sum, tokens, purpose)
            case events.MicrobatchDropped(microbatch, _):
                self._counts_for(self._started.pop(microbatch, "train")).dropped += 1
            case events.MicrobatchCounted(_, stages, tokens):
                self.counted.update(stages)
                self.counted_tokens += tokens
                self.first_counted_unix = self.first_counted_unix or at_unix
            case events.StepTaken(stage, step, _, loss):
                self.steps[stage] = step
                self.last_step_unix = at_unix
                self.stage_loss = self.stage_loss if loss is None else loss
            case _:
                self._take_rare(event)
        if isinstance(event, SIGNS_OF_PROGRESS):
            self.last_sign_unix = at_unix

    def _take_rare(self, event: Event) -> None:
        """Counts an event of the kinds that are rare."""
        match event:
            case events.MicrobatchRerouted():
                self.rerouted += 1
            case events.RepeatServed():
                self.repeats += 1
            case events.HopRefused():
                self.refused += 1
            case events.OffenceRecorded(_, offence):
                self.offences[offence] += 1
            case events.StartStep(name, seconds, _):
                self.start_steps = [*self.start_steps[-63:], (name, seconds)]  # a move adds some
            case events.FirstHopServed(_, seconds):
                self.first_hop_seconds = seconds
            case events.TaskFailed(task, error):
                self.failures = [*self.failures[-15:], f"{task}: {error}"]

    def _counts_for(self, purpose: str) -> OriginatedCounts:
        """Returns the counts of microbatches for a purpose."""
        return self.evaluate if purpose == "evaluate" else self.train

    def _completed(self, microbatch: str, loss_sum: float, tokens: int, purpose: str) -> None:
        """Counts a microbatch that has come back to its origin."""
        self._started.pop(microbatch, None)
        total = self._counts_for(purpose)
        total.completed += 1
        total.tokens += tokens
        total.loss_sum += loss_sum

    def summary(self) -> dict[str, Any]:
        """Returns the counters as JSON values; stage numbers become strings, as JSON requires of keys."""
        return {
            "microbatches": {
                "started": self.train.started,
                "completed": self.train.completed,
                "dropped": self.train.dropped,
                "in_flight": self.train.started - self.train.completed - self.train.dropped,
                "rerouted": self.rerouted,
                "repeats": self.repeats,
                "refused": self.refused,
            },
            "tokens": self.train.tokens,
            "evaluated": {"completed": self.evaluate.completed, "dropped": self.evaluate.dropped},
            "counted": {str(stage): count for stage, count in sorted(self.counted.items())},
            "steps": {str(stage): step for stage, step in sorted(self.steps.items())},
            "last_step_unix": self.last_step_unix,
            "offences": dict(self.offences),
            "start_steps": [{"name": name, "seconds": round(seconds, 4)} for name, seconds in self.start_steps],
            "first_hop_seconds": self.first_hop_seconds,
            "failures": list(self.failures),
        }
