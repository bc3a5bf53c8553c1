"""What the device thread and the event loop exchange: the loop sends step policies, the thread results and events.

Knows: tokens, step numbers, encoded gradients. Must not know: torch, threads, replicas, how tokens are agreed on.
The loop publishes a new StepPolicy whenever its knowledge of the other replicas changes; the device thread reads the
newest one. For every step and every closed share it puts an event on a queue (train.step_events).
"""

from __future__ import annotations

from dataclasses import dataclass

from agora_protocol.tensors import WireTensor


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """Immutable policy: when a stage steps along its gradient sum, or closes its share of a step for the mean.

    `own_tokens`, `alone` and `closes_share` hold for step number `step` only (0 is the first). The stage may be at a
    later step by now, about which nothing is known; then the last column holds, which is always safe.

    | question                                 | step `step`                             | any other step      |
    |------------------------------------------|-----------------------------------------|---------------------|
    | own tokens needed                        | own_tokens                              | target_tokens       |
    | steps along the mean of all replicas     | step < exact_steps, unless `alone`      | step < exact_steps  |
    | closes its share when it has the tokens  | closes_share, if it steps along a mean  | no                  |
    """

    target_tokens: int  # how many all replicas together count for one step
    exact_steps: int = 0  # the first steps, which are taken along the mean gradient of all replicas
    step: int = -1  # for which the next three hold; -1: for none
    own_tokens: int = 0  # how many this replica must count so that all reach `target_tokens`, with those it has counted
    alone: bool = False  # no other replica holds the stage
    closes_share: bool = False

    def tokens_needed(self, step: int) -> int:
        """Returns how many tokens this replica must count for step `step`, see the table."""
        return self.own_tokens if step == self.step else self.target_tokens

    def is_along_mean(self, step: int) -> bool:
        """Returns whether step `step` is taken along the mean gradient of all replicas, see the table."""
        return step < self.exact_steps and not (self.alone and step == self.step)

    def must_close(self, step: int) -> bool:
        """Returns whether the share of step `step` is to be closed once it has `tokens_needed(step)`, see the table."""
        return self.closes_share and step == self.step and self.is_along_mean(step)


@dataclass(frozen=True, slots=True)
class StageStepped:
    """Event: a stage has taken an optimizer step. step: steps taken so far. own_tokens: this replica's tokens in it."""

    stage: int
    step: int
    own_tokens: int


@dataclass(frozen=True, slots=True)
class ShareClosed:
    """Event: a stage has closed its share of step number `step` (0 the first), over `tokens`, and opened the next."""

    stage: int
    step: int
    tokens: int


StepEvent = StageStepped | ShareClosed


@dataclass(frozen=True, slots=True)
class SpanResult:
    """The result of one microbatch in this peer's span: gradient, device time, loss."""

    gradient: WireTensor | None  # with respect to the boundary that entered, encoded; None at stage 0 or if not trained
    busy_s: float  # seconds on the device, the forward included
    loss_sum: float = 0.0  # in nats, over `tokens` supervised tokens; both are known only in the run's last stage
    tokens: int = 0
    metrics: tuple[float, ...] = ()  # sums, see agora.metrics; known only in the run's last stage
    log_probabilities: tuple[float, ...] = ()  # of each row's supervised tokens; for a reference request only
