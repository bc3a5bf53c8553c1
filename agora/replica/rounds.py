"""What a round of averaging is given, and what it gives."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId
from torch import Tensor

from agora.core.calls import ConnectionBroken
from agora.replica.reducers import Members
from agora.replica.shard_codec import RoundConfig, Shard, cut_into_shards

MAX_OPEN_SHARDS: Final = 8  # maximum number of shards that a peer sends, or asks for, at the same time
# Codes of the errors with which a call ends when its peer is gone or hangs.
NO_ANSWER: Final = (ConnectionBroken.code, "deadline")

# A round is remembered for this many times round_s after it began here, for late contributions and for Recall.
RECORD_LIFETIME_ROUNDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class RoundContext:
    """What this peer knows of a shard's round now."""

    members: Members  # this peer included
    live_others: frozenset[PeerId]  # those that may keep the round's means
    do_not_wait_for: frozenset[PeerId]  # members whose contributions need not be waited for
    allowed_s: float  # seconds that the round may take
    # By member, the most tokens that can be behind its contribution; a member that is not in it has no bound.
    token_bounds: Mapping[PeerId, float] = field(default_factory=dict)
    may_sign_mean: bool = True  # this peer cannot have signed another mean of the round before a restart
    numel: int = 0  # elements of the shard
    refusal: AgoraError | None = None  # why the shard is not averaged here now


@dataclass(slots=True)
class RoundResult:
    """The result of a round for one member. Failed shards are filled in later, in place."""

    mean: Tensor  # float32 [n]; in a failed shard, this replica's own values until the shard is filled in
    averaged: list[bool]  # for each shard
    fragments: int  # how many the stage has in this round, ALL_REDUCE for a gradient
    wanted_fragments_by_shard: list[int]  # how many its reducer wants later; of a failed shard the present number
    contributors: float = 0.0  # members that contributed in time: average over all shards, 0 for a failed one
    # This peer's tokens that were too late for this round and the one before: average over shards.
    lost_tokens: float = 0.0
    # For each averaged shard, the tokens that its mean was computed over, as its reducer reported.
    reported_weights: dict[int, float] = field(default_factory=dict)
    weight: float = 0.0  # the lower median of reported_weights, as far as it is believed
    is_weight_confirmed: bool = False  # whether two reducers have reported nearly that weight
    own_weight: float = 0.0  # tokens that this replica's own values were computed over

    @property
    def failed_shards(self) -> int:
        return self.averaged.count(False)

    @property
    def wanted_fragments(self) -> int:
        # The present number, unless the means of all shards want others: so no single reducer forces a change.
        wanted = self.wanted_fragments_by_shard
        return max(wanted) if wanted and self.fragments not in wanted else self.fragments

    @classmethod
    def of_failed_shards(cls, own: Tensor, fragments: int) -> RoundResult:
        shards = len(cut_into_shards(len(own)))
        return cls(own, [False] * shards, fragments, [fragments] * shards)

    def set_weight(self, first_shard: Shard, config: RoundConfig) -> float:
        """Sets `weight` of a round with averaged shards; returns it as reported. first_shard: of the round."""
        # The median: whoever reduces fewer than half of the shards cannot choose it.
        reported = statistics.median_low(self.reported_weights.values())
        self.weight = config.believed_weight(first_shard, reported)
        return reported
