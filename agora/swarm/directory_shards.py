"""Decides in which shards of the directory a peer publishes its records, and which it reads when. Pure.

The nodes that store a key bound what it holds. This module bounds what one peer reads and publishes, for any number of
peers (protocol/SPEC.md, "Shards"). A run of up to SMALL_RUN claims is read whole each time. In a larger one:

| shards | how many | read again after |
|---|---|---|
| of the reader's stages | those of OWN_SHARDS around its hash; all, up to some 500 replicas | one cycle |
| of the stage after the span | MIN_NEXT_SHARDS to MAX_NEXT_SHARDS at random, replaced one by one | one cycle |
| of every other stage | one at random | some cycles |

One read takes the SHARDS_PER_READ shards that are most overdue. A cycle is the number of reads after which every shard
of the first two rows has been read again.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from agora_protocol.directory_shards import HASH_BITS, HASHES, DirectoryShard, shard_bits
from agora_protocol.ids import Span
from agora_protocol.limits import MAX_KEY_RECORDS, MAX_SHARD_BITS

SHARD_PEERS = 32  # approximate number of peers in a shard of the depth that is read: 23 to 45 if the estimate is right
# Maximum number of claims of a run that is read whole each time; a span counts once for each of its stages.
SMALL_RUN = 256
SHARDS_PER_READ = 6
OWN_SHARDS = 16
MIN_NEXT_SHARDS, MAX_NEXT_SHARDS = 4, 16
# Minimum number of callers that should know each shard of the next stage, as far as MAX_NEXT_SHARDS allows.
CALLERS_PER_SHARD = 4
OTHERS_PER_CYCLE = 8  # stages, other than the reader's and the next, of which a shard is read in one cycle
MIN_CYCLES_FOR_OTHERS = 4.0  # minimum number of cycles after which a shard of such another stage is read again
# Seconds after which a random shard is replaced by another; those of the next stage one after the other.
RANDOM_SHARD_ROTATION_S = 1920.0
# Seconds after which all replicas of a stage too large to be read whole move on, at the same time, to other shards.
OWN_SHARD_ROTATION_S = 600.0
READINGS_LIFETIME_S = 300.0  # A reading no longer counts when it is this many seconds older than the stage's newest one
# A cached function keeps at most this many results: a simulation asks for those of 10,000 peers in turn.
MAX_CACHED_RESULTS = 1 << 17
# A peer publishes at depth 0 while its expected rank there is at most this times the records that the key keeps.
DEPTH_0_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class Reading:
    """What one read of a directory shard shows about the number of its stage's peers."""

    count: int  # the number of peers found
    # The fraction, from 0 to 1, of all possible peer hashes that the read covers: it found every peer in that range.
    covered: float
    at: float  # when it was read, in unix seconds


KnownReadings = Mapping[int, Mapping[DirectoryShard, Reading]]  # the readings that still count, by stage and shard


@dataclass(frozen=True, slots=True)
class ReaderIdentity:
    """The facts about the reading peer that decide which shards it reads."""

    peer_hash: int  # the peer's hash in the run, whose first bits name the shards that hold its records
    stage_count: int  # the number of the run's stages
    span: Span | None  # the one that the peer claims, None for none
    seed: int  # of the peer's random choices of shards


@dataclass(frozen=True, slots=True)
class ShardsToRead:
    """The shards to read next, and after how many reads a shard comes round again."""

    shards: tuple[DirectoryShard, ...]  # to be read next, the most overdue first
    is_small: bool  # whether the run is so small that every shard is read each time
    # Mean number of reads after which a shard of the reader's own stages or of the one after them is read again.
    close_period: float = 1.0
    other_period: float = 1.0  # the same for a shard of the other stages


# --- how many peers there are


def judge_reading(shard: DirectoryShard, hashes: Collection[int], now: float) -> Reading:
    """Returns the Reading of a shard in which peers with these hashes were found. now: unix seconds.

    A key with MAX_KEY_RECORDS records is full and has kept only the lowest hashes: the reading covers those below the
    greatest hash found.
    """
    if len(hashes) < MAX_KEY_RECORDS:
        return Reading(len(hashes), 0.5**shard.depth, now)
    return Reading(len(hashes) - 1, (max(hashes) - shard.first_hash) / HASHES, now)


