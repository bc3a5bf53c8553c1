"""Whose history of means is right, where replicas of a stage differ, by what this replica has seen of them. Pure.

Peer ids are free, so ids do not decide. A replica has a vote by tenure: it has shared this replica's history for a
while. Those of one network have one vote together, and one that says it trains but brings nothing to means has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

# Number of steps for which another replica must have shared this one's history to have a vote.
VOTE_STEPS: Final = 50
# Number of shards that this replica has reduced, of which another one must have brought values to one.
MIN_REDUCED: Final = 16
MAX_LAG: Final = 2  # steps by which an honest replica's report may lag behind
MAX_STANDINGS: Final = 1024  # maximum number of replicas that are remembered; those that were equal last stay


class HistoryReport(NamedTuple):
    """What a replica last reported itself: the digest of all means that it has applied up to `step`, 0 if unknown.

    start_step: steps of the state that it began with.
    """

    step: int
    digest: int
    start_step: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What this replica has seen of another one: the first and the last step at which both had the same history.

    reduced: number of shards that this replica has reduced meanwhile; brought: of these, how many have values of the
    other one.
    """

    first: int
    last: int
    reduced: int = 0
    brought: int = 0

    @property
    def is_idle(self) -> bool:
        return self.reduced >= MIN_REDUCED and not self.brought


Standings = Mapping[PeerId, Standing]


def with_reports(
    standings: Standings, history: Mapping[int, int], reports: Mapping[PeerId, HistoryReport]
) -> Standings:
    """Returns the standings after `reports` of live replicas; `standings` itself if nothing changed.

    history: of this replica, digests of all means applied up to a step, by the number of that step.
    """
    changed: dict[PeerId, Standing] = {}
    for peer, report in reports.items():
        if not report.digest or history.get(report.step) != report.digest:
            continue
        known = standings.get(peer) or Standing(report.step, report.step)
        if peer not in standings or report.step > known.last:
            changed[peer] = replace(known, last=max(known.last, report.step))
    if not changed:
        return standings
    merged = {**standings, **changed}
    if len(merged) <= MAX_STANDINGS:
        return merged
    latest = sorted(merged, key=lambda peer: (merged[peer].last, -merged[peer].first))
    return {peer: merged[peer] for peer in latest[-MAX_STANDINGS:]}


def with_reduced_shard(standings: Standings, contributors: Collection[PeerId], step: int) -> Standings:
    """Returns the standings after this replica, at `step`, has reduced a shard of `contributors`' values.

    The others that have not shared its history in the last MAX_LAG steps were perhaps not reached, and lose nothing.
    """
    return {
        peer: replace(known, reduced=known.reduced + 1, brought=known.brought + (peer in contributors))
        if known.last >= step - MAX_LAG
        else known
        for peer, known in standings.items()
    }


@dataclass(frozen=True, slots=True)
class Electorate:
    """Who of the live replicas has a vote.

    | a replica has a vote | if |
    |---|---|
    | this one | always |
    | another one | it has shared this one's history for VOTE_STEPS steps; or for half of the most that any has |
    | an idle one | never |
    | any | the state here began less than VOTE_STEPS ago, and no live one has shared its history yet |

    Of these only those count that began VOTE_STEPS ago, by their own word, if there are any: so a newcomer sees as
    those see it that do not know it yet.

    "Any" includes this one since it `began`: the steps of the state that it loaded last. start_step: of the state that
    it started with, which is what the others know. reports: of the live replicas. networks: asked only where histories
    differ: the networks of peers, this one included; one that is left out, as in a LAN, is of this peer's network.
    """

    me: PeerId
    start_step: int
    began: int
    reports: Mapping[PeerId, HistoryReport]
    standings: Standings
    networks: Callable[[], Mapping[PeerId, str]] = dict

    def knows_nobody(self, step: int) -> bool:
        """Returns whether this replica, at `step`, is too new to say whose word counts: then everybody's does."""
        return step - self.began < VOTE_STEPS and not self.standings.keys() & self.reports.keys()

    def voters(self, step: int) -> set[PeerId]:
        """Returns the live replicas that have a vote by what was seen up to `step`, this one included."""
        if self.knows_nobody(step):
            entitled = {*self.reports, self.me}
        else:
            shared = self._steps_shared(step)
            needed = min(VOTE_STEPS, max(step - self.began, *shared.values(), 0) // 2)
            entitled = {p for p, steps in shared.items() if steps >= needed and not self.standings[p].is_idle}
            entitled.add(self.me)
        return {peer for peer in entitled if self.start_of(peer, step) + VOTE_STEPS <= step} or entitled

    def start_of(self, peer: PeerId, step: int) -> int:
        """Returns the steps of the state that a live replica started with, by its own word.

        Of this one, those of the state that it loaded last, if all that know it do so since then.
        """
        if peer != self.me:
            return self.reports[peer].start_step
        is_known = max(self._steps_shared(step).values(), default=0) >= VOTE_STEPS
        return self.start_step if is_known else self.began

    def _steps_shared(self, step: int) -> dict[PeerId, int]:
        live = {peer: known for peer, known in self.standings.items() if peer in self.reports}
        return {peer: min(known.last, step) - known.first for peer, known in live.items()}


def replicas_to_fetch_from(
    history: Mapping[int, int], electorate: Electorate, *, is_torn: bool = False
) -> tuple[PeerId, ...]:
    """Returns the sorted ids of the replicas whose state is right, for this one to fetch, because its own is wrong.

    history: of this replica, digests of all means applied up to a step, by the number of that step. Replicas with the
    same digest at the same step form a group. A replica at a later step than `history` reaches joins this replica's
    group; one that reports no digest, or is at a step for which `history` has none, is ignored. is_torn: this replica
    has taken a step by half, so any other group is right. Returns () when this replica's own group is right, and when
    there is no other.

    Right is the group that is first in this order:

    1. networks of its voters, as of the step at which the last of the others still shared this history: so both sides
       of a split stage count the same replicas, whoever joined one side meanwhile;
    2. these voters;
    3. its replicas;
    4. the least start_step, then the least id.

    Of the right group, voters are fetched from if there are any.
    """
    me, reports = electorate.me, electorate.reports
    own = set() if is_torn else {me}
    groups: defaultdict[HistoryReport, set[PeerId]] = defaultdict(set)
    for peer, report in reports.items():
        if not report.digest:
            continue
        content = report._replace(start_step=0)
        if is_torn:
            groups[content].add(peer)
        elif report.step > max(history, default=0):
            own.add(peer)
        elif own_digest := history.get(report.step, 0):
            (own if report.digest == own_digest else groups[content]).add(peer)
    if not groups:
        return ()
    step = max(history, default=0)
    known = electorate.standings
    shared = [known[peer].last for group in groups.values() for peer in group & known.keys()]
    split_at = max(shared, default=step)
    voters = electorate.voters(split_at)

    networks = electorate.networks()
    own_network = networks.get(me, "")

    def order(group: set[PeerId]) -> tuple[object, ...]:
        votes, oldest = group & voters, min((electorate.start_of(peer, split_at), peer) for peer in group or {me})
        return -len({networks.get(peer, own_network) for peer in votes}), -len(votes), -len(group), oldest

    right = min([own, *groups.values()], key=order)
    return () if right is own else tuple(sorted(right & voters or right))
