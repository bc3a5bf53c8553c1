"""Files of a base model: only what a span needs is read, what is wrong is one sentence, and nothing is half loaded."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from agora.core.hub_files import WEIGHTS_INDEX_FILE
from agora.core.optional_packages import PackageMissing
from agora.model import family_of
from agora.tuning.base import model_files
from agora.tuning.base.model_files import WantedTensor, read_config, tensor_list_hash, weight_files
from agora.tuning.base.store import BaseModelError, TensorStore, list_tensors, read_tensor_locations
from agora.tuning.hf_family import needed_tensors
from tests.model.tiny_models import (
    CONFIGS,
    hashes,
    logits_of,
    make_model,
    manifest_of,
    save,
    some_tokens,
    stages_of,
)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A Llama of 3 layers in a folder with a shard for about each tensor or two."""
    return save(make_model("llama", tie_word_embeddings=True), tmp_path / "base", "14KB")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return save(make_model("llama"), tmp_path / "one")


def build(manifest: Manifest, stage: int, folder: Path | None) -> Any:
    return family_of(manifest.model).build_stage(manifest.layers_of(stage), manifest.seed, folder)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Replaces a weights file by one with changed tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


# --- what is read


def test_shards_and_one_file_give_the_same_weights(sharded: Path, tmp_path: Path) -> None:
    whole = save(make_model("llama", tie_word_embeddings=True), tmp_path / "whole")
    assert len(weight_files(sharded)) > 5 and weight_files(whole) == ["model.safetensors"]
    tokens = some_tokens()
    expected = logits_of(stages_of(manifest_of(whole), whole), tokens)
    assert torch.equal(logits_of(stages_of(manifest_of(sharded), sharded), tokens), expected)


