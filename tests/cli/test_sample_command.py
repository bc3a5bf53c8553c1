"""`swarm sample`: text that goes on from a prompt, whole characters, the document's end, what a terminal is given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.identity import Identity
from agora_protocol.manifest import SignedManifest

from agora.cli import console, sample_command
from agora.cli.console import Failure
from agora.cli.sample_command import SamplingOptions, decode_pieces
from agora.cli.stage_sources import base_model_folder
from agora.data.tokenizer import ByteTokenizer
from agora.node import paths, run_files
from agora.node.settings import SettingsError
from agora.state.checkpoint import write_checkpoint
from agora.state.layout import StageState
from agora.train.stage import stage_layout
from tests.cli.test_text_sample import demo
from tests.model.tiny_models import make_model, manifest_of, save, stages_of

__all__ = ["demo"]


def ask(demo: Path, prompt: str, sampling: SamplingOptions, *, as_json: bool = True) -> int:
    return sample_command.run(str(demo / "run.toml"), prompt, sampling=sampling, as_json=as_json)


def test_the_same_seed_draws_the_same_text_of_so_many_tokens(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in (1, 1, 2, None):
        assert ask(demo, "for ", SamplingOptions(20, seed=seed)) == console.EXIT_DONE
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] | {"seconds": 0} == answers[1] | {"seconds": 0}
    assert len({answer["text"] for answer in answers[1:]}) == 3
    first = answers[0]
    assert first["prompt"] == "for " and first["name"] == "poems" and first["schema"] == 1
    assert first["stages"] == [{"stage": 0, "step": 9}, {"stage": 1, "step": 9}] and first["from"] == "checkpoints"
    assert 0 < first["tokens"] <= 20 and isinstance(answers[3]["seed"], int)


def test_people_see_prompt_and_text_and_the_seed(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(demo, "a\x1b[31mb", SamplingOptions(10, seed=3), as_json=False) == console.EXIT_DONE
    shown = capsys.readouterr()
    assert shown.out.startswith("a?[31mb") and shown.out.endswith("\n") and "\x1b" not in shown.out
    assert "--seed 3 draws them again" in shown.err


def test_an_empty_prompt_begins_a_document(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(demo, "", SamplingOptions(5, seed=1)) == console.EXIT_DONE
    assert json.loads(capsys.readouterr().out)["prompt"] == ""


def test_a_run_that_nobody_has_here_is_one_sentence(tmp_path: Path, demo: Path) -> None:
    with pytest.raises(Failure, match="has not joined run"):
        sample_command.run("cd" * 32, "a", [tmp_path], sampling=SamplingOptions())


@pytest.mark.parametrize(("text", "pieces"), [("añb", ["a", "", "ñ", "b", ""]), ("€", ["", "", "€", ""]), ("", [""])])
def test_a_character_is_shown_when_it_is_whole(text: str, pieces: list[str]) -> None:
    taken: list[int] = []
    tokenizer = ByteTokenizer()
    assert list(decode_pieces(iter(text.encode()), tokenizer.decode, taken)) == pieces
    assert taken == list(text.encode())


def test_what_is_no_character_at_the_end_is_said() -> None:
    assert list(decode_pieces(iter("€".encode()[:2]), ByteTokenizer().decode, [])) == ["", "", "�"]


# --- a run that trains LoRA on top of a base model


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with run.toml, the base model, and a data directory with checkpoints of two stages of LoRA."""
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "sockets"))
    monkeypatch.chdir(tmp_path)
    folder = save(make_model("qwen2"), tmp_path / "base")
    manifest = manifest_of(folder, 2, model={"trained": "lora", "frozen_as": "nf4", "lora_dropout": 0.5})
    signed, home = SignedManifest.sign(manifest, Identity.generate()), paths.Home(tmp_path / "peer")
    run_files.remember_manifest(home, signed)
    for number, stage in enumerate(stages_of(manifest, folder)):
        layout = stage_layout(manifest, number)
        random = np.random.default_rng(number)
        named = {n: random.normal(0, 0.5, p.shape).astype("f4") for n, p in stage.trained_parameters()}
        flat = layout.flatten(named)
        arrays = {moment.name: np.abs(flat) if moment.is_square else flat for moment in layout.moments}
        state = StageState(number, 5, 5, 0, layout, flat, arrays)
        write_checkpoint(home.checkpoints(signed.run_id), signed.run_id, state, keep=1)
    (tmp_path / "run.toml").write_text(signed.to_toml())
    return tmp_path


def sampled(tuned: Path, capsys: pytest.CaptureFixture[str], **options: object) -> str:
    """The text of a sample with seed 1."""
    run = str(tuned / "run.toml")
    given = {"sampling": SamplingOptions(20, seed=1), "as_json": True, **options}
    assert sample_command.run(run, "a", [tuned / "peer"], **given) == console.EXIT_DONE
    return str(json.loads(capsys.readouterr().out)["text"])


def test_a_run_with_lora_is_sampled_with_its_base_model(
    tuned: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sampled(tuned, capsys, base_model=Path("base"))
    assert first == sampled(tuned, capsys, base_model=Path("base")), "no dropout"
    monkeypatch.setenv("AGORA_BASE_MODEL", str(tuned / "base"))
    assert sampled(tuned, capsys) == first


def test_without_the_base_model_it_is_one_sentence_before_any_text(
    tuned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Failure, match="trains LoRA on top of a base model.* --base-model DIR"):
        sampled(tuned, capsys, as_json=False)
    assert not capsys.readouterr().out


def test_the_folder_is_named_by_the_flag_or_the_settings_of_a_daemon(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert base_model_folder(None, []) is None
    (tuned / "peer" / "agora.toml").write_text('base_model = "/models/one"')
    assert base_model_folder(None, [tuned / "peer"]) == Path("/models/one")
    assert base_model_folder(None, []) is None
    noted = run_files.KnownFiles(base_model=Path("/models/noted"))
    assert base_model_folder(None, [], noted) == Path("/models/noted")
    assert base_model_folder(None, [tuned / "peer"], noted) == Path("/models/one")
    monkeypatch.setenv("AGORA_BASE_MODEL", "/models/two")
    assert base_model_folder(None, [tuned / "peer"]) == Path("/models/two")
    assert base_model_folder(Path("three"), [tuned / "peer"]) == Path("three").absolute()
    (tuned / "peer" / "agora.toml").write_text("base_modle = 1")
    with pytest.raises(SettingsError, match="did you mean base_model"):
        base_model_folder(None, [tuned / "peer"])
