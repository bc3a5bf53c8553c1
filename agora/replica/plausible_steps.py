"""Decides which step numbers that other replicas report are plausible: those possible since this peer's last step.

Deterministic.

All replicas of a stage take its steps together, so a replica that takes part knows how fast they come. A report of more
steps than MAX_SPEED_UP times as many as that pace allows is implausible, however many tokens it claims to have counted:

    highest plausible step = own step + lead + MAX_SPEED_UP * (SLACK_S + seconds since that step) / step_s

where step_s is how long its own steps last.

`own step` is the last one that this replica took itself, level with the others. Step numbers that it took over from
them since then, by catching up or fetching a state, do not raise the bound.

A replica that was away, or whose machine slept, accepts the others' steps again once enough time has passed here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Steps by which others may lead at any time where all take each step together: two closed shares, and one step.
LEAD: Final = 3
# Steps by which others may lead where each takes local steps; a replica further behind fetches their state.
LOCAL_LEAD: Final = 20
MAX_SPEED_UP: Final = 4.0  # how many times as fast as before others may go on stepping without this replica
# Seconds for which a busy machine may stand still without noticing it, while honest replicas go on.
SLACK_S: Final = 10.0
# Maximum tokens per second that a stage's replicas can plausibly count together, until a step was measured here.
FASTEST_TOKENS_PER_S: Final = 1e6
JOIN_S: Final = 1800.0  # maximum age, in seconds, of the state with which a newcomer starts: no transfer takes longer
# Seconds after an implausible report for which nothing that its sender reports of the stage counts.
FORGIVE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class OwnPace:
    """How far this replica is with a stage, and how fast it steps; bounds what other replicas can have reached.

    own_step: the last step that this replica took itself while it was level with the others (at most LEAD behind).
    own_step_at: the time in seconds when it took that step.
    present_step: the step that it is at now, which it may have taken over from another replica.
    step_s: average duration of its steps in seconds, None if unknown.
    """

    own_step: int
    own_step_at: float
    present_step: int
    step_s: float | None = None

    def with_step(self, step: int, now: float, step_s: float | None, furthest_step: int) -> OwnPace:
        """Returns the pace after this replica was seen at `step` at time `now`: with present_step and step_s replaced.

        own_step and own_step_at become `step` and `now` only if this replica took exactly one step and is level with
        the others (at most LEAD behind): one that replays takes many steps quickly, which must not raise the bound.
        furthest_step: the highest plausible step that another replica has reported.
        """
        if step == self.present_step + 1 and furthest_step <= step + LEAD:
            return OwnPace(step, now, step, step_s)
        return OwnPace(self.own_step, self.own_step_at, step, step_s)

    def highest_plausible_step(self, now: float, target_tokens: int, lead: int) -> int:
        """Returns the highest step that another replica can have taken by now.

        That is max(present_step + 1, own_step + lead + n), with n = MAX_SPEED_UP * (SLACK_S + now - own_step_at) /
        step_s, rounded down. lead: LEAD or LOCAL_LEAD. target_tokens: tokens of a step; while step_s is unknown,
        target_tokens / FASTEST_TOKENS_PER_S stands for step_s / MAX_SPEED_UP.
        """
        least_s = self.step_s / MAX_SPEED_UP if self.step_s else target_tokens / FASTEST_TOKENS_PER_S
        most_steps = int((SLACK_S + max(0.0, now - self.own_step_at)) / least_s)
        return max(self.present_step + 1, self.own_step + lead + most_steps)
