"""Determines which rounds of a stage this peer takes part in now, with which members, and their largest weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from agora_protocol.errors import AgoraError, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.manifest import Manifest

from agora.core.live_manifest import LiveManifest
from agora.core.step_schedule import ALL_REDUCE, SyncChangeRule
from agora.replica.gossip import StepGossip
from agora.replica.pacing import StepPacing
from agora.replica.reducers import FragmentDivision, Members
from agora.replica.rounds import RoundContext
from agora.replica.shard_codec import Shard, cut_into_shards
from agora.replica.stage_view import (
    KnownReplicas,
    Membership,
    lagging_or_unheard_replicas,
    lagging_replicas,
    may_sign,
    newcomers,
)
from agora.replica.step_worker import StepWorker
from agora.replica.trust import token_bounds

# A reducer refuses a shard more than this many gradient rounds, or passes over all fragments, away from its own round.
MAX_ROUNDS_APART: Final = 2
# Steps by which a replica's last report may lag behind the step of a fragment sync in which it takes part.
MAX_REPORT_LAG: Final = 2
# A round of an asynchronous run may take max(MIN_ROUND_TIMEOUT_S, ROUND_STEPS * the average duration of a step).
ROUND_STEPS: Final = 2.0
MIN_ROUND_TIMEOUT_S: Final = 4.0


class RoundContexts:
    """Makes the context of a stage's rounds from its gossip, this peer's view of the run, and the stage's progress."""

    def __init__(
        self,
        stage: int,
        manifest: Manifest,
        me: PeerId,
        *,
        live: LiveManifest,
        worker: StepWorker,
        gossip: StepGossip,
        bandwidths: Callable[[], Mapping[PeerId, float]],
        pacing: StepPacing,
    ) -> None:
        """bandwidths: by which the stage's reducers are chosen, see SwarmQueries."""
        self._stage = stage
        self._me = me
        self._seed = manifest.seed
        self._averaging = manifest.averaging
        self._synchronous = manifest.schedule.kind == "synchronous"
        self._live_manifest = live
        self._change_rule = SyncChangeRule.from_manifest(manifest)
        self._worker = worker
        self._gossip = gossip
        self._bandwidths = bandwidths
        self._pacing = pacing
        self._start_step = worker.step_of(stage)
        self._divisions: dict[int, FragmentDivision] = {}

    def members(self) -> Members:
        """Returns the members of the stage's next round, this peer included."""
        return self._members(self._gossip.membership())

    def _members(self, membership: Membership) -> Members:
        known, others = membership.known, set(membership.members)
        progress = self._worker.progress_of(self._stage)
        if not progress.sync_schedule.is_inner(progress.step) and not self._synchronous:
            # These replay all-reduces.
            others -= lagging_replicas(known, others, progress.step)
        new = newcomers(known, others, progress.step)
        if not may_sign(progress.step, self._start_step):
            new.add(self._me)
        bandwidths = self._bandwidths()
        return {peer: None if peer in new else bandwidths.get(peer, 0.0) for peer in {*others, self._me}}

    def allowed_s(self) -> float:
        """Returns how many seconds a round may take now."""
        step_s = self._pacing.step_s.value
        round_s = self._live_manifest.at(self._worker.step_of(self._stage)).averaging.round_s
        if self._synchronous or step_s is None:
            return round_s
        return min(round_s, max(MIN_ROUND_TIMEOUT_S, ROUND_STEPS * step_s))

    def context_of(self, shard: Shard) -> RoundContext:
        """Returns what this peer knows of the shard's round now."""
        membership = self._gossip.membership()
        members = self._members(membership)
        do_not_wait_for = members.keys() & membership.suspected
        if not self._synchronous:
            is_gradient = shard.kind == "gradient"
            step = shard.round if is_gradient else shard.round * self._averaging.every - MAX_REPORT_LAG
            do_not_wait_for |= lagging_or_unheard_replicas(membership.known, members.keys() - {self._me}, step)
            if is_gradient:
                do_not_wait_for |= members.keys() & self._without_tokens(membership.known, step)
        numel, refusal = self._check(shard)
        step = shard.round * (self._averaging.every if shard.fragments else 1)
        live = membership.listed_live
        return RoundContext(
            members,
            # A replica that began with a later state keeps no mean of this round; that it has none must not count
            # against what others keep.
            frozenset(peer for peer, progress in live.items() if progress.direct.start_step <= step),
            frozenset(do_not_wait_for),
            self.allowed_s(),
            token_bounds=self._token_bounds(shard, members, membership.known),
            may_sign_mean=may_sign(step, self._start_step) or not any(rate is not None for rate in members.values()),
            numel=numel,
            refusal=refusal,
        )

    def _without_tokens(self, known: KnownReplicas, step: int) -> frozenset[PeerId]:
        # Slow replicas that have counted nothing for the step, and need not. Such a device may be in the middle of a
        # job that takes it longer than the others' step, and closes its share, of no tokens, only after it.
        own = self._worker.progress_of(self._stage)
        with_tokens = {peer for peer, progress in known.items() if progress.tokens_of(step)}
        if own.open_step != step or own.tokens_in_share:
            with_tokens.add(self._me)
        return self._pacing.without_part - with_tokens

    def _token_bounds(self, shard: Shard, members: Members, known: KnownReplicas) -> dict[PeerId, float]:
        rates = {peer: known[peer].direct.meter.per_second for peer in members if peer in known}
        rates[self._me] = self._pacing.meter.per_second
        steps = self._averaging.every * shard.fragments or 1
        step = shard.round if shard.kind == "gradient" else max(shard.round * self._averaging.every - 1, 0)
        bounds = token_bounds(rates, self._live_manifest.target_tokens(step), self._pacing.microbatch_tokens)
        return {peer: steps * bound for peer, bound in bounds.items()}

    def _check(self, shard: Shard) -> tuple[int, AgoraError | None]:
        stage, is_gradient = self._stage, shard.kind == "gradient"
        every, fragments = self._averaging.every, shard.fragments
        if is_gradient != (fragments == ALL_REDUCE):
            return 0, ProtocolError("bad-message", f"Stage {stage} averages no {shard.kind} of {fragments} fragments.")
        averaged_step = shard.round if is_gradient else shard.round * every - 1
        if self._worker.progress_of(stage).sync_schedule.fragments_at(averaged_step) != fragments:
            # Where sync schedules change, an honest member may not know of the change yet.
            if self._change_rule.may_change:
                return 0, Refused(f"stage {stage} averages no {shard.kind} {shard.round} here")
            return 0, ProtocolError("bad-message", f"Stage {stage} averages no {shard.kind} {shard.round} here.")
        numel = self._worker.layout(stage).numel
        if not is_gradient:
            numel = self.division_of(shard.round).numel_of(shard.round)
        cuts = cut_into_shards(numel)
        if shard.position >= len(cuts):
            problem = f"Round {shard.round} has {len(cuts)} shards, not {shard.position + 1}."
            return 0, ProtocolError("bad-message", problem)
        step = self._worker.step_of(stage)
        own_number = step if is_gradient else step // every
        if abs(shard.round - own_number) > MAX_ROUNDS_APART * max(fragments, 1):
            return 0, Refused(f"round {shard.round} is too far from this peer's round {own_number}")
        return len(range(numel)[cuts[shard.position]]), None

    def division_of(self, number: int) -> FragmentDivision:
        """Returns the division of the stage's weights of which sync `number` averages one fragment."""
        sync_schedule = self._worker.progress_of(self._stage).sync_schedule
        count = sync_schedule.fragments_at(number * self._averaging.every - 1)
        if count not in self._divisions:
            self._divisions[count] = FragmentDivision(self._worker.layout(self._stage).numel, count, self._seed)
        return self._divisions[count]
