"""Files of a base model's tensors: what is listed, what is found, what a crash and a full disk leave."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agora_protocol.errors import DiskError, ProtocolError
from agora_protocol.limits import MAX_BASE_TENSORS, STATE_CHUNK_BYTES
from agora_protocol.tensor_list import ListedTensor, TensorList
from safetensors.numpy import save_file

from agora.tuning.base.store import LIST, BaseModelError, TensorStore, is_intact, list_tensors, read_tensor_locations
from tests.tuning.base_world import NAMES, SIZES, make_folder, named_by_owner, values_in


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def listed(whole: Path) -> TensorList:
    return list_tensors([whole / name for name in NAMES])


# --- the list of files


def test_the_list_has_the_hash_of_every_piece(whole: Path, listed: TensorList) -> None:
    values = values_in(whole)
    assert [tensor.name for tensor in listed.tensors] == sorted(SIZES)
    for tensor in listed.tensors:
        data = values[tensor.name].tobytes()
        pieces = [data[at : at + STATE_CHUNK_BYTES] for at in range(0, len(data), STATE_CHUNK_BYTES)]
        assert tensor.hashes == b"".join(hashlib.sha256(piece).digest() for piece in pieces)
        assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("F32", (SIZES[tensor.name],), len(data))


def test_the_list_does_not_depend_on_how_the_model_is_cut_into_files(whole: Path, tmp_path: Path) -> None:
    save_file(values_in(whole), tmp_path / "one.safetensors", {"format": "pt"})
    assert list_tensors([tmp_path / "one.safetensors"]) == list_tensors([whole / name for name in NAMES])


def test_what_no_stage_has_is_left_out(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "good": np.ones((2, 3), np.float16),
        "mask": np.ones(4, np.bool_),
        "ids": np.ones(4, np.int64),
        "empty": np.ones((0, 3), np.float32),
        "deep": np.ones((1,) * 7, np.float32),
        "a name": np.ones(1, np.float32),
        "scalar": np.array(3, np.float32),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    assert [(t.name, t.shape) for t in list_tensors([tmp_path / "a.safetensors"]).tensors] == [
        ("good", (2, 3)),
        ("scalar", ()),
    ]


def test_a_tensor_in_two_files_and_too_many_tensors_cannot_be_listed(tmp_path: Path) -> None:
    for name in NAMES:
        save_file({"same": np.ones(3, np.float32)}, tmp_path / name)
    with pytest.raises(BaseModelError, match=r"model-2.safetensors has same, and so has another weights file"):
        list_tensors([tmp_path / name for name in NAMES])
    one = np.ones(1, np.float32)
    save_file({f"t{n}": one for n in range(MAX_BASE_TENSORS + 1)}, tmp_path / "many.safetensors")
    with pytest.raises(ProtocolError):
        list_tensors([tmp_path / "many.safetensors"])
    with pytest.raises(BaseModelError, match="cannot be read as safetensors"):
        list_tensors([tmp_path / "absent.safetensors"])


def raw_file(path: Path, header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> Path:
    """A file with this header, which need not be valid."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"", 2**62),
        (b"{", None),
        (b"[" * 100_000, None),
        (b"\xff\xfe", None),
        ([], None),
        ({"a": 3}, None),
        ({"a": {}}, None),
        ({"a": {**ENTRY, "shape": 4}}, None),
        ({"a": {**ENTRY, "data_offsets": [0, 20]}}, None),
        ({"a": {**ENTRY, "data_offsets": [-16, 0]}}, None),
        ({"a": {**ENTRY, "data_offsets": [0, 8]}}, None),
        ({"a": {**ENTRY, "data_offsets": [8, 24]}}, None),
        ({"a": {**ENTRY, "data_offsets": [0]}}, None),
        ({"a": {**ENTRY, "data_offsets": ["0", "16"]}}, None),
        ({"a": {**ENTRY, "data_offsets": [0.0, 16.0]}}, None),
        ({"a": {**ENTRY, "shape": [2**31 - 1] * 6}}, None),
    ],
)
def test_a_malformed_header_is_one_sentence(tmp_path: Path, header: Any, length: int | None) -> None:
    path = raw_file(tmp_path / "bad.safetensors", header, length=length)
    with pytest.raises(BaseModelError, match=r"bad.safetensors cannot be read as safetensors .*; download") as raised:
        if not read_tensor_locations(path):
            raise BaseModelError("bad.safetensors cannot be read as safetensors (it is empty); download")
    assert "\n" not in str(raised.value)


def test_a_good_header_is_read_without_the_data(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, "a": ENTRY})
    assert read_tensor_locations(path)["a"].shape == (4,)
    (tmp_path / "short.safetensors").write_bytes(b"\1\2")
    with pytest.raises(BaseModelError):
        read_tensor_locations(tmp_path / "short.safetensors")


# --- the store


def fill(store: TensorStore, number: int, listed: TensorList, whole: Path) -> None:
    """Writes a tensor as a fetch does."""
    tensor = listed.tensors[number]
    data = values_in(whole)[tensor.name].tobytes()
    assert store.begin(number, tensor) == set()
    for piece in reversed(range(tensor.piece_count)):
        store.write_piece(number, tensor, piece, data[piece * STATE_CHUNK_BYTES :][: tensor.piece_bytes(piece)])
    store.finish(number)


