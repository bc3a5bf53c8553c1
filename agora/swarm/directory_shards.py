"""Decides in which shards of the directory a peer publishes its records, and which it reads when. Pure.

Knows: shards, and what reads of them have shown. Must not know: records, the view, the DHT, any clock.

What one key holds is bounded by the nodes that store it. What one peer reads and publishes is bounded here, for any
number of peers (protocol/SPEC.md, "Shards"). A run of up to SMALL_RUN claims is read whole each time. In a larger one:

| shards | how many | read again after |
|---|---|---|
| of the reader's stages | those of OWN_SHARDS around its hash; all, up to some 500 replicas | one cycle |
| of the stage after the span | MIN_NEXT_SHARDS to MAX_NEXT_SHARDS at random, exchanged one by one | one cycle |
| of every other stage | one at random | some cycles |

A read is of SHARDS_PER_READ shards, those that are most overdue. A cycle is as many reads as that takes.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from agora_protocol.ids import Span
from agora_protocol.limits import MAX_KEY_RECORDS, MAX_SHARD_BITS
from agora_protocol.shards import HASH_BITS, HASHES, Shard, shard_bits

SHARD_PEERS = 32
"""Approximate peers in a shard of the depth that is read: 23 to 45 if the estimate is right."""
SMALL_RUN = 256
"""Maximum number of claims of a run that is read whole each time; a span counts once for each of its stages."""
SHARDS_PER_READ = 6
OWN_SHARDS = 16
MIN_NEXT_SHARDS, MAX_NEXT_SHARDS = 4, 16
CALLERS_PER_SHARD = 4
"""Minimum number of callers that should know each shard of the next stage, as far as MAX_NEXT_SHARDS allows."""
OTHERS_PER_CYCLE = 8
"""Stages, other than the reader's and the next, of which a shard is read in one cycle."""
MIN_WAIT_OF_OTHERS = 4.0
"""Minimum number of cycles after which such a shard is read again."""
EXCHANGE_S = 1920.0
"""Seconds after which each random shard of the next stage is replaced by another; they take turns."""
MIX_S = 600.0
"""Seconds after which the replicas of a stage of which not all shards are read move on, together, to other shards."""
READINGS_S = 300.0
"""A reading no longer counts when it is this many seconds older than the stage's newest one."""
MAX_CACHED_RESULTS = 1 << 17
"""Maximum number of cached results of a pure function: a simulation asks for those of 10,000 peers in turn."""
DEPTH_0_MARGIN = 1.5
"""A peer publishes at depth 0 while its expected rank there is at most this times the records that the key keeps."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a shard at unix time `at`: `count` peers, in the fraction `covered` of all hashes."""

    count: int
    covered: float
    at: float


KnownReadings = Mapping[int, Mapping[Shard, Reading]]
"""The readings that still count, by stage and shard."""


@dataclass(frozen=True, slots=True)
class ReaderIdentity:
    """The facts about the reading peer that decide what it reads. Immutable.

    peer_hash: its hash in the run. stage_count: of the run. span: what it claims, None for nothing. seed: of its random
    choices.
    """

    peer_hash: int
    stage_count: int
    span: Span | None
    seed: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The shards to read next. Immutable.

    is_small: whether everything is read each time. near_period: number of reads after which a shard of the reader's
    stages or the next one is read again. other_period: the same for the other stages.
    """

    shards: tuple[Shard, ...]
    is_small: bool
    near_period: float = 1.0
    other_period: float = 1.0


# --- how many peers there are


def judge_reading(shard: Shard, hashes: Collection[int], now: float) -> Reading:
    """Returns the reading of a shard in which peers with these hashes were found. now: unix seconds.

    A shard that is not full covers its part of all hashes. A full one covers those below its greatest hash.
    """
    if len(hashes) < MAX_KEY_RECORDS:
        return Reading(len(hashes), 0.5**shard.depth, now)
    return Reading(len(hashes) - 1, (max(hashes) - shard.first_hash) / HASHES, now)


def add_readings(known: KnownReadings, found: Mapping[Shard, Reading]) -> KnownReadings:
    """Returns a copy of `known` with the readings `found`, without those READINGS_S older than their stage's newest."""
    merged = {stage: dict(readings) for stage, readings in known.items()}
    for shard, reading in found.items():
        merged.setdefault(shard.stage, {})[shard] = reading
    for stage in {shard.stage for shard in found}:
        oldest = max(reading.at for reading in merged[stage].values()) - READINGS_S
        merged[stage] = {shard: reading for shard, reading in merged[stage].items() if reading.at >= oldest}
    return merged


