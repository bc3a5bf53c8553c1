"""Claims about what RUN means: files, invites, names; and about founding a run."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import AgoraError, InputError, ManifestError
from agora_protocol.identity import Identity
from agora_protocol.invite import Invite
from agora_protocol.manifest import SignedManifest, preset

from agora.node import daemon_registry, paths, run_files, runs
from agora.node.paths import Home
from agora.node.process.signing import sign_draft

ADDRESS = "/ip4/203.0.113.5/tcp/4001/p2p/"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "run"))
    paths.make_private(tmp_path / "run")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    made.root.mkdir()
    return made


def write(tmp_path: Path, text: str = "") -> Path:
    path = tmp_path / "poems.toml"
    path.write_text(text or preset("tiny").with_values(name="poems").to_toml())
    return path


def test_founding_signs_the_file_and_keeps_what_its_author_wrote(tmp_path: Path, home: Home) -> None:
    path = write(tmp_path, "# my own words\n\nname = 'poems'  # mine, too\n[optimizer]\nlearning_rate = 0.001\n")
    identity, told = Identity.generate(), []
    signed, note = sign_draft(runs.resolve(str(path), home), identity, told.append)
    text = path.read_text()
    assert text.startswith("# my own words\n\nfounder = ") and "# mine, too" in text and "[signed]" in text
    assert SignedManifest.from_toml(text) == signed and told == [signed]
    assert signed.founder == identity.peer and "signed" in note
    again = runs.resolve(str(path), home)
    assert again.run == signed.run_id and again.signed == signed


def test_two_who_found_from_one_file_found_one_run(tmp_path: Path, home: Home) -> None:
    path = write(tmp_path)
    draft = runs.resolve(str(path), home)
    first, _ = sign_draft(draft, Identity.generate(), lambda signed: None)
    stored: list[SignedManifest] = []
    second, note = sign_draft(draft, Identity.generate(), stored.append)
    assert second == first and "meanwhile" in note
    assert stored == [first], "the second stores the run and registers under it as well"


def test_a_read_only_file_stays_unsigned_and_the_run_is_founded_all_the_same(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = write(tmp_path), Path.open

    def read_only(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if "+" in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", read_only)
    signed, note = sign_draft(runs.resolve(str(path), home), Identity.generate(), lambda signed: None)
    signed.verify()
    assert "stays unsigned" in note and "[signed]" not in path.read_text()


def test_a_file_on_a_file_system_without_locks_is_signed(
    tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = write(tmp_path)
    signed, note = sign_draft(runs.resolve(str(path), home), Identity.generate(), lambda signed: None)
    assert SignedManifest.from_toml(path.read_text()) == signed and "as founder" in note


def test_a_draft_is_the_run_that_a_daemon_on_this_machine_founded_from_it(tmp_path: Path, home: Home) -> None:
    draft = runs.resolve(str(write(tmp_path)), home)
    assert draft.draft is not None and draft.run == ""
    signed = SignedManifest.sign(draft.draft, Identity.generate())
    entry = daemon_registry.DaemonEntry(signed.run_id, "poems", signed.founder, "", os.getpid(), str(home.root), "s")
    other = daemon_registry.DaemonEntry("b" * 64, "poems", signed.founder, "", os.getpid(), str(home.root), "s")
    assert draft.is_of(entry) and not draft.is_of(other)


def test_a_file_for_whose_signature_the_disk_has_no_room_keeps_its_text(tmp_path: Path, home: Home) -> None:
    path = write(tmp_path)
    reference, text = runs.resolve(str(path), home), path.read_text()
    _, hard = former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(text) + 20, hard))
    try:
        signed, note = sign_draft(reference, Identity.generate(), lambda signed: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    signed.verify()
    assert "stays unsigned" in note and path.read_text() == text


def test_where_the_files_lie_is_noted_until_another_place_is_said_or_they_are_gone(home: Home, tmp_path: Path) -> None:
    signed = SignedManifest.sign(preset("tiny"), Identity.generate())
    run, file = signed.run_id, home.manifest(signed.run_id).with_name("files.json")
    assert run_files.remembered_files(home, run) == run_files.KnownFiles()
    run_files.remember_manifest(home, signed)
    for text in ("", "[]", "{", '["/x/tokenizer.json"]', '{"tokenizer": 3}', "\0"):
        file.write_text(text)
        assert run_files.remembered_files(home, run) == run_files.KnownFiles(), text
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "tokenizer.json").touch()
    run_files.remember_files(home, run, run_files.KnownFiles(first / "tokenizer.json", first))
    run_files.remember_files(home, run, run_files.KnownFiles())  # a later start by name, without flags
    assert run_files.remembered_files(home, run) == run_files.KnownFiles(first / "tokenizer.json", first)
    run_files.remember_files(home, run, run_files.KnownFiles(base_model=second))
    assert run_files.remembered_files(home, run) == run_files.KnownFiles(first / "tokenizer.json", second)
    (first / "tokenizer.json").unlink()
    assert run_files.remembered_files(home, run) == run_files.KnownFiles(None, second)


def test_a_relative_place_is_noted_as_an_absolute_one(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = SignedManifest.sign(preset("tiny"), Identity.generate())
    run_files.remember_manifest(home, signed)
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    run_files.remember_files(home, signed.run_id, run_files.KnownFiles(base_model=Path("base")))
    monkeypatch.chdir("/")
    assert run_files.remembered_files(home, signed.run_id).base_model == tmp_path / "base"


def test_a_joined_run_is_found_by_name_and_by_the_beginning_of_its_id(home: Home) -> None:
    signed = SignedManifest.sign(preset("tiny").with_values(name="poems"), Identity.generate())
    run_files.remember_manifest(home, signed)
    run_files.remember_addresses(home, signed.run_id, [ADDRESS + signed.founder])
    for text in ("poems", signed.run_id, signed.run_id[:8]):
        found = runs.resolve(text, home)
        assert (found.run, found.addresses) == (signed.run_id, (ADDRESS + signed.founder,))
    with pytest.raises(InputError, match="did you mean 'poems'"):
        runs.resolve("poem", home)
    twin = SignedManifest.sign(preset("tiny").with_values(name="poems", seed=2), Identity.generate())
    run_files.remember_manifest(home, twin)
    with pytest.raises(InputError, match="Several runs are called 'poems'"):
        runs.resolve("poems", home)


def test_an_invite_is_joined_by_addresses_that_were_remembered(home: Home) -> None:
    signed = SignedManifest.sign(preset("tiny"), Identity.generate())
    run_files.remember_manifest(home, signed)
    other = "/ip4/203.0.113.6/tcp/4001/p2p/" + Identity.generate().peer
    run_files.remember_addresses(home, signed.run_id, [other])
    found = runs.resolve(str(Invite(signed.run_id, (ADDRESS + signed.founder,), "poems")), home)
    assert found.addresses == (ADDRESS + signed.founder, other) and found.signed is None and found.name == "poems"


@pytest.mark.parametrize("how", ["file", "file with blank lines", "stdin"])
def test_an_invite_may_come_from_a_file_or_standard_input(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """So a ticket, which is a secret, is in no argument that `ps` shows."""
    signed = SignedManifest.sign(preset("tiny"), Identity.generate())
    text = str(Invite(signed.run_id, (ADDRESS + signed.founder,), "poems"))
    text = f"\n{text}\n\n" if how == "file with blank lines" else f"{text}\n"
    (tmp_path / "invite").write_text(text)
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    found = runs.resolve("-" if how == "stdin" else str(tmp_path / "invite"), home)
    assert (found.run, found.addresses, found.file) == (signed.run_id, (ADDRESS + signed.founder,), None)
    if how == "stdin":
        assert runs.resolve("-", home) == found, "whoever watches the run asks again, and it can be read only once"


@pytest.mark.parametrize("text", ["", "name = 'poems'\n", "agora:/x", "\N{BOM}agora://x"])
def test_standard_input_without_an_invite_is_a_sentence(home: Home, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(InputError, match="Standard input holds no invite"):
        runs.resolve("-", home)


def test_a_file_with_an_invite_that_is_cut_off_is_said_to_be_one(home: Home, tmp_path: Path) -> None:
    (tmp_path / "invite").write_text("agora://abc\n")
    with pytest.raises(InputError, match="invite"):
        runs.resolve(str(tmp_path / "invite"), home)


def test_a_damaged_line_of_remembered_addresses_costs_that_address_alone(home: Home) -> None:
    signed = SignedManifest.sign(preset("tiny"), Identity.generate())
    run_files.remember_manifest(home, signed)
    whole = ADDRESS + signed.founder
    home.peers(signed.run_id).write_text(f"/ip4/203.0.113.6/tcp\n# mine\n{whole}\n{whole[:-20]}")
    assert run_files.remembered_addresses(home, signed.run_id) == (whole,)


@pytest.mark.parametrize(
    ("text", "error", "expected"),
    [
        ("missing.toml", InputError, "write one with `swarm new missing.toml`"),
        ("somewhere/missing", InputError, "There is no manifest"),
        ("nonsense", InputError, "not a file, an invite or a run"),
        ("agora://nonsense", InputError, "agora-node join"),
        (".", InputError, "is a directory"),
    ],
)
def test_what_is_none_of_the_three_is_a_sentence(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: type[Exception], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=expected) as caught:
        runs.resolve(text, home)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model]\nwidht = 128\n", "width"),
        ("[model]\nwidth = 130\nheads = 4\n", "heads"),
        ("[model]\nlayers = 1\n[stages]\ncount = 2\n", "layer"),
        ("name = \n", "TOML"),
        ("\x00", "TOML"),
    ],
)
def test_a_bad_manifest_is_a_sentence_that_names_the_file(home: Home, tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ManifestError, match=expected) as caught:
        runs.resolve(str(path), home)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_changed_signed_manifest_is_refused(home: Home, tmp_path: Path) -> None:
    path = write(tmp_path)
    sign_draft(runs.resolve(str(path), home), Identity.generate(), lambda signed: None)
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    with pytest.raises(AgoraError, match="signature"):
        runs.resolve(str(path), home)