def test_a_tensor_is_there_when_it_is_whole(tmp_path: Path, whole: Path, listed: TensorList) -> None:
    store = TensorStore(tmp_path / listed.digest)
    assert store.find(0, listed.tensors[0]) is None
    fill(store, 0, listed, whole)
    place = store.find_intact(0, listed.tensors[0])
    assert place is not None and place.is_like(listed.tensors[0])
    np.testing.assert_array_equal(
        values_in(store.folder / "tensors")["model.embed_tokens.weight"], values_in(whole)["model.embed_tokens.weight"]
    )
    assert store.find(0, listed.tensors[1]) is None, "the number is another tensor's"
    assert place.path.stat().st_mode & 0o777 == 0o600


def test_damage_is_noticed_also_after_the_file_was_checked(tmp_path: Path, whole: Path, listed: TensorList) -> None:
    store = TensorStore(tmp_path / listed.digest)
    fill(store, 0, listed, whole)
    place = store.find_intact(0, listed.tensors[0])
    assert place is not None
    with place.path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    os.utime(place.path, ns=(1, 1))
    assert store.find_intact(0, listed.tensors[0]) is None and store.find(0, listed.tensors[0]) == place
    assert not is_intact(place, listed.tensors[0])
    place.path.write_bytes(b"{}")
    assert store.find(0, listed.tensors[0]) is None


def test_an_intact_file_is_read_once(
    tmp_path: Path, whole: Path, listed: TensorList, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TensorStore(tmp_path / listed.digest)
    fill(store, 1, listed, whole)
    opened: list[Path] = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self) or real(self, *a, **k))
    for _ in range(3):
        assert store.find_intact(1, listed.tensors[1])
    assert len(opened) == 3 + listed.tensors[1].piece_count, "the header each time, each piece once"


@pytest.mark.parametrize(
    "damage",
    [
        lambda part: part.write_bytes(b""),
        lambda part: part.write_bytes(part.read_bytes()[:-1]),
        lambda part: part.write_bytes(b"\x01" + part.read_bytes()[1:]),
        Path.unlink,
    ],
)
def test_what_is_left_of_a_tensor_is_used_only_if_it_is_that_tensor(
    tmp_path: Path, listed: TensorList, whole: Path, damage: Callable[[Path], Any]
) -> None:
    store, tensor = TensorStore(tmp_path / listed.digest), listed.tensors[0]
    data = values_in(whole)[tensor.name].tobytes()
    store.begin(0, tensor)
    store.write_piece(0, tensor, 1, data[STATE_CHUNK_BYTES : 2 * STATE_CHUNK_BYTES])
    assert store.begin(0, tensor) == {1}
    damage(store.folder / "tensors" / "00000.part")
    assert store.begin(0, tensor) == set()
    fill(store, 0, listed, whole)


def test_the_list_is_kept_under_its_hash_and_no_other(tmp_path: Path, listed: TensorList) -> None:
    store = TensorStore(tmp_path / listed.digest)
    assert store.read_list() is None
    store.keep_list(listed)
    store.keep_list(listed)
    assert store.read_list() == listed
    other = store.folder.rename(tmp_path / ("0" * 64))
    assert TensorStore(other).read_list() is None
    (other / LIST).write_bytes(b"\xc1")
    malformed = other.rename(tmp_path / hashlib.sha256(b"\xc1").hexdigest())
    with pytest.raises(ProtocolError):
        TensorStore(malformed).read_list()


def test_links_show_the_owners_files_and_follow_them(tmp_path: Path, whole: Path, listed: TensorList) -> None:
    store = TensorStore(tmp_path / listed.digest)
    store.keep_list(listed)
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(whole / NAMES[0], part)
    for owner, expected in ((whole, {*NAMES}), (part, {NAMES[0]}), (None, set())):
        store.link_files(named_by_owner(owner))
        assert {path.name for path in store.folder.glob("*.safetensors")} == expected
    (store.folder / NAMES[0]).write_bytes(b"put here by hand")
    store.link_files(named_by_owner(whole))
    assert (store.folder / NAMES[0]).read_bytes() == b"put here by hand"


def test_too_little_room_is_said_before_anything_is_fetched(tmp_path: Path, listed: TensorList) -> None:
    store = TensorStore(tmp_path / listed.digest)
    store.create()
    store.require_room(1000, "it")
    with pytest.raises(DiskError, match=r"The base model for stages 0-1 needs 1000000.0 GB in .* are free; free some"):
        store.require_room(10**15, "The base model for stages 0-1")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, listed: TensorList) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = TensorStore(tmp_path / "file" / listed.digest)
    tensor: ListedTensor = listed.tensors[0]
    for call in (
        store.create,
        lambda: store.keep_list(listed),
        lambda: store.begin(0, tensor),
        lambda: store.write_piece(0, tensor, 0, b"x"),
        lambda: store.finish(0),
        lambda: store.require_room(1, "it"),
    ):
        with pytest.raises(
            DiskError, match=r"Cannot read and write in .*; free some space, choose another --dir, or name a"
        ):
            call()
