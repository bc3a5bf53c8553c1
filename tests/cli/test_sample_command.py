"""`swarm sample`: text that goes on from a prompt, whole characters, the document's end, what a terminal is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agora.cli import console, sample_command
from agora.cli.console import Failure
from agora.cli.sample_command import Sampling, decoded_pieces
from agora.data.tokenizer import ByteTokenizer
from tests.cli.test_text_sample import demo

__all__ = ["demo"]


def ask(demo: Path, prompt: str, sampling: Sampling, *, as_json: bool = True) -> int:
    return sample_command.run(str(demo / "run.toml"), prompt, sampling=sampling, as_json=as_json)


def test_the_same_seed_draws_the_same_text_of_so_many_tokens(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in (1, 1, 2, None):
        assert ask(demo, "for ", Sampling(20, seed=seed)) == console.DONE
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] | {"seconds": 0} == answers[1] | {"seconds": 0}
    assert len({answer["text"] for answer in answers[1:]}) == 3
    first = answers[0]
    assert first["prompt"] == "for " and first["name"] == "poems" and first["schema"] == 1
    assert first["stages"] == [{"stage": 0, "step": 9}, {"stage": 1, "step": 9}] and first["from"] == "checkpoints"
    assert 0 < first["tokens"] <= 20 and isinstance(answers[3]["seed"], int)


def test_people_see_prompt_and_text_and_the_seed(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(demo, "a\x1b[31mb", Sampling(10, seed=3), as_json=False) == console.DONE
    shown = capsys.readouterr()
    assert shown.out.startswith("a?[31mb") and shown.out.endswith("\n") and "\x1b" not in shown.out
    assert "--seed 3 draws them again" in shown.err


def test_an_empty_prompt_begins_a_document(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(demo, "", Sampling(5, seed=1)) == console.DONE
    assert json.loads(capsys.readouterr().out)["prompt"] == ""


def test_a_run_that_nobody_has_here_is_one_sentence(tmp_path: Path, demo: Path) -> None:
    with pytest.raises(Failure, match="has not joined run"):
        sample_command.run("cd" * 32, "a", [tmp_path], sampling=Sampling())


@pytest.mark.parametrize(("text", "pieces"), [("añb", ["a", "", "ñ", "b", ""]), ("€", ["", "", "€", ""]), ("", [""])])
def test_a_character_is_shown_when_it_is_whole(text: str, pieces: list[str]) -> None:
    taken: list[int] = []
    tokenizer = ByteTokenizer()
    assert list(decoded_pieces(iter(text.encode()), tokenizer.decode, taken)) == pieces
    assert taken == list(text.encode())


def test_what_is_no_character_at_the_end_is_said() -> None:
    assert list(decoded_pieces(iter("€".encode()[:2]), ByteTokenizer().decode, [])) == ["", "", "�"]
