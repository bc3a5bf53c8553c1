"""Decides which origin takes which microbatch of an epoch, so that each is done once an epoch across the swarm.

Deterministic.

Microbatch j of epoch e has the number e * count + j. An origin claims microbatches some time before it opens them, and
sends the others what it has claimed, opened and done. Its own order of the blocks of an epoch follows from rendezvous
hashing (Thaler and Ravishankar, IEEE/ACM Trans. Networking 1998): first the blocks where it has the lowest hash of the
live origins, then those where one live origin has a lower hash, and so on. So origins that are equally fast do not take
the same microbatches, and a fast one takes what the slow ones have not reached.

| a microbatch | when |
|---|---|
| is free | it is not done, and no live origin has opened or claimed it: what a dead one had in flight is free again |
| is claimed | it is the first free one: of the oldest epoch, next to the origin's last claim, or of its next block |
| may be claimed where another origin works | every unfinished block has a worker: join one, picked by a hash |
| is opened | its claim was sent ANNOUNCE_INTERVALS times, or the origin has the lowest hash of the block |
| is no longer claimed | a live origin opened it, or claimed it with a lower hash; or take_next is not called any more |

An origin claims as many microbatches ahead as it opens during ANNOUNCE_INTERVALS of gossip. So others receive a claim
before it is opened, and one of two origins with the same claim drops it. A paused origin delays no other, because its
claims lapse. When no microbatch of an epoch is free, origins go on with the next epoch. At most open_epochs are in
progress; beyond them origins wait for the oldest one.

What another origin says is done, its own microbatches or those of others, is believed:

| of a microbatch, or of all in an epoch | when |
|---|---|
| most of the live origins say it, and at least two | at once |
| the only other origin says it, while this one is new | at once: there is nothing to compare with |
| one origin says it | as far as its pace is at most PACE_LIMIT times this origin's own, with CREDIT_AT_START more |

What is not believed yet is taken last, when nothing else is free, and not left out.

A microbatch is done twice if its origin seems dead but is not, if two origins open it because a message was lost or
late, or if an origin died before it sent that it was done. Each session sends all origins what it has completed, so
that repeats are counted, except those that a dead origin never sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from agora_protocol.errors import DataError, ProtocolError

from agora.data.draws import Hashes, splitmix64
from agora.tuning.epochs.state import (
    KEPT_TALLIES,
    MAX_STATE_INTS,
    MAX_TALLIES,
    BlockLayout,
    DifferentRowsError,
    EpochCounts,
    EpochProgress,
    EpochState,
    EpochTotals,
    MicrobatchSet,
    NumberRange,
    Tally,
    lowest_bit,
    open_epochs,
    position_of_set_bit,
    read_state,
    write_state,
)

# --- the order in which an origin prefers the blocks of an epoch


KEPT_ORDERS: Final = 128  # maximum number of orders that a BlockOrder caches


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The order in which one origin prefers the blocks of an epoch, by rendezvous hashing.

    The first sort key is the number of other live origins whose hash of the block is lower than this origin's, the
    second is this origin's hash. blocks: all block numbers in this order. own: the blocks for which no live origin has
    a lower hash, in the same order, as keys of a dict whose values are None. hashes: this origin's hash of each block,
    indexed by block number.
    """

    blocks: list[int]
    own: dict[int, None]
    hashes: list[int]


