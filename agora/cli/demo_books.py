"""The demo's accounts: what became of every microbatch, from the journals of all peers, killed ones included.

Knows: the journal's events. Must not know: processes, files. Pure: events come in, numbers come out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agora.observe import events
from agora.observe.journal import from_json


@dataclass
class PeerBooks:
    """One peer's part."""

    killed: bool = False
    joined: bool = False
    serving: bool = False
    open: set[str] = field(default_factory=set)  # train microbatches it originated and has not finished
    counted: deque[tuple[str, int]] = field(default_factory=deque)  # stage 0: microbatch, tokens; not yet in a step
    due: deque[tuple[int, int]] = field(default_factory=deque)  # stage 0: step, tokens that it still lacks here
    steps: dict[int, int] = field(default_factory=dict)
    boundary_bytes: int = 0
    averaging_bytes: int = 0
    state_bytes: int = 0
    span: tuple[int, int] | None = None
    start_steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class StepLoss:
    """The loss of the microbatches that went into one optimizer step of stage 0, as their origins saw it."""

    loss_sum: float = 0.0
    tokens: int = 0

    @property
    def mean(self) -> float | None:
        """Mean loss per token."""
        return self.loss_sum / self.tokens if self.tokens else None


@dataclass
class Books:
    """All peers' parts, added up. A step of a stage is `target_tokens` tokens, whichever replicas saw them."""

    target_tokens: int
    peers: dict[int, PeerBooks] = field(default_factory=dict)
    completed: int = 0
    rerouted: int = 0
    dropped: int = 0
    tokens: int = 0
    first_started_unix: float | None = None
    first_completed_unix: float | None = None
    last_completed_unix: float | None = None
    recent_loss: float | None = None
    refused_gradients: int = 0
    finished_rounds: set[tuple[int, int]] = field(default_factory=set)
    failed_parts: int = 0
    _members: float = 0.0
    _expected: int = 0
    _stepped_tokens: int = 0
    _counted: dict[str, Counter[int]] = field(default_factory=dict)
    _step_of: dict[str, int] = field(default_factory=dict)
    _loss_of: dict[str, StepLoss] = field(default_factory=dict)
    _losses: dict[int, StepLoss] = field(default_factory=dict)

    def peer(self, index: int) -> PeerBooks:
        """One peer's books, opened at its first mention."""
        return self.peers.setdefault(index, PeerBooks())

    def take(self, index: int, fields: Mapping[str, Any]) -> None:
        """Adds one line of a peer's journal."""
        peer, at_unix = self.peer(index), float(fields.get("at_unix", 0.0))
        match from_json(fields):
            case events.MicrobatchStarted(microbatch, "train"):
                peer.open.add(microbatch)
                self.first_started_unix = min(self.first_started_unix or at_unix, at_unix)
            case events.MicrobatchCompleted(microbatch, loss_sum, tokens, _, "train"):
                self._complete(peer, microbatch, StepLoss(loss_sum, tokens), at_unix)
            case events.MicrobatchDropped(microbatch, _) if microbatch in peer.open:
                peer.open.discard(microbatch)
                self.dropped += 1
            case events.MicrobatchRerouted():
                self.rerouted += 1
            case events.MicrobatchCounted(microbatch, stages, tokens):
                self._count(peer, microbatch, stages, tokens)
            case events.StepTaken(stage, step, tokens):
                self._step(peer, stage, step, tokens)
            case event:
                self._take_rare(peer, event)

    def _take_rare(self, peer: PeerBooks, event: events.Event | None) -> None:
        match event:
            case events.StateChanged("serving", _):
                peer.serving = peer.joined = True
            case events.StateChanged("leaving" | "left", _):
                peer.serving = False
            case events.SpanChosen(first, last, _):
                peer.span = (first, last)
            case events.Traffic():
                peer.boundary_bytes = event.boundary_bytes
                peer.averaging_bytes = event.averaging_bytes
                peer.state_bytes = event.state_bytes
            case events.RoundDone():
                self.finished_rounds.add((event.stage, event.round))
                self.failed_parts += event.failed_parts
                self._members += event.members
                self._expected += event.expected
            case events.GradientRefused():
                self.refused_gradients += 1
            case events.StepsSkipped(0, _, _, tokens) if tokens:
                peer.due.append((self._stepped_tokens // self.target_tokens + 1, tokens))
            case events.StartStep(name, seconds, _):
                peer.start_steps.append({"name": name, "seconds": round(seconds, 3)})

    def _complete(self, peer: PeerBooks, microbatch: str, loss: StepLoss, at_unix: float) -> None:
        peer.open.discard(microbatch)
        self.completed += 1
        self.tokens += loss.tokens
        self.first_completed_unix = min(self.first_completed_unix or at_unix, at_unix)
        self.last_completed_unix = max(self.last_completed_unix or at_unix, at_unix)
        self.recent_loss = loss.mean
        self._loss_of[microbatch] = loss
        self._book_loss(microbatch)

    def _count(self, peer: PeerBooks, microbatch: str, stages: tuple[int, ...], tokens: int) -> None:
        self._counted.setdefault(microbatch, Counter()).update(stages)
        if 0 in stages:
            peer.counted.append((microbatch, tokens))
            self._fill_steps(peer)

    def _step(self, peer: PeerBooks, stage: int, step: int, tokens: int) -> None:
        peer.steps[stage] = step
        if stage == 0 and tokens:
            peer.due.append((self._stepped_tokens // self.target_tokens + 1, tokens))
            self._stepped_tokens += tokens
            self._fill_steps(peer)

    def _fill_steps(self, peer: PeerBooks) -> None:
        """Gives each step the microbatches that it was made of: the device counts in order, and says how many tokens.

        A step is reported by the device's thread, its last microbatch by the event loop: either may come first.
        """
        while peer.due and peer.counted:
            (step, lacking), (microbatch, tokens) = peer.due[0], peer.counted.popleft()
            self._step_of[microbatch] = step
            self._book_loss(microbatch)
            if lacking > tokens:
                peer.due[0] = (step, lacking - tokens)
            else:
                peer.due.popleft()

    def _book_loss(self, microbatch: str) -> None:
        """Adds a microbatch's loss to its step's once both are known, in whichever order they come."""
        if microbatch in self._step_of and microbatch in self._loss_of:
            total, loss = self._losses.setdefault(self._step_of[microbatch], StepLoss()), self._loss_of.pop(microbatch)
            total.loss_sum += loss.loss_sum
            total.tokens += loss.tokens

    @property
    def step(self) -> int:
        """Optimizer steps of stage 0: by the tokens its replicas saw together, or those of the one that took most.

        A replica that took a killed one's place begins to count at 0, the stage does not.
        """
        most = max((peer.steps.get(0, 0) for peer in self.peers.values()), default=0)
        return max(most, self._stepped_tokens // self.target_tokens)

    def achieved(self, peers: int) -> tuple[int, int, int]:
        """What grows as long as a run of so many `peers` gets on: microbatches completed, the step, peers that joined.

        Peers beyond those replace others: however many come, that alone is no training.
        """
        return self.completed, self.step, min(peers, sum(peer.joined for peer in self.peers.values()))

    def trained(self) -> tuple[int, float]:
        """Tokens so far, and the seconds from the first microbatch's start to the last one's end."""
        if self.first_started_unix is None or self.last_completed_unix is None:
            return self.tokens, 0.0
        return self.tokens, self.last_completed_unix - self.first_started_unix

    @property
    def losses(self) -> list[float]:
        """Mean loss of each step of stage 0, in order."""
        return [loss.mean for _, loss in sorted(self._losses.items()) if loss.mean is not None]

    @property
    def counted_twice(self) -> int:
        """Microbatches whose gradient some stage added more than once."""
        return sum(1 for stages in self._counted.values() if max(stages.values()) > 1)

    @property
    def abandoned(self) -> int:
        """Microbatches started by an origin that was itself killed before it had their answer."""
        return sum(len(peer.open) for peer in self.peers.values() if peer.killed)

    @property
    def lost(self) -> int:
        """Microbatches that a living origin started and nobody finished; meaningful when all origins have drained."""
        return self.dropped + sum(len(peer.open) for peer in self.peers.values() if not peer.killed)

    @property
    def boundary_bytes(self) -> int:
        """Boundary and gradient bytes sent by all peers."""
        return sum(peer.boundary_bytes for peer in self.peers.values())

    @property
    def averaging_bytes(self) -> int:
        """Bytes of averaged slices sent by all peers."""
        return sum(peer.averaging_bytes for peer in self.peers.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of weights and moments sent to joiners."""
        return sum(peer.state_bytes for peer in self.peers.values())

    @property
    def rounds(self) -> int:
        """Rounds of all stages that somebody took part in."""
        return len(self.finished_rounds)

    @property
    def participation(self) -> float | None:
        """Of the replicas that could have been in an average, the share that was; None before a round."""
        return self._members / self._expected if self._expected else None
