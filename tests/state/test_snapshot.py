"""What a peer can give: one copy for several joiners, for a while, within its memory."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
from agora_protocol.errors import Busy, NotMyStage, ProtocolError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.manifest_sections import ALL_STEPS
from agora_protocol.messages import Chunk, GetChunk, GetSketches, GetState, StateIndex

from agora.state import snapshot
from agora.state.comparison import sketch_chunk
from agora.state.layout import StageState, chunk_arrays, pack_chunk
from agora.state.snapshot import MAX_BYTES, SnapshotServer
from tests.state.world import chunks, state
from tests.virtual_time import run

NUMEL = chunks(2.5)
NBYTES = 12 * NUMEL


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time must not pass while a real thread works."""

    async def inline(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)


class Source:
    """A stage that trains on: every copy is of a later step. nbytes: what a copy is said to need."""

    def __init__(self, nbytes: int = NBYTES, copying_s: float = 0.0) -> None:
        self.copies = 0
        self.copying_s = copying_s
        self.serving = True
        self.snapshots = SnapshotServer(self.export, lambda _: nbytes, lambda _: self.step)

    async def export(self, stage: int) -> StageState | None:
        if stage > 1:
            raise NotMyStage("not held here")
        await asyncio.sleep(self.copying_s)
        if not self.serving:
            return None
        self.copies += 1
        return state(NUMEL, step=10 * self.copies, value=float(self.copies), stage=stage)

    @property
    def step(self) -> int:
        """That of a copy made now."""
        return 10 * (self.copies + 1)

    async def index(self, stage: int = 0, at_least: int = 0, peer_caller: str = "joiner") -> StateIndex:
        given = await self.snapshots.get_state(GetState(stage, at_least), PeerId(peer_caller))
        assert isinstance(given.message, StateIndex)
        return given.message


async def every_chunk_hashes_as_the_index_says() -> None:
    source = Source()
    given = await source.snapshots.get_state(GetState(0), PeerId("joiner"))
    index = given.message
    assert isinstance(index, StateIndex)
    assert (index.step, index.updates, index.size) == (10, 7, NBYTES)
    hashes = bytes(given.tensors[0].data)
    assert hashlib.sha256(hashes).digest() == index.snapshot
    assert len(hashes) == 3 * 32
    for chunk in range(3):
        answer = await source.snapshots.get_chunk(GetChunk(index.snapshot, chunk))
        assert isinstance(answer.message, Chunk)
        assert hashlib.sha256(answer.tensors[0].data).digest() == hashes[32 * chunk : 32 * chunk + 32]
        assert bytes(answer.tensors[0].data) == pack_chunk(state(NUMEL), chunk)


async def several_joiners_share_one_copy() -> None:
    source = Source(copying_s=3.0)
    indices = await asyncio.gather(*(source.index() for _ in range(5)))
    await asyncio.sleep(26.0)
    assert {i.snapshot for i in [*indices, await source.index()]} == {indices[0].snapshot}
    assert source.copies == 1


async def a_small_state_is_copied_anew_rather_than_steps_replayed() -> None:
    source = Source()
    assert (await source.index()).step == 10
    await asyncio.sleep(1.0)
    assert (await source.index()).step == 20


async def who_needs_a_later_step_gets_a_new_copy_but_not_four_in_a_second() -> None:
    source = Source()
    assert (await source.index(at_least=5)).step == 10
    assert (await source.index(at_least=11)).step == 10 and source.copies == 1, "one was made just now"
    await asyncio.sleep(0.3)
    assert (await source.index(at_least=11)).step == 20
    assert (await source.index(at_least=20)).step == 20
    assert source.copies == 2


async def steps_that_change_no_byte_are_in_a_new_copy() -> None:
    given = state(NUMEL, step=10, agreed_step=10, history_hash=5)

    async def export(_: int) -> StageState:
        return given

    snapshots = SnapshotServer(export, lambda _: NBYTES, lambda _: 0)
    first = (await snapshots.get_state(GetState(0), PeerId("joiner"))).message
    given = state(NUMEL, step=11, agreed_step=11, history_hash=6)
    await asyncio.sleep(31.0)
    second = (await snapshots.get_state(GetState(0), PeerId("joiner"))).message
    assert isinstance(first, StateIndex)
    assert isinstance(second, StateIndex)
    assert first.snapshot == second.snapshot
    assert [(index.step, index.agreed, index.lineage) for index in (first, second)] == [(10, 10, 5), (11, 11, 6)]


async def an_older_copy_serves_who_has_begun_and_a_new_one_who_comes() -> None:
    source = Source()
    first = await source.index()
    await asyncio.sleep(31.0)
    second = await source.index()
    assert second.step > first.step
    assert source.snapshots.nbytes == 2 * NBYTES
    await source.snapshots.get_chunk(GetChunk(first.snapshot, 0))
    await asyncio.sleep(40.0)  # the second copy was last used 40 s ago, the first 40 s ago too
    source.snapshots.drop_idle()
    assert source.snapshots.nbytes == 2 * NBYTES
    await source.snapshots.get_chunk(GetChunk(first.snapshot, 1))
    await asyncio.sleep(30.0)
    source.snapshots.drop_idle()
    assert source.snapshots.nbytes == NBYTES
    with pytest.raises(Refused, match="not kept any more"):
        await source.snapshots.get_chunk(GetChunk(second.snapshot, 0))
    await asyncio.sleep(61.0)
    source.snapshots.drop_idle()
    assert source.snapshots.nbytes == 0


