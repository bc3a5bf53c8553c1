"""Tensors of a base model on their way: from several peers, some of which die, hang, lie, are busy, or have little."""

from __future__ import annotations

import asyncio
import errno
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from agora_protocol.errors import Busy, DiskError, PeerFailed, ProtocolError
from agora_protocol.limits import STATE_CHUNK_BYTES
from agora_protocol.messages import BaseIndex, GetPiece, Pong
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.observe.events import Event
from agora.state.chunk_fetch import CHUNK_TIMEOUT_S, MAX_SOURCE_FAILURES, WINDOW
from agora.swarm.peer_score import Violation
from agora.tuning.base import fetch
from agora.tuning.base.fetch import NO_PEER_TIMEOUT_S, TIMEOUT_S
from agora.tuning.base.server import LIST
from agora.tuning.base.store import BaseModelError
from tests.state.world import flipped
from tests.tuning.base_world import CHUNK_VALUES, BaseWorld, make_folder, values_in
from tests.virtual_time import run

PIECES = 9


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Virtual time must not pass while a real thread works."""

    async def inline(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr("agora.tuning.base.server.run_in_thread", inline)
    return


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "model")


def in_world(tmp_path: Path, whole: Path, work) -> None:
    """Runs `work` with a world, in virtual time."""

    async def main() -> None:
        await work(BaseWorld(tmp_path, whole))

    run(main())


def part_of(world: BaseWorld, folder: Path, *keep: int) -> Path:
    """A folder that has some of the model's tensors."""
    from safetensors.numpy import save_file

    folder.mkdir()
    values = values_in(world.whole)
    names = [world.list.tensors[number].name for number in keep]
    save_file({name: values[name] for name in names}, folder / "model-1.safetensors")
    return folder