class BlockOrder:
    """Computes an origin's EpochOrder of each epoch, and caches up to KEPT_ORDERS of them. blocks: in an epoch."""

    def __init__(self, seed: int, me: str, blocks: int) -> None:
        self._seed = seed
        self._me = me
        self._blocks = blocks
        self._kept: dict[tuple[int, frozenset[str]], EpochOrder] = {}

    def order(self, epoch: int, live: frozenset[str]) -> EpochOrder:
        """Returns this origin's order of an epoch's blocks. live: the live origins; this one always counts as live."""
        key = epoch, live
        if key not in self._kept:
            if len(self._kept) >= KEPT_ORDERS:
                self._kept.clear()
            mine = self.hashes(epoch, self._me)
            ranks = np.zeros(self._blocks, np.int64)
            for name in live - {self._me}:
                ranks += self.hashes(epoch, name) < mine
            blocks = np.lexsort((mine, ranks)).tolist()
            own = dict.fromkeys(block for block in blocks if ranks[block] == 0)
            self._kept[key] = EpochOrder(blocks, own, mine.tolist())
        return self._kept[key]

    def hashes(self, epoch: int, name: str) -> Hashes:
        """Returns origin `name`'s hash of each block of an epoch, uint64 [blocks]: uniform, equal on every machine."""
        digest = hashlib.sha256(f"agora epoch share 1\0{self._seed}\0{epoch}\0{name}".encode()).digest()
        return splitmix64(np.arange(self._blocks, dtype=np.uint64), int.from_bytes(digest[:8], "little"))

    def is_preceded_by(self, name: str, epoch: int, block: int) -> bool:
        """Whether origin `name` has the lower hash of the block; the lower name, if hashes are equal."""
        other, mine = int(self.hashes(epoch, name)[block]), int(self.hashes(epoch, self._me)[block])
        return (other, name) < (mine, self._me)


# --- which free microbatch an origin takes next


class HeldByOthers:
    """What other live origins have opened or claimed. states: by name, without this origin. live: with it."""

    def __init__(self, states: Mapping[str, EpochState], live: frozenset[str], layout: BlockLayout) -> None:
        self.states = states
        self.live = live
        self._layout = layout
        self._held: dict[int, tuple[MicrobatchSet, dict[int, int]]] = {}

    def of_epoch(self, epoch: int) -> tuple[MicrobatchSet, dict[int, int]]:
        """What others hold, and block -> how many hold something in it. Cached: callers must not change them."""
        if epoch not in self._held:
            held = MicrobatchSet(self._layout)
            workers: dict[int, int] = {}
            for state in self.states.values():
                if part := state.epochs.get(epoch):
                    held.update(part.opened)
                    held.update(part.claimed)
                    for block in part.opened.masks.keys() | part.claimed.masks.keys():
                        workers[block] = workers.get(block, 0) + 1
            self._held[epoch] = held, workers
        return self._held[epoch]


def next_free(
    order: EpochOrder, taken: MicrobatchSet, workers: Mapping[int, int], last_claimed: int | None
) -> int | None:
    """Returns the number of the free microbatch that an origin should claim next in an epoch; None if all are taken.

    taken: all microbatches that are not free. workers: block -> how many other origins work in it; absent: none.
    last_claimed: this origin's last claim in the epoch, None without. The first row that applies decides:

    | the microbatch returned | condition |
    |---|---|
    | the one after `last_claimed` | it is free, and in the same block |
    | the first free one of the first block, in `order`, without workers | such a block has a free one |
    | one chosen by the order's hash, in the block with the fewest workers | any is free |
    """
    layout = taken.layout
    following = 0 if last_claimed is None else last_claimed + 1
    if following % layout.size and following < layout.count and following not in taken:
        return following
    unshared = first_free(order.blocks, taken, workers)
    if unshared is not None:
        return unshared
    shared = [block for block in order.blocks if not taken.is_full(block)]
    if not shared:
        return None
    block = min(shared, key=lambda block: workers.get(block, 0))
    free = layout.full_mask(block) & ~taken.mask(block)
    return block * layout.size + position_of_set_bit(free, order.hashes[block] % free.bit_count())


def first_free(blocks: Iterable[int], taken: MicrobatchSet, workers: Mapping[int, int]) -> int | None:
    """The first free microbatch of the first of `blocks` that has one and no other origin in it, or None."""
    layout = taken.layout
    for block in blocks:
        if not workers.get(block) and not taken.is_full(block):
            return block * layout.size + lowest_bit(~taken.mask(block))
    return None


# --- what to believe


def _bits_in_most(masks: Sequence[int], most: int) -> int:
    in_at_least = [0] * (most + 1)  # [n]: the bits that n or more of the masks have
    for mask in masks:
        for count in range(most, 1, -1):
            in_at_least[count] |= in_at_least[count - 1] & mask
        in_at_least[1] |= mask
    return in_at_least[most]


