"""Claims about `swarm invite` and `swarm ban` without a daemon: who may sign, what is printed, what is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.errors import InputError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.manifest import SignedManifest, preset
from agora_protocol.messages import TookRevocations
from agora_protocol.tickets import InviteTicket, open_proof, open_revocation

import agora.net.dht
from agora.cli import main_node, signing_command
from agora.cli.console import Failure
from agora.cli.signing_command import InviteRequest
from agora.cli.stage_sources import FoundRun
from agora.node import run_files
from agora.node.paths import Home

PEER = Identity(bytes([7]) * 32).peer


class Machine:
    """A data directory with a key and a joined run, and an address of a peer that does not answer."""

    def __init__(self, folder: Path, signed: SignedManifest | None = None, **admission: Any) -> None:
        self.home = Home(folder)
        self.identity = Identity.load_or_create(self.home.identity)
        self.signed = signed or SignedManifest.sign(preset("tiny", admission=admission), self.identity)
        run_files.remember_manifest(self.home, self.signed)
        run_files.remember_addresses(self.home, self.run, [f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"])

    @property
    def run(self) -> RunId:
        return self.signed.run_id

    def invite(self, capsys: pytest.CaptureFixture[str], request: InviteRequest) -> Invite:
        capsys.readouterr()
        assert signing_command.print_invite(self.run, request, self.home.root, as_json=True) == 0
        return Invite.parse(json.loads(capsys.readouterr().out)["invite"])

    def refuses(self, says: str, request: InviteRequest) -> None:
        with pytest.raises(Failure, match=says):
            signing_command.print_invite(self.run, request, self.home.root, as_json=True)


def test_the_founder_signs_for_one_peer_or_for_whoever_has_the_invite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    founder = Machine(tmp_path, mode="ticket")
    named = InviteTicket.parse(founder.invite(capsys, InviteRequest(PEER, 3.0)).ticket)
    (ticket,) = open_proof(named.proof_for(PEER, founder.run), founder.run)
    assert (ticket.issuer, ticket.holder, ticket.role) == (founder.identity.peer, PEER, "member")
    anybody = InviteTicket.parse(founder.invite(capsys, InviteRequest(role="reader")).ticket)
    assert [link.role for link in open_proof(anybody.proof_for(PEER, founder.run), founder.run)] == ["reader"] * 2
    assert signing_command.print_invite(founder.run, InviteRequest(), founder.home.root, as_json=False) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("agora://") and "keep it secret" in printed.err and "swarm ban" in printed.err


def test_a_delegate_signs_in_the_founders_name_but_names_no_delegates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    founder = Machine(tmp_path / "founder", mode="ticket")
    other = Machine(tmp_path / "delegate", founder.signed)
    other.refuses("only the founder .* or a delegate can sign", InviteRequest())
    ticket = InviteTicket.parse(founder.invite(capsys, InviteRequest(other.identity.peer, role="delegate")).ticket)
    run_files.write_proof(other.home, other.run, ticket.proof_for(other.identity.peer, other.run))
    made = InviteTicket.parse(other.invite(capsys, InviteRequest()).ticket)
    assert [link.role for link in open_proof(made.proof_for(PEER, other.run), other.run)] == [
        "delegate",
        "member",
        "member",
    ]
    other.refuses("only the founder can name delegates", InviteRequest(PEER, role="delegate"))


def test_runs_without_tickets_have_plain_invites_and_say_what_has_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Machine(tmp_path / "open", mode="open").invite(capsys, InviteRequest()).ticket == ""
    listed = Machine(tmp_path / "listed", mode="listed", peers=[PEER])
    assert listed.invite(capsys, InviteRequest(PEER)).ticket == ""
    listed.refuses("does not list", InviteRequest(Identity(bytes([8]) * 32).peer))
    listed.refuses("tickets of readers do not count", InviteRequest(role="reader"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (InviteRequest(role="king"), "member, reader, delegate"),
        (InviteRequest("somebody"), "not a peer id"),
        (InviteRequest(role="delegate"), "name it with --peer"),
        (InviteRequest(days=0), "above 0"),
    ],
)
def test_what_cannot_be_is_said_at_once(tmp_path: Path, wrong: InviteRequest, says: str) -> None:
    Machine(tmp_path, mode="ticket").refuses(says, wrong)


def test_a_ban_that_reaches_nobody_is_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    founder = Machine(tmp_path, mode="open")
    asked: list[list[bytes]] = []

    def unreachable(*arguments: Any) -> list[str]:
        asked.append(run_files.read_revocations(founder.home, founder.run))
        raise Failure("nobody could be told")

    monkeypatch.setattr(signing_command, "tell_peer", unreachable)
    with pytest.raises(Failure, match="nobody could be told"):
        signing_command.ban(founder.run, PEER, tmp_path, as_json=True)
    ((sealed,),) = asked
    assert open_revocation(sealed, founder.run).subject == PEER
    for peer, says in (("nobody", "not a peer id"), (founder.identity.peer, "founder cannot be banned")):
        with pytest.raises(Failure, match=says):
            signing_command.ban(founder.run, peer, tmp_path, as_json=True)


def test_an_owner_bans_a_peer_while_no_daemon_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGORA_RUNTIME_DIR", str(tmp_path / "no daemons"))
    main_node.ban(PEER, directory=tmp_path)
    assert run_files.read_banned(Home(tmp_path)) == [PEER] and "next start" in capsys.readouterr().err
    with pytest.raises(InputError, match="not a peer id"):
        main_node.ban("somebody", directory=tmp_path)


def test_the_owners_bans_and_the_runs_are_read_again_as_they_were_written(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert run_files.read_banned(home) == [] == run_files.read_revocations(home, "ab")
    run_files.add_banned(home, PEER)
    run_files.add_banned(home, PEER)
    assert run_files.read_banned(home) == [PEER] and home.banned.stat().st_mode & 0o777 == 0o600
    run_files.write_revocations(home, "ab", [b"one", b"two"])
    home.revocations("ab").write_text(home.revocations("ab").read_text() + "not hex\n")
    assert run_files.read_revocations(home, "ab") == [b"one", b"two"]
    home.ticket("ab").write_text("not hex")
    with pytest.raises(Exception, match="damaged"):
        run_files.read_proof(home, "ab")


def test_a_data_directory_without_the_run_costs_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    founder, asked = Machine(tmp_path / "with", mode="open"), []

    def share(addresses: Sequence[str], *others: object) -> TookRevocations:
        asked.append(addresses)
        return TookRevocations(1, 0)

    # A fake module: the real one's packages cannot be imported beside those of other tests.
    light = SimpleNamespace(share_revocations=share, Credentials=lambda identity, proof: None)
    monkeypatch.setitem(sys.modules, "agora.net.dht.status_client", light)
    monkeypatch.setattr(agora.net.dht, "status_client", light, raising=False)
    found = FoundRun(founder.signed, (founder.home, Home(tmp_path / "without")), (), tmp_path)
    signer = signing_command.find_signer(found)
    assert signing_command.tell_peer(founder.run, found, b"sealed", signer) == ["a peer of the run"]
    assert asked == [(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",)]
