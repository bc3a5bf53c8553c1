"""Claims about the closed list of events and the reporter."""

from __future__ import annotations

import dataclasses
import errno
import json
import threading
import typing

import pytest

from agora.observe import events, journal
from agora.observe.reporter import Reporter


def sample(cls: type[events.Event]) -> events.Event:
    """An instance with a plausible value in every field."""
    values = {"str": "word", "int": 3, "float": 0.5, "bool": True, "tuple[str, ...]": ("a",)}
    values |= {"tuple[int, ...]": (0, 1), "tuple[float, ...]": (0.5, 1.5)}
    chosen = {f.name: values[str(f.type).split(" | ")[0]] for f in dataclasses.fields(cls)}
    return cls(**chosen)


@pytest.mark.parametrize("cls", events.EVENTS.values(), ids=events.EVENTS)
def test_every_event_is_documented_frozen_and_survives_json(cls: type[events.Event]) -> None:
    assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "(")
    event = sample(cls)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, dataclasses.fields(cls)[0].name, "other")
    assert journal.from_json(json.loads(json.dumps(journal.to_json(event)))) == event
    assert "\n" not in event.describe()
    assert cls.level in typing.get_args(events.Level)


def test_an_event_from_elsewhere_is_refused() -> None:
    class Foreign(events.Event):
        what: str

    with pytest.raises(TypeError, match="closed list"):
        journal.to_json(Foreign("x"))


def test_unknown_names_and_shapes_read_as_nothing() -> None:
    assert journal.from_json({"event": "FromTheFuture"}) is None
    assert journal.from_json({"event": "StepTaken", "stage": 1}) is None
    assert journal.from_json({}) is None
    later = journal.to_json(events.PeerGone("p", "left")) | {"added_later": 1, "at_unix": 2.0}
    assert journal.from_json(later) == events.PeerGone("p", "left")


class Collecting:
    def __init__(self) -> None:
        self.taken: list[events.Event] = []

    def take(self, event: events.Event, at_unix: float) -> None:
        self.taken.append(event)


class Full:
    path = "/full/events.jsonl"

    def take(self, event: events.Event, at_unix: float) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_sink_without_space_is_left_out_and_that_is_told_once() -> None:
    sink = Collecting()
    reporter = Reporter([Full(), sink])
    reporter.report(events.PeerGone("p", "left"))
    reporter.report(events.PeerGone("q", "left"))
    troubles = [event for event in sink.taken if isinstance(event, events.DiskTrouble)]
    assert len(troubles) == 1
    assert "cannot write /full/events.jsonl: No space left on device" in troubles[0].describe()


def test_counters_add_up_what_origins_did() -> None:
    reporter = Reporter()
    for microbatch in ("a", "b", "c", "d"):
        reporter.report(events.MicrobatchStarted(microbatch))
    reporter.report(events.MicrobatchStarted("e", "evaluate"))
    reporter.report(events.MicrobatchCompleted("a", 10.0, 4, 0.1))
    reporter.report(events.MicrobatchCompleted("e", 9.0, 3, 0.1, "evaluate"))
    reporter.report(events.MicrobatchDropped("b", "no peer"))
    reporter.report(events.MicrobatchDropped("f", "no peer", "evaluate"))
    reporter.report(events.MicrobatchRerouted("c", 1, "p", "broken"))
    reporter.report(events.MicrobatchCounted("a", (0, 1), 4))
    reporter.report(events.StepTaken(0, 7, 4, None, 0.01))
    found = reporter.counters.summary()
    expected = {"started": 4, "completed": 1, "dropped": 1, "in_flight": 2, "rerouted": 1, "repeats": 0, "refused": 0}
    assert found["microbatches"] == expected
    assert found["tokens"] == 4 and found["counted"] == {"0": 1, "1": 1} and found["steps"] == {"0": 7}
    assert found["evaluated"] == {"completed": 1, "dropped": 1}
    json.dumps(found)


def test_reports_from_many_threads_are_all_counted() -> None:
    reporter = Reporter()
    threads = [
        threading.Thread(target=lambda: [reporter.report(events.RepeatServed("m", 0)) for _ in range(500)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reporter.counters.occurred["RepeatServed"] == 4000
