"""A base model is named by its id: it is found in the cache, fetched from the Hub, or a sentence says why not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from huggingface_hub import constants

from agora.cli import new_command
from agora.cli.console import Failure
from agora.core.optional_packages import PackageMissing
from agora.data.tokenizer import byte_tokenizer_json
from agora.node import settings
from agora.tuning.base.hub import (
    HubId,
    absolute_name,
    fetch_model,
    find_cached,
    find_or_fetch,
    find_or_fetch_folder,
    hub_id_of,
    public_name,
)
from agora.tuning.base.store import BaseModelError
from tests.model.tiny_models import hashes, make_model, save
from tests.tuning.hub_server import COMMIT, REPO, FakeHub, serve

NOBODY = "http://127.0.0.1:9"
PICKLED = ("pytorch_model.bin", "modeling_tiny.py", "onnx/model.safetensors", "consolidated.safetensors", "README.md")
"""Files of the model that nobody may fetch: pickles, code, and weights that are not those of transformers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in several shards as a repository of the Hub, with files that must not be fetched."""
    folder = save(make_model("llama"), tmp_path_factory.mktemp("model"), "30KB")
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    for name in PICKLED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("do not read me")
    return folder


def shards(model: Path) -> list[list[str]]:
    """Names and hashes of the model's own weights files."""
    return [pair for pair in hashes(model) if pair[0] not in PICKLED]


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve(FakeHub(model)) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield made


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("org/name", HubId("org/name")),
        ("org/name-1.5@v2", HubId("org/name-1.5", "v2")),
        (f"org/name@{COMMIT}", HubId("org/name", COMMIT)),
        ("org/name@refs/pr/1", HubId("org/name", "refs/pr/1")),
        ("name", None),
        ("./name", None),
        ("/models/name", None),
        ("../models/name", None),
        ("models/org/name", None),
        ("org/name@", None),
    ],
)
def test_an_id_has_two_parts_and_perhaps_a_revision(text: str, wanted: HubId | None) -> None:
    assert hub_id_of(Path(text)) == wanted
    assert wanted is None or str(wanted) == text


def test_a_folder_that_exists_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id_of(Path(REPO)) is not None
    assert absolute_name(Path(REPO)) == REPO
    (tmp_path / REPO).mkdir(parents=True)
    assert hub_id_of(Path(REPO)) is None
    assert absolute_name(Path(REPO)) == str(tmp_path / REPO)
    assert find_or_fetch_folder(Path(REPO), pytest.fail) == Path(REPO)


def test_config_tokenizer_and_safetensors_are_fetched_and_nothing_else(hub: FakeHub, model: Path) -> None:
    assert find_cached(HubId(REPO)) is None
    assert hub.requests == 0
    found = fetch_model(HubId(REPO))
    assert found.hub_id == HubId(REPO, COMMIT)
    assert found.folder.name == COMMIT
    expected = {file.relative_to(model).as_posix() for file in model.rglob("*") if file.is_file()} - set(PICKLED)
    assert set(hub.fetched) == expected
    assert len(hub.fetched) == len(expected)
    assert len(hashes(found.folder)) > 2
    assert hashes(found.folder) == shards(model)


def test_what_is_in_the_cache_is_found_without_a_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fetch_model(HubId(REPO))
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    asked = hub.requests
    assert find_or_fetch(HubId(REPO)) == find_or_fetch(HubId(REPO, COMMIT)) == found
    assert hub.requests == asked
    assert fetch_model(HubId(REPO)) == found, "whoever writes a manifest goes on with it too"


def test_a_model_of_which_a_shard_lacks_is_completed(hub: FakeHub) -> None:
    found = fetch_model(HubId(REPO))
    shard = min(found.folder.glob("*.safetensors"))
    shard.resolve().unlink()
    shard.unlink()
    assert find_cached(HubId(REPO)) is None
    hub.fetched.clear()
    assert find_or_fetch(HubId(REPO)) == found
    assert hub.fetched == [shard.name]
    assert shard.is_file()


def test_no_such_model_revision_or_permission_is_one_sentence_each(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BaseModelError, match=r"no folder other/model, and the Hub has no such model; correct the name"):
        fetch_model(HubId("other/model"))
    with pytest.raises(BaseModelError, match="has no revision v9; see its page"):
        fetch_model(HubId(REPO, "v9"))
    hub.gated = True
    with pytest.raises(BaseModelError, match=r"accept its terms; accept them on its page .* `hf auth login`"):
        fetch_model(HubId(REPO))
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    with pytest.raises(BaseModelError, match=r"the Hub cannot be reached, .* check the network, or name a folder"):
        fetch_model(HubId(REPO))