def test_one_source_gives_exactly_what_is_asked_for(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        holder = world.add("a")
        await world.run(1, 4)
        world.assert_fetched(1, 4)
        assert sorted(holder.given) == [(LIST, 0), (1, 0), (1, 1), (4, 0)] and set(holder.given.values()) == {1}
        assert holder.calls["GetBase"] == 1 and world.peak_open <= WINDOW

    in_world(tmp_path, whole, work)


def test_several_sources_are_used_at_once_for_one_tensor(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        for name in "abc":
            world.add(name, uplink=1e6)
        fetch, took = await world.run(0)
        world.assert_fetched(0)
        assert len(fetch.bytes_from) == 3
        assert took < 1.2 * STATE_CHUNK_BYTES / 1e6

    in_world(tmp_path, whole, work)


def test_a_source_killed_in_the_middle_costs_its_open_pieces(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        world.add("killed").die_after = 3
        world.add("other", uplink=5e6)
        fetch, _ = await world.run()
        world.assert_fetched()
        assert world.network.faults.fired["kill"] == 1 and fetch.bytes_from.keys() == {"killed", "other"}
        assert 1 <= fetch.schedule.refetched <= WINDOW + MAX_SOURCE_FAILURES and not world.violations
        assert sum(fetch.bytes_from.values()) == sum(tensor.nbytes for tensor in world.list.tensors)

    in_world(tmp_path, whole, work)


def test_a_hung_source_is_replaced(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        for name in ("hung1", "hung2", "hung3", "hung4"):
            world.add(name).hang_after = 1  # after the list
        world.add("well")
        _, took = await world.run()
        world.assert_fetched()
        assert took < CHUNK_TIMEOUT_S / 4, "the fifth is asked once the first four are slow"

    in_world(tmp_path, whole, work)


def test_a_source_that_answers_nothing_at_all_is_replaced(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        for name in "abcd":
            world.add(name)
            world.network.silent.add(name)
        world.add("well")
        _, took = await world.run()
        world.assert_fetched()
        assert took < 30

    in_world(tmp_path, whole, work)


def test_who_lies_in_one_tensor_is_named_and_asked_no_more(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        fired = []

        def lie(answer: Reply, request, nth: int) -> Reply:
            if not isinstance(request, GetPiece) or request.tensor != 0:
                return answer
            fired.append(request)
            return flipped(answer)

        liar = world.add("liar")
        liar.fault = lie
        world.add("well", uplink=10e6)
        await world.run()
        world.assert_fetched()
        assert [(peer, what) for peer, what, _ in world.violations] == [("liar", Violation.FALSE_BASE)]
        assert "has another SHA-256" in world.violations[0][2]
        assert 1 <= len(fired) <= WINDOW and liar.calls["GetBase"] == 1

    in_world(tmp_path, whole, work)


def test_who_lies_in_the_list_is_named_and_asked_no_more(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        liar = world.add("liar")
        liar.fault = lambda answer, request, nth: flipped(answer) if isinstance(request, GetPiece) else answer
        world.add("well", uplink=1e3)  # so slow that the liar would win
        await world.run(4)
        world.assert_fetched(4)
        assert [(peer, what) for peer, what, _ in world.violations] == [("liar", Violation.FALSE_BASE)]
        assert liar.calls == {"GetBase": 1, "GetPiece": 1}

    in_world(tmp_path, whole, work)


def _another_message(answer: Reply) -> Reply:
    return Reply(Pong())


def _too_long(answer: Reply) -> Reply:
    data = bytes(answer.tensors[0].data) + b"x"
    return Reply(answer.message, [WireTensor("uint8", (len(data),), memoryview(data))])


def _other_dtype(answer: Reply) -> Reply:
    return Reply(answer.message, [WireTensor("int8", answer.tensors[0].shape, answer.tensors[0].data)])


def _other_size(answer: Reply) -> Reply:
    return Reply(BaseIndex(7), answer.tensors) if isinstance(answer.message, BaseIndex) else answer


def _bit_beyond(answer: Reply) -> Reply:
    if not isinstance(answer.message, BaseIndex):
        return answer
    return Reply(answer.message, [WireTensor("uint8", (1,), memoryview(b"\xff"))])


@pytest.mark.parametrize("change", [_another_message, _too_long, _other_dtype, _other_size, _bit_beyond])
def test_answers_that_cannot_be_true_are_violations(tmp_path: Path, whole: Path, change) -> None:
    async def work(world: BaseWorld) -> None:
        world.add("liar").fault = lambda answer, request, nth: change(answer)
        world.add("well", uplink=1e4)
        await world.run(4)
        world.assert_fetched(4)
        assert [(peer, what) for peer, what, _ in world.violations] == [("liar", Violation.FALSE_BASE)]

    in_world(tmp_path, whole, work)


def test_a_peer_that_refuses_by_a_protocol_error_is_no_liar(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        world.add("strict").fault = lambda answer, request, nth: ProtocolError("bad-message", "no such piece")
        world.add("well")
        await world.run(4)
        world.assert_fetched(4)
        assert not world.violations

    in_world(tmp_path, whole, work)


def test_sources_that_lack_tensors_are_asked_only_for_what_they_have(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        for number in range(5):
            world.add(f"has {number}", part_of(world, tmp_path / f"folder{number}", number))
        await world.run()
        world.assert_fetched()
        for number in range(5):
            given = {tensor for tensor, _ in world.holders[f"has {number}"].given}
            assert given - {LIST} == {number}

    in_world(tmp_path, whole, work)


def test_four_peers_with_nothing_of_use_do_not_keep_a_fifth_from_being_asked(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        folder = part_of(world, tmp_path / "norm", 4)
        for name in "abcd":
            world.add(name, folder)
        world.add("well")
        _, took = await world.run(0)
        world.assert_fetched(0)
        assert took < 1.0

    in_world(tmp_path, whole, work)


def test_a_peer_that_gets_tensors_meanwhile_gives_them(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        late = world.add("late", part_of(world, tmp_path / "norm", 4))
        full = world.add("full", uplink=4e3)  # 20 minutes for a piece
        whole_places = full.base.locations_in_folder()
        loop = asyncio.get_running_loop()

        def get() -> None:
            late.base.add_location(0, whole_places[world.list.tensors[0].name])

        loop.call_later(20.0, get)
        _, took = await world.run(0)
        world.assert_fetched(0)
        assert 20 < took < 40

    in_world(tmp_path, whole, work)


def test_peers_that_come_later_are_asked_too(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        asyncio.get_running_loop().call_later(NO_PEER_TIMEOUT_S - 3, world.add, "late")
        _, took = await world.run()
        world.assert_fetched()
        assert NO_PEER_TIMEOUT_S - 3 < took < NO_PEER_TIMEOUT_S + 1

    in_world(tmp_path, whole, work)


def test_a_busy_source_is_waited_for(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        began = asyncio.get_running_loop().time()

        def busy(answer: Reply, request, nth: int):
            early = asyncio.get_running_loop().time() < began + 5 * TIMEOUT_S
            return Busy("hashing its files", 5000) if early else answer

        world.add("busy").fault = busy
        _, took = await world.run(4)
        world.assert_fetched(4)
        assert 5 * TIMEOUT_S < took < 5 * TIMEOUT_S + 15

    in_world(tmp_path, whole, work)


def test_a_source_that_is_always_busy_is_not_waited_for_for_ever(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        world.add("busy").fault = lambda answer, request, nth: Busy("hashing its files", 5000)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(BaseModelError, match="hashing its files"):
            await world.run(4)
        took = loop.time() - began
        assert fetch.BUSY_TIMEOUT_S < took < fetch.BUSY_TIMEOUT_S + TIMEOUT_S + 15

    in_world(tmp_path, whole, work)


def test_a_source_that_fails_now_and_then_is_asked_again(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        world.add("shaky").fault = lambda answer, request, nth: PeerFailed("a shaky disk") if nth % 3 else answer
        await world.run()
        world.assert_fetched()
        assert not world.violations

    in_world(tmp_path, whole, work)


def test_a_damaged_file_costs_its_owner_that_tensor_and_nobody_a_violation(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        folder = make_folder(tmp_path / "damaged")
        damaged = world.add("damaged", folder)
        place = damaged.base.locations_in_folder()[world.list.tensors[0].name]
        with place.path.open("r+b") as file:
            file.seek(place.start + STATE_CHUNK_BYTES)  # its second piece
            file.write(b"!")
        world.add("well", uplink=1e6)
        await world.run()
        world.assert_fetched()
        assert not world.violations
        (event,) = world.events
        assert isinstance(event, Event)
        assert "model.embed_tokens.weight" in event.describe() and 0 not in damaged.base.held

    in_world(tmp_path, whole, work)


# --- what fails


@pytest.mark.parametrize("others", [0, 2])
def test_without_a_source_one_sentence_says_what_to_do(tmp_path: Path, whole: Path, others: int) -> None:
    async def work(world: BaseWorld) -> None:
        for name in "abcdef"[:others]:
            holder = world.add(name, part_of(world, tmp_path / name, 4))
            holder.base.drop(4)
        loop = asyncio.get_running_loop()
        began = loop.time()
        says = "has no tensor of the base model" if others else "there is no other peer"
        with pytest.raises(BaseModelError, match=rf"(?s)list of the base model's tensors \(.*{says}.*--base-model DIR"):
            await world.run()
        assert loop.time() - began < (TIMEOUT_S if others else NO_PEER_TIMEOUT_S) + 1

    in_world(tmp_path, whole, work)


def test_a_tensor_that_nobody_has_is_named(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        world.add("a", part_of(world, tmp_path / "part", 1, 4))
        with pytest.raises(
            BaseModelError, match=r"tensor model.embed_tokens.weight and 2 more \(they say that they have"
        ):
            await world.run()
        assert len(list((world.store.folder / "tensors").glob("*.safetensors"))) == 2, "what came stays"

    in_world(tmp_path, whole, work)


def test_a_full_disk_is_one_sentence(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: BaseWorld) -> None:
        world.add("a")
        real, writes = type(world.store).write_piece, []

        def write(store, number, listed, piece, data) -> None:
            writes.append(piece)
            if len(writes) == 3:
                with store._disk_errors():
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(store, number, listed, piece, data)

        monkeypatch.setattr(type(world.store), "write_piece", write)
        with pytest.raises(DiskError, match="No space left on device.*free some space, choose another --dir, or name"):
            await world.run()

    in_world(tmp_path, whole, work)


# --- going on


def test_what_is_there_is_not_fetched_again(tmp_path: Path, whole: Path) -> None:
    """Also after a death in the middle of a tensor, and not what a torn write has left of a piece."""

    async def work(world: BaseWorld) -> None:
        first = world.add("first", uplink=1e6)
        await asyncio.create_task(world.fetch().fetch_list(None))
        first.die_after = 6  # the list, five pieces
        with pytest.raises(BaseModelError):
            await world.run()
        pieces = {key for key in first.given if key[0] != LIST}
        assert len(pieces) >= 3
        del world.holders[first.peer]
        torn = max(key for key in pieces if (world.store.folder / "tensors" / f"{key[0]:05d}.part").exists())
        with (world.store.folder / "tensors" / f"{torn[0]:05d}.part").open("r+b") as file:
            file.seek(-2000, os.SEEK_END) if torn[1] else file.seek(2000)
            file.write(b"torn")
        second = world.add("second")
        whole_before = {n for n in range(5) if world.store.find(n, world.list.tensors[n])}
        fetch = world.fetch()
        await fetch.fetch_list(None)
        await fetch.fetch(world.begin(*({*range(5)} - whole_before)))
        world.assert_fetched()
        again = {key for key in second.given if key[0] != LIST} & pieces
        assert again == {torn}

    in_world(tmp_path, whole, work)


def test_a_list_that_is_known_is_not_asked_for(tmp_path: Path, whole: Path) -> None:
    async def work(world: BaseWorld) -> None:
        holder = world.add("a")
        fetch = world.fetch()
        assert await fetch.fetch_list(world.list) is world.list and not holder.calls
        await fetch.fetch(world.begin(4))
        assert sorted(holder.given) == [(4, 0)]

    in_world(tmp_path, whole, work)


def test_a_tensor_is_never_in_memory(tmp_path: Path) -> None:
    """One source: at most its window of pieces, and those that it reads and that are written."""
    count = 24
    whole = make_folder(tmp_path / "large", {"embed": count * CHUNK_VALUES, "norm": 4})

    async def work(world: BaseWorld) -> None:
        world.add("a")
        tracemalloc.start()
        try:
            await world.run(0)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < (WINDOW + 2) * STATE_CHUNK_BYTES < count * STATE_CHUNK_BYTES / 4

    in_world(tmp_path, whole, work)
