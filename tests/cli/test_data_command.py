"""Claims about `swarm data`: what it prints, what it counts, and that nothing in a file reaches a terminal as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agora.cli import console, data_command
from agora.cli.data_command import DataOptions, ReadingChoice
from agora.cli.run_data import read_training_data
from agora.tuning.chat.data_survey import DataSurvey
from agora.tuning.chat.sample_formats import ReadingCounts
from agora.tuning.chat.sample_rows import open_sample_rows
from tests.tuning.chat_folders import CHATML, write_folder
from tests.tuning.sample_runs import completions, sample_run

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on rows in a file, and returns its standard output."""

    def command(rows: Sequence[Mapping[str, Any]], as_json: bool = False, **flags: Any) -> str:
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
        chosen = {key: flags.pop(key) for key in list(flags) if key in ("base_model", "objective", "context")}
        options = DataOptions((tmp_path / "x.jsonl",), **chosen, reading=ReadingChoice(**flags))
        assert data_command.run(options, as_json=as_json) == console.EXIT_DONE
        return capsys.readouterr().out

    return command


def test_it_prints_what_was_recognised_and_three_samples_with_the_supervised_part_in_brackets(run: Run) -> None:
    lines = run([{"messages": CHAT, "id": number} for number in range(5)]).splitlines()
    assert lines[:5] == [
        "format     chat, by the columns messages; not used: 'id'",
        "objective  sft",
        "tokenizer  bytes, conversations by the plain template",
        "",
        "sample 1: 26 tokens",
    ]
    assert lines[5:7] == ["User: 2 + 2?", "Assistant: [[4\\x00]]"]
    assert "sample 3: 26 tokens" in lines and "sample 4: 26 tokens" not in lines
    assert lines[-4].split()[:3] == ["17", "to", "32"] and lines[-4].endswith("  5")
    assert [*lines[-8:-4], *lines[-3:]] == [
        "supervised is what stands in [[ ]]",
        "samples    5",
        "tokens     130, 7.7 % of them supervised",
        "lengths    26 to 26 tokens, median 26, 95 % at most 26",
        "context    1,024 tokens; 0 samples truncated, losing 0 tokens",
        "duplicates 4 samples equal to an earlier one, learnt each time",
        "packing    1 sequence, 12.7 % full",
    ]


def test_a_terminal_gets_colour_instead_of_brackets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CI", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = run([{"messages": CHAT}])
    assert "[[" not in out and "\x1b[1;32m4\\x00\x1b[0m" in out and "supervised is what stands in this colour" in out


def test_nothing_of_a_file_steers_the_terminal(run: Run) -> None:
    evil = "\x1b]0;owned\x07 \x9b31m \u202e [bold]x[/bold] \r :smile:"
    chat = [{"role": "user", "content": evil}, {"role": "assistant", "content": evil}]
    out = run([{"messages": chat, f"id{evil}": 1}])
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r"} & set(out)
    assert "\\x1b]0;owned\\x07 \\x9b31m \\u202e [bold]x[/bold] \\r :smile:" in out


def test_a_preference_shows_both_sides_and_is_not_packed(run: Run) -> None:
    row = {"prompt": CHAT[:1], "chosen": "four", "rejected": "I do not know"}
    out = run([row])
    assert "sample 1, chosen: 29 tokens" in out and "sample 1, rejected: 38 tokens" in out
    assert "[[four\\x00]]" in out and "packing    none" in out
    fields = json.loads(run([row], as_json=True))
    assert (fields["objective"], fields["packing"], fields["lengths"]["most"]) == ("dpo", None, 38)
    assert fields["tokens"] == {"kept": 67, "supervised": 19}


def test_the_json_object_has_what_people_see(run: Run) -> None:
    rows = [{"question": "a" * length, "answer": "b"} for length in (1, 2, 3, 6, 100)]
    fields = json.loads(run(rows, as_json=True, columns="prompt=question,completion=answer", context=8))
    assert fields["columns"] == {"prompt": "question", "completion": "answer"}
    assert (fields["schema"], fields["format"], fields["objective"]) == (1, "prompt and completion", "sft")
    assert (fields["samples"], fields["context"], fields["tokenizer"]) == (5, 8, "bytes")
    assert fields["truncated"] == {"samples": 1, "tokens": 93} and fields["left_out"] == 1
    assert fields["tokens"] == {"kept": 3 + 4 + 5 + 8, "supervised": 8}
    assert fields["packing"] == {"sequences": 3, "efficiency": pytest.approx(20 / 27)}
    assert fields["lengths"]["histogram"] == [
        {"first": 3, "last": 4, "count": 2},
        {"first": 5, "last": 8, "count": 2},
        {"first": 9, "last": 16, "count": 0},
        {"first": 17, "last": 32, "count": 0},
        {"first": 33, "last": 64, "count": 0},
        {"first": 65, "last": 128, "count": 1},
    ]
    assert fields["shown"][0] == [[{"text": "a", "supervised": False}, {"text": "b\0", "supervised": True}]]


