"""Decisions about state: where a stage starts from, which steps are plausible, when a checkpoint is due. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from agora_protocol.ids import PeerId

# How many steps a fetched state may be behind the newest, and how many a plausible claim may exceed the median.
LAG_LIMIT: Final = 100
CLAIM_LAG: Final = 20  # how many steps a fetched state may be behind the lower median of the claims


@dataclass(frozen=True, slots=True)
class StartDecision:
    """How a starting stage gets its state, and the reason in words.

    | action               | at_least (a step)            | sources                                          |
    |----------------------|------------------------------|--------------------------------------------------|
    | load                 | this peer's checkpoint's     | ()                                               |
    | fetch                | the lowest step to accept    | peers to fetch from, the most advanced one first |
    | keep initial weights | 0                            | ()                                               |
    """

    action: Literal["load", "fetch", "keep initial weights"]
    at_least: int
    sources: tuple[PeerId, ...]
    reason: str


def choose_start(checkpoint_step: int | None, offers: Mapping[PeerId, int], lag_limit: int) -> StartDecision:
    """Decides where a starting stage's state comes from: its own checkpoint, other peers, or the seed.

    | the first that holds                                                    | action               |
    |-------------------------------------------------------------------------|----------------------|
    | there is a checkpoint, and no peer offers a later step                  | load                 |
    | no peer offers a step above 0                                           | keep initial weights |
    | always                                                                  | fetch                |

    checkpoint_step: None without a checkpoint. offers: peer that can give the state -> its plausible step. Sources are
    the peers at most `lag_limit` steps behind the most advanced one.
    """
    newest = max(offers.values(), default=0)
    if checkpoint_step is not None and checkpoint_step >= newest:
        others = f"peers are at step {newest}" if offers else "no peer offers any"
        return StartDecision("load", checkpoint_step, (), f"own checkpoint of step {checkpoint_step}; {others}")
    if newest == 0:
        reason = "no peer has taken a step yet" if offers else "no checkpoint, and no peer offers any"
        return StartDecision("keep initial weights", 0, (), reason)
    lowest = max(newest - lag_limit, 1)
    sources = tuple(peer for peer in most_advanced_first(offers) if offers[peer] >= lowest)
    own = "no local checkpoint" if checkpoint_step is None else f"own checkpoint of step {checkpoint_step}"
    reason = f"{own}; {len(sources)} peers are at most {lag_limit} steps behind step {newest}"
    return StartDecision("fetch", lowest, sources, reason)


def most_advanced_first(offers: Mapping[PeerId, int]) -> list[PeerId]:
    """Returns the peers of `offers` (peer -> step), sorted by step, the highest first, then by peer id."""
    return sorted(offers, key=lambda peer: (-offers[peer], peer))


def plausibility_bound(serving: Collection[int], lag_limit: int) -> float:
    """Returns the highest step that a replica can plausibly be at: lower median of `serving` + lag_limit.

    serving: the steps that the stage's replicas claim; with fewer than two the bound is infinite. The lower median is
    used so that of two replicas that disagree the one that claims less counts: a claim that is too low costs steps, one
    that is too high can bring any weights.
    """
    return math.inf if len(serving) < 2 else statistics.median_low(serving) + lag_limit


def lowest_step_to_fetch(at_least: int, claimed_steps: Collection[int]) -> int:
    """Returns the lowest step of a state to accept: max(at_least, lower median of `claimed_steps` - CLAIM_LAG).

    claimed_steps: the steps that the sources claim; if empty, the result is at_least.
    """
    return max(at_least, statistics.median_low(claimed_steps or [0]) - CLAIM_LAG)


def is_checkpoint_due(step: int, every: int, last: int, end: int) -> bool:
    """Returns whether a multiple of `every` steps, or the run's last step `end`, lies in (last, step].

    last: the step of the previous checkpoint.
    """
    return step // every > last // every or last < end <= step
