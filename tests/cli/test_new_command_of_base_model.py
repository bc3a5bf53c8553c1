"""What `swarm new --base-model DIR --data FILE` writes, and what it says of files that cannot be learnt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import AgoraError
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import HfSection
from agora_protocol.manifest_sections import ALL_STEPS

from agora.cli import data_command, new_command
from agora.cli.console import EXIT_USAGE, Failure
from agora.cli.data_command import USUAL_READING, ReadingChoice
from agora.cli.new_command import (
    FEWER_ROWS_OF_A_STEP,
    ROWS_OF_A_STEP,
    TuningChoice,
    TuningManifest,
    manifest_of_base_model,
    step_values,
)
from agora.cli.run_data import TrainingData, read_training_data
from agora.data.corpus import open_corpus
from agora.data.local_files import LocalFiles
from agora.data.sampling import Sampler
from agora.data.tokenizer import byte_tokenizer_json, open_tokenizer
from agora.tuning.chat.model_tokenizer import read_chat_template
from agora.tuning.chat.sample_rows import open_sample_rows
from tests.model.tiny_models import make_model, save

CONTEXT = 64
READING_FLAGS = tuple(ReadingChoice.__dataclass_fields__)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 64 positions with a tokenizer of bytes and without a chat template."""
    folder = save(make_model("llama"), tmp_path_factory.mktemp("base"))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    return folder


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chats(path: Path, count: int) -> Path:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    return write(path, [{"messages": turns}] * count)


