"""Finds out whether replicas that should be equal have diverged, and which of them are right. Pure.

Knows: lineages by step (train.lineage), what others reported of theirs. Must not know: weights, calls, time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from agora_protocol.ids import PeerId

from agora.averaging.replica_progress import KnownReplicas


def replicas_to_fetch_from(lineages: Mapping[int, int], me: PeerId, live: KnownReplicas) -> tuple[PeerId, ...]:
    """Returns the replicas whose state is right where this one's is not; () when it is right or nothing is comparable.

    lineages: this replica's, by agreed step. Replicas with one lineage at one step are a group. The largest group is
    right; of groups of one size, that with the least id. A replica at a later step than this one counts as equal to it.
    """
    equal = [me]
    groups: defaultdict[tuple[int, int], list[PeerId]] = defaultdict(list)
    for peer, last in live.items():
        step, theirs = last.direct.agreed, last.direct.lineage
        if not theirs:
            continue
        if step > max(lineages, default=0):
            equal.append(peer)
        elif ours := lineages.get(step, 0):
            (equal if theirs == ours else groups[step, theirs]).append(peer)
    right = min([equal, *groups.values()], key=lambda group: (-len(group), min(group)))
    return () if right is equal else tuple(sorted(right))
