"""Passes each event from any thread to every sink, and counts it. A sink that cannot write is dropped."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agora.observe import events
from agora.observe.events import Event


class Sink(Protocol):
    """What a Reporter passes each event to, in the order of the reports: the journal, the log."""

    def take(self, event: Event, at_unix: float) -> None:
        """Takes one event, quickly, since a lock is held. Raises OSError if it cannot; the reporter then drops this
        sink.
        """


class Reporter:
    """Counts events and passes each to every sink. Thread-safe."""

    def __init__(self, sinks: Sequence[Sink] = (), unix: Callable[[], float] = time.time) -> None:
        """unix: the present time in unix seconds; called once for each event."""
        self._sinks = list(sinks)
        self._unix = unix
        self._lock = threading.Lock()
        self.counters = Counters()

    def report(self, event: Event) -> None:
        """Drops a sink that raises OSError for good, and reports DiskTrouble to the others."""
        now = self._unix()
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
        with self._lock:
            return copy.deepcopy(self.counters)


# The events that prove to the watchdog that the work makes progress. Retries and answers from the cache prove nothing:
# a daemon whose microbatches all fail has such events too.
SIGNS_OF_PROGRESS = (
    events.MicrobatchCompleted,
    events.MicrobatchCounted,
    events.StepTaken,
    events.StartStep,
)


@dataclass
class Counters:
    """Running totals of a daemon's events, changed by `take`; of microbatches unless their comment differs."""

    occurred: Counter[str] = field(default_factory=Counter)  # all events, by name
    started: Counter[str] = field(default_factory=Counter)  # by purpose: those that this peer originated
    completed: Counter[str] = field(default_factory=Counter)  # by purpose: originated here and answered
    dropped: Counter[str] = field(default_factory=Counter)  # by purpose: originated here and given up
    tokens: int = 0  # of the completed microbatches with purpose "train"
    counted: Counter[int] = field(default_factory=Counter)  # by stage: those whose gradient this peer added
    counted_tokens: int = 0  # of the counted microbatches; each microbatch once, in however many stages
    first_counted_unix: float | None = None  # when the first was counted
    steps: dict[int, int] = field(default_factory=dict)  # by stage: the newest optimizer step
    stage_loss: float | None = None  # the newest mean loss per token that the last stage reported
    last_sign_unix: float = 0.0  # when the last of SIGNS_OF_PROGRESS came
    offences: Counter[str] = field(default_factory=Counter)  # violations by other peers, by kind
    samples: events.SamplesCounted | None = None  # the newest event of this kind

    def take(self, event: Event, at_unix: float) -> None:
        self.occurred[type(event).__name__] += 1
        if isinstance(event, SIGNS_OF_PROGRESS):
            self.last_sign_unix = at_unix
        match event:
            case events.MicrobatchStarted(_, purpose):
                self.started[purpose] += 1
            case events.MicrobatchCompleted(_, _, tokens, _, purpose, _):
                self.completed[purpose] += 1
                self.tokens += tokens if purpose == "train" else 0
            case events.MicrobatchDropped(_, _, purpose):
                self.dropped[purpose] += 1
            case events.MicrobatchCounted(_, stages, tokens):
                self.counted.update(stages)
                self.counted_tokens += tokens
                self.first_counted_unix = self.first_counted_unix or at_unix
            case events.StepTaken(stage, step, _, loss):
                self.steps[stage] = step
                self.stage_loss = self.stage_loss if loss is None else loss
            case events.OffenceRecorded(_, offence):
                self.offences[offence] += 1
            case events.SamplesCounted():
                self.samples = event

    def summary(self) -> dict[str, Any]:
        """ "rerouted", "repeats" and "refused" count all purposes, the others training. Stages' numbers are strings."""
        started, completed, dropped = (counts["train"] for counts in (self.started, self.completed, self.dropped))
        return {
            "microbatches": {
                "started": started,
                "completed": completed,
                "dropped": dropped,
                "in_flight": started - completed - dropped,
                "rerouted": self.occurred["MicrobatchRerouted"],
                "repeats": self.occurred["RepeatServed"],
                "refused": self.occurred["HopRefused"],
            },
            "tokens": self.tokens,
            "evaluated": {"completed": self.completed["evaluate"], "dropped": self.dropped["evaluate"]},
            "counted": {str(stage): count for stage, count in sorted(self.counted.items())},
            "steps": {str(stage): step for stage, step in sorted(self.steps.items())},
            "offences": dict(self.offences),
        }