class RecordingReader:
    """Opens safetensors files and remembers which tensors' values were read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self._open = safe_open

    def __call__(self, path: Path, framework: str) -> Any:
        recorder, opened = self, self._open(path, framework=framework)

        class Reader:
            def __enter__(self) -> Any:
                self.inner = opened.__enter__()
                return self

            def __exit__(self, *error: object) -> None:
                opened.__exit__(*error)

            def keys(self) -> Any:
                return self.inner.keys()

            def get_slice(self, name: str) -> Any:
                return self.inner.get_slice(name)

            def get_tensor(self, name: str) -> torch.Tensor:
                recorder.read.append(name)
                return self.inner.get_tensor(name)

        return Reader()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_the_tensors_of_the_stage_are_read(single: Path, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RecordingReader()
    monkeypatch.setattr(model_files, "safe_open", recorder)
    built = build(manifest_of(single, 3), stage, single)
    assert sorted(recorder.read) == sorted(name for name, _ in built.named_parameters())
    assert ("model.embed_tokens.weight" in recorder.read) == (stage == 0)


def test_a_peer_needs_the_shards_of_its_own_stage_only(sharded: Path) -> None:
    manifest = manifest_of(sharded, 3)
    files = json.loads((sharded / WEIGHTS_INDEX_FILE).read_text())["weight_map"]
    kept = {file for tensor, file in files.items() if ".layers.1." in tensor}
    for path in sharded.glob("*.safetensors"):
        if path.name not in kept:
            path.unlink()
    (sharded / WEIGHTS_INDEX_FILE).unlink()
    assert isinstance(manifest.model, HfSection) and len(kept) < len(manifest.model.weights)
    build(manifest, 1, sharded)
    for stage in (0, 2):
        with pytest.raises(
            BaseModelError, match=r"has no model-00\d.*download the missing files .* or hold other stages"
        ):
            build(manifest, stage, sharded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_without_a_loss(single: Path, dtype: torch.dtype) -> None:
    path = single / "model.safetensors"
    rewrite(path, lambda tensors: tensors.update({name: value.to(dtype) for name, value in tensors.items()}))
    stored = load_file(path)
    for stage in stages_of(manifest_of(single), single):
        for name, parameter in stage.named_parameters():
            assert parameter.dtype == torch.float32 and torch.equal(parameter, stored[name].float())


def test_names_without_their_root_are_found_as_in_the_published_gpt2(tmp_path: Path) -> None:
    whole, tokens = make_model("gpt2"), some_tokens()
    folder = save(whole, tmp_path / "base")
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask, which old files have and no model reads
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "wte.weight" in tensors
    logits = logits_of(stages_of(manifest_of(folder), folder), tokens)
    assert torch.allclose(logits, whole(tokens).logits, atol=1e-6)


def test_a_file_is_hashed_once_while_nobody_changes_it(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = single / "model.safetensors", []
    manifest = manifest_of(single, 3)
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(self) or real(self, *a, **k))
    for stage in range(3):
        build(manifest, stage, single)
    assert opened.count(path) == 1
    rewrite(path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(BaseModelError, match="has the SHA-256"):
        build(manifest, 2, single)


# --- tensors that were fetched


@pytest.fixture
def store(single: Path, tmp_path: Path) -> TensorStore:
    """A store with every second tensor of the model in `single`, as if they had been fetched."""
    tensors = list_tensors([single / "model.safetensors"])
    made = TensorStore(tmp_path / tensors.digest)
    made.keep_list(tensors)
    places = read_tensor_locations(single / "model.safetensors")
    for number, listed in list(enumerate(tensors.tensors))[::2]:
        made.begin(number, listed)
        data = places[listed.name].read_piece(listed, 0)
        assert data is not None
        made.write_piece(number, listed, 0, data)
        made.finish(number)
    return made


def test_a_stage_takes_what_the_owners_files_lack_from_those_that_were_fetched(
    single: Path, store: TensorStore, tmp_path: Path
) -> None:
    manifest, tokens = manifest_of(single), some_tokens()
    expected = logits_of(stages_of(manifest, single), tokens)
    owner = tmp_path / "owner"
    owner.mkdir()
    values = load_file(single / "model.safetensors")
    fetched = model_files.read_fetched_tensors(store.folder)
    assert 0 < len(fetched) < len(values)
    rest = {name: tensor for name, tensor in values.items() if name not in fetched}
    save_file(rest, owner / "model.safetensors", {"format": "pt"})
    manifest = manifest_of(single, model={"weights": hashes(owner)})  # the hash of what the owner has
    with pytest.raises(BaseModelError, match="No weights file in"):
        stages_of(manifest, owner)
    store.link_files({"model.safetensors": owner / "model.safetensors"})
    assert torch.equal(logits_of(stages_of(manifest, store.folder), tokens), expected)


def test_a_weights_file_comes_before_a_fetched_tensor_and_is_checked_by_its_own_hash(
    single: Path, store: TensorStore
) -> None:
    manifest = manifest_of(single)
    store.link_files({"model.safetensors": single / "model.safetensors"})
    wanted = {"w": WantedTensor(("model.norm.weight",), (32,))}
    for stored in model_files.locate_tensors(store.folder, ["model.safetensors"], wanted).values():
        assert stored.path.name == "model.safetensors" and stored.fetched is None
    _flip_a_bit(single / "model.safetensors")
    with pytest.raises(BaseModelError, match="has the SHA-256"):
        stages_of(manifest, store.folder)


def test_a_damaged_fetched_tensor_is_one_sentence_before_any_value_is_read(
    single: Path, store: TensorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, stored = next(iter(model_files.read_fetched_tensors(store.folder).items()))
    wanted = {"w": WantedTensor((name,), stored.shape)}
    assert [key for key, _ in model_files.read_tensors(store.folder, [], wanted)] == ["w"]
    _flip_a_bit(stored.path)
    recorder = RecordingReader()
    monkeypatch.setattr(model_files, "safe_open", recorder)
    with pytest.raises(BaseModelError, match=r"\.safetensors is damaged; start the daemon again"):
        list(model_files.read_tensors(store.folder, [], wanted))
    assert not recorder.read


def test_fetched_tensors_count_only_beside_the_list_that_the_folder_is_named_by(store: TensorStore) -> None:
    other = store.folder.rename(store.folder.with_name("0" * 64))
    assert model_files.read_fetched_tensors(other) == {} and model_files.read_fetched_tensors(other / "tensors") == {}


def test_the_hash_of_the_list_is_that_of_the_model_however_it_is_cut(single: Path, tmp_path: Path) -> None:
    shards = save(make_model("llama"), tmp_path / "shards", "14KB")
    assert len(weight_files(shards)) > 5
    expected = list_tensors([single / "model.safetensors"]).digest
    assert tensor_list_hash([single / "model.safetensors"]) == expected
    assert tensor_list_hash([shards / name for name in weight_files(shards)]) == expected


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_a_span_needs_is_what_its_stages_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_model(name), tmp_path / "base")
    manifest = manifest_of(folder, 3)
    for stage in range(3):
        with monkeypatch.context() as patch:
            recorder = RecordingReader()
            patch.setattr(model_files, "safe_open", recorder)
            build(manifest, stage, folder)
        stored = load_file(folder / "model.safetensors")
        needed = needed_tensors(manifest.model, manifest.layers_of(stage))
        found = {next(n for n in wanted.names if n in stored): wanted.shape for wanted in needed}
        assert found.keys() == set(recorder.read)
        assert all(tuple(stored[name].shape) == shape for name, shape in found.items())


# --- what is wrong


def test_a_run_with_a_base_model_needs_its_folder(single: Path) -> None:
    manifest = manifest_of(single)
    with pytest.raises(BaseModelError, match="name the folder that has its files: --base-model DIR"):
        build(manifest, 0, None)
    with pytest.raises(BaseModelError, match=r"--base-model /nowhere is not a folder; name the one"):
        build(manifest, 0, Path("/nowhere"))


def test_the_machine_is_checked_before_anything_is_claimed(single: Path, tmp_path: Path) -> None:
    family = family_of(manifest_of(single).model)
    family.check_machine(single)
    with pytest.raises(BaseModelError, match="--base-model DIR"):
        family.check_machine(None)
    family_of(Manifest().model).check_machine(None)


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _not_safetensors(path: Path) -> None:
    path.write_bytes(b"\x80\x04pickled nonsense" * 20)


def _huge_header(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _without_a_tensor(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.pop("model.norm.weight"))


def _of_another_shape(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))


def _of_integers(path: Path) -> None:
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))


@pytest.mark.parametrize(
    ("damage", "is_in_manifest", "says"),
    [
        (Path.unlink, False, r"has no model.safetensors, and no other file has the tensor model.layers.1"),
        (_cut_off, False, r"model.safetensors cannot be read as safetensors .*; download the model again"),
        (_not_safetensors, True, r"model.safetensors cannot be read as safetensors"),
        (_huge_header, True, r"model.safetensors cannot be read as safetensors"),
        (_flip_a_bit, False, r"model.safetensors has the SHA-256 \w{16}..., and the manifest says \w{16}...; download"),
        (
            _without_a_tensor,
            True,
            r"No weights file in .* has the tensor model.norm.weight, which the manifest's config",
        ),
        (_of_another_shape, True, r"model.norm.weight has the shape \[31\], and the manifest's config gives it \[32\]"),
        (_of_integers, True, r"model.norm.weight is I8, and only F32, BF16, F16 can be trained; .* unquantised"),
    ],
)
def test_files_that_are_not_the_runs_are_one_sentence(
    single: Path, damage: Callable[[Path], None], is_in_manifest: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the manifest itself has the hash of the wrong file. No value is read before all is checked."""
    before = manifest_of(single)
    damage(single / "model.safetensors")
    recorder = RecordingReader()
    monkeypatch.setattr(model_files, "safe_open", recorder)
    with pytest.raises(BaseModelError, match=says) as raised:
        build(manifest_of(single) if is_in_manifest else before, 1, single)
    assert "\n" not in str(raised.value) and not recorder.read


