"""What a peer gives of a base model: what its files have right, never more at once than it can, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import Busy, ProtocolError, Refused
from agora_protocol.limits import MAX_BASE_TENSORS, STATE_CHUNK_BYTES
from agora_protocol.messages import GetBase, GetPiece
from agora_protocol.tensor_list import TensorList, bits_to_held

from agora.tuning.base import store as base_store
from agora.tuning.base.server import LIST, LIST_RETRY_MS, MAX_AT_ONCE, BaseServer
from agora.tuning.base.store import BaseModelError, TensorLocation, TensorStore, list_tensors
from agora.tuning.base.tensors import BaseTensors
from tests.tuning.base_world import NAMES, make_folder, named_by_owner


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def listed(whole: Path) -> TensorList:
    return list_tensors([whole / name for name in NAMES])


def peer(tmp_path: Path, listed: TensorList, folder: Path | None) -> tuple[BaseServer, BaseTensors, list[Any]]:
    """A peer whose owner has named `folder`, with an empty store."""
    events: list[Any] = []
    base = BaseTensors(listed.digest, named_by_owner(folder), TensorStore(tmp_path / "base" / listed.digest))
    return BaseServer(base, events.append), base, events


async def held_by(server: BaseServer, listed: TensorList) -> set[int]:
    reply = await server.answer(GetBase())
    return set(bits_to_held(reply.tensors[0].data, len(listed.tensors)))


def test_a_whole_folder_gives_list_and_tensors_and_hashes_itself_once(
    tmp_path: Path, whole: Path, listed: TensorList, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        server, base, _ = peer(tmp_path, listed, whole)
        assert await held_by(server, listed) == {0, 1, 2, 3, 4}
        data = (await server.answer(GetPiece(LIST, 0))).tensors[0].data
        assert TensorList.from_bytes(bytes(data)) == listed
        for number, tensor in enumerate(listed.tensors):
            for piece in range(tensor.piece_count):
                data = (await server.answer(GetPiece(number, piece))).tensors[0].data
                assert tensor.is_piece(piece, data) and len(data) == tensor.piece_bytes(piece)
        monkeypatch.setattr("agora.tuning.base.tensors.list_tensors", None)  # it is kept on the disk
        again, _, _ = peer(tmp_path, listed, whole)
        assert await held_by(again, listed) == {0, 1, 2, 3, 4}

    asyncio.run(work())


def test_while_it_hashes_its_files_it_is_busy(
    tmp_path: Path, whole: Path, listed: TensorList, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()

    def slowly(files):
        assert going_on.wait(30)
        return list_tensors(files)

    monkeypatch.setattr("agora.tuning.base.tensors.list_tensors", slowly)
    monkeypatch.setattr("agora.tuning.base.server.LIST_TIMEOUT_S", 0.05)

    async def work() -> None:
        server, _, _ = peer(tmp_path, listed, whole)
        for _ in range(3):
            with pytest.raises(Busy, match="hashing") as raised:
                await server.answer(GetBase())
            assert raised.value.retry_after_ms == LIST_RETRY_MS
        going_on.set()
        monkeypatch.setattr("agora.tuning.base.server.LIST_TIMEOUT_S", 30)
        assert await held_by(server, listed) == {0, 1, 2, 3, 4}
        await server.close()

    asyncio.run(work())


def test_closing_ends_the_wait_for_a_list(
    tmp_path: Path, whole: Path, listed: TensorList, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()
    monkeypatch.setattr("agora.tuning.base.tensors.list_tensors", lambda files: going_on.wait(30))
    monkeypatch.setattr("agora.tuning.base.server.LIST_TIMEOUT_S", 0.05)

    async def work() -> None:
        server, _, _ = peer(tmp_path, listed, whole)
        with pytest.raises(Busy):
            await server.answer(GetBase())
        await asyncio.wait_for(server.close(), 5)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())
    going_on.set()


def test_a_part_of_the_files_gives_nothing_until_the_list_is_known(
    tmp_path: Path, whole: Path, listed: TensorList
) -> None:
    folder = tmp_path / "part"
    folder.mkdir()
    (folder / NAMES[1]).write_bytes((whole / NAMES[1]).read_bytes())

    async def work() -> None:
        server, base, _ = peer(tmp_path, listed, folder)
        with pytest.raises(Refused, match="neither all files of the base model nor their list"):
            await server.answer(GetBase())
        base.adopt_list(listed)
        assert await held_by(server, listed) == {2, 3, 4}
        with pytest.raises(Refused, match="does not have this tensor"):
            await server.answer(GetPiece(0, 0))

    asyncio.run(work())


def test_a_peer_without_anything_refuses(tmp_path: Path, listed: TensorList) -> None:
    async def work() -> None:
        server, base, _ = peer(tmp_path, listed, None)
        for request in (GetBase(), GetPiece(LIST, 0), GetPiece(0, 0)):
            with pytest.raises(Refused, match="neither"):
                await server.answer(request)
        base.adopt_list(listed)
        with pytest.raises(Refused, match="no tensor of the base model"):
            await server.answer(GetBase())

    asyncio.run(work())


def test_files_of_another_model_are_never_given_and_the_owner_is_told_once(tmp_path: Path, listed: TensorList) -> None:
    async def work() -> None:
        server, base, events = peer(tmp_path, listed, make_folder(tmp_path / "other", {"a": 5, "b": 6}))
        for _ in range(2):
            with pytest.raises(Refused, match="not usable"):
                await server.answer(GetBase())
        (event,) = events
        assert "the manifest says" in event.describe()
        with pytest.raises(BaseModelError, match="download the model again"):
            base.open_list()

    asyncio.run(work())


def test_what_no_list_has_is_a_protocol_error(tmp_path: Path, whole: Path, listed: TensorList) -> None:
    async def work() -> None:
        server, _, _ = peer(tmp_path, listed, whole)
        for request in (
            GetPiece(LIST, 1),
            GetPiece(0, listed.tensors[0].piece_count),
            GetPiece(0, 2**63 - 1),
            GetPiece(5, 0),
            GetPiece(MAX_BASE_TENSORS - 1, 0),
        ):
            with pytest.raises(ProtocolError, match="ask for one of them"):
                await server.answer(request)

    asyncio.run(work())


def test_a_damaged_tensor_is_not_given_and_reported_once(tmp_path: Path, listed: TensorList) -> None:
    folder = make_folder(tmp_path / "damaged")

    async def work() -> None:
        server, base, events = peer(tmp_path, listed, folder)
        base.adopt_list(listed)
        place = base.locations_in_folder()[listed.tensors[0].name]
        with place.path.open("r+b") as file:
            file.seek(place.start + STATE_CHUNK_BYTES)
            file.write(b"!")
        assert (await server.answer(GetPiece(0, 0))).tensors
        for _ in range(2):
            with pytest.raises(Refused, match="does not have this tensor"):
                await server.answer(GetPiece(0, 1))
        assert await held_by(server, listed) == {1, 2, 3, 4}
        place.path.unlink()
        with pytest.raises(Refused, match="any more"):
            await server.answer(GetPiece(1, 0))
        assert [event.name for event in events] == [listed.tensors[0].name, listed.tensors[1].name]

    asyncio.run(work())


def test_more_pieces_than_it_can_give_at_once_are_refused_busy(
    tmp_path: Path, whole: Path, listed: TensorList, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, reading, most, lock = threading.Event(), [0], [0], threading.Lock()
    real = TensorLocation.read_piece

    def slowly(place, tensor, piece):
        with lock:
            reading[0] += 1
            most[0] = max(most[0], reading[0])
        assert going_on.wait(30)
        with lock:
            reading[0] -= 1
        return real(place, tensor, piece)

    monkeypatch.setattr(TensorLocation, "read_piece", slowly)

    async def work() -> None:
        server, base, _ = peer(tmp_path, listed, whole)
        base.adopt_list(listed)
        asked = [asyncio.create_task(server.answer(GetPiece(4, 0))) for _ in range(3 * MAX_AT_ONCE)]
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        going_on.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        busy = [answer for answer in answers if isinstance(answer, Busy)]
        assert len(busy) == 2 * MAX_AT_ONCE and most[0] <= MAX_AT_ONCE
        assert (await server.answer(GetPiece(4, 0))).tensors

    asyncio.run(work())


def test_a_disk_that_fails_once_is_asked_again(
    tmp_path: Path, whole: Path, listed: TensorList, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        server, _, events = peer(tmp_path, listed, whole)
        real, failures = base_store.read_at, [OSError("the disk does not answer")]

        def read_at(path: Path, start: int, size: int) -> bytes:
            if failures:
                raise failures.pop()
            return real(path, start, size)

        monkeypatch.setattr(base_store, "read_at", read_at)
        with pytest.raises(Refused, match="not usable"):
            await held_by(server, listed)
        assert "the disk does not answer" in events[0].error
        assert await held_by(server, listed)

    asyncio.run(test())


def test_all_who_wait_for_a_list_that_is_not_found_are_refused(tmp_path: Path, listed: TensorList) -> None:
    async def test() -> None:
        server, _, _ = peer(tmp_path, listed, None)
        answers = await asyncio.gather(*(server.answer(GetBase()) for _ in range(3)), return_exceptions=True)
        assert [type(answer) for answer in answers] == [Refused] * 3

    asyncio.run(test())