def add_readings(known: KnownReadings, found: Mapping[DirectoryShard, Reading]) -> KnownReadings:
    """Returns a copy of `known` with the readings `found`.

    In each stage with a new reading, drops those more than READINGS_LIFETIME_S older than its newest one.
    """
    merged = {stage: dict(readings) for stage, readings in known.items()}
    for shard, reading in found.items():
        merged.setdefault(shard.stage, {})[shard] = reading
    for stage in {shard.stage for shard in found}:
        oldest = max(reading.at for reading in merged[stage].values()) - READINGS_LIFETIME_S
        merged[stage] = {shard: reading for shard, reading in merged[stage].items() if reading.at >= oldest}
    return merged


def estimate_peers(known: KnownReadings, stage: int) -> float:
    """Returns about how many peers claim a stage: peers counted / fraction of hashes covered; 0.0 without readings.

    Hashes are uniform, so every shard is a sample. Shards that cover more count for more: a full key of ids that were
    chosen for small hashes covers next to nothing.
    """
    readings = known.get(stage, {}).values()
    covered = sum(reading.covered for reading in readings)
    return sum(reading.count for reading in readings) / covered if covered else 0.0


def _depth(peers: float) -> float:
    # The number of bits, here a real number, at which a shard holds SHARD_PEERS of a stage's peers.
    return min(float(MAX_SHARD_BITS), max(0.0, math.log2(max(peers, 1.0) / SHARD_PEERS)))


def depth_to_read(peers: float) -> int:
    """Returns the depth (number of bits) of the shards to read of a stage of about `peers` peers."""
    return math.floor(_depth(peers) + 0.5)


def depths_to_publish(peers: float) -> set[int]:
    """Returns the one or two depths to publish at, in a stage of about `peers` peers: `_depth` rounded down and up.

    A reader whose estimate is up to 1.4 times larger or smaller then still reads at one of them, and a peer whose
    estimate changes slowly publishes at a new depth before it leaves the old one.
    """
    return {math.floor(_depth(peers)), math.ceil(_depth(peers))}


def shards_to_publish(known: KnownReadings, span: Span, peer_hash: int) -> list[DirectoryShard]:
    """Returns the shards in which a peer with this hash and span publishes its records, by stage and depth.

    It also publishes at depth 0 while that key may keep the record, since a full key keeps the lowest hashes. Without
    readings of a stage it publishes only there.
    """
    shards = []
    for stage in span.stages:
        peers = estimate_peers(known, stage)
        depths = depths_to_publish(peers)
        if peer_hash / HASHES * peers <= DEPTH_0_MARGIN * MAX_KEY_RECORDS:
            depths.add(0)
        shards += [DirectoryShard(stage, shard_bits(peer_hash, depth)) for depth in sorted(depths)]
    return shards


# --- what to read


def choose_shards_to_read(known: KnownReadings, reader: ReaderIdentity, now: float, rng: random.Random) -> ShardsToRead:
    """Returns which shards to read next, and how many reads it takes until a shard is read again. now: unix seconds.

    Among equally overdue shards the close ones come first, then `rng` decides.
    """
    peers = [estimate_peers(known, stage) for stage in range(reader.stage_count)]
    if sum(peers) <= SMALL_RUN:
        return ShardsToRead(
            tuple(shard for stage, count in enumerate(peers) for shard in all_shards(stage, count)), True
        )
    close = close_shards(peers, reader, now)
    others = other_shards(peers, reader, now)
    wait = max(MIN_CYCLES_FOR_OTHERS, len(others) / OTHERS_PER_CYCLE)
    cycle = max(1.0, (len(close) + len(others) / wait) / SHARDS_PER_READ)

    def lateness(shard: DirectoryShard) -> float:
        # For a shard of another stage: seconds since any shard of that stage was read, divided by `wait`, the number of
        # cycles after which such a stage is due, so that it does not delay the close shards.
        readings = known.get(shard.stage, {})
        if shard in close:
            return now - readings[shard].at if shard in readings else math.inf
        return (now - max((reading.at for reading in readings.values()), default=-math.inf)) / wait

    candidates = sorted(close | others)  # sets of strings have another order in each process
    rng.shuffle(candidates)
    candidates.sort(key=lambda shard: (-lateness(shard), shard not in close))
    return ShardsToRead(tuple(candidates[:SHARDS_PER_READ]), False, cycle, wait * cycle)