def preferences(path: Path, count: int) -> Path:
    return write(path, [{"prompt": "p ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(count)])


def made(base: Path, file: Path | None = None, **choice: Any) -> TuningManifest:
    reading = ReadingChoice(**{key: choice.pop(key) for key in list(choice) if key in READING_FLAGS})
    files = () if file is None else (file,)
    return manifest_of_base_model(base, "run", TuningChoice(data=files, reading=reading, **choice))


def test_sft_trains_adapters_beside_frozen_weights_and_averages_them_exactly(base: Path, tmp_path: Path) -> None:
    tuning = made(base, chats(tmp_path / "chats.jsonl", 500))
    manifest = tuning.manifest
    assert isinstance(manifest.model, HfSection) and manifest.objective.kind == "sft"
    assert (manifest.model.trained, manifest.model.frozen_as) == ("lora", "bf16")
    assert (manifest.model.lora_rank, manifest.model.lora_alpha, manifest.optimizer.learning_rate) == (16, 32.0, 2e-4)
    assert (manifest.averaging.exact_steps, manifest.averaging.gradient_wire) == (ALL_STEPS, "float32")
    assert manifest.optimizer.average_decay == 0 and manifest.model.context == CONTEXT
    assert manifest.data.samples == str(tmp_path / "chats.jsonl") and manifest.data.columns == ()
    assert manifest.data.heldout == 0.1, "of 500 samples a tenth: 64 would be more"
    assert Manifest.from_toml(manifest.to_toml()) == manifest


def test_the_steps_see_the_training_rows_once_per_epoch(base: Path, tmp_path: Path) -> None:
    file = chats(tmp_path / "chats.jsonl", 500)
    once, thrice = made(base, file), made(base, file, epochs=3.0)
    assert once.data is not None
    tokens = once.data.found.supervised * 0.9
    each = once.data.found.supervised / once.data.rows
    for tuning, epochs in ((once, 1), (thrice, 3)):
        optimizer = tuning.manifest.optimizer
        target = optimizer.target_tokens
        assert abs(target - FEWER_ROWS_OF_A_STEP * each) <= CONTEXT, "about so many rows, in whole microbatches"
        assert tokens * epochs <= optimizer.total_steps * target < tokens * epochs + target
        assert 0 < optimizer.warmup_steps < optimizer.total_steps / 2
    first, second, repeated, template, third = once.summary_lines()
    assert repeated == "duplicates   499 samples equal to an earlier one, learnt each time"
    assert template == "template     the plain template"
    assert first == "data         chat, 500 samples, objective sft"
    assert second.startswith(f"rows         {once.data.rows} of 64 tokens, ") and "tokens are supervised" in second
    steps = once.manifest.optimizer
    held = f"steps        {steps.total_steps} of {steps.target_tokens:,} supervised tokens"
    assert third == f"{held}, which see the data once; learning rate 0.0002"
    assert "which see the data 3 times" in thrice.summary_lines()[-1]


def test_data_that_is_less_than_a_step_is_said_to_be_seen_as_often_as_it_will_be(base: Path, tmp_path: Path) -> None:
    few = made(base, chats(tmp_path / "few.jsonl", 4)).summary_lines()
    (steps,) = (line for line in few if line.startswith("steps"))
    assert "times: a step has more tokens than the data" in steps and "once" not in steps


def test_a_large_file_has_larger_steps_and_a_single_sample_still_makes_one(base: Path, tmp_path: Path) -> None:
    one = read_training_data([chats(tmp_path / "one.jsonl", 1)], base, USUAL_READING, None, CONTEXT)
    few, many = step_values(one, CONTEXT, 1.0), step_values(one, CONTEXT, 100_000.0)
    assert few["total_steps"] == 1 and few["warmup_steps"] == 0
    assert abs(many["target_tokens"] - ROWS_OF_A_STEP * one.found.supervised) <= CONTEXT
    assert many["total_steps"] > 2000 and many["warmup_steps"] == 100


def test_dpo_has_pairs_in_rows_as_short_as_the_answers(base: Path, tmp_path: Path) -> None:
    tuning = made(base, preferences(tmp_path / "pairs.jsonl", 100), frozen_as="nf4")
    manifest = tuning.manifest
    assert isinstance(manifest.model, HfSection) and manifest.model.frozen_as == "nf4"
    assert manifest.objective.kind == "dpo" and manifest.schedule.microbatch % 2 == 0
    assert tuning.data is not None and tuning.data.rows == 200
    assert manifest.optimizer.learning_rate == 2e-5 and manifest.optimizer.total_steps == 12  # 180 rows of 200
    long = made(
        base,
        write(
            tmp_path / "long.jsonl",
            [{"prompt": "p" * 99, "chosen": "a", "rejected": "b"}] * 2
            + [{"prompt": "p", "chosen": "good", "rejected": "bad"}],
        ),
    )
    assert long.manifest.model.context == CONTEXT and long.data is not None and long.data.found.left_out == 2
    without = "2 samples without a supervised token, or without a difference, within the context"
    assert f"left out     {without}" in long.summary_lines()


def test_the_context_of_dpo_is_the_longest_answer_in_blocks(base: Path, tmp_path: Path) -> None:
    from agora.cli.new_command import fitting_context

    data = read_training_data([preferences(tmp_path / "pairs.jsonl", 10)], base, USUAL_READING, None, 1000)
    assert fitting_context(data, 1000) == 64
    chat = read_training_data([chats(tmp_path / "chats.jsonl", 10)], base, USUAL_READING, None, 1000)
    assert fitting_context(chat, 1000) == 1000


def test_columns_are_mapped_in_the_manifest_too(base: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "qa.jsonl", [{"question": "1 + 1 = ", "answer": "2"}] * 20)
    manifest = made(base, file, columns="prompt=question,completion=answer").manifest
    assert manifest.data.columns == (("prompt", "question"), ("completion", "answer"))
    assert manifest.objective.kind == "sft"


def test_text_is_a_corpus_and_trains_all_parameters(base: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "text.jsonl", [{"text": "word " * 100}] * 50)
    manifest = made(base, file).manifest
    assert (manifest.objective.kind, manifest.data.corpus, manifest.data.samples) == ("lm", (str(file),), "")
    assert isinstance(manifest.model, HfSection) and manifest.model.trained == "all"
    assert manifest.averaging.gradient_wire == "int8" and manifest.optimizer.average_decay > 0
    assert (manifest.optimizer.target_tokens, manifest.optimizer.total_steps) == (16_384, 2)
    adapters = made(base, file, trained="lora").manifest
    assert adapters.optimizer.learning_rate == 2e-4 and adapters.averaging.gradient_wire == "float32"
    learnt_as_samples = made(base, file, objective="sft").manifest
    assert learnt_as_samples.data.samples == str(file) and learnt_as_samples.objective.kind == "sft"


def test_without_data_it_is_the_manifest_of_a_run_on_plain_text(base: Path) -> None:
    tuning = made(base)
    assert tuning.data is None and tuning.summary_lines() == []
    assert (tuning.manifest.objective.kind, tuning.manifest.data.corpus) == ("lm", ("stdlib",))
    assert tuning.manifest.optimizer.total_steps == 2000


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"objective": "sft"}, "--objective sft learns from samples; give them with --data FILE"),
        ({"objective": "rl"}, "--objective is lm, sft or dpo"),
        ({"columns": "prompt=q"}, "--columns is about a data file"),
        ({"epochs": 2.0}, "--epochs is about a data file"),
        ({"trained": "head"}, "--train is all or lora"),
        ({"frozen_as": "int4", "trained": "lora"}, "--frozen-as is float32, bf16 or nf4"),
        ({"frozen_as": "nf4"}, "--frozen-as is about what lora leaves as it is; add --train lora"),
    ],
)
def test_choices_that_do_not_fit_are_bad_arguments(base: Path, choice: dict[str, Any], says: str) -> None:
    with pytest.raises(Failure, match=says) as raised:
        made(base, **choice)
    assert raised.value.code == EXIT_USAGE