def _lowest_bits(mask: int, most: int) -> int:
    if mask.bit_count() <= most:
        return mask
    return mask & ((1 << position_of_set_bit(mask, most)) - 1)


# --- the assigner


# Number of calls of `next_state` after which the other origins are assumed to know of a claim.
ANNOUNCE_INTERVALS: Final = 3
# Calls of `next_state` without a `take_next` after which an origin drops its claims; a new origin waits for the states
# of all live origins for at most as many.
LAPSE_INTERVALS: Final = 8
# A single origin's report counts for this many times the microbatches that this one does in the same time.
PACE_LIMIT: Final = 4.0
CREDIT_AT_START: Final = 8  # microbatches that are believed on one origin's word before its pace is known
BELIEVE_INTERVALS: Final = 4  # calls of `next_state` after which what was doubted is judged again
# If more other origins are known, those that are not live are forgotten. What they had done stays known.
KEPT_ORIGINS: Final = 256
# The factor by which the measured pace decays with each call of `next_state` while fewer microbatches are opened.
PACE_DECAY: Final = 31 / 32


# A microbatch that this origin means to open. number: counted from 0 within the epoch. calls_before: how often
# `next_state` had been called when the microbatch was claimed.
@dataclass(frozen=True, slots=True)
class _Claim:
    epoch: int
    number: int
    calls_before: int


