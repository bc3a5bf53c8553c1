"""How a deadline is divided along the nested call: pure arithmetic on seconds, no clock.

Knows: that everybody downstream must be done before we must be done. Must not know: peers, microbatches, the network.

The budget of a microbatch with d calls still before it is divided so that every caller on the way keeps an equal part
for one retry: at depth d an attempt gets d/(d+1) of what is left, which telescopes to 1/(d+1) of the whole for the
last callee and 1/(d+1) for the reserve of each caller. A fixed share per call (one half, say) would shrink
exponentially.
"""

from __future__ import annotations

MARGIN_SHARE = 0.25
"""No hop keeps more than this part of its remaining time for itself: a wrong estimate must not starve the rest."""

LEAST_S = 0.001
"""Shorter deadlines are not worth a message."""


def attempt_deadline(now: float, deadline: float, expected_s: float, others: int, depth: int = 1) -> float:
    """When to leave a callee, as a time on the clock of `now`.

    All of the remaining time when no sibling could be asked (`others` = 0); else d/(d+1) of it for `depth` stages
    from the callee to the end, but at least twice `expected_s`, the time in which this call usually comes back.
    """
    remaining = deadline - now
    if others <= 0 or remaining <= 0:
        return deadline
    share = remaining * depth / (depth + 1)
    return now + min(max(share, 2.0 * expected_s), remaining)


def downstream_deadline(now: float, deadline: float, own_s: float) -> float:
    """By when the gradient must be back for our own backward, which takes about `own_s`, to make `deadline`."""
    remaining = max(0.0, deadline - now)
    return deadline - min(1.5 * own_s, MARGIN_SHARE * remaining)


def deadline_to_send(now: float, deadline: float, return_s: float, most_ms: int) -> int:
    """What to tell the callee, in milliseconds: less than we wait, so that its answer or refusal still reaches us."""
    remaining = max(0.0, deadline - now)
    left = remaining - min(return_s, MARGIN_SHARE * remaining)
    return max(1, min(most_ms, int(left * 1000.0)))


def is_hopeless(now: float, deadline: float, own_s: float) -> bool:
    """Whether even this hop's own work, which takes about `own_s` of computing, can hardly be done in time."""
    return deadline - now < max(LEAST_S, 0.5 * own_s)
