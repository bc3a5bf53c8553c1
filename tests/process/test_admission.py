"""Daemons of a run that admits by ticket: who gets in, what a stranger gets, and that a banned one stays out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.addresses import peer_of_address

from agora.cli import amend_command, signing_command
from agora.cli.signing_command import InviteRequest
from agora.node import run_files
from agora.node.paths import Home
from tests.process.harness import ENOUGH, Daemon, Swarm, swarm, swarm_command, tiny

pytestmark = pytest.mark.process

MANIFEST = tiny(2, admission={"mode": "ticket"}, optimizer={"target_tokens": 2048, "total_steps": 10**6})


def invite(capsys: pytest.CaptureFixture[str], made: Swarm, request: InviteRequest) -> dict[str, Any]:
    """What `swarm invite --json` prints on the founder's machine."""
    capsys.readouterr()
    assert signing_command.print_invite(str(made.file), request, made.directory / "founder", as_json=True) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def ban(made: Swarm, peer: str) -> None:
    assert signing_command.ban(str(made.file), peer, made.directory / "founder", as_json=False) == 0


def peers_seen(daemon: Daemon) -> set[str]:
    """The peers in the daemon's view; the empty set when it does not answer."""
    answer = daemon.try_ask("status")
    return {peer["peer"] for peer in answer["peers"]} if answer is not None else set()


def peers_on_disk(daemon: Daemon) -> set[str]:
    """The peers whose addresses the daemon has written for its next start, which a `swarm` command finds, too."""
    run = daemon.events("PeerStarted")[0]["run"]
    return {peer_of_address(address) for address in run_files.remembered_addresses(Home(daemon.root), run)}


def test_only_who_has_a_ticket_trains_until_it_is_banned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with swarm(tmp_path, MANIFEST) as made:
        founder = made.start("founder", "0")
        stranger = made.start("stranger", "1")  # with the invite that the founder's daemon prints: it has no ticket
        stranger.end_is_intended = True
        made.until(lambda: not stranger.is_alive, "the stranger to give up")
        assert stranger.process.poll() == 1 and "ticket" in stranger.last_words(), stranger.log()
        printed = invite(capsys, made, InviteRequest())
        guest = made.start("guest", "1", run=printed["invite"])
        made.serving("founder", "guest")
        made.until(lambda: made.completed(founder) >= ENOUGH, "microbatches to come home")
        kept = Home(guest.root).ticket(printed["invite"].split("/")[2])
        assert kept.stat().st_mode & 0o777 == 0o600
        made.until(lambda: peers_seen(founder) == {founder.peer, guest.peer}, "the founder to see the guest alone")
        ban(made, printed["ban_by"])
        made.until(lambda: peers_seen(founder) == {founder.peer}, "the ban to work")
        assert founder.events("PeerBanned", peer=printed["ban_by"])
        founder.ask("ban", peer=guest.peer)  # what `agora-node ban` asks: for this machine, whatever the run says
        assert (founder.root / "banned.txt").read_text().split() == [guest.peer]
        guest.kill()
        before = {event["microbatch"] for event in guest.events("MicrobatchCounted")}
        again = made.start("guest", "1", run=printed["invite"])
        made.until(lambda: again.is_serving or not again.is_alive, "the guest to have tried again")
        assert {peer["peer"] for peer in founder.ask("status")["peers"]} == {founder.peer}
        assert before == {event["microbatch"] for event in again.events("MicrobatchCounted")}


def last_step(daemon: Daemon) -> int:
    return int(daemon.ask("amendments")["step"])


def admit(made: Swarm, *peers: str) -> int:
    """Amends the run to admit these peers alone, and returns the step."""
    step = last_step(made.daemons["founder"]) + 80
    sets = ["admission.mode=listed", f"admission.peers={json.dumps(peers)}"]
    assert amend_command.amend(str(made.file), step, sets, made.directory / "founder", as_json=True) == 0
    return step