def estimate_peers(known: KnownReadings, stage: int) -> float:
    """Returns about how many peers claim a stage: peers counted / fraction of hashes covered; 0.0 without readings.

    Hashes are uniform, so that every shard is a sample. Shards that cover more count for more: a full key of ids that
    were chosen for small hashes covers next to nothing.
    """
    readings = known.get(stage, {}).values()
    covered = sum(reading.covered for reading in readings)
    return sum(reading.count for reading in readings) / covered if covered else 0.0


def _depth(peers: float) -> float:
    """Returns the depth, as a real number, at which a shard would hold SHARD_PEERS of a stage's `peers` peers."""
    return min(float(MAX_SHARD_BITS), max(0.0, math.log2(max(peers, 1.0) / SHARD_PEERS)))


def depth_to_read(peers: float) -> int:
    """Returns the depth of the shards to read of a stage with about `peers` peers."""
    return math.floor(_depth(peers) + 0.5)


def depths_to_publish(peers: float) -> set[int]:
    """Returns the one or two depths to publish at, in a stage with about `peers` peers: `_depth` rounded down and up.

    So a reader whose estimate is up to 1.4 times larger or smaller finds the record, and a peer whose estimate changes
    slowly publishes at a new depth before it leaves the old one.
    """
    return {math.floor(_depth(peers)), math.ceil(_depth(peers))}


def shards_to_publish(known: KnownReadings, span: Span, peer_hash: int) -> list[Shard]:
    """Returns the shards in which a peer publishes its records.

    For each stage of its span: its shard at each depth of depths_to_publish (one or two), and at depth 0 if its hash
    is low enough for that key to keep it.
    """
    shards = []
    for stage in span.stages:
        peers = estimate_peers(known, stage)
        depths = depths_to_publish(peers)
        if peer_hash / HASHES * peers <= DEPTH_0_MARGIN * MAX_KEY_RECORDS:
            depths.add(0)
        shards += [Shard(stage, shard_bits(peer_hash, depth)) for depth in sorted(depths)]
    return shards


# --- what to read


def plan_read(known: KnownReadings, reader: ReaderIdentity, now: float, rng: random.Random) -> ReadPlan:
    """Returns which shards to read next, and how many reads it takes until a shard is read again. now: unix seconds.

    In a run of up to SMALL_RUN peers these are all shards. Shuffles with `rng`, so that shards that are equally overdue
    are read in random order.
    """
    peers = [estimate_peers(known, stage) for stage in range(reader.stage_count)]
    if sum(peers) <= SMALL_RUN:
        return ReadPlan(tuple(shard for stage, count in enumerate(peers) for shard in all_shards(stage, count)), True)
    close = close_shards(peers, reader, now)
    others = other_shards(peers, reader, now)
    wait = max(MIN_WAIT_OF_OTHERS, len(others) / OTHERS_PER_CYCLE)
    cycle = max(1.0, (len(close) + len(others) / wait) / SHARDS_PER_READ)

    def lateness(shard: Shard) -> float:
        """Returns how long ago a shard was read, in its own periods; infinity for a close one that never was.

        A shard of another stage is as overdue as the newest reading of its stage, so that it does not delay near ones.
        """
        readings = known.get(shard.stage, {})
        if shard in close:
            return now - readings[shard].at if shard in readings else math.inf
        return (now - max((reading.at for reading in readings.values()), default=-math.inf)) / wait

    candidates = sorted(close | others)  # sets of texts have another order in each process
    rng.shuffle(candidates)
    candidates.sort(key=lambda shard: (-lateness(shard), shard not in close))
    return ReadPlan(tuple(candidates[:SHARDS_PER_READ]), False, cycle, wait * cycle)


