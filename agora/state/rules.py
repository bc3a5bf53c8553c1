"""When to write a checkpoint, who speaks of it, where a stage starts from, which slices were missed. Pure."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agora_protocol.ids import PeerId, RunId


@dataclass(frozen=True, slots=True)
class Start:
    """Where a stage starts from. `sources`: whom to fetch it from, best first; `step`: the least to take from them."""

    kind: Literal["own", "peers", "seed"]
    step: int
    sources: tuple[PeerId, ...]
    reason: str


def choose_start(own: int | None, offers: Mapping[PeerId, int], *, max_lag: int = 100) -> Start:
    """The newest of what there is: the own checkpoint's step (None: there is none), what peers are at, or the seed.

    Of equals the own checkpoint is taken, since it costs no bytes. Peers more than `max_lag` steps behind the newest
    are not asked. The reason is printed, and shown by the tests.
    """
    newest = max(offers.values(), default=0)
    if own is not None and own >= newest:
        ahead = f"peers are at step {newest}" if offers else "no peer offers any"
        return Start("own", own, (), f"own checkpoint of step {own}; {ahead}")
    if newest == 0:
        return Start(
            "seed", 0, (), "nobody has taken a step yet" if offers else "no checkpoint, and no peer offers any"
        )
    least = max(newest - max_lag, 1)
    sources = sorted((peer for peer, step in offers.items() if step >= least), key=lambda peer: (-offers[peer], peer))
    mine = "no own checkpoint" if own is None else f"own checkpoint of step {own}"
    return Start("peers", least, tuple(sources), f"{mine}; {len(sources)} peers are at step {newest} or little behind")


def most_believed(serving: Sequence[int], max_lag: int) -> float:
    """The latest step that a replica of a stage is believed to be at: `max_lag` beyond the upper median of those that
    serve it, once there are three of them, so that what one says leads nobody away.
    """
    return math.inf if len(serving) < 3 else statistics.median_high(serving) + max_lag


def checkpoint_due(step: int, every: int, last: int) -> bool:
    """Whether a stage at `step` owes a checkpoint: a multiple of `every` lies behind it since its last one."""
    return cut_step(step, every) > cut_step(last, every)


def cut_step(step: int, every: int) -> int:
    """The step by which a checkpoint at `step` is known to the whole swarm: replicas may catch up over a multiple."""
    return step // every * every


def choose_writer(run: RunId, stage: int, step: int, members: Iterable[PeerId]) -> PeerId | None:
    """Who of a stage's replicas publishes the Cut of `step`: rendezvous hashing, the same in every peer's view."""
    return max(members, key=lambda peer: (_weight(run, stage, step, peer), peer), default=None)


def missed_rounds(snapshot_step: int, step: int, every: int, count: int) -> list[int]:
    """The averaging rounds begun after `snapshot_step` and up to `step`, each of the `count` slices at most once."""
    rounds = range(snapshot_step // every + 1, step // every + 1)
    return list(rounds[-count:])


def leading_step(steps: Iterable[Sequence[int]]) -> int:
    """The step that the furthest stage has reached, given those of each stage's replicas: of a stage the lower median,
    so that no single replica can lead it away.
    """
    return max((sorted(of_stage)[(len(of_stage) - 1) // 2] for of_stage in steps if of_stage), default=0)


def _weight(run: RunId, stage: int, step: int, peer: PeerId) -> bytes:
    return hashlib.sha256(f"agora cut 1\0{run}\0{stage}\0{step}\0{peer}".encode()).digest()
