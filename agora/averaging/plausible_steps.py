"""Decides which step numbers that others report are believed: those possible since this peer's last step. Pure.

Knows: this replica's last step, how long its steps last, a step's tokens. Must not know: calls, weights, any clock.

All replicas of a stage take its steps together, so a replica that takes part knows how fast they come. Whoever reports
more steps than MAX_SPEED_UP times as many as that allows is not believed, however many tokens it says it has counted:

    highest plausible step = own step + lead + MAX_SPEED_UP * (SLACK_S + seconds since that step) / step_s

where step_s is how long its own steps last.

The own step is the last one that this replica took itself, level with the others: step numbers that it took over from
them since, by catching up or fetching a state, allow no more.

A replica that was away, or asleep, follows the others as soon as that much time has passed for it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAD: Final = 3
"""Steps by which others may lead at any time where all take each step together: two closed shares, and one step."""
LOCAL_LEAD: Final = 20
"""The same where each replica takes local steps; one that is further behind fetches the others' state."""
MAX_SPEED_UP: Final = 4.0
"""How many times as fast as before others may go on stepping without this replica."""
SLACK_S: Final = 10.0
"""A busy machine stands still for that long without knowing it: meanwhile honest replicas go on."""
FASTEST_TOKENS_PER_S: Final = 1e6
"""Tokens that a stage's replicas together count per second at most, while this replica has not measured a step."""
JOIN_S: Final = 1800.0
"""A newcomer's state may be this many seconds old: no transfer takes longer."""
FORGIVE_S: Final = 10.0
"""Seconds after an implausible report for which nothing that its sender reports of the stage is believed."""


@dataclass(frozen=True, slots=True)
class OwnPace:
    """How fast this replica steps. Immutable; times in seconds.

    step: the last step that it took itself, level with the others. since: when it took that. at: the step that it is at
    now, which may have been taken over from others. step_s: average duration of its steps, None if unknown.
    """

    step: int
    since: float
    at: int
    step_s: float | None = None

    def at_step(self, at: int, now: float, step_s: float | None, furthest: int) -> OwnPace:
        """Returns the pace after the replica was seen at step `at` at time `now`.

        `step` and `since` become those of now only if it took exactly one step and is level with the others: a replica
        that replays takes many steps at once, which must not allow more. furthest: the highest believed step of others.
        """
        if at == self.at + 1 and furthest <= at + LEAD:
            return OwnPace(at, now, at, step_s)
        return OwnPace(self.step, self.since, at, step_s)

    def highest_plausible_step(self, now: float, target_tokens: int, lead: int) -> int:
        """Returns the highest step that another replica can have taken by now, by the module's formula.

        target_tokens: of a step. lead: LEAD or LOCAL_LEAD.
        """
        least_s = self.step_s / MAX_SPEED_UP if self.step_s else target_tokens / FASTEST_TOKENS_PER_S
        return max(self.at + 1, self.step + lead + int((SLACK_S + max(0.0, now - self.since)) / least_s))
