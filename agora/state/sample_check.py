"""Compares samples of a fetched state with other sources': nobody's state is believed alone.

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
"""Chunks of each source that are compared."""
WITNESSES: Final = 2
"""Other sources with which each is compared, at most."""
NEAR: Final = 0.05
CLOSEST_RATIO: Final = 4.0
DRIFT: Final = 0.05
"""How much of their own size weights may change in a step, at most, as far as this check knows."""
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
    """Judges a source's chunk by those of others, see the module's table."""
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
    """Returns the sources whose chunks are not believed, with the verdict.

    chunks_of: the chunks that each source gave. witnesses: whom to compare with, the best first.
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
    """Returns whether of two that disagree, this one's step is later, or the same."""
    return own.step >= other.step
