"""An adapter is named by its Hub id: `swarm new`, `join` and `demo` find or fetch it, or a sentence says why not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from huggingface_hub import constants

from agora.cli import new_command
from agora.cli.console import EXIT_USAGE, Failure
from agora.cli.demo_command import DemoOptions
from agora.node import settings
from agora.tuning.base.hub import HubId, fetch_adapter, find_cached, find_or_fetch_folder
from agora.tuning.base.model_files import file_hash
from agora.tuning.base.store import BaseModelError
from tests.tuning.hub_server import COMMIT, REPO, FakeHub, serve
from tests.tuning.test_going_on_from_adapter import FILE, make_adapter, make_base

NOBODY = "http://127.0.0.1:9"
OTHERS = ("adapter_model.bin", "optimizer.pt", "README.md", "model.safetensors", "tokenizer.json", "train.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_adapter(base, tmp_path_factory.mktemp("adapter"))
    for name in OTHERS:
        (folder / name).write_text("do not read me")
    return folder


@pytest.fixture
def hub(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve(FakeHub(Path(shutil.copytree(written, tmp_path / "there")))) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield made


def begun(run: Path, base: Path, adapter: Path) -> HfSection:
    new_command.run(run, None, base, None, new_command.TuningChoice(adapter=adapter))
    model = Manifest.from_toml(run.read_text()).model
    assert isinstance(model, HfSection)
    return model


def test_the_manifest_of_an_id_is_that_of_the_folder_and_the_next_command_names_the_commit(
    hub: FakeHub, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = begun(tmp_path / "run.toml", base, Path(REPO))
    told = capsys.readouterr().err
    assert sorted(hub.fetched) == ["adapter_config.json", FILE], "nothing else is fetched"
    assert model.adapter_hash == file_hash(hub.folder / FILE)
    assert model == begun(tmp_path / "other.toml", base, hub.folder)
    assert f"hub          {REPO}@{COMMIT} is in {tmp_path / 'cache'}" in told
    assert f"begins with {REPO}@{COMMIT}: LoRA of rank 4" in told
    assert f"--base-model {base} --adapter {REPO}@{COMMIT}`" in told
    assert str(tmp_path / "cache") not in (tmp_path / "run.toml").read_text()


def test_a_daemon_finds_the_adapter_of_the_manifest_without_asking_anyone(
    hub: FakeHub, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = fetch_adapter(HubId(REPO)).folder, list[str]()
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    chosen = settings.load(tmp_path / "agora.toml", {}, {"AGORA_ADAPTER": f"{REPO}@{COMMIT}"})
    assert chosen.names_hub_files
    placed = chosen.with_fetched_base_model(said.append).with_fetched_adapter(said.append)
    assert placed.named_adapter == folder and placed.named_base_model is None and not placed.names_hub_files
    assert said == [f"{REPO}@{COMMIT} is in {folder}"]
    nothing = settings.load(tmp_path / "agora.toml", {}, {})
    assert nothing.with_fetched_adapter(pytest.fail) is nothing


def test_a_daemon_without_it_in_its_cache_fetches_it(hub: FakeHub, tmp_path: Path) -> None:
    assert find_cached(HubId(REPO), "adapter") is None
    chosen = settings.load(tmp_path / "agora.toml", {"adapter": REPO}, {}).with_fetched_adapter(lambda line: None)
    assert chosen.named_adapter is not None and (chosen.named_adapter / FILE).is_file()
    found = find_cached(HubId(REPO), "adapter")
    assert found is not None and found.folder == chosen.named_adapter
    assert find_cached(HubId(REPO)) is None, "a whole model is not there"
    (chosen.named_adapter / FILE).unlink()
    assert find_cached(HubId(REPO), "adapter") is None, "half an adapter is none"


def test_a_folder_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / REPO).mkdir(parents=True)
    assert find_or_fetch_folder(Path(REPO), pytest.fail, "adapter") == Path(REPO)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("adapter_config.json", r"on the Hub has no adapter_config\.json, .*choose an adapter of peft"),
        (FILE, r"on the Hub has no adapter_model\.safetensors, .*write it with save_pretrained"),
    ],
)
def test_what_is_no_adapter_in_safetensors_is_refused_before_a_manifest_is_written(
    missing: str, words: str, hub: FakeHub, base: Path, tmp_path: Path
) -> None:
    (hub.folder / missing).unlink()
    with pytest.raises(BaseModelError, match=words):
        begun(tmp_path / "run.toml", base, Path(REPO))
    assert not (tmp_path / "run.toml").exists() and "adapter_model.bin" not in hub.fetched


def test_an_adapter_that_cannot_be_had_is_named_with_the_remedy(
    hub: FakeHub, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run.toml"
    with pytest.raises(BaseModelError, match=r"no folder other/adapter, and the Hub has no such adapter; correct"):
        begun(run, base, Path("other/adapter"))
    with pytest.raises(BaseModelError, match="has no revision v9; see its page"):
        begun(run, base, Path(f"{REPO}@v9"))
    hub.gated = True
    with pytest.raises(BaseModelError, match=r"accept its terms"):
        begun(run, base, Path(REPO))
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    with pytest.raises(BaseModelError, match=r"the cache does not have that adapter whole; check the network"):
        begun(run, base, Path(REPO))


def test_a_demo_goes_on_from_an_adapter(base: Path, written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = DemoOptions(steps=30, base_model=base, adapter=written)
    model = plan.manifest().model
    assert isinstance(model, HfSection) and model.adapter_hash == file_hash(written / FILE)
    assert "adapter      begins with" in capsys.readouterr().err
    assert plan.flags() == ["--allow-files", "--base-model", str(base), "--adapter", str(written)]
    with pytest.raises(Failure, match="--adapter is for a base model; give one with --base-model DIR") as raised:
        DemoOptions(adapter=written).manifest()
    assert raised.value.code == EXIT_USAGE
