"""Whose manifest may make this machine read its files without being asked."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.identity import Identity
from agora_protocol.manifest import Manifest, SignedManifest, preset

from agora.node import daemon_registry, paths
from agora.node.daemon_registry import DaemonEntry
from agora.node.runs import RunReference
from agora.node.span.training_data import open_training_data

ME, STRANGER, NEIGHBOUR = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


class Opened(Exception):
    """Raised where the data would be read."""


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "run"))
    paths.make_private(tmp_path / "run")


def open_with(manifest: Manifest, founder: Identity, *, file: bool, draft: bool = False, allow: bool = False) -> None:
    signed = SignedManifest.sign(manifest, founder)
    reference = RunReference("", "", file=Path("x.toml") if file else None, draft=manifest if draft else None)

    def enter(name: str) -> Any:
        raise Opened(name)

    context = SimpleNamespace(
        reference=reference,
        settings=SimpleNamespace(allow_files=allow),
        me=ME.peer,
        phases=SimpleNamespace(enter=enter),
    )
    peer = SimpleNamespace(context=context, signed=signed, manifest=signed.manifest)
    asyncio.run(open_training_data(cast(Any, peer)))


def reading(**data: Any) -> Manifest:
    return preset("tiny", data=data)


CORPUS = reading(corpus=["~/**/*.txt"])


@pytest.mark.parametrize(
    "manifest", [CORPUS, reading(corpus=["stdlib", "/home/*/*.jsonl"]), reading(tokenizer="/etc/tokenizer.json")]
)
@pytest.mark.parametrize("file", [True, False])
def test_a_strangers_manifest_reads_no_file_of_this_machine_however_it_came(manifest: Manifest, file: bool) -> None:
    with pytest.raises(LocalError, match="--allow-files"):
        open_with(manifest, STRANGER, file=file)
    with pytest.raises(Opened):
        open_with(manifest, STRANGER, file=file, allow=True)


def test_what_names_no_file_needs_no_permission() -> None:
    with pytest.raises(Opened):
        open_with(preset("tiny"), STRANGER, file=True)


def test_an_own_draft_and_an_own_run_need_no_permission() -> None:
    with pytest.raises(Opened):
        open_with(CORPUS, STRANGER, file=True, draft=True)
    with pytest.raises(Opened):
        open_with(CORPUS, ME, file=True)
    with pytest.raises(LocalError):
        open_with(CORPUS, ME, file=False)


@pytest.mark.parametrize("peer", [NEIGHBOUR, STRANGER])
def test_a_run_that_another_daemon_of_this_user_founded_is_an_own_one(tmp_path: Path, peer: Identity) -> None:
    """A daemon here that merely takes part in a stranger's run is no reason."""
    home = paths.Home(tmp_path / "other")
    socket = str(daemon_registry.socket_of(home))
    daemon_registry.register(DaemonEntry("a" * 64, "n", NEIGHBOUR.peer, peer.peer, os.getpid(), str(home.root), socket))
    with pytest.raises(Opened if peer is NEIGHBOUR else LocalError):
        open_with(CORPUS, NEIGHBOUR, file=True)