def test_it_counts_the_rows_that_training_makes(run: Run, tmp_path: Path) -> None:
    records = completions(200, longest=40)  # at a context of 15 some are truncated and some fit exactly
    for context in (15, 24):
        fields = json.loads(run(records, as_json=True, context=context))
        manifest = sample_run(context=context, samples=str(tmp_path / "x.jsonl"))
        made = open_sample_rows(manifest, tmp_path / "rows").summary
        assert fields["context"] == context and fields["packing"]["sequences"] == made.rows
        assert fields["truncated"]["samples"] == made.truncated > 0 and fields["left_out"] == made.left_out
        assert fields["tokens"] == {"kept": made.tokens, "supervised": made.supervised}


def test_truncated_and_unlearnable_samples_are_counted_for_people(run: Run) -> None:
    out = run([{"prompt": "a" * 20, "completion": "b"}, {"prompt": "a", "completion": "b" * 20}], context=8)
    assert "sample 1: 9 tokens, the last 13 of 22 truncated\naaaaaaaaa\n" in out
    assert "2 samples truncated, losing 26 tokens" in out
    assert "left out   1 sample without a supervised token within the context" in out


def test_documents_of_the_objective_lm_are_cut_and_never_truncated(run: Run) -> None:
    out = run([{"text": "roses are red"}] * 4, context=8)
    assert "documents are cut where a sequence is full, none is truncated" in out
    assert "packing    7 sequences, 88.9 % full" in out
    assert json.loads(run([{"text": "x" * 20}], as_json=True, context=8, objective="sft"))["truncated"]["samples"] == 1


def test_long_texts_are_shortened_but_every_part_is_shown(run: Run) -> None:
    chat = [{"role": "user", "content": "a" * 5000}, {"role": "assistant", "content": "the end"}]
    out = run([{"messages": chat}], context=8192)
    assert " characters ... a" in out and "[[the end\\x00]]" in out and len(out) < 3000
    out = run([{"messages": CHAT * 30}], context=8192)
    assert "... and 44 parts more" in out