def all_shards(stage: int, peers: float) -> Iterator[DirectoryShard]:
    """Yields every shard of a stage with about `peers` peers, in order of the bits."""
    for bits in product("01", repeat=depth_to_read(peers)):
        yield DirectoryShard(stage, "".join(bits))


def close_shards(peers: list[float], reader: ReaderIdentity, now: float) -> set[DirectoryShard]:
    """Returns the shards to read of the reader's own stages and of the stage after its span; none without a span.

    peers: the estimated number of peers of each stage. now: unix seconds.
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


def own_shards(stage: int, peers: float, span_length: int, peer_hash: int, now: float) -> set[DirectoryShard]:
    """Returns the shards to read of `stage`, one of the reader's own stages.

    These are OWN_SHARDS / span_length shards, rounded down to a power of two, or all if there are not as many.

    Their bits are those of the reader's hash but for a few positions, at which every combination is read; the positions
    change every OWN_SHARD_ROTATION_S. So all peers of these shards read the same ones, and agree on who averages with
    whom; over time each averages with every other.
    """
    depth = depth_to_read(peers)
    free_bits = min(depth, int(math.log2(max(1, OWN_SHARDS // span_length))))
    return {
        DirectoryShard(stage, bits)
        for bits in _bits_around(peer_hash, depth, free_bits, int(now // OWN_SHARD_ROTATION_S))
    }


@lru_cache(maxsize=MAX_CACHED_RESULTS)
def _bits_around(peer_hash: int, depth: int, free_bits: int, period: int) -> tuple[str, ...]:
    # The bits of 2**free_bits shards: those of the hash, with every combination at the positions from
    # period * free_bits on, modulo `depth`.
    positions = [(period * free_bits + index) % depth for index in range(free_bits)]
    bits = list(shard_bits(peer_hash, depth))
    around = []
    for combination in product("01", repeat=free_bits):
        for position, bit in zip(positions, combination, strict=True):
            bits[position] = bit
        around.append("".join(bits))
    return tuple(around)


def next_shards(stage: int, peers: float, callers: float, seed: int, now: float) -> set[DirectoryShard]:
    """Returns the shards to read of `stage`, the one after the reader's span: random ones, chosen by the reader's seed.

    Their number is such that CALLERS_PER_SHARD of the about `callers` peers that call this stage read each shard, but
    from MIN_NEXT_SHARDS to MAX_NEXT_SHARDS. One after the other is replaced, each after RANDOM_SHARD_ROTATION_S.
    """
    depth = depth_to_read(peers)
    count = math.ceil(CALLERS_PER_SHARD * 2**depth / max(1.0, callers))
    count = max(MIN_NEXT_SHARDS, min(MAX_NEXT_SHARDS, count))
    if count >= 2**depth:
        return set(all_shards(stage, peers))
    return {DirectoryShard(stage, shard_bits(_random_hash(seed, index, now), depth)) for index in range(count)}


def other_shards(peers: list[float], reader: ReaderIdentity, now: float) -> set[DirectoryShard]:
    """Returns one random shard of each stage that is neither in the reader's span nor the one after it.

    The reader's seed chooses the bits, the same in all stages; they change every RANDOM_SHARD_ROTATION_S.
    """
    span = reader.span
    bits = _random_hash(reader.seed, 0, now)
    others = (stage for stage in range(len(peers)) if span is None or not span.first <= stage <= span.last + 1)
    return {DirectoryShard(stage, shard_bits(bits, depth_to_read(peers[stage]))) for stage in others}


def _random_hash(seed: int, index: int, now: float) -> int:
    # The hashes of different indices change at different times.
    return _hash_of_period(seed, index, math.floor(now / RANDOM_SHARD_ROTATION_S + index / MAX_NEXT_SHARDS))


@lru_cache(maxsize=MAX_CACHED_RESULTS)
def _hash_of_period(seed: int, index: int, period: int) -> int:
    digest = hashlib.sha256(f"{seed} {index} {period}".encode()).digest()
    return int.from_bytes(digest[: HASH_BITS // 8], "big")
