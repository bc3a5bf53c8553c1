"""The totals of a demo: what became of every microbatch, from the journals of all peers, killed ones included.

Knows: the journal's events. Must not know: processes, files. Pure: events come in, numbers come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agora.observe import events
from agora.observe.journal import from_json


@dataclass
class PeerTotals:
    """What one peer's journal adds up to."""

    is_killed: bool = False
    has_joined: bool = False
    is_serving: bool = False
    unfinished: set[str] = field(default_factory=set)
    """Training microbatches that it originated and that have neither completed nor been dropped."""
    steps: dict[int, int] = field(default_factory=dict)
    traffic: events.Traffic = field(default_factory=lambda: events.Traffic(0, 0, 0))
    span: tuple[int, int] | None = None
    start_steps: list[dict[str, Any]] = field(default_factory=list)


class LossSum(NamedTuple):
    """A sum of token losses, in nats, and the number of tokens."""

    loss: float = 0.0
    tokens: int = 0


@dataclass
class DemoTotals:
    """The totals of all peers. A step of a stage is `target_tokens` tokens, whichever of its replicas saw them."""

    target_tokens: int
    peers: dict[int, PeerTotals] = field(default_factory=dict)
    completed: int = 0
    rerouted: int = 0
    dropped: int = 0
    tokens: int = 0
    first_started_unix: float | None = None
    first_completed_unix: float | None = None
    last_completed_unix: float | None = None
    recent_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    """Mean loss per token of the microbatches of each step, in the order in which they were completed."""
    refused_gradients: int = 0
    finished_rounds: set[tuple[int, int]] = field(default_factory=set)
    failed_parts: int = 0
    _members: float = 0.0
    _expected_members: int = 0
    _stepped_tokens: int = 0
    _times_counted: dict[str, Counter[int]] = field(default_factory=dict)
    _loss_of_step: LossSum = field(default_factory=LossSum)

    def peer(self, index: int) -> PeerTotals:
        """Returns the totals of one peer, which are empty at its first mention."""
        return self.peers.setdefault(index, PeerTotals())

    def add(self, index: int, fields: Mapping[str, Any]) -> None:
        """Adds one line of the journal of the peer with this index."""
        peer, at_unix = self.peer(index), float(fields.get("at_unix", 0.0))
        match from_json(fields):
            case events.MicrobatchStarted(microbatch, "train"):
                peer.unfinished.add(microbatch)
                self.first_started_unix = min(self.first_started_unix or at_unix, at_unix)
            case events.MicrobatchCompleted(microbatch, loss, tokens, _, "train"):
                peer.unfinished.discard(microbatch)
                self._add_completed(loss, tokens, at_unix)
            case events.MicrobatchDropped(microbatch, _) if microbatch in peer.unfinished:
                peer.unfinished.discard(microbatch)
                self.dropped += 1
            case events.MicrobatchRerouted():
                self.rerouted += 1
            case events.MicrobatchCounted(microbatch, stages, _):
                self._times_counted.setdefault(microbatch, Counter()).update(stages)
            case events.StepTaken(stage, step, tokens):
                peer.steps[stage] = step
                self._stepped_tokens += tokens if stage == 0 else 0
            case event:
                self._add_rare(peer, event)

    def _add_rare(self, peer: PeerTotals, event: events.Event | None) -> None:
        """Adds an event that is not about one microbatch or one step."""
        match event:
            case events.StateChanged("serving", _):
                peer.is_serving = peer.has_joined = True
            case events.StateChanged("leaving" | "left", _):
                peer.is_serving = False
            case events.SpanChosen(first, last, _):
                peer.span = (first, last)
            case events.Traffic():
                peer.traffic = event
            case events.RoundDone():
                self.finished_rounds.add((event.stage, event.round))
                self.failed_parts += event.failed_parts
                self._members += event.members
                self._expected_members += event.expected
            case events.GradientRefused():
                self.refused_gradients += 1
            case events.StartStep(name, seconds, _):
                peer.start_steps.append({"name": name, "seconds": round(seconds, 3)})

    def _add_completed(self, loss: float, tokens: int, at_unix: float) -> None:
        """Adds a completed microbatch: its loss, summed over its tokens, and when it was back at its origin."""
        self.completed += 1
        self.tokens += tokens
        self.first_completed_unix = min(self.first_completed_unix or at_unix, at_unix)
        self.last_completed_unix = max(self.last_completed_unix or at_unix, at_unix)
        self.recent_loss = loss / tokens if tokens else None
        self._loss_of_step = LossSum(self._loss_of_step.loss + loss, self._loss_of_step.tokens + tokens)
        if self._loss_of_step.tokens >= self.target_tokens:
            self.losses.append(self._loss_of_step.loss / self._loss_of_step.tokens)
            self._loss_of_step = LossSum()

    @property
    def step(self) -> int:
        """Optimizer steps of stage 0: tokens of its replicas / target_tokens, or the most that one of them has taken.

        A replica that takes a killed one's place may count from 0 again, the stage does not.
        """
        most = max((peer.steps.get(0, 0) for peer in self.peers.values()), default=0)
        return max(most, self._stepped_tokens // self.target_tokens)

    def achieved(self, peers: int) -> tuple[int, int, int]:
        """Returns numbers of which one grows as long as training goes on: microbatches completed, step, peers joined.

        peers: how many the demo has at a time. Further ones replace others, which alone is no training.
        """
        return self.completed, self.step, min(peers, sum(peer.has_joined for peer in self.peers.values()))

    def trained(self) -> tuple[int, float]:
        """Returns the tokens so far, and the seconds from the first microbatch's start to the last one's completion."""
        if self.first_started_unix is None or self.last_completed_unix is None:
            return self.tokens, 0.0
        return self.tokens, self.last_completed_unix - self.first_started_unix

    @property
    def counted_twice(self) -> int:
        """Microbatches whose gradient some stage added more than once."""
        return sum(1 for stages in self._times_counted.values() if max(stages.values()) > 1)

    @property
    def abandoned(self) -> int:
        """Microbatches whose origin was killed before it had their answer."""
        return sum(len(peer.unfinished) for peer in self.peers.values() if peer.is_killed)

    @property
    def lost(self) -> int:
        """Microbatches that a living origin started and nobody finished; meaningful when all origins have drained."""
        return self.dropped + sum(len(peer.unfinished) for peer in self.peers.values() if not peer.is_killed)

    @property
    def participation(self) -> float | None:
        """Members of all rounds / replicas that could have been members; None before the first round."""
        return self._members / self._expected_members if self._expected_members else None
