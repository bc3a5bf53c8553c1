"""Compares samples of a fetched state with those of other sources, so that no single source is simply trusted.

`judge_sample` is pure.

A chunk's hash shows that the chunk is what its source offered, not that the offer is a state of this run. So some
chunks of each source are compared with the same chunks of up to two others:

    distance(a, b) = rms(a - b) / max(rms(a), rms(b))      over a chunk's weights
    allowed        = min(FAR, max(NEAR, CLOSEST_RATIO * the least distance of any two) + DRIFT * steps apart)

| a source's chunk lies | with | is |
|---|---|---|
| within `allowed` of one of theirs | two others | plausible |
| further from both | two others | corrupt: reported, its chunks are dropped |
| nearer to it than FAR | one other | plausible |
| at FAR from it, or further | one other | undecided: dropped unless the other claims a later step |
| anywhere | none | plausible |
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

SAMPLES: Final = 2  # at most this many chunks of each source are compared
WITNESSES: Final = 2  # each chunk is compared with those of at most this many other sources
NEAR: Final = 0.05
CLOSEST_RATIO: Final = 4.0
DRIFT: Final = 0.05  # the largest change in one step, relative to the weights' own size, that this check allows
FAR: Final = 1.0  # unrelated weights of one size have a distance of 1.4; zeros have 1 from anything

Verdict = Literal["plausible", "corrupt", "undecided"]


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One source's weights of a chunk, and the step of the snapshot that the weights are from."""

    weights: Flat
    step: int


# Returns a source's weights of a chunk; None when it cannot give them.
ReadSample = Callable[[PeerId, int], Awaitable[ChunkSample | None]]


def distance(a: Flat, b: Flat) -> float:
    """Returns rms(a - b) / max(rms(a), rms(b)), computed in float64; 0 when a and b are all zeros.

    Infinite when a or b has infinite values. a, b: of the same length, without NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        largest = max(float(np.linalg.norm(a.astype(np.float64))), float(np.linalg.norm(b.astype(np.float64))))
        difference = float(np.linalg.norm(a.astype(np.float64) - b.astype(np.float64)))
    if not math.isfinite(largest):
        return math.inf
    return difference / largest if largest else 0.0


def judge_sample(own: ChunkSample, others: Sequence[ChunkSample]) -> Verdict:
    """Compares a source's chunk with the same chunk of up to two other sources, and returns the verdict on the source.

    The module's table has the rule: "plausible" without others, or near enough to one of them; otherwise "corrupt" with
    two others, "undecided" with one. Drops nothing: the caller decides by the steps about an "undecided" chunk.
    """
    distances = [distance(own.weights, other.weights) for other in others]
    if not others:
        return "plausible"
    if len(others) == 1:
        return "plausible" if distances[0] < FAR else "undecided"
    between_others = [distance(a.weights, b.weights) for i, a in enumerate(others) for b in others[:i]]
    near = max(NEAR, CLOSEST_RATIO * min(*distances, *between_others))
    for other, distance_to_other in zip(others, distances, strict=True):
        if distance_to_other <= min(FAR, near + DRIFT * abs(own.step - other.step)):
            return "plausible"
    return "corrupt"


async def find_corrupt_sources(
    chunks_of: Mapping[PeerId, Sequence[int]], witnesses: Sequence[PeerId], read: ReadSample, rng: random.Random
) -> dict[PeerId, Verdict]:
    """Compares samples of all sources; returns source -> "corrupt" or "undecided" for those whose chunks must go.

    chunks_of: source -> the numbers of the chunks that it gave. witnesses: the sources to compare with, the best first.
    Up to SAMPLES random chunks of each source are compared, one after the other: `read` is awaited for the source's
    own, then for witnesses until WITNESSES have given that chunk. An own chunk that cannot be read counts as plausible;
    an undecided one is accepted if the witness is at a later step.
    """
    found: dict[PeerId, Verdict] = {}
    for source, chunks in chunks_of.items():
        for chunk in rng.sample(list(chunks), min(SAMPLES, len(chunks))):
            own = await read(source, chunk)
            others: list[ChunkSample] = []
            for witness in witnesses:
                if witness != source and len(others) < WITNESSES and (sample := await read(witness, chunk)) is not None:
                    others.append(sample)
            verdict = "plausible" if own is None else judge_sample(own, others)
            if verdict == "corrupt" or (verdict == "undecided" and own is not None and _is_not_earlier(own, others[0])):
                found[source] = verdict
                break
    return found


def _is_not_earlier(own: ChunkSample, other: ChunkSample) -> bool:
    return own.step >= other.step
