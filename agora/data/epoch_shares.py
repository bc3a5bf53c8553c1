"""Decides which origin takes which microbatch of an epoch, so that each is done once an epoch across the swarm.

Knows: origins by name, what they say of the epochs, who is live. Must not know: rows, tensors, messages, a clock.
Deterministic: an EpochShares changes only itself, and only by the calls to it.

Microbatch j of epoch e has the number e * count + j. An origin claims microbatches some time before it opens them, and
tells the others what it has claimed, opened and done. Its own order of the blocks of an epoch follows from hashes
(block_order.py): first the blocks in which it has the lowest hash of the live origins, then those in which one of them
has a lower one, and so on. So origins that are equally fast do not take the same microbatches, and a fast one takes
what the slow ones have not reached.

| a microbatch | when |
|---|---|
| is free | it is not done, and no live origin has opened or claimed it: what a dead one had in flight is free again |
| is claimed | it is the first free one: of the oldest epoch, next to the origin's last claim, or of its next block |
| is claimed in a block where others work | they work in all blocks with free ones; a hash chooses the place |
| is opened | its claim was told ANNOUNCE_INTERVALS times, or the origin has the lowest hash of the block |
| is given up | a live origin has opened it, or has claimed it with a lower hash; or take_next is not called any more |

An origin claims as many ahead as it opens in ANNOUNCE_INTERVALS of gossip. So others hear of a claim before it is
opened, and one of two origins with the same claim gives it up. If all of its claims are too new, it claims and
opens one more in a block where it has the lowest hash. A paused origin delays nobody, because its claims lapse.

An epoch is complete when all of its microbatches are done. When none is free, origins go on with the next epoch. At
most open_epochs are in progress; beyond them origins wait for the oldest one.

A microbatch is done twice when its origin seems dead but is not, when two origins open it because a message was lost or
late, or when an origin died before it told that it was done. Each session counts what it has completed, and tells the
count to all, so that repeats are counted, except those that a dead origin never told.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from agora_protocol.errors import DataError, ProtocolError

from agora.data.block_order import BlockOrder
from agora.data.epoch_state import (
    KEPT_TALLIES,
    MAX_STATE_INTS,
    MAX_TALLIES,
    DifferentRowsError,
    EpochPart,
    EpochState,
    Tally,
    open_epochs,
    read_state,
    write_state,
)
from agora.data.free_microbatches import HeldByOthers, first_free, next_free
from agora.data.microbatch_sets import BlockLayout, MicrobatchSet, Run

ANNOUNCE_INTERVALS: Final = 3
"""How many calls of `state` after a claim the others count as told of it."""
LAPSE: Final = 8
"""How many calls of `state` without a call of `take_next` make an origin give up its claims.

