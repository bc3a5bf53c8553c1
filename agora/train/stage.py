"""One stage in training: its weights, what was summed and counted for the next step, and the step itself.

Knows: weights, the optimizer, which graphs are alive. Must not know: how gradients are computed, queues, peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from agora_protocol.errors import LocalError, ProtocolError
from torch import Tensor

from agora.observe.events import GradientLate, GradientRefused, Report, StepsSkipped, StepTaken
from agora.stepping import StageStepped
from agora.train.held import HeldForwards
from agora.train.optimizer import StageOptimizer, StepDone
from agora.train.weights import StageWeights

STALENESS_BINS = 33
"""Staleness 0, 1, ... 31, and one bin for all that is older."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage of this peer is. `staleness[i]`: microbatches whose backward came i steps after their forward."""

    stage: int
    step: int
    tokens_in_step: int
    tokens_total: int
    staleness: tuple[int, ...]
    refused_nonfinite: int


@dataclass(slots=True)
class Counted:
    """What a gradient sum is made of: supervised tokens, their loss, microbatches, and the steps these were late."""

    tokens: int = 0
    loss: float = 0.0
    microbatches: int = 0
    age: int = 0


@dataclass(frozen=True, slots=True)
class MeanGradient:
    """A replica's share of a step: the mean over its own `tokens` of the gradients of step number `step` (0 the first).

    values: float32 [numel] on the CPU, finite, not to be changed; zeros when `tokens` is 0.
    """

    step: int
    tokens: int
    values: Tensor


