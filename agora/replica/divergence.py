"""Finds out whether replicas that should be equal have diverged, and which of them are right. Deterministic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from agora_protocol.ids import PeerId

from agora.replica.replica_progress import KnownReplicas


def replicas_to_fetch_from(lineages: Mapping[int, int], me: PeerId, live: KnownReplicas) -> tuple[PeerId, ...]:
    """Returns the sorted ids of the replicas whose state is right, for this one to fetch, because its own is wrong.

    lineages: of this replica, digests of all means applied up to a step, by the number of that step. live: the other
    replicas, each with one step and its lineage. Replicas with the same lineage at the same step form a group. The
    largest group is right; among groups of equal size, the one that has the least id. A replica at a later step than
    `lineages` reach joins this replica's group; one that reports no lineage (0), or is at a step for which `lineages`
    has none, is ignored. Returns () when this replica's own group is right.
    """
    equal = [me]
    groups: defaultdict[tuple[int, int], list[PeerId]] = defaultdict(list)
    for peer, progress in live.items():
        step, their_lineage = progress.direct.agreed, progress.direct.lineage
        if not their_lineage:
            continue
        if step > max(lineages, default=0):
            equal.append(peer)
        elif own_lineage := lineages.get(step, 0):
            (equal if their_lineage == own_lineage else groups[step, their_lineage]).append(peer)
    majority = min([equal, *groups.values()], key=lambda group: (-len(group), min(group)))
    return () if majority is equal else tuple(sorted(majority))
