"""The daemon's own look at itself, every second: what systemd is told, what it waits for, how healthy the swarm is.

Knows: facts. Must not know: how they came about. It feeds the watchdog only where the work itself proves progress or
states its wait (service.may_pat); that this loop runs proves nothing.
"""

from __future__ import annotations

import asyncio
import time

from agora.node import runs
from agora.node.facts import Facts
from agora.node.parts import Early, Parts, Where
from agora.node.service import Notifier, Pulse, may_pat
from agora.observe import events
from agora.observe.events import Report
from agora.observe.report import Counters

TICK_S = 1.0
TRAFFIC_S = 2.0
REMEMBER_S = 15.0
LONELY_S = 10.0
SILENCE_S = 30.0
TRIPS = 10.0


class Heart:
    """`beat` until cancelled."""

    def __init__(
        self, where: Where, early: Early, facts: Facts, counters: Counters, report: Report, notifier: Notifier
    ) -> None:
        self._where = where
        self._early = early
        self._facts = facts
        self._counters = counters
        self._report = report
        self._notifier = notifier
        self._health = ""
        self._waiting = ""
        self._served = False
        self._traffic = (0, 0, 0, 0, 0)
        self._next: dict[str, float] = {}

    async def beat(self, parts: Parts) -> None:
        """One look each second."""
        began_unix = self._where.incarnation / 1e9
        while True:
            now = asyncio.get_running_loop().time()
            self._facts.rate.look(now, self._counters.counted_tokens)
            self._first_hop(parts, began_unix)
            self._judge()
            self._wait_for(parts)
            self._feed(parts)
            if self._due("traffic", TRAFFIC_S, now):
                self.tell_traffic(parts)
            if self._due("remember", REMEMBER_S, now):
                await asyncio.to_thread(self._remember)
            if self._due("meet", LONELY_S, now):
                await self._meet(parts)
            await asyncio.sleep(TICK_S)

    def _due(self, what: str, every_s: float, now: float) -> bool:
        if now < self._next.get(what, 0.0):
            return False
        self._next[what] = now + every_s
        return True

    def _first_hop(self, parts: Parts, began_unix: float) -> None:
        first = self._counters.first_counted_unix
        if first is not None and not self._served:
            self._served = True
            self._report(events.FirstHopServed(parts.span.first, first - began_unix))

    def _judge(self) -> None:
        health = self._facts.health(time.time())
        if health.state != self._health:
            self._health = health.state
            self._report(events.HealthChanged(health.state, health.why, health.do))

    def _wait_for(self, parts: Parts) -> None:
        """A stage with nobody is a stated wait."""
        view, stages = parts.membership.view, range(parts.signed.manifest.stage_count)
        empty = [stage for stage in stages if not view.replicas(stage)]
        waiting = f"a peer of stage {empty[0]}" if empty else ""
        if waiting != self._waiting:
            self._waiting = waiting
            self._report(events.Waiting(waiting))

    def _feed(self, parts: Parts) -> None:
        trip_s = parts.hop.path_s() or 0.0
        silence_s = max(self._notifier.watchdog_s / 2 or SILENCE_S, TRIPS * trip_s)
        now_unix = time.time()
        pulse = Pulse(now_unix, self._counters.last_sign_unix, parts.in_hand, self._waiting, self._facts.paused)
        fed, sentence = may_pat(pulse, silence_s)
        if fed:
            self._notifier.send(WATCHDOG=1)
            if not self._served:
                self._notifier.send(EXTEND_TIMEOUT_USEC=120_000_000)
        steps = ", ".join(f"stage {stage} step {step}" for stage, step in sorted(self._counters.steps.items()))
        rate = f"{self._facts.rate.per_second:.0f} tokens/s"
        status = f"{self._health}: {sentence}; {steps or 'no step yet'}; {rate}"
        if self._served:  # said again each time: a datagram may be lost, and saying it twice means nothing
            self._notifier.send(READY=1, STATUS=status)
        else:
            self._notifier.send(STATUS=status)

    def tell_traffic(self, parts: Parts) -> None:
        """Puts the byte counters into the journal, where they survive a kill."""
        network = parts.network.statistics()
        meter = parts.meter
        own = (meter.averaging_bytes, meter.state_bytes)
        traffic = (meter.boundary_bytes, network.bytes_out, network.bytes_in, *own)
        if traffic != self._traffic:
            self._traffic = traffic
            self._report(events.Traffic(*traffic))

    async def _meet(self, parts: Parts) -> None:
        """Who is alone in the directory asks again at every address it knows; a swarm never stays in two halves so."""
        if self._early.others and parts.directory.neighbours == 0:
            await parts.directory.bootstrap(self._early.others, timeout_s=2.0)

    def _remember(self) -> None:
        """Keeps addresses of others for the next start; a full disk costs that and nothing else."""
        signed, parts = self._early.signed, self._facts.parts
        if signed is None or parts is None:
            return
        others = [seen for seen in parts.membership.view.peers.values() if seen.peer != self._where.peer]
        addresses = [address for seen in others for address in seen.addresses[:2]][:16]
        if not addresses:
            return
        try:
            runs.remember_addresses(self._where.home, signed.run_id, addresses)
        except OSError as error:
            path = str(self._where.home.peers(signed.run_id))
            self._report(events.DiskTrouble(path, error.strerror or str(error)))
