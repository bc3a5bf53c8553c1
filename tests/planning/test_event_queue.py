"""Simulated time: order, and deadlines that are removed."""

from __future__ import annotations

from agora.planning.simulator.event_queue import EventQueue, TimingWheel
from agora.planning.simulator.simulated_machine import JobOrder, SimulatedDevice


def test_events_happen_in_order_of_time_and_then_of_their_adding() -> None:
    queue, seen = EventQueue(), []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "never")):
        queue.at(time, seen.append, name)
    queue.run(5.0)
    assert seen == ["a", "b", "c"] and queue.now == 5.0


def test_a_deadline_that_was_removed_does_not_pass() -> None:
    queue, seen = EventQueue(), []
    wheel: TimingWheel[str] = TimingWheel(queue, seen.append, grain_s=0.5)
    wheel.add("stays", 1.2)
    wheel.add("goes", 1.2)
    wheel.remove("goes")
    queue.run(1.4)
    assert seen == []
    queue.run(1.5)
    assert seen == ["stays"]


def test_a_deadline_may_remove_another_that_passes_with_it() -> None:
    queue, seen = EventQueue(), []

    def passed(key: str) -> None:
        seen.append(key)
        wheel.remove("second")

    wheel: TimingWheel[str] = TimingWheel(queue, passed)
    wheel.add("first", 1.0)
    wheel.add("second", 1.0)
    queue.run(2.0)
    assert seen == ["first"]


def test_a_device_runs_backwards_before_forwards() -> None:
    queue, ended = EventQueue(), []
    device = SimulatedDevice(queue)

    def done(name: str) -> None:
        ended.append((queue.now, name))

    device.submit(JobOrder.FORWARD, 1.0, done, "first")
    device.submit(JobOrder.FORWARD, 1.0, done, "forward")
    device.submit(JobOrder.BACKWARD, 2.0, done, "backward")
    assert device.queue_length == 3
    queue.run(10.0)
    assert ended == [(1.0, "first"), (3.0, "backward"), (4.0, "forward")]


def test_a_stopped_device_tells_of_nothing_more() -> None:
    queue, ended = EventQueue(), []
    device = SimulatedDevice(queue)
    device.submit(JobOrder.FORWARD, 1.0, ended.append, "job")
    device.stop()
    queue.run(10.0)
    assert ended == []
