"""Sums what the replicas of a stage publish of their tokens. Pure.

Peers may publish
wrong numbers: these sums are shown to people, and nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agora_protocol.records import StageAccount


@dataclass(frozen=True, slots=True)
class StageTokens:
    """How many tokens the present replicas of one stage have computed, and how many went into optimizer steps.

    tokens_computed: tokens whose gradient the replicas have computed, each replica since it loaded the stage.
    tokens_counted: of these, the tokens that went into a step.
    share_counted: of the computed tokens that no longer wait for a step, the fraction that went into one; the rest is
    lost.
    tokens_per_step: mean number of tokens that one step is of.
    staleness: mean number of steps by which a token's weights were behind when its gradient was used.

    share_counted, tokens_per_step and staleness are None if not known yet.
    """

    tokens_computed: int
    tokens_counted: int
    share_counted: float | None
    tokens_per_step: float | None
    staleness: float | None


def sum_accounts(accounts: Sequence[StageAccount]) -> StageTokens:
    """Returns the token counts of one stage, from the accounts that its replicas publish; without any, 0 or None.

    tokens_per_step is tokens divided by steps. In a step with its own gradient a replica counts its own tokens, so
    these tokens are added up, and the steps are those of the replica with the most. In a step with the replicas' mean
    gradient each counts the tokens of all, so only the replica with the most such steps is used. staleness is weighted
    by each replica's counted tokens.
    """
    counted = sum(account.counted for account in accounts)
    settled = sum(account.computed - account.waiting for account in accounts)
    of_means = max(accounts, key=lambda account: account.mean_steps, default=StageAccount())
    steps = of_means.mean_steps + max((account.own_steps for account in accounts), default=0)
    held = of_means.in_mean + sum(account.along_own for account in accounts)
    age = sum(account.counted * account.staleness for account in accounts)
    return StageTokens(
        tokens_computed=sum(account.computed for account in accounts),
        tokens_counted=counted,
        share_counted=round(counted / settled, 4) if settled else None,
        tokens_per_step=round(held / steps, 1) if steps else None,
        staleness=round(age / counted, 4) if counted else None,
    )