async def memory_is_bounded_and_who_fetches_is_not_cut_off() -> None:
    source = Source(MAX_BYTES)  # two never fit
    first = await source.index()
    await asyncio.sleep(31.0)
    await source.snapshots.get_chunk(GetChunk(first.snapshot, 0))
    assert (await source.index()).snapshot == first.snapshot, "in use, and no room for another: the older one is given"
    with pytest.raises(Busy):
        await source.index(stage=1)
    await asyncio.sleep(11.0)
    assert (await source.index()).step > first.step
    assert source.snapshots.nbytes == NBYTES


async def the_older_copy_that_is_given_for_lack_of_room_is_still_kept() -> None:
    needed = NBYTES
    source = Source()
    source.snapshots = SnapshotServer(source.export, lambda _: needed, lambda _: 0)
    first = await source.index()
    await asyncio.sleep(31.0)
    await source.index(stage=1)
    needed = MAX_BYTES  # both copies would have to go, and the second one is in use
    assert (await source.index()).snapshot == first.snapshot
    await source.snapshots.get_chunk(GetChunk(first.snapshot, 0))


async def the_first_copy_is_made_whatever_its_size() -> None:
    source = Source(2 * MAX_BYTES)
    assert (await source.index()).size == NBYTES


async def nothing_to_give_is_said_and_asked_again() -> None:
    source = Source()
    source.serving = False
    assert (await source.index()) == StateIndex(b"", 0, 0, 0, 0, 0, ALL_STEPS, 0, 0)
    source.serving = True
    assert (await source.index()).size == NBYTES
    with pytest.raises(NotMyStage):
        await source.index(stage=2)


async def what_cannot_be_asked_for_is_refused() -> None:
    source = Source()
    index = await source.index()
    with pytest.raises(ProtocolError, match="has 3 chunks"):
        await source.snapshots.get_chunk(GetChunk(index.snapshot, 3))
    with pytest.raises(Refused):
        await source.snapshots.get_chunk(GetChunk(bytes(32), 0))


async def a_step_far_ahead_is_refused_and_no_copy_is_made_for_it() -> None:
    source = Source()
    await source.index()
    for at_least in (source.step + 101, 10**6, 2**62, 2**63 - 1):
        with pytest.raises(Refused, match="is at step 20, far from"):
            await source.index(at_least=at_least)
    assert source.copies == 1


async def one_caller_has_a_copy_made_anew_once_a_minute_whatever_it_wants() -> None:
    source = Source(copying_s=1.0)
    await source.index()
    for _ in range(16):
        await asyncio.sleep(3.0)
        await source.index(at_least=source.step + 50, peer_caller="greedy")
    assert source.copies <= 7, "as if it wanted no later step, but for one copy: an age of 10 s each"
    copies = source.copies
    await asyncio.sleep(3.0)
    await source.index(at_least=source.step + 50, peer_caller="another")
    assert source.copies == copies + 1, "others are not held up by it"


async def sketches_are_those_of_the_chunks() -> None:
    source, seed = Source(), bytes(range(16))
    index = await source.index()
    given = await source.snapshots.get_sketches(GetSketches(index.snapshot, seed, 1, 2), PeerId("joiner"))
    sums = np.frombuffer(given.tensors[0].data, "<f4").reshape(2, 3, 16)
    held = state(NUMEL)
    for row, chunk in enumerate((1, 2)):
        expected = sketch_chunk(chunk_arrays(held, chunk), held.layout, chunk, seed)
        np.testing.assert_allclose(sums[row], expected, rtol=1e-6, atol=1e-3)
    for first, count in ((2, 2), (3, 1), (2**63 - 1, 64)):
        with pytest.raises(ProtocolError, match="has 3 chunks"):
            await source.snapshots.get_sketches(GetSketches(index.snapshot, seed, first, count), PeerId("joiner"))
    with pytest.raises(Refused, match="not kept any more"):
        await source.snapshots.get_sketches(GetSketches(bytes(32), seed, 0, 1), PeerId("joiner"))


async def one_caller_gets_as_many_sketches_as_a_fetch_needs_and_others_theirs() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "SKETCHED_BURST", 3.0)
        source = Source()
    wanted = GetSketches((await source.index()).snapshot, bytes(16), 0, 3)
    await source.snapshots.get_sketches(wanted, PeerId("greedy"))
    with pytest.raises(Busy, match="many sketches"):
        await source.snapshots.get_sketches(wanted, PeerId("greedy"))
    await source.snapshots.get_sketches(wanted, PeerId("another"))


async def a_joiner_that_leaves_while_its_copy_is_made_does_not_spoil_it_for_the_next() -> None:
    source = Source()
    first, second = (asyncio.create_task(source.index()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).size == NBYTES
    assert first.cancelled()


@pytest.mark.parametrize(
    "claim",
    [
        every_chunk_hashes_as_the_index_says,
        several_joiners_share_one_copy,
        a_small_state_is_copied_anew_rather_than_steps_replayed,
        who_needs_a_later_step_gets_a_new_copy_but_not_four_in_a_second,
        steps_that_change_no_byte_are_in_a_new_copy,
        an_older_copy_serves_who_has_begun_and_a_new_one_who_comes,
        memory_is_bounded_and_who_fetches_is_not_cut_off,
        the_older_copy_that_is_given_for_lack_of_room_is_still_kept,
        the_first_copy_is_made_whatever_its_size,
        nothing_to_give_is_said_and_asked_again,
        what_cannot_be_asked_for_is_refused,
        a_step_far_ahead_is_refused_and_no_copy_is_made_for_it,
        one_caller_has_a_copy_made_anew_once_a_minute_whatever_it_wants,
        sketches_are_those_of_the_chunks,
        one_caller_gets_as_many_sketches_as_a_fetch_needs_and_others_theirs,
        a_joiner_that_leaves_while_its_copy_is_made_does_not_spoil_it_for_the_next,
    ],
    ids=lambda claim: claim.__name__,
)
def test_snapshots(claim) -> None:
    run(claim())
