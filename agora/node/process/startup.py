"""What a daemon is started with, and the named and timed steps of its start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.core.clock import boot_time
from agora.node.paths import Home
from agora.node.process.watchdog import Notifier
from agora.node.runs import RunReference
from agora.node.settings import Settings
from agora.observe import events
from agora.observe.reporter import Reporter
from agora.swarm.swarm_clock import SwarmClock

WAIT_USEC = 300_000_000  # microseconds for which systemd waits for the next sign of a start's progress


@dataclass
class StepNote:
    """The result of a step of the start, in a few words: the step's block sets `text`, StartStep reports it."""

    text: str = ""


class StartSteps:
    """Times the steps of a start: `with steps.step("host") as note:` reports StartStep("host", seconds, note.text).

    `current` names the step that runs, and how far that is, or the step that failed; "" if none runs and none failed.
    """

    def __init__(self, report_event: events.Report, notifier: Notifier) -> None:
        self._report_event = report_event
        self._notifier = notifier
        self.current = ""

    @contextmanager
    def step(self, name: str) -> Iterator[StepNote]:
        """Notifies systemd of the step, times the block, and reports StartStep when the block ends without an error.

        Sets `current` to `name` meanwhile; after an error it keeps that name. Yields the note that StartStep reports.
        """
        note = StepNote()
        began = time.perf_counter()
        self.current = name
        self._notifier.send(STATUS=f"starting: {name}", EXTEND_TIMEOUT_USEC=WAIT_USEC)
        yield note
        self._report_event(events.StartStep(name, time.perf_counter() - began, note.text))
        self.current = ""

    def report_progress(self, text: str) -> None:
        """Reports to systemd how far the step is, so that systemd goes on waiting; sets `current` to "STEP: text"."""
        name = self.current.partition(":")[0]
        self.current = f"{name}: {text}"
        self._notifier.send(STATUS=f"starting: {self.current}", EXTEND_TIMEOUT_USEC=WAIT_USEC)


@dataclass(frozen=True, slots=True)
class Startup:
    """What a daemon is started with: its run, data directory, settings, key, where to report, and its start's steps."""

    reference: RunReference
    home: Home
    settings: Settings
    identity: Identity
    incarnation: int  # the unix time of the start, in nanoseconds, but greater than that of any earlier start
    clock: SwarmClock
    reporter: Reporter
    notifier: Notifier
    steps: StartSteps
    began_s: float = field(default_factory=boot_time)  # by the clock of `boot_time`

    def age_s(self) -> float:
        """Returns for how many seconds this daemon has run, pauses included."""
        return boot_time() - self.began_s

    @property
    def me(self) -> PeerId:
        return self.identity.peer

    def report_event(self, event: events.Event) -> None:
        """Reports an event to the journal, the log and the counters."""
        self.reporter.report(event)