class TrainedStage:
    """`step` is how many steps the stage has taken in all its replicas; the optimizer counts its own updates.

    `sum` says what is in the open gradient sum. While the replicas average their gradients, this one's share of the
    step is given away, and the sum is already that of the step after.
    """

    def __init__(
        self,
        number: int,
        weights: StageWeights,
        optimizer: StageOptimizer,
        held: HeldForwards,
        *,
        report: Report,
        on_step: Callable[[StageStepped], None],
        knows_loss: bool,
        flowing: bool,
    ) -> None:
        """on_step: is called after each step, on the device thread. knows_loss: this stage is the model's last, whose
        microbatches have a loss here. flowing: microbatches may come while a step is taken (asynchronous runs).
        """
        self.number = number
        self.weights = weights
        self.optimizer = optimizer
        self.step = 0
        self.sum = Counted()
        self.refused = 0
        self._held = held
        self._report = report
        self._on_step = on_step
        self._knows_loss = knows_loss
        self._flowing = flowing
        self._given: tuple[MeanGradient, Counted] | None = None
        self._tokens_stepped = 0
        self._staleness = [0] * STALENESS_BINS
        self._stepped_at = time.monotonic()
        self.publish()

    def publish(self) -> None:
        """Makes the present counts `progress`, which other threads read: its numbers belong together.

        Tokens given away count in the step that they were given for, until it is taken.
        """
        given = self._given[1].tokens if self._given else 0
        self.progress = StageProgress(
            self.number,
            self.step,
            given if self._given else self.sum.tokens,
            self._tokens_stepped + given + self.sum.tokens,
            tuple(self._staleness),
            self.refused,
        )

    def count(self, name: str, tokens: int, loss: float, step_at_forward: int) -> None:
        """One more microbatch is in the gradient sum."""
        age = max(self.step - step_at_forward, 0)
        self.sum.tokens += tokens
        self.sum.loss += loss
        self.sum.microbatches += 1
        self.sum.age += age
        self._staleness[min(age, STALENESS_BINS - 1)] += 1
        self.publish()
        if self._given is not None and not self._flowing:
            self._report(GradientLate(self.number, self.step, name, tokens))

    def is_due(self, tokens: int) -> bool:
        """Whether the sum of a step that is not given away holds `tokens`, and anything at all."""
        return self._given is None and 0 < self.sum.tokens >= tokens

    def make_way(self) -> Tensor:
        """Before weights change in place: no live graph may need them. Returns the flat weights to change."""
        weights = self.weights
        if self._held.graphs_on(weights.current):
            for held in self._held.graphs_on(weights.former):
                held.drop_graph()
            weights.turn_over()
        return weights.current.flat

    # --- steps

    def take_step(self) -> None:
        """The optimizer step over what was summed here. A sum that is not finite is dropped, and no step is taken."""
        done = self.optimizer.step(self.make_way(), self.step, self.sum.tokens)
        counted, self.sum = self.sum, Counted()
        if done is None:
            self._refuse_sum(counted.tokens)
            self._stepped_at = time.monotonic()
        else:
            self._count_step(counted, done)

    def catch_up(self, step: int) -> None:
        """The stage's replicas have taken `step` steps: takes the next one too, or all that this one is behind.

        One behind, what was counted here goes into the step, as it does at the others. Further behind, it was computed
        on weights too old for any step to come, and is dropped (StepsSkipped). Nothing happens when it is not behind,
        and while its own share is given away: `step_with_gradient` comes first.
        """
        if step <= self.step or self._given is not None:
            return
        if step == self.step + 1 and self.sum.tokens > 0:
            self.take_step()
        if self.step < step:
            self._skip_to(step)

    def take_mean_gradient(self) -> MeanGradient:
        """This replica's share of the step, for the replicas to average; its sum is empty from now on.

        The same again until the step is taken, so that a caller that failed may ask once more. What is counted
        meanwhile goes into the next step's sum; in a synchronous run that is late, and reported.
        """
        if self._given is None:
            self._given = self._mean()
            self.sum = Counted()
            self.weights.gradient.zero_()
            self.publish()
        return self._given[0]

    def step_with_gradient(self, number: int, gradient: Tensor, tokens: int) -> None:
        """Step `number`, whose share was given, along `gradient` [numel], the mean over the `tokens` of all replicas.

        `gradient` is overwritten. Without tokens the step's number is taken and nothing else. Raises LocalError when
        this step's share is not given away, ProtocolError ("bad-tensor") when the gradient's norm is not finite; the
        step can then still be taken along another.
        """
        if self._given is None or self._given[0].step != number:
            raise LocalError(f"stage {self.number} does not wait for the gradient of step {number}; ask for its share")
        done = None
        if tokens > 0:
            self.weights.clear_gaps(gradient)
            done = self.optimizer.step_along(self.make_way(), gradient, number)
            if done is None:
                raise ProtocolError("bad-tensor", f"the mean gradient of stage {self.number} is not finite")
        own, self._given = self._given[1], None
        self._count_step(own, done)

    def restart(self, step: int, tokens: int) -> None:
        """Goes on at `step`, with weights and moments that somebody else trained on `tokens`; the sum is dropped."""
        self.weights.gradient.zero_()
        self.sum, self._given = Counted(), None
        self.step, self._tokens_stepped = step, tokens
        self._stepped_at = time.monotonic()
        self.publish()

    @property
    def tokens_stepped(self) -> int:
        """Supervised tokens of the steps taken so far, as far as they were seen here or came with a loaded state."""
        return self._tokens_stepped

    def _mean(self) -> tuple[MeanGradient, Counted]:
        """The mean of the sum as it is; nothing at all when it is empty or not finite."""
        counted = self.sum
        mean = (self.weights.gradient / max(counted.tokens, 1)).cpu()
        if not bool(mean.isfinite().all()):
            self._refuse_sum(counted.tokens)
            counted = Counted()
            mean.zero_()
        return MeanGradient(self.step, counted.tokens, mean), counted

    def _refuse_sum(self, tokens: int) -> None:
        self.refused += 1
        self.publish()
        self._report(GradientRefused(self.number, "", f"the sum over {tokens} tokens is not finite"))

    def _skip_to(self, step: int) -> None:
        """Takes the number of a step without having a part in it."""
        skipped, late = step - self.step, self.sum.tokens
        self.weights.gradient.zero_()
        self.sum = Counted()
        self.step = step - 1
        if skipped > 1 or late:
            self._report(StepsSkipped(self.number, step, skipped, late))
        self._count_step(self.sum, None)

    def _count_step(self, counted: Counted, done: StepDone | None) -> None:
        """The stage is one step further. done: None when this replica had no part in it."""
        now = time.monotonic()
        self.step += 1
        self._tokens_stepped += counted.tokens
        self.publish()
        self._report(
            StepTaken(
                stage=self.number,
                step=self.step,
                tokens=counted.tokens,
                loss=counted.loss / counted.tokens if self._knows_loss and counted.tokens else None,
                seconds=now - self._stepped_at,
                learning_rate=done.learning_rate if done else 0.0,
                gradient_norm=done.gradient_norm if done else None,
                staleness=counted.age / max(counted.microbatches, 1),
            )
        )
        self._stepped_at = now
        self._on_step(StageStepped(self.number, self.step, counted.tokens))
