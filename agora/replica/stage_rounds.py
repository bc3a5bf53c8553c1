"""The rounds of this peer's stages: who is a member, which parts are averaged now, how long a round may take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from agora_protocol.errors import ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest
from torch import Tensor

from agora.core import sync_mode
from agora.core.calls import Caller
from agora.core.clock import loop_time
from agora.core.sync_mode import EXACT, ReplicaUplink
from agora.observe import events
from agora.replica import replica_progress
from agora.replica.gossip import StepGossip
from agora.replica.part_averager import Part, RoundConfig
from agora.replica.partition import Members, Slices, cut_into_parts
from agora.replica.quota import StepMeter
from agora.replica.reducer import PartReducer
from agora.replica.replicated_stages import ReplicaListing, ReplicatedStages
from agora.replica.rounds import Round, RoundResult

# An owner refuses a part more than this many gradient rounds, or passes over all slices, away from its own round.
MAX_ROUNDS_APART: Final = 2
# Steps by which a replica's last report may lag behind the step of a slice round in which it takes part.
MAX_REPORT_LAG: Final = 2
# A round of an asynchronous run may take max(MIN_ROUND_S, ROUND_STEPS * the average duration of a step).
ROUND_STEPS: Final = 2.0
MIN_ROUND_S: Final = 4.0


class StageRounds:
    """The replicas of this peer's stages, as its rounds see them; holds the PartReducer that averages its own parts.

    Implements ReducerView and RoundGroup.
    """

    def __init__(
        self,
        signed: SignedManifest,
        me: PeerId,
        stages: ReplicatedStages,
        gossip: StepGossip,
        listing: ReplicaListing,
        meters: Mapping[int, StepMeter],
        caller: Caller,
        report: events.Report,
    ) -> None:
        """meters: by stage, the measured durations of its steps and this replica's rate."""
        manifest = signed.manifest
        self.reducer = PartReducer(RoundConfig.from_manifest(signed, me), caller, self)
        self._slices: dict[tuple[int, int], Slices] = {}
        self._seed = manifest.seed
        self._change_rule = sync_mode.ChangeRule.from_manifest(manifest)
        self._me = me
        self._synchronous = manifest.schedule.kind == "synchronous"
        self._every = manifest.averaging.every
        self._manifest_round_s = manifest.averaging.round_s
        self._stages = stages
        self._gossip = gossip
        self._listing = listing
        self._meters = meters
        self._report = report
        self._start_steps = {stage: stages.step_of(stage) for stage in stages.span.stages}
        self._wishes = {stage: sync_mode.Wish(since=loop_time()) for stage in stages.span.stages}

    # --- members

    def live_others(self, stage: int) -> set[PeerId]:
        """Returns the ids of the stage's other replicas that are both listed and live."""
        known, listed = self._gossip.known_progress(stage), self._gossip.others_in_view(stage)
        return set(replica_progress.live_replicas(known, listed, loop_time()))

    def members(self, stage: int) -> Members:
        """Returns the members of the stage's next round, with this peer, by id, and their bandwidths, see `Members`.

        Newcomers own no part. In asynchronous runs lagging replicas are not members at exact steps: they replay them.
        """
        listed, known = self._listing.replicas_in_view(stage), self._gossip.known_progress(stage)
        step = self._stages.step_of(stage)
        others = replica_progress.round_members(known, self._gossip.others_in_view(stage), loop_time())
        if not self._stages.step_plan(stage).is_local(step) and not self._synchronous:
            others -= replica_progress.lagging_replicas(known, others, step)
        new = replica_progress.newcomers(known, others, step)
        if self._start_steps[stage] > step - replica_progress.NEWCOMER_STEPS >= 0:
            new.add(self._me)
        return {peer: None if peer in new else listed.get(peer, 0.0) for peer in {*others, self._me}}

    def peers_not_awaited(self, part: Part, peers: Collection[PeerId]) -> set[PeerId]:
        """Returns those of `peers` whose contributions to `part` need not be waited for: the unreachable ones.

        In asynchronous runs also others that have not reported yet (after step 0), or whose last report was more than 1
        step (for slices MAX_REPORT_LAG + 1) behind the part's step. A slice's step is part.round * averaging.every.
        """
        known = self._gossip.known_progress(part.stage)
        not_awaited = replica_progress.unreachable_replicas(known, peers, loop_time())
        if not self._synchronous:
            step = part.round if part.kind == "gradient" else part.round * self._every - MAX_REPORT_LAG
            not_awaited |= replica_progress.lagging_or_unheard_replicas(known, set(peers) - {self._me}, step)
        return not_awaited

    # --- rounds

    def round_s(self, stage: int) -> float:
        """Returns the seconds that a round may take: the manifest's `averaging.round_s`.

        In an asynchronous run at most max(MIN_ROUND_S, ROUND_STEPS * a recent step's seconds), once these are known.
        """
        step_s = self._meters[stage].step_s.value
        if self._synchronous or step_s is None:
            return self._manifest_round_s
        return min(self._manifest_round_s, max(MIN_ROUND_S, ROUND_STEPS * step_s))

    def check_part(self, part: Part) -> int:
        """Checks that `part` can be averaged here now, and returns its number of elements.

        Raises ProtocolError if no stage here has such a part, Refused if its round is too far from this peer's. For a
        part of another number of slices than the stage has at that step, raises Refused if that number may change.
        """
        if part.stage not in self._stages.span or (part.kind == "gradient") != (part.slices == EXACT):
            raise ProtocolError("bad-message", f"no {part.kind} of {part.slices} slices is averaged in {part.stage}")
        is_gradient = part.kind == "gradient"
        averaged_step = part.round if is_gradient else part.round * self._every - 1
        if self._stages.step_plan(part.stage).slices_at(averaged_step) != part.slices:
            problem = f"stage {part.stage} averages no {part.kind} {part.round} here"
            raise Refused(problem) if self._change_rule.may_change else ProtocolError("bad-message", problem)
        slices = None if is_gradient else self.slices(part.stage, part.round)
        numel = self._stages.layout(part.stage).numel if slices is None else slices.numel_of(part.round)
        cuts = cut_into_parts(numel)
        if part.position >= len(cuts):
            raise ProtocolError("bad-message", f"round {part.round} has {len(cuts)} parts, not {part.position + 1}")
        step = self._stages.step_of(part.stage)
        own_number = step if is_gradient else step // self._every
        if abs(part.round - own_number) > MAX_ROUNDS_APART * max(part.slices, 1):
            raise Refused(f"round {part.round} is too far from this peer's round {own_number}")
        return len(range(numel)[cuts[part.position]])

    def slices(self, stage: int, number: int) -> Slices:
        """Returns the slices of the stage, of which slice round `number` averages one."""
        count = self._stages.step_plan(stage).slices_at(number * self._every - 1)
        if (stage, count) not in self._slices:
            self._slices[stage, count] = Slices(self._stages.layout(stage).numel, count, self._seed)
        return self._slices[stage, count]

    async def run_round(
        self, stage: int, kind: str, number: int, values: Tensor, weight: float, slices: int = EXACT
    ) -> RoundResult:
        """Averages `values`, float32 [n], with those of the present members, within round_s seconds; see Round."""
        deadline = loop_time() + self.round_s(stage)
        who = self.reducer, self._report, stage, kind, number, weight, self.members(stage)
        return await Round(*who, deadline, slices).run(values)

    # --- exact or local steps

    def wanted_slices(self, part: Part) -> int:
        """Returns in how many slices the part's stage should agree later, or EXACT; see step_kinds.

        That is the part's own number, which asks for no change, until the wish for a change is held.
        """
        wanted = self.update_wish(part.stage, part.slices)
        return wanted if self._wishes[part.stage].is_held(loop_time()) else part.slices

    def update_wish(self, stage: int, present: int) -> int:
        """Returns how many slices this peer wants for a stage that has `present`, or EXACT; notes since when it does.

        Called at least after every step: a wish is held only if nothing else was wanted in between.
        """
        if not self._change_rule.may_change:
            return present
        wanted, _ = self.explain_slices(stage, present)
        self._wishes[stage] = self._wishes[stage].after(present, wanted, loop_time())
        return wanted

    def explain_slices(self, stage: int, present: int) -> tuple[int, str]:
        """Returns sync_mode.wanted_slices for a stage, by what its live replicas have reported, with its reason.

        present: the number of slices that the stage has now, or EXACT.
        """
        known, listed = self._gossip.known_progress(stage), self._gossip.others_in_view(stage)
        live = replica_progress.live_replicas(known, listed, loop_time())
        uplinks = [ReplicaUplink(each.direct.rate.per_second, each.counts.bytes_carried) for each in live.values()]
        uplinks.append(ReplicaUplink(self._meters[stage].rate.per_second, self._gossip.own_counts(stage).bytes_carried))
        return sync_mode.wanted_slices(present, uplinks, self._change_rule.most_slices)
