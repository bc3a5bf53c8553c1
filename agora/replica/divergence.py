"""Which replicas of a stage have the right state when their histories differ, and which of them have a vote. Pure.

A history is a hash of all means that a replica has applied. docs/understand/divergence.md has the rules as a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agora_protocol.ids import PeerId

# Number of steps for which another replica must have shared this one's history to have a vote.
VOTE_STEPS: Final = 50
# Maximum number of replicas that are remembered; beyond it, those that have not been equal for longest are forgotten.
MAX_SHARED_HISTORIES: Final = 1024


class HistoryReport(NamedTuple):
    """What a replica last reported itself: the digest of all means that it has applied up to `step`, 0 if unknown.

    start_step: steps of the state that it began with.
    """

    step: int
    digest: int
    start_step: int = 0


class SharedHistory(NamedTuple):
    """The first and the last step at which another replica had this one's history.

    at: when that was last seen, in seconds. step_s: how long a step took then, None if unknown.
    """

    first: int
    last: int
    at: float = 0.0
    step_s: float | None = None


def with_reports(
    shared_histories: Mapping[PeerId, SharedHistory],
    history: Mapping[int, int],
    reports: Mapping[PeerId, HistoryReport],
    now: float = 0.0,
    step_s: float | None = None,
) -> Mapping[PeerId, SharedHistory]:
    """Returns the shared histories after `reports` of live replicas at `now`. history: see replicas_to_fetch_from."""
    found = dict(shared_histories)
    for peer, report in reports.items():
        if report.digest and history.get(report.step) == report.digest:
            known = found.get(peer)
            if known is None or report.step > known.last:
                found[peer] = SharedHistory(known.first if known else report.step, report.step, now, step_s)
    if len(found) <= MAX_SHARED_HISTORIES:
        return found
    return dict(sorted(found.items(), key=lambda item: (item[1].last, -item[1].first))[-MAX_SHARED_HISTORIES:])


@dataclass(frozen=True, slots=True)
class Electorate:
    """Determines which live replicas have a vote. Peer ids cost nothing, so that their number alone decides nothing.

    joined_history_at_step: the step of this replica's state when it joined those with which it shares its history.
    reports: of the other live replicas. networks: called only where histories differ; returns the public networks of
    peers, this one included. A peer that is missing in it, as in a LAN, counts as of this peer's network.
    """

    me: PeerId
    joined_history_at_step: int
    reports: Mapping[PeerId, HistoryReport]
    shared_histories: Mapping[PeerId, SharedHistory]
    networks: Callable[[], Mapping[PeerId, str]] = dict

    def knows_nobody(self, step: int) -> bool:
        """Returns whether this replica, at `step`, is too new to know whose reports count: then all count."""
        return (
            step - self.joined_history_at_step < VOTE_STEPS and not self.shared_histories.keys() & self.reports.keys()
        )

    def voters(self, step: int) -> set[PeerId]:
        """Returns the replicas that have a vote by what was seen up to `step`; this one may be among them.

        These are this one and those that have shared its history for VOTE_STEPS, or for half as long as any replica or
        this one's state did. Of them only those count that began as long ago, as they report it: so a newcomer sees as
        those see it that do not know it yet, and both sides of a split stage count the same replicas.
        """
        shared = {p: min(it.last, step) - it.first for p, it in self.shared_histories.items() if p in self.reports}
        if self.knows_nobody(step):
            shared = dict.fromkeys(self.reports, VOTE_STEPS)
        needed = min(VOTE_STEPS, max(step - self.joined_history_at_step, *shared.values(), 0) // 2)
        entitled = {self.me, *(peer for peer, steps in shared.items() if steps >= needed)}
        needed = min(VOTE_STEPS, (step - min(map(self.start_of, entitled))) // 2)
        return {peer for peer in entitled if self.start_of(peer) <= step - needed}

    def others_to_follow(self, step: int) -> set[PeerId] | None:
        """Returns the other replicas whose steps this one, at `step`, catches up with; None: all.

        These are the ones that had a vote when they last shared this one's history: after a split the other side may
        be ahead of all that this one can compare.
        """
        if self.knows_nobody(step):
            return None
        last = {peer: it.last for peer, it in self.shared_histories.items() if peer in self.reports}
        voters = {at: self.voters(at) for at in set(last.values())}
        return {peer for peer, at in last.items() if peer in voters[at]}

    def start_of(self, peer: PeerId) -> int:
        """Returns the steps of the state that a live replica began with, as it reports them."""
        return self.joined_history_at_step if peer == self.me else self.reports[peer].start_step


def replicas_to_fetch_from(
    history: Mapping[int, int], electorate: Electorate, *, is_torn: bool = False
) -> tuple[PeerId, ...]:
    """Returns the sorted ids of the replicas whose state is right, for this one to fetch, because its own is wrong.

    history: of this replica, digests of all means applied up to a step, by the number of that step. Replicas with the
    same digest at the same step form a group. A replica at a later step than `history` reaches joins this replica's
    group; one that reports no digest, or is at a step for which `history` has none, is ignored. is_torn: this replica
    has taken a step by half, so any other group is right. Returns () when this replica's own group is right, and when
    there is no other.

    Right is the group whose voters have most networks, then that with most voters, most replicas, the least start step,
    the least id. Voters are those of the step at which the last of the others still shared this history, so that nobody
    counts who joined one side of a split stage since. Of the right group, voters are fetched from if there are any.
    """
    me = electorate.me
    own = set() if is_torn else {me}
    groups: defaultdict[tuple[int, int], set[PeerId]] = defaultdict(set)
    for peer, report in electorate.reports.items():
        if not report.digest:
            continue
        if is_torn:
            groups[report.step, report.digest].add(peer)
        elif report.step > max(history, default=0):
            own.add(peer)
        elif own_digest := history.get(report.step, 0):
            (own if report.digest == own_digest else groups[report.step, report.digest]).add(peer)
    if not groups:
        return ()
    last_shared = [
        electorate.shared_histories[p].last
        for group in groups.values()
        for p in group & electorate.shared_histories.keys()
    ]
    voters = electorate.voters(max(last_shared, default=max(history, default=0)))
    networks = electorate.networks()
    own_network = networks.get(me, "")

    def order(group: set[PeerId]) -> tuple[object, ...]:
        votes, oldest = group & voters, min((electorate.start_of(peer), peer) for peer in group or {me})
        return -len({networks.get(peer, own_network) for peer in votes}), -len(votes), -len(group), oldest

    right = min([own, *groups.values()], key=order)
    return () if right is own else tuple(sorted(right & voters or right))