def test_a_base_model_brings_its_tokenizer_template_and_longest_context(run: Run, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", CHATML)
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    out = run([{"messages": CHAT}], base_model=folder)
    assert "<|im_start|>assistant\n[[4<|im_end|>\n]]" in out and "context    512 tokens" in out
    assert f"tokenizer  {folder}, conversations by the chat template of {folder}" in out
    with pytest.raises(console.Failure, match="--context 513 is more than the 512 tokens"):
        run([{"messages": CHAT}], base_model=folder, context=513)


def test_what_is_wrong_is_one_sentence_with_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\nno\n')

    def ends(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "agora.cli.main_swarm", "data", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout, done.stderr.splitlines()[-1]

    code, out, error = ends("x.jsonl", "--json")
    assert (code, out) == (1, "") and error.startswith("error: x.jsonl:2 is not JSON")
    assert ends("x.jsonl", "--objective", "rl") == (2, "", "error: --objective is lm, sft or dpo")
    code, _, error = ends("x.jsonl", "--columns", "promt=a")
    assert code == 2 and "did you mean 'prompt'" in error
    assert ends("none.jsonl")[0] == 1


def test_the_command_needs_no_torch() -> None:
    code = "import sys, agora.cli.data_command; print(sorted({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("lengths", [[1], [2], [1, 2, 3, 4, 5, 8, 9], [1024, 1025], [0, 7]])
def test_each_length_is_in_the_bin_that_says_so(lengths: list[int]) -> None:
    survey = DataSurvey("sft", 8, np.array(lengths), 0, 0, 0, 0, 0, 0, ReadingCounts(), None, None, ())
    for each in survey.histogram():
        assert each.count == sum(each.first <= length <= each.last for length in lengths)
    assert sum(each.count for each in survey.histogram()) == len(lengths)


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_a_terminal_without_colours_gets_brackets(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name in ("NO_COLOR", "CI", "COLUMNS", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal would be
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    out = run([{"messages": CHAT}])
    assert "[[4\\x00]]" in out and "supervised is what stands in [[ ]]" in out


def test_what_was_left_out_is_counted_and_shown(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"prompt": "a", "completion": "b", "label": True}
    rows = [good, good, good | {"label": False}, {"prompt": 5, "completion": "c", "label": True}]
    rows += [good | {"completion": ""}, good | {"completion": "b" * 50}]
    report = tmp_path / "bad.txt"
    flags = {"objective": "sft", "skip_bad": True, "too_long": "drop", "context": 8}
    out = run(rows, **flags)
    for line in (
        "samples    3",
        "too long   1 sample longer than the context, left out",
        "bad        1 sample labelled bad, left out: only good answers are learnt",
        "malformed  1 sample malformed, left out",
        "duplicates 1 sample equal to an earlier one, learnt each time",
        "empty      1 sample with an empty answer, learnt as they are",
    ):
        assert line in out.splitlines()
    fields = json.loads(run(rows, as_json=True, bad_report=report, **flags))
    assert [fields[key] for key in ("too_long", "labelled_bad", "duplicates", "empty_answers")] == [1, 1, 1, 1]
    (skipped,) = fields["skipped"]
    assert "x.jsonl:4: prompt is a number, not text" in skipped and report.read_text() == f"{skipped}\n"


def test_every_skipped_record_is_listed_on_the_screen_or_in_the_report(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"messages": CHAT}, *[{"messages": number} for number in range(30)]]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data_command.run(DataOptions((tmp_path / "x.jsonl",), reading=ReadingChoice(skip_bad=True)), as_json=False)
    shown = capsys.readouterr().err
    assert shown.count("skipped      ") == 21 and "10 more; --bad-report FILE writes all of them" in shown
    run(rows, skip_bad=True, bad_report=tmp_path / "bad.txt")
    assert len((tmp_path / "bad.txt").read_text().splitlines()) == 30


def test_wrong_flags_of_reading_say_what_is_right(run: Run) -> None:
    for flags, says in (
        ({"role_order": "none"}, "--role-order is turns or any"),
        ({"too_long": "no"}, "--too-long is cut or drop"),
        ({"bad_report": Path("x")}, "--bad-report is about what --skip-bad skips"),
    ):
        with pytest.raises(console.Failure, match=says):
            run([{"messages": CHAT}], **flags)


TEXT = [{"text": "A text without messages. " * 20}]
ALPACA = [{"instruction": "2 + 2?", "output": "4"}]


@pytest.mark.parametrize(
    ("rows", "flags", "says"),
    [
        (
            TEXT,
            {"roles": "customer=user"},
            "--roles is about messages, and .*x.jsonl has none .format: text",
        ),
        (TEXT, {"role_order": "any"}, "--role-order is about messages"),
        (ALPACA, {"columns": "role=from"}, "--columns role is about messages, and .* has none .format: Alpaca"),
        (ALPACA, {"role_order": "any"}, "--role-order is about messages"),
        (TEXT, {"too_long": "drop"}, "--too-long is for samples, not for text learnt whole"),
        (TEXT, {"chat_template": "chatml"}, "--chat-template is for samples, not for plain text"),
        (TEXT, {"chat_template": "chatml", "objective": "sft"}, "--chat-template is for samples, not for plain text"),
    ],
)
def test_flags_that_have_no_effect_on_this_data_are_refused(
    run: Run, tmp_path: Path, rows: list[dict[str, Any]], flags: dict[str, str], says: str
) -> None:
    with pytest.raises(console.Failure, match=says):
        run(rows, **flags)
    reading = ReadingChoice(**{key: value for key, value in flags.items() if key != "objective"})
    folder = write_folder(tmp_path / "base", CHATML)
    with pytest.raises(console.Failure, match=says):
        read_training_data([tmp_path / "x.jsonl"], folder, reading, flags.get("objective"), 16)
    assert run([{"messages": CHAT}], roles="customer=user", role_order="any", chat_template="chatml")
    assert run([{"prompt": CHAT[:1], "completion": CHAT[1:]}], roles="customer=user", columns="role=role")


def test_standard_input_several_files_and_a_template_are_read_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "x.JSONL").write_text(json.dumps({"messages": CHAT}))
    program = [sys.executable, "-m", "agora.cli.main_swarm", "data"]
    command = [*program, "-", "x.JSONL", "--chat-template", "chatml", "--json"]
    given = json.dumps([{"messages": CHAT}, {"messages": CHAT}])
    done = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout)
    assert (fields["samples"], fields["duplicates"], len(fields["files"])) == (3, 2, 2)
    assert fields["template"] == "the chosen chat template"
    assert fields["shown"][0][0][1] == {"text": "4<|im_end|>\n", "supervised": True}
    again = subprocess.run(
        [*program, "-", "-"], cwd=tmp_path, input="", capture_output=True, text=True, timeout=60, check=False
    )
    assert again.returncode == 2 and "named twice" in again.stderr
