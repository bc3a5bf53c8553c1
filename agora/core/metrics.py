"""The metrics of an objective: the sums in a microbatch's answer, their bounds, and the means that are made from them.

| objective | sums of a microbatch                                                           | metrics             |
|-----------|--------------------------------------------------------------------------------|---------------------|
| lm        | none                                                                           | none                |
| sft       | supervised tokens that the model predicts right                                | token_accuracy      |
| dpo       | rewards of chosen, of rejected answers; pairs whose chosen one has more; pairs | rewards/chosen,     |
|           |                                                                                | rewards/rejected,   |
|           |                                                                                | rewards/accuracies, |
|           |                                                                                | rewards/margins     |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# The names of the metrics, by the manifest's `objective.kind`, in the order in which a progress record has them.
METRIC_NAMES: Final = {
    "lm": (),
    "sft": ("token_accuracy",),
    "dpo": ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
}


MAX_REWARD: Final = 1e12  # the largest absolute value that a microbatch's sum of rewards may have


def are_plausible(kind: str, sums: Sequence[float], tokens: int, rows: int) -> bool:
    """Returns whether a microbatch of `tokens` supervised tokens and `rows` rows can have these metric sums.

    kind: the manifest's objective.kind. sft: 0 to `tokens` right tokens. dpo: rows // 2 pairs, 0 to that many right
    ones, sums of rewards within +-MAX_REWARD. Returns False also for a wrong number of sums and for an unknown kind.
    """
    match kind, tuple(sums):
        case "lm", ():
            return True
        case "sft", (correct,):
            return 0 <= correct <= tokens
        case "dpo", (chosen, rejected, accurate, pairs):
            return (
                pairs == rows // 2 and 0 <= accurate <= pairs and all(abs(x) <= MAX_REWARD for x in (chosen, rejected))
            )
    return False


def add_sums(sums: Sequence[float], more: Sequence[float]) -> tuple[float, ...]:
    """Returns the elementwise sums of `sums` and `more`; `more` alone if `sums` is empty.

    Raises ValueError if their lengths differ.
    """
    return tuple(a + b for a, b in zip(sums, more, strict=True)) if sums else tuple(more)


def named_means(kind: str, sums: Sequence[float], tokens: int) -> dict[str, float]:
    """Returns the metrics by name: means over the supervised tokens (sft) or over the pairs (dpo).

    kind: the manifest's objective.kind. tokens: number of supervised tokens behind the sums; dpo ignores it. Returns {}
    for lm, for a wrong number of sums, and if no tokens (sft) or no pairs (dpo) have been summed.
    """
    match kind, tuple(sums):
        case "sft", (correct,) if tokens:
            means: tuple[float, ...] = (correct / tokens,)
        case "dpo", (chosen, rejected, accurate, pairs) if pairs:
            means = chosen / pairs, rejected / pairs, accurate / pairs, (chosen - rejected) / pairs
        case _:
            return {}
    return dict(zip(METRIC_NAMES[kind], means, strict=True))
