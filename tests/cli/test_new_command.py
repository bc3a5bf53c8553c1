"""`swarm new --base-model DIR` writes a manifest that holds for the folder, or says in a sentence why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agora_protocol.errors import AgoraError
from agora_protocol.manifest import Manifest, preset
from agora_protocol.manifest_model import HfSection

from agora.cli import new_command
from agora.cli.console import EXIT_USAGE, Failure
from agora.data.tokenizer import byte_tokenizer_json, open_tokenizer
from tests.model.tiny_models import hashes, make_model, save, stages_of


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tied Llama in several shards, with a tokenizer."""
    folder = save(make_model("llama", tie_word_embeddings=True), tmp_path / "base", "30KB")
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    return folder


def test_the_manifest_of_a_base_model_is_read_again_and_its_stages_are_built(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    new_command.run(Path("poems of mine.toml"), None, Path("base"), None)
    text = Path("poems of mine.toml").read_text()
    manifest = Manifest.from_toml(text)
    assert isinstance(manifest.model, HfSection) and manifest.name == "poemsofmine"
    assert [list(pair) for pair in manifest.model.weights] == hashes(base) and len(hashes(base)) > 2
    assert (manifest.model.context, manifest.stage_count, manifest.optimizer.target_tokens) == (64, 2, 16_384)
    assert manifest.optimizer.learning_rate < 1e-4 and manifest.optimizer.weight_decay == 0
    assert manifest.data.tokenizer == "tokenizer.json"
    assert open_tokenizer(str(base / manifest.data.tokenizer), manifest.model.vocabulary).vocabulary == 256
    assert len(stages_of(manifest, base)) == 2
    assert "agora-node join 'poems of mine.toml' --base-model base" in capsys.readouterr().err


def test_the_json_object_names_the_file_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_command.run(tmp_path / "my poems.toml", None, None, None, as_json=True)
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    assert said["schema"] == 1 and said["name"] == "mypoems" and said["summary"] == [] and not printed.err
    assert said["manifest"] == str(tmp_path / "my poems.toml") and said["next"].endswith("/my poems.toml'")


def test_without_a_base_model_it_is_a_preset(tmp_path: Path) -> None:
    for number, name in enumerate((None, "small")):
        path = tmp_path / f"{number}.toml"
        new_command.run(path, name, None, "poems")
        assert Manifest.from_toml(path.read_text()) == preset(name or "tiny").with_values(name="poems")


@pytest.mark.parametrize(("name", "ids"), [("tiny", None), ("150m", "32,000"), ("8b", "32,000")])
def test_a_preset_with_a_large_vocabulary_says_where_its_tokenizer_is_named(
    name: str, ids: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new_command.run(tmp_path / "run.toml", name, None, None)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenizer")]
    assert len(told) == (ids is not None) and all(f"vocabulary of {ids} name" in line for line in told)


def _lose_a_tensor(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    lost = content["weight_map"]["model.norm.weight"]
    kept = {name: file for name, file in content["weight_map"].items() if file != lost}
    index.write_text(json.dumps({"weight_map": kept}))


def _be_a_bert(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))


def _have_pickles_only(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "Cannot read .*config.json .*name the folder of a Hugging"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (_be_a_bert, "config.json has model_type 'bert'; a run can train llama"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"has no tokenizer.json, .*save_pretrained\(DIR\)"),
        (_have_pickles_only, "has neither model.safetensors nor .* other kinds of weights are not read"),
        (_lose_a_tensor, "No weights file in .* has the tensor model"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_one_sentence_and_no_file(
    base: Path, tmp_path: Path, damage: object, says: str
) -> None:
    assert callable(damage)
    damage(base)
    with pytest.raises((AgoraError, Failure), match=says):
        new_command.run(tmp_path / "run.toml", None, base, None)
    assert not (tmp_path / "run.toml").exists()


def test_two_beginnings_and_a_name_that_is_taken_are_refused_before_any_work(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="exclude each other") as raised:
        new_command.run(tmp_path / "run.toml", "tiny", base, None)
    assert raised.value.code == EXIT_USAGE
    (tmp_path / "run.toml").write_text("mine")
    with pytest.raises(Failure, match="exists; choose another name"):
        new_command.run(tmp_path / "run.toml", None, tmp_path / "nowhere", None)
