"""Compares samples of a fetched state with those of other sources, so that no single source is simply believed.

Knows: chunks, who gave them, how near the weights of replicas lie. Must not know: how chunks are scheduled, or what
becomes of the state. `judge` is pure.

A chunk's hash says that it is what its source offered, not that the offer is a state of this run. So some chunks of
each source are compared with the same chunks of up to two others:

    distance(a, b) = rms(a - b) / max(rms(a), rms(b))      over a chunk's weights
    allowed        = min(FAR, max(NEAR, CLOSEST_RATIO * the least distance of any two) + DRIFT * steps apart)

| a source's chunk lies | with | is |
|---|---|---|
| within `allowed` of another source's | one or two others | believed |
| further from both | two others | false: reported, its chunks are dropped |
| further from it than FAR | one other | undecided: dropped if it is the one of the two that claims the later step |
| anywhere | none | believed |
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from agora_protocol.ids import PeerId

from agora.state.layout import Flat

SAMPLES: Final = 2
"""At most this many chunks of each source are compared."""
WITNESSES: Final = 2
"""Each chunk is compared with those of at most this many other sources."""
NEAR: Final = 0.05
CLOSEST_RATIO: Final = 4.0
DRIFT: Final = 0.05
"""The largest change in one step, relative to the weights' own size, that this check allows."""
FAR: Final = 1.0
"""Unrelated weights of one size have a distance of 1.4; zeros have 1 from anything."""

Verdict = Literal["believed", "false", "undecided"]


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One source's weights of a chunk, and the step of the snapshot that they are from."""

    weights: Flat
    step: int


ReadSample = Callable[[PeerId, int], Awaitable[ChunkSample | None]]
"""Returns a source's weights of a chunk; None when it cannot give them."""


def distance(a: Flat, b: Flat) -> float:
    """Returns rms(a - b) / max(rms(a), rms(b)); 0 when both are all zeros, infinite when either is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        largest = max(float(np.linalg.norm(a.astype(np.float64))), float(np.linalg.norm(b.astype(np.float64))))
        apart = float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))
    if not math.isfinite(largest):
        return math.inf
    return apart / largest if largest else 0.0


def judge(own: ChunkSample, others: Sequence[ChunkSample]) -> Verdict:
    """Returns the verdict on a source's chunk, by the same chunk of up to two other sources: see the module's table.

    Whether an "undecided" one is dropped is for the caller to decide, by the steps.
    """
    apart = [distance(own.weights, other.weights) for other in others]
    if not others:
        return "believed"
    if len(others) == 1:
        return "believed" if apart[0] < FAR else "undecided"
    among = [distance(a.weights, b.weights) for i, a in enumerate(others) for b in others[:i]]
    near = max(NEAR, CLOSEST_RATIO * min(*apart, *among))
    for other, far in zip(others, apart, strict=True):
        if far <= min(FAR, near + DRIFT * abs(own.step - other.step)):
            return "believed"
    return "false"


async def find_false(
    chunks_of: Mapping[PeerId, Sequence[int]], witnesses: Sequence[PeerId], read: ReadSample, rng: random.Random
) -> dict[PeerId, Verdict]:
    """Returns the sources whose chunks must be dropped, each with its verdict, "false" or "undecided".

    chunks_of: the numbers of the chunks that each source gave. witnesses: the sources to compare with, the best first.
    read: is awaited for SAMPLES random chunks of each source and for the same chunks of up to WITNESSES witnesses.
    """
    found: dict[PeerId, Verdict] = {}
    for source, chunks in chunks_of.items():
        for chunk in rng.sample(list(chunks), min(SAMPLES, len(chunks))):
            own, others = await read(source, chunk), list[ChunkSample]()
            for witness in witnesses:
                if witness != source and len(others) < WITNESSES and (sample := await read(witness, chunk)) is not None:
                    others.append(sample)
            verdict = "believed" if own is None else judge(own, others)
            if verdict == "false" or (verdict == "undecided" and own is not None and _is_later(own, others[0])):
                found[source] = verdict
                break
    return found


def _is_later(own: ChunkSample, other: ChunkSample) -> bool:
    """Returns whether the step of `own` is that of `other` or a later one."""
    return own.step >= other.step