@pytest.mark.timeout(600)
def test_the_founder_amends_who_takes_part_and_lets_a_machine_in_again(tmp_path: Path) -> None:
    optimizer = {"target_tokens": 512, "total_steps": 10**6}
    with swarm(tmp_path, tiny(2, optimizer=optimizer)) as made:
        founder, mate, guest = (
            made.start(name, span) for name, span in (("founder", "0"), ("mate", "1"), ("guest", "1"))
        )
        made.serving()
        everyone = {founder.peer, mate.peer, guest.peer}
        made.until(lambda: all(peers_seen(daemon) == everyone for daemon in (founder, mate, guest)), "all to see all")
        step = admit(made, mate.peer)
        made.until(lambda: peers_seen(founder) == {founder.peer, mate.peer} == peers_seen(mate), "the guest to be out")
        assert last_step(founder) >= step - 1
        (told,) = made.until(lambda: guest.events("AdmissionChanged"), "the guest to know")
        assert told["mode"] == "listed" and not told["is_admitted"] and guest.is_alive
        assert any("this machine does not any more" in event["text"] for event in guest.events("OwnerTold"))
        goal = made.completed(founder) + ENOUGH
        made.until(lambda: made.completed(founder) >= goal, "the run to go on")
        guest.kill()
        for name in ("guest", "late"):
            refused = made.start(name, "1", run=made.invite)
            refused.end_is_intended = True
            made.until(lambda refused=refused: not refused.is_alive, f"{name} to give up")
            assert refused.process.poll() == 1 and "is not one of them" in refused.last_words(), refused.log()
        step = admit(made, mate.peer, guest.peer)
        made.until(lambda: last_step(founder) > step, "the second amendment")
        again = made.start("guest", "1", run=made.invite)
        made.serving("guest")
        made.until(lambda: peers_seen(founder) == everyone == peers_seen(again), "the guest to be back")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ban_reaches_all_by_any_peer_and_outlasts_every_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The founder's daemon is down when it bans: a peer takes the ban over the network, and tells the others."""
    with swarm(tmp_path, MANIFEST) as made:
        founder = made.start("founder", "0")
        text = invite(capsys, made, InviteRequest(days=1))["invite"]
        guests = [
            made.start(name, stages, run=text) for name, stages in (("first", "0"), ("second", "1"), ("bad", "1"))
        ]
        first, second, bad = guests
        made.serving()
        made.until(lambda: all(len(peers_seen(guest)) == 4 for guest in guests), "all to see all")
        reader = invite(capsys, made, InviteRequest(role="reader"))["invite"]
        nobody = str(tmp_path / "nobody")
        assert swarm_command(tmp_path / "run", "status", reader, "--dir", nobody)[1]["step"] >= 0
        code, status = swarm_command(tmp_path / "run", "status", made.invite, "--dir", nobody)
        assert (code, status["health"]["state"]) == (4, "UNREACHABLE") and "ticket" in status["health"]["why"]
        honest = {first.peer, second.peer}
        made.until(lambda: honest <= peers_on_disk(founder), "the founder's disk to have the addresses of the two")
        founder.kill()
        banned = bad.peer
        code, said = swarm_command(tmp_path / "run", "ban", str(made.file), banned, "--dir", str(founder.root))
        assert (code, said["told"]) == (0, ["a peer of the run"])
        for guest in (first, second):
            made.until(lambda guest=guest: not peers_seen(guest) & {banned}, "the ban to reach all")
        for guest in (first, second):
            guest.kill()
        daemons = [made.start("founder", "0", run=str(made.file))]
        made.serving("founder")
        text = invite(capsys, made, InviteRequest(days=1))["invite"]  # it listens at a new port, as they all do
        daemons += [made.start(name, stages, run=text) for name, stages in (("first", "0"), ("second", "1"))]
        made.serving("founder", "first", "second")
        everyone = {*honest, founder.peer}
        made.until(lambda: all(peers_seen(daemon) == everyone for daemon in daemons), "the three to see each other")
        before = made.completed(daemons[0])
        made.until(lambda: made.completed(daemons[0]) >= before + ENOUGH, "microbatches to come home")
        for daemon in daemons:
            assert banned not in {peer["peer"] for peer in daemon.ask("status")["peers"]}
        assert bad.is_alive