def test_a_folder_without_usable_weights_is_one_sentence(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for call, says in (
        (lambda: weight_files(tmp_path / "empty"), "has neither model.safetensors nor model.safetensors.index.json"),
        (lambda: read_config(tmp_path / "empty"), "Cannot read .*config.json"),
        (lambda: read_config(tmp_path / "nowhere"), "is not a folder"),
    ):
        with pytest.raises(BaseModelError, match=says):
            call()
    first = weight_files(sharded)[0]
    (sharded / first).unlink()
    with pytest.raises(BaseModelError, match=f"has no {first}, which model.safetensors.index.json lists"):
        weight_files(sharded)
    outside = sharded.parent / "outside.safetensors"
    outside.write_bytes(b"here")
    names = ["../outside.safetensors", str(outside), "sub/x.safetensors", "config.json", "..", "x.safetensors\n"]
    listings = [json.dumps({"weight_map": {"a": name}}) for name in names]
    for content in (
        "{",
        '{"weight_map": [1]}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {}}',
        "[" * 10_000,
        *listings,
    ):
        (sharded / WEIGHTS_INDEX_FILE).write_text(content)
        with pytest.raises(BaseModelError, match="is not an index of weights files"):
            weight_files(sharded)


@pytest.mark.parametrize(
    "json_text",
    [
        b'{"a": [' + b"[]," * 1_500_000 + b"[]]}",
        b"{" + b",".join(b'"%d":{}' % n for n in range(700_000)) + b"}",
        b"[" * 2_000_000,
        b'{"a": "' + b"x" * (65 << 20) + b'"}',
    ],
    ids=["lists", "maps", "deep", "long"],
)
def test_a_header_of_many_values_takes_no_memory_beyond_its_bytes(json_text: bytes, tmp_path: Path) -> None:
    path, index = tmp_path / "model.safetensors", tmp_path / "sharded" / WEIGHTS_INDEX_FILE
    path.write_bytes(len(json_text).to_bytes(8, "little") + json_text + bytes(64))
    index.parent.mkdir()
    index.write_bytes(json_text)
    for read in (lambda: read_tensor_locations(path), lambda: weight_files(index.parent)):
        tracemalloc.start()
        try:
            with pytest.raises(BaseModelError):
                read()
            taken = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert taken < len(json_text) + (4 << 20)


# --- without transformers


def test_who_lacks_transformers_is_told_the_command(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, real = manifest_of(single), importlib.import_module

    def refuse(name: str) -> Any:
        if name.startswith("transformers"):
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    family = family_of(manifest.model)
    for call in (lambda: build(manifest, 0, single), lambda: family.check_machine(single)):
        with pytest.raises(
            PackageMissing, match=r"needs the package transformers.* pip install 'agora-swarm\[tuning\]'"
        ):
            call()
    assert family.describe().kind == "A Llama decoder"


def test_an_old_transformers_is_refused(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    manifest = manifest_of(single)
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    with pytest.raises(PackageMissing, match=r"5 or newer \(version 4.57.6 is installed\)"):
        build(manifest, 0, single)


def test_other_families_import_no_transformers() -> None:
    code = "import agora.model, agora.train.device_worker, sys; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_pointer_of_git_lfs_in_place_of_a_file_of_the_model_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(BaseModelError, match=rf"{name} is a git-lfs pointer.*git lfs pull"):
        read_config(tmp_path) if name == "config.json" else weight_files(tmp_path)
