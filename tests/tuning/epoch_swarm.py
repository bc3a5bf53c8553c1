"""A swarm of origins in virtual time: speeds, deaths, joins, late and lost gossip, and what really happened."""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from agora.tuning.epochs.assigner import EpochAssigner

INTERVAL = 0.25
SESSIONS = itertools.count(1)


@dataclass
class SimulatedOrigin:
    """heard: bit n for the completion number n of the swarm's log, of which it knows by what was delivered to it.

    stalls: how often it could open a microbatch and found none.
    """

    name: str
    assigner: EpochAssigner
    seconds: float
    send_window: int
    open: set[int] = field(default_factory=set)
    heard: int = 0
    is_alive: bool = True
    is_paused: bool = False
    stalls: int = 0


@dataclass
class EpochSwarm:
    """log: the microbatch of every completion, in order. delay: seconds that gossip travels on average. noticed:
    seconds until a death is known. collisions: microbatches opened while another live origin had them open, or after
    they were done. lost_with_dead: completions of which the dead had told nobody.
    """

    count: int
    seed: int
    delay: float = 0.05
    loss: float = 0.0
    noticed: float = 2.0
    now: float = 0.0
    log: list[int] = field(default_factory=list)
    collisions: int = 0
    lost_with_dead: int = 0
    longest_state: int = 0
    origins: dict[str, SimulatedOrigin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._dead_at: dict[str, float] = {}
        self._known_done: set[int] = set()
        self.suspected: set[str] = set()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def join(
        self, name: str, seconds: float = 0.2, send_window: int = 2, snapshot: tuple[int, ...] | None = None
    ) -> None:
        """seconds: how long one microbatch takes on average, with `send_window` of them in flight."""
        origin = SimulatedOrigin(name, EpochAssigner(self.seed, name, next(SESSIONS), self.count), seconds, send_window)
        if snapshot is not None:
            origin.assigner.restore(snapshot)
        self.origins[name] = origin
        self._dead_at.pop(name, None)
        self.at(self.now + self.rng.random() * INTERVAL, lambda: self._gossip(origin))
        self.at(self.now, lambda: self._fill(origin))

    def kill(self, name: str) -> None:
        origin = self.origins[name]
        origin.is_alive = False
        self._dead_at[name] = self.now
        self.lost_with_dead += (origin.heard & ~self._heard_by_alive()).bit_count()
        self._known_done = set(self.known_completions())

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.now = until

    def restart(self) -> None:
        """Kills all at once, and starts them again from the snapshots that they had made at that moment."""
        former = self.alive()
        snapshots = [origin.assigner.snapshot() for origin in former]
        for origin in former:
            origin.is_alive = False
        for origin, snapshot in zip(former, snapshots, strict=True):
            self.join(origin.name, origin.seconds, origin.send_window, snapshot)
            self.origins[origin.name].heard = origin.heard

    def settle(self) -> None:
        """Opens nothing more, waits for what is open, and gossips without loss until all know the same."""
        self.loss = 0.0
        for origin in self.alive():
            origin.is_paused = True
        self.run(self.now + 60 * max(origin.seconds for origin in self.alive()))
        assert not any(origin.open for origin in self.alive())

    def alive(self) -> list[SimulatedOrigin]:
        return [origin for origin in self.origins.values() if origin.is_alive]

    def live_names(self) -> set[str]:
        """A death is noticed after `noticed` seconds, by all at once."""
        return {
            name
            for name, origin in self.origins.items()
            if (origin.is_alive or self.now < self._dead_at[name] + self.noticed) and name not in self.suspected
        }

    def _fill(self, origin: SimulatedOrigin) -> None:
        while origin.is_alive and not origin.is_paused and len(origin.open) < origin.send_window:
            number = origin.assigner.take_next(self.live_names())
            if number is None:
                origin.stalls += 1
                return
            self.collisions += number in self._known_done or any(number in other.open for other in self.alive())
            origin.open.add(number)
            took = origin.seconds * self.rng.uniform(0.5, 1.5) * origin.send_window
            self.at(self.now + took, lambda number=number: self._complete(origin, number))

    def _complete(self, origin: SimulatedOrigin, number: int) -> None:
        if origin.is_alive:
            origin.open.remove(number)
            origin.heard |= 1 << len(self.log)
            self.log.append(number)
            self._known_done.add(number)
            origin.assigner.mark_completed(number)
            self._fill(origin)

    def _gossip(self, origin: SimulatedOrigin) -> None:
        if not origin.is_alive:
            return
        told, heard = origin.assigner.next_state(), origin.heard
        self.longest_state = max(self.longest_state, len(told))
        for other in self.alive():
            if other is not origin and self.rng.random() >= self.loss:
                arrival = self.now + self.rng.uniform(0.5, 1.5) * self.delay
                self.at(arrival, lambda other=other: self._deliver(other, origin, told, heard))
        self.at(self.now + INTERVAL, lambda: self._gossip(origin))
        self._fill(origin)

    def _deliver(self, to: SimulatedOrigin, sender: SimulatedOrigin, told: tuple[int, ...], heard: int) -> None:
        if to.is_alive:
            to.assigner.merge(sender.name, told)
            to.heard |= heard
            self._fill(to)

    def check(self) -> None:
        """Asserts, after `settle`, that the counts are what happened, and that no complete epoch lacks a microbatch."""
        known = self.known_completions()
        for origin in self.alive():
            counts = origin.assigner.counts()
            assert counts.seen == len(known)
            assert counts.repeated == sum(known.values()) - len(known)
            assert counts.samples == sum(known.values())
            assert not any(epoch.in_flight for epoch in counts.epochs)
            assert counts.missed == sum(epoch.not_started for epoch in counts.epochs[:-1])
            first = counts.epochs[0].epoch if counts.epochs else counts.seen // self.count
            assert all(number in known for number in range(first * self.count))
        repeated = len(self.log) - len(set(self.log))
        assert repeated <= self.collisions + self.lost_with_dead

    def known_completions(self) -> Counter[int]:
        """How often each microbatch was completed, as far as the live origins together know."""
        heard = self._heard_by_alive()
        return Counter(number for place, number in enumerate(self.log) if heard >> place & 1)

    def _heard_by_alive(self) -> int:
        return functools.reduce(int.__or__, (origin.heard for origin in self.alive()), 0)
