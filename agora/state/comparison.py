"""Compares what several sources say of one state, so that no single source is believed. Pure.

**By hash.** An offer names the SHA-256 of each chunk. Replicas that took the same steps have the same bytes, so a hash
that at least MIN_VOTES sources offer, and more than offer any other, is believed, and only these bytes are fetched.
This costs no byte.

**By sketch.** Replicas on other kinds of devices differ by their rounding. Replicas that take inner steps, or are at
other steps, differ truly. Then no hash is believed, and sources send sketches: SKETCH_SUMS sums for each array of a
chunk.

    sum b = the sum of sign(j) * x(j) over the values j of the array in the chunk with j mod SKETCH_SUMS = b

with x the value, or its logarithm in an array of squares. The signs are random. The peer that compares draws them after
the sources have offered their chunks, so nobody can make false values with the sums of true ones. The difference of two
sketches is about as long as that of the arrays (Alon, Matias, Szegedy: The space complexity of approximating the
frequency moments, 1996; Charikar, Chen, Farach-Colton: Finding frequent items in data streams, 2002).

    distance(a, b) = |a - b| / max(|a|, |b|)            of squares: rms(log a - log b) / 2
    allowed        = min(FAR, max(NEAR, CLOSEST_RATIO * the least distance of any two)
                              + DRIFT * steps apart + 2 * steps apart / the later step)

| a source's chunk lies, in any array | with | is |
|---|---|---|
| within `allowed` of one of theirs | two or more others | plausible |
| further from all | two or more others | corrupt: reported, its chunks are dropped |
| nearer to it than FAR | one other | plausible |
| at FAR from it, or further | one other | undecided: dropped unless the first other claims a later step |
| anywhere | none | plausible: nothing was compared |

Moments change much from step to step, so this table compares them only where they must be equal (`_is_same_moment`).
Otherwise all chunks of a source together must be within the factor LOOSE, or CLOSEST_RATIO times what others are apart;
if they are not, the source is undecided.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from agora_protocol.limits import SKETCH_SUMS
from numpy.typing import NDArray

from agora.state.layout import AVERAGE, HASH_BYTES, OUTER_PARAMETERS, VELOCITY, Flat, Layout, MomentSpec

MIN_VOTES: Final = 2
MAX_WITNESSES: Final = 3  # a state is compared with those of at most this many sources
NEAR: Final = 0.05
CLOSEST_RATIO: Final = 4.0
DRIFT: Final = 0.05  # the largest change in one step, relative to the weights' own size, that this check allows
FAR: Final = 1.0  # unrelated weights of one size have a distance of 1.4; zeros have 1 from anything
LOOSE: Final = 8.0
LEAST_SQUARE: Final = 1e-20  # below the square of any optimizer's epsilon: smaller squares act like this one

Verdict = Literal["plausible", "corrupt", "undecided"]
Values = NDArray[np.floating]


def believed_hashes(offers: Sequence[bytes], count: int) -> list[bytes | None]:
    """Returns the hash to believe of each of `count` chunks; None where too few sources agree on one.

    offers: of each source the SHA-256 of all chunks, one after the other.
    """
    if not offers:
        return [None] * count
    columns = zip(*(_split_hashes(offer) for offer in offers), strict=True)
    return [_most_offered(hashes) for hashes in columns]


def _split_hashes(offer: bytes) -> list[bytes]:
    return [offer[start : start + HASH_BYTES] for start in range(0, len(offer), HASH_BYTES)]


def _most_offered(hashes: Iterable[bytes]) -> bytes | None:
    (first, votes), *others = Counter(hashes).most_common(2)
    return first if votes >= MIN_VOTES and all(votes > fewer for _, fewer in others) else None


# --- sketches


def sketch_chunk(arrays: Sequence[Flat], layout: Layout, chunk: int, seed: bytes) -> NDArray[np.float64]:
    """Returns a chunk's sketch [arrays, SKETCH_SUMS]. arrays: the chunk's values in the weights and in each moment."""
    squares = [False, *(moment.is_square for moment in layout.moments)]
    signs = _signs(seed, chunk, max(values.size for values in arrays))
    return np.stack([_sketch(values, signs, square) for values, square in zip(arrays, squares, strict=True)])


def _signs(seed: bytes, chunk: int, count: int) -> NDArray[np.float64]:
    data = hashlib.shake_128(seed + chunk.to_bytes(8, "little")).digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:count]
    return 1.0 - 2.0 * bits.astype(np.float64)


def _sketch(values: Flat, signs: NDArray[np.float64], is_square: bool) -> NDArray[np.float64]:
    terms = np.zeros(-(-values.size // SKETCH_SUMS) * SKETCH_SUMS)
    terms[: values.size] = np.log(np.maximum(values, LEAST_SQUARE)) if is_square else values
    terms[: values.size] *= signs[: values.size]
    sums: NDArray[np.float64] = terms.reshape(-1, SKETCH_SUMS).sum(axis=0)
    return sums


# --- one array of one chunk


@dataclass(frozen=True, slots=True)
class ChunkSample:
    """One source's values of an array in a chunk, or their sketch, and the step of the snapshot they are from.

    alone: how many steps the source has taken since its values were those of all replicas.
    """

    values: Values
    step: int
    alone: int = 0


def distance(a: Values, b: Values) -> float:
    """Returns rms(a - b) / max(rms(a), rms(b)), computed in float64; 0 when a and b are all zeros.

    Infinite when a or b has infinite values. a, b: of the same length, without NaN.
    """
    largest = max(_length(a), _length(b))
    if not math.isfinite(largest):
        return math.inf
    return _apart(a, b) / largest if largest else 0.0


def judge_sample(
    own: ChunkSample, others: Sequence[ChunkSample], measure: Callable[[Values, Values], float] = distance
) -> Verdict:
    """Compares a source's values with those of other sources by the module's table, and returns the verdict on it.

    It drops nothing: the caller decides by the steps what becomes of an "undecided" source.
    """
    if not others:
        return "plausible"
    distances = [measure(own.values, other.values) for other in others]
    if len(others) == 1:
        return "plausible" if distances[0] < FAR else "undecided"
    near = max(NEAR, CLOSEST_RATIO * _closest(distances, [other.values for other in others], measure))
    for other, distance_to_other in zip(others, distances, strict=True):
        steps_apart = abs(own.step - other.step) + own.alone + other.alone
        # The last term allows for weights that began as zeros: early in a run each step changes them by their own size.
        drift = DRIFT * steps_apart + 2 * steps_apart / max(own.step, other.step, 1)
        if distance_to_other <= min(FAR, near + drift):
            return "plausible"
    return "corrupt"


def _closest(distances: Sequence[float], others: Sequence[Values], measure: Callable[[Values, Values], float]) -> float:
    return min(*distances, *(measure(a, b) for i, a in enumerate(others) for b in others[:i]))


def _apart(a: Values, b: Values) -> float:
    return _length(a.astype(np.float64) - b.astype(np.float64))


def _length(values: Values) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        length = float(np.linalg.norm(values.astype(np.float64)))
    return length if length == length else math.inf


def _ratio(own: Values, other: Values) -> float:
    reference, apart = _length(other), _apart(own, other)
    return apart / reference if reference else (math.inf if apart else 0.0)


# --- all arrays of all chunks of one source


@dataclass(frozen=True, slots=True)
class SketchedState:
    """Sketches [chunks, arrays, SKETCH_SUMS] of some chunks of a snapshot, and what is claimed of the snapshot.

    is_inner_step: whether its next step is an inner step.
    """

    sums: NDArray[np.float64]
    step: int
    agreed_step: int
    is_inner_step: bool

    def sample(self, moment: MomentSpec | None, sums: Values) -> ChunkSample:
        is_own = self.is_inner_step and (moment is None or moment.name == AVERAGE)
        return ChunkSample(sums, self.step, max(self.step - self.agreed_step, 0) if is_own else 0)


def judge_source(own: SketchedState, others: Sequence[SketchedState], layout: Layout, chunks: Sequence[int]) -> Verdict:
    """Returns the verdict on a source by the module's table. All sketches are of `chunks` and have one seed."""
    verdicts: set[Verdict] = set()
    places = [layout.chunk_places(chunk) for chunk in chunks]
    for array, moment in enumerate([None, *layout.moments]):
        is_square = moment is not None and moment.is_square
        counts = np.array([[place[array].stop - place[array].start] for place in places])
        scale = 0.5 / np.sqrt(np.maximum(counts, 1)) if is_square else np.ones((len(chunks), 1))
        equal = [other for other in others if _is_same_moment(moment, own, other)]
        if len(equal) >= MIN_VOTES or len(equal) == len(others):
            for row, factor in enumerate(scale):
                mine, *samples = [state.sample(moment, state.sums[row, array] * factor) for state in (own, *equal)]
                verdicts.add(judge_sample(mine, samples, _apart if is_square else distance))
        else:
            factors = scale / math.sqrt(len(chunks)) if is_square else scale
            theirs = [other.sums[:, array] * factors for other in others]
            verdicts.add(_judge_loosely(own.sums[:, array] * factors, theirs, _apart if is_square else _ratio))
    return "corrupt" if "corrupt" in verdicts else "undecided" if "undecided" in verdicts else "plausible"


# Whether an array of two honest snapshots lies so near that each chunk of it can be compared.
def _is_same_moment(moment: MomentSpec | None, a: SketchedState, b: SketchedState) -> bool:
    if moment is None or moment.name in (AVERAGE, OUTER_PARAMETERS):
        return True
    if moment.name == VELOCITY:
        return a.agreed_step == b.agreed_step
    return (a.agreed_step, a.step) == (b.agreed_step, b.step) and not (a.is_inner_step or b.is_inner_step)


def _judge_loosely(own: Values, others: Sequence[Values], measure: Callable[[Values, Values], float]) -> Verdict:
    # The verdict is never "corrupt": moments of rows that one step used and another did not differ beyond every bound.
    distances = [measure(own, other) for other in others]
    closest = _closest(distances, others, measure) if len(others) > 1 else 0.0
    near = max(LOOSE, CLOSEST_RATIO * closest)
    return "plausible" if min(distances) <= near else "undecided"