A new origin also waits for at most this many calls of `state` until it has heard from all live origins."""
KEPT_ORIGINS: Final = 256
"""If more origins are known, those that are not live are forgotten. What they had done stays known."""
PACE_DECAY: Final = 31 / 32
"""The factor by which the measured pace decays with each call of `state` while fewer microbatches are opened."""


@dataclass(frozen=True, slots=True)
class EpochCounts:
    """How many microbatches of an epoch in progress are done, in flight at a live origin, or neither (`missing`).

    Origins count as live if they were when `take_next` was last called.
    """

    epoch: int
    done: int
    in_flight: int
    missing: int


@dataclass(frozen=True, slots=True)
class ShareCounts:
    """How many microbatches the swarm has done, as far as this origin knows.

    seen: those done at least once, summed over the epochs. repeated: completions after the first one of a microbatch.
    missed: those not done yet of epochs before the newest that has begun. samples: the samples in all completions,
    repeats included. epochs: the epochs in progress, the oldest first.
    """

    seen: int
    repeated: int
    missed: int
    samples: int
    epochs: tuple[EpochCounts, ...]


@dataclass(frozen=True, slots=True)
class _Claim:
    """A microbatch that this origin means to open. number: within the epoch.

    calls_before: calls of `state` until then.
    """

    epoch: int
    number: int
    calls_before: int


class EpochShares:
    """Decides which microbatches of the epochs one origin takes, from what the origins of the swarm tell each other.

    seed: the run's. me: this origin's name. session: a number from 0 to 2^63 - 1, different at each start of each
    origin. count: microbatches in an epoch. rows_id: identifies the rows, so that origins with other rows are refused.
    last_told: the last result of `state`, with which the gossip of others is answered.
    """

    def __init__(self, seed: int, me: str, session: int, count: int, rows_id: int = 0) -> None:
        self._me = me
        self._session = session
        self._rows_id = rows_id
        self._layout = BlockLayout(count)
        self._first = 0  # the first epoch that is not complete
        self._parts: dict[int, EpochPart] = {}
        self._in_flight: set[int] = set()  # numbers of opened microbatches, of complete epochs too
        self._claims: list[_Claim] = []
        self._last_claimed: dict[int, int] = {}
        self._tallies: dict[int, Tally] = {}
        self._others: dict[str, EpochState] = {}
        self._live = frozenset({me})
        self._order = BlockOrder(seed, me, self._layout.blocks)
        self._state_calls = self._asked_at = self._version = 0
        self._taken_since_told, self._pace = 0, 0.0
        self.last_told: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of microbatches in an epoch."""
        return self._layout.count

    def take_next(self, live: Collection[str]) -> int | None:
        """Takes the next microbatch and returns its number; None if this origin may not open one now.

        It is in flight until `mark_completed` or `release` is called for it. After None, call again after each call of
        `merge`, `mark_completed` and `state`. live: the names of the live origins, with or without this one.
        """
        self._asked_at = self._state_calls
        self._live = names = frozenset(live) | {self._me}
        states = {name: state for name, state in self._others.items() if name in names}
        if len(states) + 1 < len(names) and self._state_calls < LAPSE:
            return None
        if len(self._others) > KEPT_ORIGINS:
            self._others = states
        seen = HeldByOthers(states, names, self._layout)
        self._claims = [claim for claim in self._claims if self._may_keep(claim, seen)]
        while len(self._claims) <= self._ahead(len(names)) and (claim := self._find_free(seen)) is not None:
            self._claims.append(claim)
        ready = [claim for claim in self._claims if self._may_open(claim, names)]
        if not ready:
            if (own := self._find_free(seen, own_blocks=True)) is None:
                return None
            self._claims.append(own)
            ready = [own]
        chosen = min(
            ready, key=lambda claim: (claim.calls_before + ANNOUNCE_INTERVALS > self._state_calls, claim.epoch)
        )
        self._claims.remove(chosen)
        self._part(chosen.epoch).opened.add(chosen.number)
        number = chosen.epoch * self.count + chosen.number
        self._in_flight.add(number)
        self._taken_since_told += 1
        return number

    def mark_completed(self, number: int, samples: int = 1) -> None:
        """Records that a microbatch which was taken is done. samples: how many it holds.

        Raises ValueError if it was not taken.
        """
        self._forget(number)
        epoch, place = divmod(number, self.count)
        tally = self._tallies.pop(self._session, Tally())  # removed and added again: the newest tally stands last
        self._tallies[self._session] = Tally(tally.microbatches + 1, tally.samples + samples)
        if epoch >= self._first:
            self._part(epoch).done.add(place)
            self._close_epochs()

    def release(self, number: int) -> None:
        """Records that a microbatch which was taken is given up, and free again.

        Raises ValueError if it was not taken.
        """
        self._forget(number)

    def state(self) -> tuple[int, ...]:
        """Returns what to tell the other origins, at most MAX_STATE_INTS integers (see epoch_state.py).

        Advances the clock: call it once in every interval of gossip, whether or not the result is sent. An origin
        measures its pace and the age of its claims in these calls, and drops its claims after LAPSE of them without
        `take_next`. The result equals the last one if nothing has changed.
        """
        self._state_calls += 1
        self._pace = max(self._taken_since_told, self._pace * PACE_DECAY)
        self._taken_since_told = 0
        if self._state_calls - self._asked_at > LAPSE:
            self._claims.clear()
        self._mark_claims()
        if self._encode(MAX_STATE_INTS) != self.last_told:
            self._version += 1
            self.last_told = self._encode(MAX_STATE_INTS)
        return self.last_told

    def merge(self, origin: str, values: Sequence[int]) -> None:
        """Adds what another origin has told: the integers that its `state` returned.

        Raises ProtocolError when it is malformed, and DataError when that origin trains on other rows.
        """
        try:
            state = read_state(values, self._layout, self._rows_id, max_tallies=MAX_TALLIES)
        except DifferentRowsError:
            raise DataError(
                f"Peer {origin} trains on other rows than this one; compare samples, tokenizer.json and chat template, "
                "and give their hashes in the manifest ([data] samples_hash and tokenizer_hash) of the next run."
            ) from None
        except ValueError as error:
            raise ProtocolError("bad-message", f"The share of {origin} cannot be read: {error}.") from None
        if origin == self._me:
            return
        known = self._others.get(origin)
        if known is None or known.session != state.session or known.version < state.version:
            self._others[origin] = state
        self._learn(state)

    def snapshot(self) -> tuple[int, ...]:
        """Returns, as integers for a checkpoint, what is known to be done; what is in flight is left out."""
        return self._encode(None)

    def restore(self, snapshot: Sequence[int]) -> None:
        """Adds what a snapshot of this or of another origin says is done.

        Raises DataError when it is of other rows, ValueError when it is malformed; nothing has changed then.
        """
        try:
            self._learn(read_state(snapshot, self._layout, self._rows_id))
        except DifferentRowsError as error:
            raise DataError(
                f"The epoch of the checkpoint cannot be resumed: {error}; give the samples and the tokenizer with "
                "which the run has begun."
            ) from error

    def done_runs(self, epoch: int) -> list[Run]:
        """Returns which microbatches (0 to count - 1) of an epoch are known to be done, as ascending runs."""
        if epoch < self._first:
            return [(0, self.count)]
        return list(self._parts[epoch].done.runs(full_blocks=True)) if epoch in self._parts else []

    def counts(self) -> ShareCounts:
        """Returns how many microbatches the swarm has done so far, as far as this origin knows."""
        epochs = [self._count_epoch(epoch) for epoch in range(self._first, self._newest() + 1)]
        seen = self._first * self.count + sum(epoch.done for epoch in epochs)
        total = Tally(*(sum(numbers) for numbers in zip(*self._tallies.values(), strict=True)))
        return ShareCounts(
            seen=seen,
            repeated=max(0, total.microbatches - seen),
            missed=sum(self.count - epoch.done for epoch in epochs[:-1]),
            samples=total.samples,
            epochs=tuple(epochs),
        )

    def _count_epoch(self, epoch: int) -> EpochCounts:
        """Returns how many microbatches of an epoch in progress are done, in flight at live origins, and neither."""
        in_flight, done = MicrobatchSet(self._layout), self._part(epoch).done
        in_flight.update(self._part(epoch).opened)
        for name, state in self._others.items():
            if name in self._live and (part := state.epochs.get(epoch)):
                in_flight.update(part.opened)
        flying = sum((mask & ~done.mask(block)).bit_count() for block, mask in in_flight.masks.items())
        return EpochCounts(epoch, len(done), flying, self.count - len(done) - flying)

    def _newest(self) -> int:
        """Returns the newest epoch of which a microbatch is done anywhere, or opened by this origin.

        Without any, it is the last complete epoch.
        """
        begun = [epoch for epoch, part in self._parts.items() if part.done.masks or part.opened.masks]
        return max(begun, default=self._first - 1)

    def _mark_claims(self) -> None:
        """Copies this origin's claims into the parts of the epochs, from which `state` tells them to others."""
        for part in self._parts.values():
            part.claimed.masks.clear()
        for claim in self._claims:
            if claim.epoch >= self._first:
                self._part(claim.epoch).claimed.add(claim.number)

    def _encode(self, limit: int | None) -> tuple[int, ...]:
        """Returns this origin's state as at most `limit` integers for others; with None, only what is done."""
        parts = {epoch: part for epoch, part in self._parts.items() if not part.is_empty()}
        tallies = dict(reversed(list(self._tallies.items())))
        if limit is None:
            nothing = MicrobatchSet(self._layout)
            done = {epoch: EpochPart(part.done, nothing, nothing) for epoch, part in parts.items() if part.done.masks}
            state = EpochState(0, 0, self._first, tallies, done)
        else:
            state = EpochState(self._session, self._version, self._first, tallies, parts)
        return write_state(state, self._layout, self._rows_id, limit)

    def _learn(self, state: EpochState) -> None:
        """Adds what another state says is done, and its tallies if they are higher; never this session's own tally.

        Keeps at most KEPT_TALLIES tallies, and closes the epochs that are done then.
        """
        for session, tally in reversed(list(state.tallies.items())):
            if session != self._session and self._tallies.get(session, Tally()) < tally:
                self._tallies.pop(session, None)
                self._tallies[session] = tally
        while len(self._tallies) > KEPT_TALLIES:
            del self._tallies[next(iter(self._tallies))]
        self._first = max(self._first, state.first)
        for epoch, part in state.epochs.items():
            if epoch >= self._first:
                self._part(epoch).done.update(part.done)
        self._close_epochs()

    def _close_epochs(self) -> None:
        """Moves `_first` to the first epoch that is not complete, and forgets the epochs before it."""
        while (part := self._parts.get(self._first)) is not None and part.done.is_complete():
            self._first += 1
        for past in [epoch for epoch in self._parts if epoch < self._first]:
            del self._parts[past]
            self._last_claimed.pop(past, None)

    def _part(self, epoch: int) -> EpochPart:
        """Returns what is known of an epoch that is not complete; adds an empty entry if nothing is."""
        return self._parts.setdefault(epoch, EpochPart.empty(self._layout))

    def _forget(self, number: int) -> None:
        """Removes a microbatch from those in flight. Raises ValueError if it is not in flight."""
        if number not in self._in_flight:
            raise ValueError(f"microbatch {number} was not taken")
        self._in_flight.remove(number)
        epoch, place = divmod(number, self.count)
        if epoch in self._parts:
            self._parts[epoch].opened.discard(place)

    def _ahead(self, origins: int) -> int:
        """Returns how many microbatches to claim ahead: as many as this origin opens in ANNOUNCE_INTERVALS.

        origins: how many are live. At least 1, at most half of an equal share of an epoch.
        """
        return max(1, min(math.ceil(ANNOUNCE_INTERVALS * self._pace), self.count // (2 * origins)))

    def _may_keep(self, claim: _Claim, seen: HeldByOthers) -> bool:
        """Returns whether this origin keeps a claim: it is not done, no other live origin has opened it, or claimed it
        with a lower hash. seen: what the other live origins told.
        """
        if claim.epoch < self._first or claim.number in self._part(claim.epoch).done:
            return False
        block = claim.number // self._layout.size
        for name, state in seen.states.items():
            part = state.epochs.get(claim.epoch)
            if part is None:
                continue
            if claim.number in part.opened:
                return False
            if claim.number in part.claimed and self._order.comes_after(name, claim.epoch, block):
                return False
        return True

    def _may_open(self, claim: _Claim, live: frozenset[str]) -> bool:
        """Returns whether a claim may be opened: told often enough, or no live origin has a lower hash there."""
        if claim.calls_before + ANNOUNCE_INTERVALS <= self._state_calls:
            return True
        return claim.number // self._layout.size in self._order.order(claim.epoch, live).own

    def _find_free(self, seen: HeldByOthers, *, own_blocks: bool = False) -> _Claim | None:
        """Returns a new claim of the first free microbatch in this origin's order, None if none is free.

        Remembers its number in `_last_claimed`; the caller adds the claim to `_claims`. own_blocks: looks only in
        blocks where this origin has the lowest hash and no other works, so that the claim may be opened at once.
        """
        for epoch in range(self._first, self._first + open_epochs(self._layout)):
            number = self._find_free_in(epoch, seen, own_blocks)
            if number is not None:
                self._last_claimed[epoch] = number
                return _Claim(epoch, number, self._state_calls)
        return None

    def _find_free_in(self, epoch: int, seen: HeldByOthers, own_blocks: bool) -> int | None:
        """Returns the free microbatch of one epoch that is next in this origin's order, None if none is free."""
        part, (held, workers) = self._part(epoch), seen.of_epoch(epoch)
        taken = MicrobatchSet(self._layout)
        for numbers in (part.done, part.opened, held):
            taken.update(numbers)
        for claim in self._claims:
            if claim.epoch == epoch:
                taken.add(claim.number)
        order = self._order.order(epoch, seen.live)
        if own_blocks:
            return first_free(order.own, taken, workers)
        return next_free(order, taken, workers, self._last_claimed.get(epoch))
