"""A founder is told what its run cannot train on before it signs the manifest."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agora_protocol.errors import AgoraError, DataError, LocalError
from agora_protocol.identity import Identity
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest, is_signed, preset

from agora.core.optional_packages import PackageMissing
from agora.node import paths, runs
from agora.node.process.joining import read_manifest
from agora.node.settings import Settings
from agora.node.span.training_data import format_times

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> paths.Home:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "run"))
    paths.make_private(tmp_path / "run")
    return paths.Home(tmp_path / "home")


def found(
    home: paths.Home,
    draft: Manifest | str,
    *data: Path,
    span: Span | None = None,
    base: Path | None = None,
    adapter: Path | None = None,
    told: list[str] | None = None,
    queued: tuple[str, ...] = (),
    **more: Any,
) -> str:
    """Joins a draft as founder; returns the manifest's text after that. more: further settings. told: gets what the
    owner is told, and the note of the phase."""
    paths.make_private(home.root)
    file = home.root.parent / "run.toml"
    file.write_text(draft.to_toml() if isinstance(draft, Manifest) else draft)
    says = told if told is not None else []

    @contextlib.contextmanager
    def enter(name: str) -> Iterator[SimpleNamespace]:
        yield (note := SimpleNamespace(text=""))
        says.append(note.text)

    context = SimpleNamespace(
        reference=runs.resolve(str(file), home),
        home=home,
        identity=(identity := Identity.generate()),
        me=identity.peer,
        settings=Settings(
            base_model=str(base or ""),
            adapter=str(adapter or ""),
            data=tuple(map(str, data)),
            stages=str(span or "auto"),
            **more,
        ),
        phases=SimpleNamespace(enter=enter, report_progress=lambda text: None),
        report_event=lambda event: says.append(event.text),
        queued=queued,
        queue_done=(),
    )
    asyncio.run(read_manifest(cast(Any, context)))
    return file.read_text()


def reading(**data: Any) -> Manifest:
    return preset("tiny", data=data)


def test_a_founder_without_the_data_is_told_before_it_signs(home: paths.Home, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="has no poems.txt, .*--data FILE or FOLDER"):
        found(home, reading(corpus=["poems.txt"]))
    assert not is_signed((tmp_path / "run.toml").read_text(), "")
    (tmp_path / "elsewhere").mkdir()
    poems = tmp_path / "elsewhere" / "poems.txt"
    poems.write_text("Roses are red. " * 500)
    assert is_signed(found(home, reading(corpus=["poems.txt"]), poems), "")


def test_a_schedule_with_a_task_that_does_not_exist_is_not_signed(home: paths.Home, tmp_path: Path) -> None:
    with pytest.raises(AgoraError, match="there is no task 'summs'; name heldout, sums"):
        found(home, preset("tiny", evaluation={"tasks": ["heldout", "summs"]}))
    assert not is_signed((tmp_path / "run.toml").read_text(), "")
    assert is_signed(found(home, preset("tiny", evaluation={"tasks": ["heldout", "sums"]})), "")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"short", "has 6 tokens .* add text"),
        ("b.txt", b"\xff\xfea\0", "b.txt is UTF-16"),
        ("c.jsonl", b"{}\n", "c.jsonl"),
    ],
)
def test_a_corpus_that_cannot_be_learnt_is_not_signed(
    home: paths.Home, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AgoraError, match=says):
        found(home, reading(corpus=[name]))
    assert not is_signed((tmp_path / "run.toml").read_text(), "")


def test_a_founder_of_later_stages_needs_no_data(home: paths.Home) -> None:
    assert is_signed(found(home, reading(corpus=["poems.txt"]), span=Span(1, 1)), "")


def test_a_founder_without_the_adapter_that_the_run_goes_on_from_signs_nothing(
    home: paths.Home, tmp_path: Path
) -> None:
    from tests.tuning.test_going_on_from_adapter import begun, make_adapter, make_base

    base = make_base("llama", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    draft = begun(base, adapter).with_values(data={"tokenizer": "tokenizer.json"})
    with pytest.raises(LocalError, match="goes on from an adapter; name the folder that has it: --adapter DIR"):
        found(home, draft, span=Span(1, 1), base=base)
    edited = draft.with_values(model={"lora_alpha": 1.0})
    with pytest.raises(LocalError, match="lora_alpha is 1.0, and that of the adapter in .* is 6.0"):
        found(home, edited, span=Span(1, 1), base=base, adapter=adapter)
    with pytest.raises(LocalError, match="this run begins with no adapter; leave it out"):
        found(home, reading(), span=Span(1, 1), adapter=adapter)
    assert not is_signed((tmp_path / "run.toml").read_text(), "")
    assert is_signed(found(home, draft, span=Span(1, 1), base=base, adapter=adapter), "")


def test_too_few_samples_are_said_before_the_manifest_is_signed(home: paths.Home, tmp_path: Path) -> None:
    from tests.model.tiny_models import make_model, manifest_of, save

    base = save(make_model("llama"), tmp_path / "base")
    (tmp_path / "one.jsonl").write_text(json.dumps(CHAT) + "\n")
    draft = manifest_of(base, data={"samples": "one.jsonl", "heldout": 0.5}, objective={"kind": "sft"})
    with pytest.raises(LocalError, match="begins with a base model; name the folder"):
        found(home, draft)
    with pytest.raises(DataError, match="one.jsonl has 1 of the 2 samples .* set .data. heldout = 0"):
        found(home, draft, base=base)
    assert not is_signed((tmp_path / "run.toml").read_text(), "")


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"span": Span(1, 4)}, "--stages 1-4 is beyond the run's last stage; give stages within 0-3"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "gpu"}, "Device 'gpu' is not known; say auto, cpu"),
        ({"memory_gib": 0.001}, "Stages 0 need .* and 1 MiB may be used .*its owner's limit"),
        ({"span": Span(1, 3), "memory_gib": 0.001}, "Stages 1-3 need .* and 1 MiB may be used"),
        ({"disk_gib": 0.0001}, "0 MiB allowed, and 64 MiB more are needed; raise --disk"),
    ],
)
def test_what_the_founders_machine_cannot_hold_is_said_while_the_manifest_can_be_edited(
    home: paths.Home, tmp_path: Path, chosen: dict[str, Any], says: str
) -> None:
    (tmp_path / "poems.txt").write_text("Roses are red. " * 500)
    draft = preset("tiny", data={"corpus": ["poems.txt"]}, model={"layers": 4}, stages={"count": 4})
    with pytest.raises(AgoraError, match=says):
        found(home, draft, **chosen)
    assert (tmp_path / "run.toml").read_text() == draft.to_toml(), "it can be edited"
    wider = draft.with_values(stages={"count": 2})
    assert is_signed(found(home, wider, span=Span(1, 1)), "")


def test_a_founder_without_the_package_of_a_quantised_base_signs_nothing(
    home: paths.Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.model.tiny_models import make_model, manifest_of, save

    base, real = save(make_model("llama"), tmp_path / "base"), importlib.import_module

    def refuse(name: str) -> Any:
        if name.split(".")[0] == "bitsandbytes":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    lora = {"trained": "lora", "frozen_as": "nf4"}
    draft = manifest_of(base, model=lora, data={"samples": "chats.jsonl"}, objective={"kind": "sft"})
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(PackageMissing, match="needs the package bitsandbytes, .* pip install"):
        found(home, draft, base=base)
    assert not is_signed((tmp_path / "run.toml").read_text(), "")


@pytest.mark.parametrize(
    ("kind", "record", "says"),
    [
        ("dpo", {"prompt": "q", "chosen": "a"}, "rejected"),
        ("dpo", {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ("sft", {"messages": [*CHAT["messages"][:1], {**CHAT["messages"][1], "weight": 0}]}, "no supervised token"),
        ("sft", {"prompt": "q " * 200, "completion": "a"}, "no supervised token in 24.; raise .model. context"),
    ],
    ids=["no rejected answer", "both answers the same", "no weight", "no room for an answer"],
)
def test_records_that_teach_nothing_are_not_signed(
    home: paths.Home, tmp_path: Path, kind: str, record: dict[str, Any], says: str
) -> None:
    from tests.model.tiny_models import make_model, manifest_of, save

    base = save(make_model("llama"), tmp_path / "base")
    (tmp_path / "taught.jsonl").write_text((json.dumps(record) + "\n") * 20)
    draft = manifest_of(base, model={"trained": "lora"}, data={"samples": "taught.jsonl"}, objective={"kind": kind})
    with pytest.raises(AgoraError, match=says):
        found(home, draft, base=base)
    assert not is_signed((tmp_path / "run.toml").read_text(), "")


def test_a_place_of_data_that_is_not_there_is_said_before_another_file_is_read_instead(
    home: paths.Home, tmp_path: Path
) -> None:
    (tmp_path / "poems.txt").write_text("Roses are red. " * 500)
    with pytest.raises(LocalError, match="There is no .*/poemz.txt, which --data names"):
        found(home, reading(corpus=["poems.txt"]), tmp_path / "poemz.txt")
    assert not is_signed((tmp_path / "run.toml").read_text(), "")


def test_a_base_model_and_data_that_the_run_has_no_use_for_are_refused_before_it_is_signed(
    home: paths.Home, tmp_path: Path
) -> None:
    (tmp_path / "poems.txt").write_text("Roses are red. " * 500)
    (tmp_path / "base").mkdir()
    (more := tmp_path / "chats.jsonl").write_text(json.dumps(CHAT))
    draft = reading(corpus=["poems.txt"])
    with pytest.raises(LocalError, match="--base-model .*base has no effect: .* with no base model; leave it out"):
        found(home, draft, base=tmp_path / "base")
    with pytest.raises(LocalError, match="--data .*chats.jsonl has no effect: .* trains on other text"):
        found(home, draft, tmp_path / "poems.txt", more)
    with pytest.raises(LocalError, match="--data .*chats.jsonl has no effect"):
        found(home, reading(corpus=["stdlib"]), more, span=Span(1, 1))
    assert not is_signed((tmp_path / "run.toml").read_text(), "")
    told: list[str] = []
    signed = found(home, draft, base=tmp_path / "base", queued=("another run",), told=told)
    assert is_signed(signed, ""), "another run of the queue may have a use for it"
    assert any("begins with no base model" in text for text in told)


def test_what_a_signed_run_has_no_use_for_is_said_and_what_it_reads_is_not(home: paths.Home, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for name in ("poems.txt", "kept/poems.txt"):
        (tmp_path / name).write_text("Roses are red. " * 500)
    signed = found(home, reading(corpus=["poems.txt"]))
    told: list[str] = []
    found(home, signed, tmp_path / "kept", base=tmp_path / "kept", told=told)
    assert [text for text in told if "has no effect" in text] == [
        f"--base-model {tmp_path}/kept has no effect: tiny begins with no base model"
    ]


@pytest.mark.parametrize(
    ("steps", "microbatches", "warning"),
    [(10, 1, ""), (4000, 1, "after some 20 times a model learns it by heart"), (2, 64, "a single step sees it")],
    ids=["usual", "many steps", "a large step"],
)
def test_how_often_a_run_sees_its_data_is_said_before_it_is_signed(
    home: paths.Home, tmp_path: Path, steps: int, microbatches: int, warning: str
) -> None:
    (tmp_path / "poems.txt").write_text("Roses are red. " * 500)  # 7,501 tokens
    draft = reading(corpus=["poems.txt"])
    target = microbatches * draft.tokens_per_microbatch
    draft = draft.with_values(optimizer={"total_steps": steps, "target_tokens": target, "warmup_steps": 1})
    epochs = format_times(steps * target / (7501 * (1 - draft.data.heldout)))
    told: list[str] = []
    found(home, draft, told=told)
    *warned, note = told
    assert f"its {steps:,} steps of {target:,} tokens see the data {epochs}" in note
    assert [warning in text and epochs in text for text in warned] == [True] * bool(warning)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_of_samples_the_tokens_that_count_are_compared_with_a_step(home: paths.Home, tmp_path: Path, kind: str) -> None:
    from tests.model.tiny_models import make_model, manifest_of, save

    base = save(make_model("llama"), tmp_path / "base")
    record = CHAT if kind == "sft" else {"prompt": "q", "chosen": "a", "rejected": "b"}
    (tmp_path / "taught.jsonl").write_text((json.dumps(record) + "\n") * 20)
    data = {"samples": "taught.jsonl", "heldout": 0.0}
    steps = {"total_steps": 3, "target_tokens": 99_984, "warmup_steps": 1}
    draft = manifest_of(base, model={"trained": "lora"}, data=data, objective={"kind": kind}, optimizer=steps)
    told: list[str] = []
    found(home, draft, base=base, told=told)
    assert "a single step sees it" in told[0] and "see the data" in told[-1]
