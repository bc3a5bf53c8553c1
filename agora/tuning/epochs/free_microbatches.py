"""Decides which free microbatch of an epoch an origin takes next.

Deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agora.tuning.epochs.block_order import EpochOrder
from agora.tuning.epochs.microbatch_sets import BlockLayout, MicrobatchSet, lowest_bit, position_of_set_bit
from agora.tuning.epochs.state import EpochState


class HeldByOthers:
    """The microbatches that the other live origins have opened or claimed, made for each decision of an origin.

    states: name -> last known state, of the live origins without this one. live: the names of all live origins, with
    this one.
    """

    def __init__(self, states: Mapping[str, EpochState], live: frozenset[str], layout: BlockLayout) -> None:
        self.states = states
        self.live = live
        self._layout = layout
        self._held: dict[int, tuple[MicrobatchSet, dict[int, int]]] = {}

    def of_epoch(self, epoch: int) -> tuple[MicrobatchSet, dict[int, int]]:
        """Returns the microbatches of an epoch that other origins have opened or claimed, and a count for each block.

        The dict maps a block to how many other origins have opened or claimed something in it; blocks without any are
        absent. Both results are cached: callers must not change them.
        """
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
    """Returns the first free microbatch of the first block that has a free one and no other origin in it, or None.

    blocks: in the order in which they are tried. taken, workers: see next_free.
    """
    layout = taken.layout
    for block in blocks:
        if not workers.get(block) and not taken.is_full(block):
            return block * layout.size + lowest_bit(~taken.mask(block))
    return None