def test_dpo_of_all_parameters_is_refused_with_the_flag(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="which only --train lora keeps"):
        made(base, preferences(tmp_path / "pairs.jsonl", 3), trained="all")


def test_what_is_wrong_in_a_file_is_said_as_swarm_data_says_it(base: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    chat, pairs = chats(tmp_path / "chats.jsonl", 3), preferences(tmp_path / "pairs.jsonl", 3)
    too_long = write(tmp_path / "long.jsonl", [{"prompt": "p" * 99, "completion": "c"}])
    wrong: list[tuple[Path, dict[str, Any], str]] = [
        (empty, {}, "holds no record"),
        (tmp_path / "none.jsonl", {}, "Cannot read .*none.jsonl"),
        (
            chat,
            {"objective": "dpo"},
            "which the objective dpo cannot learn from; use --objective sft",
        ),
        (pairs, {"objective": "sft"}, "learn the better answers alone with --columns prompt=prompt,completion=chosen"),
        (chat, {"objective": "lm"}, "--objective lm learns plain text, .* use --objective sft"),
        (chat, {"columns": "prompt=text"}, "has no column 'text', which --columns gives for 'prompt'"),
        (chat, {"columns": "promt=text"}, "did you mean 'prompt'"),
        (too_long, {}, "none of its 1 samples has a supervised token among its first 65"),
    ]
    for file, choice, says in wrong:
        with pytest.raises((AgoraError, Failure), match=says):
            made(base, file, **choice)


def test_text_that_a_run_cannot_read_is_said_before_it_is_counted(base: Path, tmp_path: Path) -> None:
    listed = tmp_path / "text.json"
    listed.write_text(json.dumps([{"text": "one"}]))
    with pytest.raises(Failure, match="convert it to .txt, .jsonl, .ndjson or .parquet"):
        made(base, listed)
    renamed = write(tmp_path / "body.jsonl", [{"body": "one"}])
    with pytest.raises(Failure, match="rename its column to text"):
        made(base, renamed, columns="text=body")


def test_the_command_prints_what_it_found_and_a_choice_needs_a_base_model(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = preferences(tmp_path / "pairs.jsonl", 40)
    new_command.run(tmp_path / "run.toml", None, base, None, TuningChoice(data=(file,)))
    printed = capsys.readouterr().err
    assert "data         preference, 40 samples, objective dpo" in printed and "rows         80 of 64" in printed
    assert f"agora-node join {tmp_path / 'run.toml'} --base-model {base}" in printed.splitlines()[-1]
    assert Manifest.from_toml((tmp_path / "run.toml").read_text()).objective.kind == "dpo"
    with pytest.raises(Failure, match="give one with --base-model DIR"):
        new_command.run(tmp_path / "other.toml", None, None, None, TuningChoice(data=(file,)))


def test_training_data_is_counted_with_rows_of_one_token_more_than_the_context(base: Path, tmp_path: Path) -> None:
    exact = {"prompt": "p" * 32, "completion": "c" * 32}  # and its end of turn: 65 tokens
    data: TrainingData = read_training_data(
        [write(tmp_path / "f.jsonl", [exact] * 7)], base, USUAL_READING, None, CONTEXT
    )
    assert (data.rows, data.found.truncated_samples, data.trainable_samples) == (7, 0, 7)


# --- what is wrong is said before anything is signed


@pytest.mark.parametrize("make", [chats, preferences])
def test_one_sample_trains_without_a_held_out_part(base: Path, tmp_path: Path, make: Any) -> None:
    tuning = made(base, make(tmp_path / "one.jsonl", 1))
    assert tuning.manifest.data.heldout == 0 and tuning.manifest.optimizer.total_steps == 1
    assert "held out     nothing: the data is too little for it" in tuning.summary_lines()
    rows = open_sample_rows(tuning.manifest, tmp_path / "cache")
    assert rows.items == 1 and rows.summary.heldout == 0
    two = made(base, make(tmp_path / "two.jsonl", 2))
    assert two.manifest.data.heldout > 0 and open_sample_rows(two.manifest, tmp_path / "cache").summary.heldout == 1


def test_one_sample_of_many_that_are_left_out_counts_as_one(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 99, "completion": "c"}] * 9 + [{"prompt": "p", "completion": "c"}]
    tuning = made(base, write(tmp_path / "x.jsonl", rows))
    assert tuning.manifest.data.heldout == 0
    assert open_sample_rows(tuning.manifest, tmp_path / "cache").summary.trained == 1


def test_text_for_less_than_a_row_is_refused_and_for_one_row_is_not_held_out(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Failure, match="has 21 tokens, and a row has 65"):
        made(base, write(tmp_path / "short.jsonl", [{"text": "x" * 20}]))
    with pytest.raises(Failure, match="--skip-bad is for samples, not for a corpus"):
        made(base, write(tmp_path / "bad.jsonl", [{"text": "x" * 70}]), skip_bad=True)
    one = made(base, write(tmp_path / "one.jsonl", [{"text": "x" * 70}])).manifest
    assert one.data.heldout == 0
    tokens = open_corpus(one.data.corpus, open_tokenizer(one.data.tokenizer, 256), tmp_path / "cache")
    assert Sampler(tokens, one.model.context, one.data.heldout, one.seed).windows == 1


def test_how_data_is_read_is_in_the_manifest_and_gives_the_rows_that_were_counted(base: Path, tmp_path: Path) -> None:
    turns = [{"speaker": "customer", "said": "q"}, {"speaker": "agent", "said": "a<|im_end|>"}]
    rows: list[dict[str, Any]] = [{"dialog": turns}] * 20 + [{"dialog": 5}]
    rows += [{"dialog": [turns[0], turns[1] | {"said": "long " * 20}]}, {"dialog": [turns[1], *turns]}]
    first = write(tmp_path / "x.jsonl", rows)
    folder = tmp_path / "shards"
    folder.mkdir()
    write(folder / "y.jsonl", [{"dialog": turns}] * 3)
    reading = ReadingChoice(
        columns="messages=dialog,role=speaker,content=said",
        roles="customer=user,agent=assistant",
        role_order="any",
        skip_bad=True,
        too_long="drop",
        chat_template="chatml",
    )
    tuning = manifest_of_base_model(base, "run", TuningChoice(data=(first, folder), reading=reading))
    manifest = tuning.manifest
    data = manifest.data
    assert data.samples == (str(first), str(folder)) and data.roles == (("customer", "user"), ("agent", "assistant"))
    assert (data.role_order, data.skip_bad, data.too_long) == ("any", True, "drop")
    assert data.chat_template == read_chat_template("chatml", None)
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert tuning.data is not None and "malformed    1 sample malformed, left out" in tuning.summary_lines()
    summary = open_sample_rows(manifest, tmp_path / "cache").summary
    assert (summary.malformed, summary.too_long, summary.samples) == (1, 2, 23) == (1, 2, tuning.data.found.samples)
    assert "1 malformed, 2 too long" in summary.sentence()
    first.write_text(first.read_text() + "\n")
    with pytest.raises(AgoraError, match="copy the file from a peer that trains"):
        open_sample_rows(manifest, tmp_path / "cache")


def test_named_templates_without_a_default_are_said_before_a_manifest_is_written(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "named"
    shutil.copytree(base, folder)
    named = [{"name": "tool_use", "template": read_chat_template("chatml", None)}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    file = chats(tmp_path / "chats.jsonl", 20)
    with pytest.raises(AgoraError, match=r"several chat templates \('tool_use'\), and none is the default"):
        made(folder, file)
    chosen = made(folder, file, chat_template="tool_use").manifest
    assert chosen.data.chat_template == named[0]["template"]
    assert made(folder, write(tmp_path / "qa.jsonl", [{"prompt": "a", "completion": "b"}] * 9)).manifest


def test_columns_that_are_not_used_are_said(base: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"prompt": "a", "completion": f"b{n}", "score": n} for n in range(20)])
    assert "not used     the columns 'score'" in made(base, file).summary_lines()


def test_bad_answers_are_counted_before_training(base: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": f"b{n}", "label": n % 2 == 0} for n in range(20)]
    file = write(tmp_path / "kto.jsonl", rows)
    with pytest.raises(AgoraError, match="format KTO"):
        made(base, file)
    tuning = made(base, file, objective="sft")
    assert "bad          10 samples labelled bad, left out: only good answers are learnt" in tuning.summary_lines()
    assert open_sample_rows(tuning.manifest, tmp_path / "cache").summary.labelled_bad == 10


def test_standard_input_is_kept_beside_the_manifest(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = chats(tmp_path / "given.jsonl", 20)
    with given.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        new_command.run(tmp_path / "run.toml", None, base, None, TuningChoice(data=(Path("-"),)))
    manifest = Manifest.from_toml((tmp_path / "run.toml").read_text())
    assert manifest.data.samples == "run.data.json"
    assert (tmp_path / "run.data.json").read_bytes() == given.read_bytes()
    found = LocalFiles((), tmp_path, base).localise(manifest.data)
    local = manifest.model_copy(update={"data": found})
    assert open_sample_rows(local, tmp_path / "cache").summary.samples == 20


def with_token(base: Path, folder: Path, content: str) -> Path:
    """A copy of the base model whose tokenizer has an added token for which the model has no row."""
    shutil.copytree(base, folder)
    rules = json.loads((folder / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number in range(256, 264):  # the tokenizers package numbers them so, whatever the file says
        token = {"id": number, "content": content if number == 263 else f"<{number}>"}
        rules["added_tokens"].append({**token, **flags, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder


def test_an_added_token_without_a_row_trains_and_a_text_with_it_is_refused_before_anything_is_signed(
    base: Path, tmp_path: Path
) -> None:
    folder = with_token(base, tmp_path / "padded", "[PAD]")
    manifest = made(folder, chats(tmp_path / "chats.jsonl", 20)).manifest
    assert open_sample_rows(manifest, tmp_path / "cache").summary.samples == 20
    text = tmp_path / "text.txt"
    text.write_text("some words [PAD] and more words\n" * 50)
    for objective, file in (
        ("lm", text),
        ("sft", write(tmp_path / "completions.jsonl", [{"prompt": "q", "completion": "[PAD]"}] * 9)),
        ("dpo", write(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "[PAD]", "rejected": "b"}] * 9)),
    ):
        with pytest.raises(AgoraError, match="has no row for it"):
            made(folder, file, objective=objective)


def test_a_tokenizer_that_needs_more_rows_is_refused_also_without_data(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "small")
    config = tmp_path / "small" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": 200}))
    with pytest.raises(AgoraError, match="has token id 255 but"):
        manifest_of_base_model(tmp_path / "small", "run", TuningChoice())


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_beside_the_base_model_is_said_before_training(
    base: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(base, tmp_path / "both")
    (tmp_path / "both" / file).write_text("{}")
    new_command.run(tmp_path / "alone.toml", None, base, None)
    assert "PEFT adapter" not in capsys.readouterr().err
    new_command.run(tmp_path / "run.toml", None, tmp_path / "both", None)
    assert "has a PEFT adapter beside the base model; it is not loaded" in capsys.readouterr().err
    data = data_command.DataOptions((chats(tmp_path / "chats.jsonl", 3),), tmp_path / "both")
    data_command.run(data, as_json=False)
    assert "has a PEFT adapter beside" in capsys.readouterr().out


def test_an_adapter_alone_is_no_base_model(base: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AgoraError, match="has an adapter .* and no model; name the folder of its base model"):
        manifest_of_base_model(tmp_path, "run", TuningChoice())


def test_a_manifest_has_names_and_none_of_its_authors_paths_and_another_machine_finds_its_own_files(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ann, ben = tmp_path / "ann", tmp_path / "ben"
    (ann / "data").mkdir(parents=True)
    ben.mkdir()
    shutil.copytree(base, ann / "model")
    beside, far = chats(ann / "sft.jsonl", 20), chats(ann / "data" / "far.jsonl", 20)
    for number, (file, flag) in enumerate(((beside, ""), (far, f" --data {far}"))):
        path = ann / f"run{number}.toml"
        new_command.run(path, None, ann / "model", None, TuningChoice(data=(file,)))
        assert f"--base-model {ann / 'model'}{flag}`" in capsys.readouterr().err
        text = path.read_text()
        assert str(tmp_path) not in text and "/ann" not in text
        manifest = Manifest.from_toml(text, "run.toml")
        assert (manifest.data.samples, manifest.data.tokenizer) == (file.name, "tokenizer.json")
        assert manifest.model.model_dump()["base_name"] == "model"
        copied = ben / file.name
        shutil.copy(file, copied)
        shutil.copytree(base, ben / f"other{number}")
        found = LocalFiles((), tmp_path, ben / f"other{number}").localise(manifest.data)
        assert found.sample_paths == (str(copied),) and found.tokenizer.startswith(str(ben))
        local = manifest.model_copy(update={"data": found})
        assert open_sample_rows(local, tmp_path / "cache").summary.samples == 20


def test_plain_text_and_several_files_are_named_too_and_two_of_one_name_are_refused(base: Path, tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("a.txt", "b.txt")]
    for text in texts:
        text.write_text("some words and more words\n" * 50)
    new_command.run(tmp_path / "lm.toml", None, base, None, TuningChoice(data=tuple(texts)))
    manifest = Manifest.from_toml((tmp_path / "lm.toml").read_text(), "lm.toml")
    assert manifest.data.corpus == ("a.txt", "b.txt") and str(tmp_path) not in (tmp_path / "lm.toml").read_text()
    new_command.run(tmp_path / "stdlib.toml", None, base, None)
    assert Manifest.from_toml((tmp_path / "stdlib.toml").read_text(), "x").data.corpus == ("stdlib",)
    (tmp_path / "other").mkdir()
    same = shutil.copy(texts[0], tmp_path / "other" / "a.txt")
    with pytest.raises(Failure, match="two data files have one name"):
        new_command.run(tmp_path / "two.toml", None, base, None, TuningChoice(data=(texts[0], Path(same))))