def all_shards(stage: int, peers: float) -> Iterator[Shard]:
    """Yields every shard of a stage with about `peers` peers, at the depth to read."""
    for bits in product("01", repeat=depth_to_read(peers)):
        yield Shard(stage, "".join(bits))


def close_shards(peers: list[float], reader: ReaderIdentity, now: float) -> set[Shard]:
    """Returns the shards to read of the reader's own stages and of the next one; none if it claims no span.

    peers: the estimated number of peers of each stage.
    """
    if reader.span is None:
        return set()
    stages = [stage for stage in reader.span.stages if stage < len(peers)]
    shards = {
        shard for stage in stages for shard in own_shards(stage, peers[stage], len(stages), reader.peer_hash, now)
    }
    after = reader.span.last + 1
    if after < len(peers):
        shards |= next_shards(after, peers[after], peers[reader.span.last], reader.seed, now)
    return shards


def own_shards(stage: int, peers: float, stages: int, peer_hash: int, now: float) -> set[Shard]:
    """Returns the shards to read of one own stage, when the span has `stages`: all, or about OWN_SHARDS / stages.

    If not all, they have the bits of the reader's hash, except for a few bits, of which all values are read. Which bits
    these are changes every MIX_S. All peers of these shards then read the same shards, so that they agree on who
    averages with whom; over time each peer averages with all others.
    """
    depth = depth_to_read(peers)
    free = min(depth, int(math.log2(max(1, OWN_SHARDS // stages))))
    return {Shard(stage, bits) for bits in _bits_around(peer_hash, depth, free, int(now // MIX_S))}


@lru_cache(maxsize=MAX_CACHED_RESULTS)
def _bits_around(peer_hash: int, depth: int, free: int, turn: int) -> tuple[str, ...]:
    """Returns the bits of the shards that agree with a hash but for `free` of `depth` bits; `turn` says for which."""
    places = [(turn * free + index) % depth for index in range(free)]
    own, around = list(shard_bits(peer_hash, depth)), []
    for bits in product("01", repeat=free):
        for place, bit in zip(places, bits, strict=True):
            own[place] = bit
        around.append("".join(own))
    return tuple(around)


def next_shards(stage: int, peers: float, callers: float, seed: int, now: float) -> set[Shard]:
    """Returns the shards to read of the next stage: random ones, chosen by `seed`, different for each caller.

    Their number is such that each shard is known to CALLERS_PER_SHARD of about `callers` peers that call this stage.
    """
    depth = depth_to_read(peers)
    count = math.ceil(CALLERS_PER_SHARD * 2**depth / max(1.0, callers))
    count = max(MIN_NEXT_SHARDS, min(MAX_NEXT_SHARDS, count))
    if count >= 2**depth:
        return set(all_shards(stage, peers))
    return {Shard(stage, shard_bits(_random_hash(seed, index, now), depth)) for index in range(count)}


def other_shards(peers: list[float], reader: ReaderIdentity, now: float) -> set[Shard]:
    """Returns one random shard of each stage that is neither one of the reader's own nor the next one."""
    span = reader.span
    bits = _random_hash(reader.seed, 0, now)
    others = (stage for stage in range(len(peers)) if span is None or not span.first <= stage <= span.last + 1)
    return {Shard(stage, shard_bits(bits, depth_to_read(peers[stage]))) for stage in others}


def _random_hash(seed: int, index: int, now: float) -> int:
    """Returns a random hash that changes every EXCHANGE_S; hashes of different `index` change at different times."""
    return _hash_of_turn(seed, index, math.floor(now / EXCHANGE_S + index / MAX_NEXT_SHARDS))


@lru_cache(maxsize=MAX_CACHED_RESULTS)
def _hash_of_turn(seed: int, index: int, turn: int) -> int:
    """Returns the random hash of one turn."""
    digest = hashlib.sha256(f"{seed} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")