class EpochAssigner:
    """Decides which microbatches of the epochs one origin takes, from what the origins of the swarm send each other.

    seed: the run's seed. me: this origin's name. session: a number from 0 to 2^63 - 1, unique to this start of the
    origin. count: microbatches in an epoch. rows_id: identifies the rows, so that origins with other rows are refused.
    last_state: the last result of `next_state`, () before; the gossip of other origins is answered with it.
    """

    def __init__(self, seed: int, me: str, session: int, count: int, rows_id: int = 0) -> None:
        self._me = me
        self._session = session
        self._rows_id = rows_id
        self._layout = BlockLayout(count)
        self._first = 0  # the first epoch that is not complete
        self._parts: dict[int, EpochProgress] = {}
        self._in_flight: set[int] = set()  # numbers of opened microbatches, of complete epochs too
        self._claims: list[_Claim] = []
        self._last_claimed: dict[int, int] = {}
        self._tallies: dict[int, Tally] = {}
        self._others: dict[str, EpochState] = {}
        self._heard_at: dict[str, int] = {}  # in state calls: when each origin's first state came
        self._believed: dict[str, int] = {}  # how many microbatches were believed on each origin's report alone
        self._doubted: dict[int, MicrobatchSet] = {}  # by epoch: what was said to be done, and is not believed yet
        self._active_calls = 0  # calls of `next_state` while this origin took microbatches
        self._live = frozenset({me})
        self._order = BlockOrder(seed, me, self._layout.blocks)
        self._state_calls = 0
        self._last_take_at = 0  # in state calls
        self._version = 0
        self._taken_since_told = 0
        self._pace = 0.0
        self.last_state: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return self._layout.count

    def take_next(self, live: Collection[str]) -> int | None:
        """Takes the next microbatch and returns its number, epoch * count + its place; None if it may open none.

        It is in flight until `mark_completed` or `release` is called with its number. None: no microbatch is free, all
        claims are too new, or the state of a live origin is not known yet (only in the first LAPSE_INTERVALS calls of
        `next_state`); call again after each `merge`, `mark_completed` and `next_state`. live: the names of the live
        origins, with or without this one; remembered for `counts`.
        """
        self._last_take_at = self._state_calls
        self._live = names = frozenset(live) | {self._me}
        states = {name: state for name, state in self._others.items() if name in names}
        # Before it knows their states, a new origin would take what the others have in flight.
        if len(states) + 1 < len(names) and self._state_calls < LAPSE_INTERVALS:
            return None
        if len(self._others) > KEPT_ORIGINS:
            self._others = states
        others = HeldByOthers(states, names, self._layout)
        self._claims = [claim for claim in self._claims if self._may_keep(claim, others)]
        while len(self._claims) <= self._claims_ahead(len(names)) and (claim := self._find_free(others)) is not None:
            self._claims.append(claim)
        ready = [claim for claim in self._claims if self._may_open(claim, names)]
        if not ready:
            if (own := self._find_free(others, own_blocks=True)) is None:
                return None
            self._claims.append(own)
            ready = [own]
        # Announced claims first: nobody else takes those. Then the oldest epoch, which the others wait for.
        announced_at = self._state_calls - ANNOUNCE_INTERVALS
        chosen = min(ready, key=lambda claim: (claim.calls_before > announced_at, claim.epoch))
        self._claims.remove(chosen)
        self._part(chosen.epoch).opened.add(chosen.number)
        number = chosen.epoch * self.count + chosen.number
        self._in_flight.add(number)
        self._taken_since_told += 1
        return number

    def mark_completed(self, number: int, samples: int = 1) -> None:
        """Records that a taken microbatch is done. Raises ValueError if it is not in flight."""
        self._end_flight(number)
        epoch, place = divmod(number, self.count)
        tally = self._tallies.pop(self._session, Tally())  # removed and added again: the newest tally stands last
        self._tallies[self._session] = Tally(tally.microbatches + 1, tally.samples + samples)
        if epoch >= self._first:
            self._part(epoch).done.add(place)
            self._close_epochs()

    def release(self, number: int) -> None:
        """Returns a taken microbatch untrained: any origin may take it. Raises ValueError if it is not in flight."""
        self._end_flight(number)

    def next_state(self) -> tuple[int, ...]:
        """Returns what to send to the other origins, at most MAX_STATE_INTS integers (see state.py).

        Advances the logical clock: call it once in every interval of gossip, whether or not the result is sent. An
        origin measures its pace and the age of its claims in these calls. After LAPSE_INTERVALS calls without a
        `take_next`, drops all claims. If nothing has changed, the result equals the last one; else its version grows.
        """
        self._state_calls += 1
        self._pace = max(self._taken_since_told, self._pace * PACE_DECAY)
        self._taken_since_told = 0
        if self._state_calls - self._last_take_at > LAPSE_INTERVALS:
            self._claims.clear()
        else:
            self._active_calls += 1
        if self._state_calls % BELIEVE_INTERVALS == 0:
            self._doubted.clear()
            self._believe(self._others)
        self._mark_claims()
        if self._encode(MAX_STATE_INTS) != self.last_state:
            self._version += 1
            self.last_state = self._encode(MAX_STATE_INTS)
        return self.last_state

    def merge(self, origin: str, values: Sequence[int]) -> None:
        """Takes the state that another origin sent; an older one of the same session is ignored.

        Raises ProtocolError if the state is malformed, DataError if that origin trains on other rows.
        """
        try:
            state = read_state(values, self._layout, self._rows_id, max_tallies=MAX_TALLIES)
        except DifferentRowsError:
            raise DataError(
                f"Peer {origin} trains on other rows than this one; compare samples, tokenizer.json and chat template, "
                "and give their hashes in the manifest ([data] samples_hash and tokenizer_hash) of the next run."
            ) from None
        except ValueError as error:
            raise ProtocolError("bad-message", f"The epoch state of {origin} cannot be read: {error}.") from None
        if origin == self._me:
            return
        known = self._others.get(origin)
        if known is None or known.session != state.session or known.version < state.version:
            self._others[origin] = state
            self._heard_at.setdefault(origin, self._state_calls)
        self._learn_tallies(state)
        self._believe([origin])

    def snapshot(self) -> tuple[int, ...]:
        """Returns, as integers for a checkpoint, what is known to be done, and the tallies; nothing in flight."""
        return self._encode(None)

    def restore(self, snapshot: Sequence[int]) -> None:
        """Adds the microbatches that are done in a snapshot of this or of another origin, and the snapshot's tallies.

        Raises DataError if the snapshot is of other rows, ValueError if it is malformed; nothing has changed then.
        """
        try:
            state = read_state(snapshot, self._layout, self._rows_id)
        except DifferentRowsError as error:
            raise DataError(
                f"The epoch of the checkpoint cannot be resumed: {error}; give the samples and the tokenizer with "
                "which the run has begun."
            ) from error
        self._learn_tallies(state)
        self._first = max(self._first, state.first)
        for epoch, part in state.epochs.items():
            if epoch >= self._first:
                self._part(epoch).done.update(part.done)
        self._close_epochs()

    def done_ranges(self, epoch: int) -> list[NumberRange]:
        """Returns which microbatches (0 to count - 1) of an epoch are done, as ascending (first, length)."""
        if epoch < self._first:
            return [(0, self.count)]
        return list(self._parts[epoch].done.ranges(full_blocks=True)) if epoch in self._parts else []

    def counts(self) -> EpochTotals:
        """Returns how many microbatches the swarm has done so far, as far as this origin knows."""
        epochs = [self._count_epoch(epoch) for epoch in range(self._first, self._newest() + 1)]
        seen = self._first * self.count + sum(epoch.done for epoch in epochs)
        completed = sum(tally.microbatches for tally in self._tallies.values())
        return EpochTotals(
            seen=seen,
            repeated=max(0, completed - seen),
            missed=sum(self.count - epoch.done for epoch in epochs[:-1]),
            samples=sum(tally.samples for tally in self._tallies.values()),
            epochs=tuple(epochs),
        )

    def _count_epoch(self, epoch: int) -> EpochCounts:
        own = self._parts.get(epoch, EpochProgress.empty(self._layout))
        done = own.done
        in_flight = MicrobatchSet(self._layout)
        in_flight.update(own.opened)
        for name, state in self._others.items():
            if name in self._live and (part := state.epochs.get(epoch)):
                in_flight.update(part.opened)
        in_flight_count = sum((mask & ~done.mask(block)).bit_count() for block, mask in in_flight.masks.items())
        return EpochCounts(epoch, len(done), in_flight_count, self.count - len(done) - in_flight_count)

    def _newest(self) -> int:
        begun = [epoch for epoch, part in self._parts.items() if part.done.masks or part.opened.masks]
        return max(begun, default=self._first - 1)

    def _mark_claims(self) -> None:
        for part in self._parts.values():
            part.claimed.masks.clear()
        for claim in self._claims:
            if claim.epoch >= self._first:
                self._part(claim.epoch).claimed.add(claim.number)

    def _encode(self, limit: int | None) -> tuple[int, ...]:
        parts = {epoch: part for epoch, part in self._parts.items() if not part.is_empty()}
        tallies = dict(reversed(list(self._tallies.items())))  # the newest first: a limit leaves out the oldest
        if limit is None:
            nothing = MicrobatchSet(self._layout)
            done = {
                epoch: EpochProgress(part.done, nothing, nothing) for epoch, part in parts.items() if part.done.masks
            }
            state = EpochState(0, 0, self._first, tallies, done)
        else:
            state = EpochState(self._session, self._version, self._first, tallies, parts)
        return write_state(state, self._layout, self._rows_id, limit)

    def _learn_tallies(self, state: EpochState) -> None:
        for session, tally in reversed(list(state.tallies.items())):
            if session != self._session and self._tallies.get(session, Tally()) < tally:
                self._tallies.pop(session, None)
                self._tallies[session] = tally
        while len(self._tallies) > KEPT_TALLIES:
            del self._tallies[next(iter(self._tallies))]

    def _believe(self, names: Iterable[str]) -> None:
        live = [state for name, state in self._others.items() if name in self._live] or list(self._others.values())
        most = len(live) // 2 + 1
        has_nobody_else = len(live) == 1 and len(self._live) <= 2 and self._state_calls <= LAPSE_INTERVALS
        if len(live) > 1 or has_nobody_else:
            self._first = max(self._first, sorted((state.first for state in live), reverse=True)[most - 1])
            self._close_epochs()
        for name in names:
            for epoch in range(self._first, self._first + open_epochs(self._layout)):
                done = self._part(epoch).done
                for block, mask in self._others[name].masks_done(epoch, self._layout):
                    if not (new := mask & ~done.mask(block)):
                        continue
                    believed = new
                    if not has_nobody_else:
                        masks = [other.done_mask(epoch, block, self._layout) for other in live]
                        agreed = new & _bits_in_most(masks, most) if len(live) > 1 else 0
                        alone = _lowest_bits(new & ~agreed, self._credit(name))
                        self._believed[name] = self._believed.get(name, 0) + alone.bit_count()
                        believed = agreed | alone
                    if believed:
                        done.masks[block] = done.mask(block) | believed
                    if doubted := new & ~believed:
                        masks_of = self._doubted.setdefault(epoch, MicrobatchSet(self._layout)).masks
                        masks_of[block] = masks_of.get(block, 0) | doubted
            self._close_epochs()

    def _credit(self, name: str) -> int:
        own = self._tallies.get(self._session, Tally()).microbatches / max(self._active_calls, 1)
        earned = CREDIT_AT_START + PACE_LIMIT * own * (self._state_calls - self._heard_at[name])
        return max(int(earned) - self._believed.get(name, 0), 0)

    def _close_epochs(self) -> None:
        while (part := self._parts.get(self._first)) is not None and part.done.is_complete():
            self._first += 1
        for past in [epoch for epoch in self._parts if epoch < self._first]:
            del self._parts[past]
            self._last_claimed.pop(past, None)
            self._doubted.pop(past, None)

    def _part(self, epoch: int) -> EpochProgress:
        return self._parts.setdefault(epoch, EpochProgress.empty(self._layout))

    def _end_flight(self, number: int) -> None:
        if number not in self._in_flight:
            raise ValueError(f"microbatch {number} was not taken")
        self._in_flight.remove(number)
        epoch, place = divmod(number, self.count)
        if epoch in self._parts:
            self._parts[epoch].opened.discard(place)

    def _claims_ahead(self, origins: int) -> int:
        return max(1, min(math.ceil(ANNOUNCE_INTERVALS * self._pace), self.count // (2 * origins)))

    def _may_keep(self, claim: _Claim, others: HeldByOthers) -> bool:
        if claim.epoch < self._first or claim.number in self._part(claim.epoch).done:
            return False
        block = claim.number // self._layout.size
        for name, state in others.states.items():
            part = state.epochs.get(claim.epoch)
            if part is None:
                continue
            if claim.number in part.opened:
                return False
            if claim.number in part.claimed and self._order.is_preceded_by(name, claim.epoch, block):
                return False
        return True

    def _may_open(self, claim: _Claim, live: frozenset[str]) -> bool:
        if claim.calls_before + ANNOUNCE_INTERVALS <= self._state_calls:
            return True
        return claim.number // self._layout.size in self._order.order(claim.epoch, live).own

    def _find_free(self, others: HeldByOthers, *, own_blocks: bool = False) -> _Claim | None:
        # own_blocks: only where this origin has the lowest hash and no other works: such a claim may be opened at once.
        for also_doubted in (False, True):
            for epoch in range(self._first, self._first + open_epochs(self._layout)):
                number = self._find_free_in(epoch, others, own_blocks, also_doubted)
                if number is not None:
                    self._last_claimed[epoch] = number
                    return _Claim(epoch, number, self._state_calls)
        return None

    def _find_free_in(self, epoch: int, others: HeldByOthers, own_blocks: bool, also_doubted: bool) -> int | None:
        part = self._part(epoch)
        held, workers = others.of_epoch(epoch)
        taken = MicrobatchSet(self._layout)
        for numbers in (part.done, part.opened, held):
            taken.update(numbers)
        if not also_doubted:
            taken.update(self._doubted.get(epoch, taken))
        for claim in self._claims:
            if claim.epoch == epoch:
                taken.add(claim.number)
        order = self._order.order(epoch, others.live)
        if own_blocks:
            return first_free(order.own, taken, workers)
        return next_free(order, taken, workers, self._last_claimed.get(epoch))
