"""A founder is told what its run cannot train on before it signs the manifest."""

from __future__ import annotations

import asyncio
import contextlib
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

from agora.node import paths, runs
from agora.node.process.joining import read_manifest

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> paths.Home:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "run"))
    paths.make_private(tmp_path / "run")
    return paths.Home(tmp_path / "home")


def found(
    home: paths.Home,
    draft: Manifest,
    *data: Path,
    span: Span | None = None,
    base: Path | None = None,
    adapter: Path | None = None,
) -> str:
    """Joins a draft as founder; returns the manifest's text after that, also where it is refused."""
    file = home.root.parent / "run.toml"
    file.write_text(draft.to_toml())

    @contextlib.contextmanager
    def enter(name: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(text="")

    startup = SimpleNamespace(
        reference=runs.resolve(str(file), home),
        home=home,
        identity=(identity := Identity.generate()),
        me=identity.peer,
        settings=SimpleNamespace(
            named_base_model=base, named_adapter=adapter, data_places=data, span=span, corpus_cache=None
        ),
        phases=SimpleNamespace(enter=enter, report_progress=lambda text: None),
    )
    asyncio.run(read_manifest(cast(Any, startup)))
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
