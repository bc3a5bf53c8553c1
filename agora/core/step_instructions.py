"""The device thread's instructions for the steps of a stage, and the events that it reports. Pure.

The device thread takes steps by the newest StepInstructions. The event loop replaces them whenever it learns of the
other replicas. For every step and every closed share the thread puts an event on a queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from agora.core.step_schedule import SyncSchedule


@dataclass(frozen=True, slots=True)
class StepInstructions:
    """When the device thread takes a stage's step along its gradient sum, or closes its share of a step for the mean.

    `own_tokens`, `alone` and `closes_share` hold for step number `step` only (counted from 0). The stage may be at a
    later step by now: for it the last column holds, which never counts too few tokens and closes no share.

    | question                                 | step `step`                             | any other step      |
    |------------------------------------------|-----------------------------------------|---------------------|
    | own tokens needed                        | own_tokens                              | target_tokens       |
    | uses the mean gradient of all replicas   | if all-reduce, averages, unless `alone` | if all-reduce, averages  |
    | closes its share when it has the tokens  | closes_share, if it uses the mean       | no                  |

    A stage that has taken `stops_at` steps takes and closes none: what is counted then stays in its sum.

    The stage's SyncSchedule, which changes on the device thread, says whether a step is an all-reduce or an inner step.
    """

    target_tokens: int  # how many all replicas together count for one step
    averages: bool = False  # whether replicas average their gradients; False until a group of replicas says so
    step: int = -1  # the number for which the next three fields hold; -1: they hold for none
    # At how many tokens this replica steps or closes its share: its quota; or, synchronous and alone, what the others
    # leave of `target_tokens`.
    own_tokens: int = 0
    alone: bool = False  # no other replica holds the stage
    closes_share: bool = False
    stops_at: int = 0  # how many steps the run has; 0: no end

    def run_ends_before(self, step: int) -> bool:
        """Returns whether the run ends before step number `step`."""
        return 0 < self.stops_at <= step

    def tokens_needed(self, step: int) -> int:
        """Returns how many tokens this replica must count for step `step` before it steps or closes its share.

        `own_tokens` at the instructions' own step, else `target_tokens`.
        """
        return self.own_tokens if step == self.step else self.target_tokens

    def uses_mean_gradient(self, step: int, sync_schedule: SyncSchedule) -> bool:
        """Returns whether step `step` is taken along the mean gradient of all replicas.

        True if `averages`, unless `sync_schedule` makes it an inner step, or it is the instructions' own step and the
        replica is alone.
        """
        return self.averages and not sync_schedule.is_inner(step) and not (self.alone and step == self.step)

    def must_close(self, step: int, sync_schedule: SyncSchedule) -> bool:
        """Returns whether the device thread is to close the share of step `step` once it has `tokens_needed(step)`.

        True only if `closes_share`, at the instructions' own step, and if that step uses the mean gradient.
        """
        return self.closes_share and step == self.step and self.uses_mean_gradient(step, sync_schedule)


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