def test_without_the_package_of_the_hub_a_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PackageMissing, match=r"huggingface_hub; install it with: pip install 'agora-swarm\[tuning\]'"):
        find_or_fetch(HubId(REPO))


@pytest.mark.parametrize(
    ("has_config", "why"),
    [
        (False, r"has no config\.json; choose a model of transformers"),
        (True, r"has no model\.safetensors, and other kinds of weights are not read"),
    ],
)
def test_a_model_without_safetensors_is_refused_and_its_pickles_stay_where_they_are(
    hub: FakeHub, tmp_path: Path, model: Path, has_config: bool, why: str
) -> None:
    hub.folder = tmp_path / "pickled"
    hub.folder.mkdir()
    (hub.folder / "pytorch_model.bin").write_bytes(b"pickle")
    if has_config:
        (hub.folder / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(BaseModelError, match=why):
        fetch_model(HubId(REPO))
    assert hub.fetched == ["config.json"] * has_config


@pytest.mark.parametrize("name", ["../../secret.safetensors", "pytorch_model.bin", "*.safetensors", 7])
def test_an_index_that_lists_other_files_is_refused(hub: FakeHub, tmp_path: Path, model: Path, name: object) -> None:
    hub.folder = tmp_path / "index"
    hub.folder.mkdir()
    (hub.folder / "config.json").write_bytes((model / "config.json").read_bytes())
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BaseModelError, match="is not an index of weights files"):
        fetch_model(HubId(REPO))


def test_the_manifest_of_an_id_has_the_hashes_and_the_next_command_names_the_commit(
    hub: FakeHub, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_command.run(tmp_path / "run.toml", None, Path(REPO), None)
    manifest = Manifest.from_toml((tmp_path / "run.toml").read_text())
    assert isinstance(manifest.model, HfSection)
    assert [list(pair) for pair in manifest.model.weights] == shards(model)
    assert manifest.model.tensors_hash and manifest.model.base_name == f"{REPO}@{COMMIT}"
    told = capsys.readouterr().err
    assert f"hub          {REPO}@{COMMIT} is in {tmp_path / 'cache'}" in told
    assert f"agora-node join {tmp_path / 'run.toml'} --base-model {REPO}@{COMMIT}\n" in told.replace("`\n", "\n")
    with pytest.raises(BaseModelError, match="the Hub has no such model"):
        new_command.run(tmp_path / "other.toml", None, Path("other/model"), None)
    with pytest.raises(Failure, match="exclude each other"):
        new_command.run(tmp_path / "other.toml", "tiny", Path(REPO), None)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (f"cache/models--org--tiny-1.5B/snapshots/{COMMIT}", f"org/tiny-1.5B@{COMMIT}"),
        (f"cache/models--org--tiny_x/snapshots/{COMMIT}/", f"org/tiny_x@{COMMIT}"),
        (f"cache/datasets--org--tiny/snapshots/{COMMIT}", COMMIT),
        ("home/ann/my base", "my base"),
        ("home/ann/mod\u00e8le", "mod\u00e8le"),
        ("home/ann/a\\b\x1b[1m", "ab[1m"),
        ("home/ann/base/../base/.", "base"),
    ],
)
def test_others_learn_an_id_or_the_name_of_a_folder_and_no_path(place: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / place
    (tmp_path / "home/ann/base").mkdir(parents=True)
    folder.mkdir(parents=True, exist_ok=True)
    assert public_name(folder) == name


def test_a_link_to_the_hubs_cache_has_the_models_id_and_another_link_its_targets_name(tmp_path: Path) -> None:
    cached = tmp_path / f"models--org--tiny/snapshots/{COMMIT}"
    cached.mkdir(parents=True)
    (tmp_path / "tiny").symlink_to(cached)
    (tmp_path / "plain").mkdir()
    (tmp_path / "base").symlink_to(tmp_path / "plain")
    assert public_name(tmp_path / "tiny") == f"org/tiny@{COMMIT}" and public_name(tmp_path / "base") == "plain"


def test_a_daemon_finds_the_folder_that_the_manifest_was_written_from(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = fetch_model(HubId(REPO)).folder, list[str]()
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    chosen = settings.load(tmp_path / "agora.toml", {}, {"AGORA_BASE_MODEL": f"{REPO}@{COMMIT}"})
    assert chosen.names_hub_files
    placed = chosen.with_fetched_base_model(said.append)
    assert placed.named_base_model == folder
    assert not placed.names_hub_files
    assert said == [f"{REPO}@{COMMIT} is in {folder}"]
    nothing = settings.load(tmp_path / "agora.toml", {}, {})
    assert nothing.with_fetched_base_model(pytest.fail) is nothing
