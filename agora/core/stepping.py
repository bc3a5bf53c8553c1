"""What the device thread and the event loop exchange: the loop sends step policies, the thread results and events.

The loop publishes a new StepPolicy whenever its knowledge of the other replicas changes; the device thread reads the
newest one. For every step and every closed share it puts an event on a queue (train.device_worker.StepEvents).
"""

from __future__ import annotations

from dataclasses import dataclass

from agora.core.sync_mode import StepPlan


@dataclass(frozen=True, slots=True)
class StepPolicy:
    """When the device thread takes a stage's step along its gradient sum, or closes its share of a step for the mean.

    `own_tokens`, `alone` and `closes_share` hold for step number `step` only (counted from 0). The stage may be at a
    later step by now: for it the last column holds, which never counts too few tokens and closes no share.

    | question                                 | step `step`                             | any other step      |
    |------------------------------------------|-----------------------------------------|---------------------|
    | own tokens needed                        | own_tokens                              | target_tokens       |
    | uses the mean gradient of all replicas   | if exact and averages, unless `alone`   | if exact, averages  |
    | closes its share when it has the tokens  | closes_share, if it uses the mean       | no                  |

    Whether a step is exact or local says the stage's StepPlan, which changes on the device thread.
    """

    target_tokens: int  # how many all replicas together count for one step
    averages: bool = False  # whether replicas average their gradients; False until a group of replicas says so
    step: int = -1  # the number for which the next three fields hold; -1: they hold for none
    own_tokens: int = 0  # how many this replica must count so that all reach `target_tokens`, with those it has counted
    alone: bool = False  # no other replica holds the stage
    closes_share: bool = False

    def tokens_needed(self, step: int) -> int:
        """Returns how many tokens this replica must count for step `step` before it steps or closes its share.

        `own_tokens` at the policy's own step, else `target_tokens`.
        """
        return self.own_tokens if step == self.step else self.target_tokens

    def uses_mean_gradient(self, step: int, plan: StepPlan) -> bool:
        """Returns whether step `step` is taken along the mean gradient of all replicas.

        True if `averages`, unless the step is local by `plan`, or is the policy's own step and the replica is `alone`.
        """
        return self.averages and not plan.is_local(step) and not (self.alone and step == self.step)

    def must_close(self, step: int, plan: StepPlan) -> bool:
        """Returns whether the device thread is to close the share of step `step` once it has `tokens_needed(step)`.

        True only if `closes_share`, at the policy's own step, and if that step uses the mean gradient.
        """
        return self.closes_share and step == self.step and self.uses_mean_gradient(step, plan)


@dataclass(frozen=True, slots=True)
class StageStepped:
    """Event: a stage has taken an optimizer step, and `step` in all. own_tokens: this replica's tokens in this one."""

    stage: int
    step: int
    own_tokens: int


@dataclass(frozen=True, slots=True)
class ShareClosed:
    """Event: a stage has closed its share of step `step` (counted from 0), over `tokens`, and opened the next."""

    stage: int
    step: int
    tokens: int


StepEvent = StageStepped | ShareClosed
