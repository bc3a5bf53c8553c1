"""What the daemon says of itself: the status object, the report, its progress record, its invite.

Knows: where each number lives. Must not know: who asks.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from agora_protocol.errors import LocalError
from agora_protocol.invite import Invite
from agora_protocol.records import Progress

from agora.node.parts import Early, Parts, Where
from agora.node.steps import Steps
from agora.observe.report import Counters
from agora.swarm import health as judgement
from agora.swarm.health import Health
from agora.swarm.status import PeerFacts, RunFacts, status
from agora.swarm.view import View

RATE_WINDOW_S = 15.0
MORE_ADDRESSES = 8


class Rate:
    """Tokens per second over the last 15 s, from a growing total looked at now and then."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, now: float, total: int) -> None:
        """`total` tokens so far at `now`."""
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """0 until it was looked twice."""
        if len(self._seen) < 2:
            return 0.0
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else 0.0


class Facts:
    """Answers about one daemon; `parts` is None while it starts."""

    def __init__(self, where: Where, early: Early, counters: Counters, steps: Steps) -> None:
        self._where = where
        self._early = early
        self._counters = counters
        self._steps = steps
        self.parts: Parts | None = None
        self.rate = Rate()
        self.since_unix = time.time()
        self.paused = False

    def health(self, now_unix: float) -> Health:
        """The swarm's health as this peer sees it."""
        if self.parts is None:
            step = self._steps.current or "serve"
            return Health(judgement.DEGRADED, f"this daemon is still starting: {step}", "wait until it serves")
        count = self.parts.signed.manifest.stage_count
        return judgement.judge(
            self.parts.membership.view, count, now_unix, since_unix=self.since_unix, paused=self.paused
        )

    def status(self) -> dict[str, Any]:
        """As `swarm status --json` prints it."""
        now_unix = time.time()
        signed, reference = self._early.signed, self._where.run
        run = RunFacts(
            signed.run_id if signed else reference.run,
            signed.manifest.name if signed else reference.name,
            signed.manifest.stage_count if signed else 0,
        )
        if self.parts is None:
            return status(View(), run, self.health(now_unix), now_unix)
        peers = self.parts.network.statistics().peers
        found = {peer: seen.path for peer, seen in peers.items()} | {self._where.peer: "self"}
        notes = {self._where.peer: self._note()}
        view = self.parts.membership.view
        return status(view, run, self.health(now_unix), now_unix, PeerFacts(found, notes))

    def _note(self) -> str:
        link = self._where.settings.link
        return "; ".join(["paused by its owner"] * self.paused + [f"link {link}"] * bool(link))

    def progress(self) -> Progress | None:
        """This peer's progress record."""
        if self.parts is None:
            return None
        origin = self.parts.origin
        known = origin.statistics.loss if origin is not None else self._counters.stage_loss
        return Progress(
            self._where.peer,
            self.parts.span,
            self._where.incarnation,
            tuple(stage.step for stage in self.parts.compute.progress()),
            self.rate.per_second,
            known,
            self.parts.hop.queue,
            max(self._counters.counted.values(), default=0),
        )

    def addresses(self) -> tuple[str, ...]:
        """Where this peer can be dialled, then where some others can; raises LocalError before the host is up."""
        if not self._early.addresses:
            raise LocalError("this daemon has no address yet; ask again in a moment")
        others: list[str] = []
        if self.parts is not None:
            for seen in self.parts.membership.view.peers.values():
                if seen.peer != self._where.peer and seen.state == "serving":
                    others += seen.addresses[:1]
        return (*self._early.addresses[:MORE_ADDRESSES], *others[:MORE_ADDRESSES])

    def invite(self) -> Invite:
        """What others need to join; raises LocalError before the run is known and the host is up."""
        signed = self._early.signed
        if signed is None:
            raise LocalError("this daemon does not know its run yet; ask again in a moment")
        return Invite(signed.run_id, self.addresses(), signed.manifest.name)

    def report(self) -> dict[str, Any]:
        """Everything that is counted, for the demo, the tests and the curious."""
        found = self._counters.summary() | {"peer": self._where.peer, "paused": self.paused}
        found["link"] = self._where.settings.link or None
        if self.parts is None:
            return found | {"state": "joining"}
        parts, network = self.parts, self.parts.network.statistics()
        stages = parts.compute.progress()
        origin = parts.origin
        claim = parts.membership.claim
        return found | {
            "state": claim.state if claim else "joining",
            "span": [parts.span.first, parts.span.last],
            "steps": {str(stage.stage): stage.step for stage in stages},
            "staleness": {str(stage.stage): list(stage.staleness) for stage in stages},
            "refused_nonfinite": sum(stage.refused_nonfinite for stage in stages),
            "busy_fraction": round(parts.compute.statistics().busy_fraction, 4),
            "tokens_per_second": round(self.rate.per_second, 1),
            "in_hand": parts.in_hand,
            "loss": origin.statistics.loss if origin else None,
            "credit": origin.credit.reason if origin else "",
            "bytes": {
                "boundary": parts.meter.boundary_bytes,
                "averaging": parts.meter.averaging_bytes,
                "state": parts.meter.state_bytes,
                "sent": network.bytes_out,
                "received": network.bytes_in,
            },
        }
