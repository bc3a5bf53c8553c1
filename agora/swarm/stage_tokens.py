"""Sums what the replicas of a stage publish of their tokens. Pure.

Knows: accounts (StageAccount of a Progress record). Must not know: peers, where accounts come from. Peers may publish
wrong numbers: these sums are shown to people, and nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agora_protocol.records import StageAccount


@dataclass(frozen=True, slots=True)
class StageTokens:
    """Counts of a stage's tokens. tokens_computed, tokens_counted: since each of its present replicas loaded it.

    share_counted: fraction of settled tokens (computed, no longer waiting for a step) that went into a step; the others
    are lost. tokens_per_step, staleness: means over recent steps, the latter in steps. None if not known yet.
    """

    tokens_computed: int
    tokens_counted: int
    share_counted: float | None
    tokens_per_step: float | None
    staleness: float | None


def sum_accounts(accounts: Sequence[StageAccount]) -> StageTokens:
    """Returns the counts of a stage whose replicas publish `accounts`.

    In steps along their own gradients, each replica counts its own tokens, so these are added up. In steps along the
    mean gradient, each counts the tokens of all, so only the replica with the most of these steps is used.
    """
    counted, settled = sum(a.counted for a in accounts), sum(a.computed - a.waiting for a in accounts)
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
