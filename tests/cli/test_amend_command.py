"""Claims about `swarm amend` without a daemon: what may be set, by whom, from when, and what is printed and kept."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from agora_protocol.amendments import open_amendment
from agora_protocol.errors import AgoraError
from agora_protocol.messages import TookAmendments
from agora_protocol.tickets import InviteTicket, Revocation, seal_revocation

import agora.net.dht
from agora.cli import amend_command
from agora.cli.console import EXIT_STALLED, EXIT_USAGE, Failure
from agora.cli.signing_command import InviteRequest
from agora.node import run_files
from tests.cli.test_signing_command import Machine


class FakeSwarm:
    """The light client's answers: of a run at `step` whose peer knows `known`; None: no peer answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int | None = 100) -> None:
        self.step = step
        self.known: list[bytes] = []
        self.refuses = ""
        monkeypatch.setenv("AGORA_RUNTIME_DIR", "/nonexistent")
        # A fake module: the real one's packages cannot be imported beside those of other tests.
        light = SimpleNamespace(
            Credentials=lambda identity, proof: None,
            fetch_status=lambda *_, **__: {"step": self._answer()},
            fetch_amendments=lambda *_, **__: tuple(self.known),
            share_amendments=self._share,
        )
        monkeypatch.setitem(sys.modules, "agora.net.dht.status_client", light)
        monkeypatch.setattr(agora.net.dht, "status_client", light, raising=False)

    def _answer(self) -> int:
        if self.step is None:
            raise AgoraError("no peer of the run answered")
        return self.step

    def _share(self, addresses: Sequence[str], run: str, sealed: Sequence[bytes], *_: object) -> TookAmendments:
        if self.refuses:
            return TookAmendments(0, 1, self.refuses)
        self.known += [each for each in sealed if each not in self.known]
        return TookAmendments(1, 0, "")


def amend(machine: Machine, from_step: int | None, *sets: str) -> int:
    return amend_command.amend(machine.run, from_step, sets, machine.home.root, as_json=True)


def refuses(machine: Machine, says: str, from_step: int | None, *sets: str, code: int | None = None) -> None:
    with pytest.raises(Failure, match=says) as caught:
        amend(machine, from_step, *sets)
    assert code is None or caught.value.code == code


def test_the_founder_amends_and_the_next_one_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, founder = FakeSwarm(monkeypatch), Machine(tmp_path, mode="open")
    assert amend(founder, 200, "optimizer.total_steps=4000", "optimizer.learning_rate = 1e-3") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"] == 100 and printed["told"] == ["a peer of the run"]
    assert printed["amendment"]["changes"] == {"optimizer.total_steps": 4000, "optimizer.learning_rate": 0.001}
    assert amend(founder, 300, "optimizer.learning_rate=2") == 0
    first, second = (open_amendment(sealed, founder.run) for sealed in swarm.known)
    assert second.amendment.previous == first.hash and second.amendment.number == 2
    assert second.amendment.values == {"optimizer.learning_rate": 2.0}, "as the manifest has it"
    assert run_files.read_amendments(founder.home, founder.run) == swarm.known
    swarm.step = 250
    capsys.readouterr()
    assert amend_command.list_amendments(founder.run, founder.home.root, as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)["amendments"]
    assert [(row["number"], row["counts"], row["in_force"]) for row in listed] == [(1, True, True), (2, True, False)]
    assert amend_command.list_amendments(founder.run, founder.home.root, as_json=False) == 0
    assert "optimizer.learning_rate = 2.0  (in 50 steps)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("from_step", "sets", "says", "code"),
    [
        (None, ["optimizer.total_steps=1"], "--from-step N", EXIT_USAGE),
        (200, [], "--set SECTION.FIELD=VALUE", EXIT_USAGE),
        (200, ["optimizer.total_steps"], "is not SECTION.FIELD=VALUE", EXIT_USAGE),
        (200, ["optimizer.totl_steps=1"], "did you mean 'optimizer.total_steps'", EXIT_USAGE),
        (200, ["model.layers=8"], "core of the manifest", EXIT_USAGE),
        (200, ['evaluation.tasks=["summs"]'], "there is no task 'summs'", EXIT_USAGE),
        (200, ["optimizer.total_steps=1", "optimizer.total_steps=2"], "set twice", EXIT_USAGE),
        (200, ["optimizer.total_steps=many"], "do not fit the run", EXIT_USAGE),
        (200, ["optimizer.target_tokens=1000"], "use target_tokens", EXIT_USAGE),
        (110, ["optimizer.total_steps=4000"], "is too near.* use --from-step 120", None),
        (200, ["optimizer.total_steps=150"], "would have ended after 150 steps", None),
    ],
)
def test_what_cannot_be_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_step: int | None, sets: list[str], says: str, code: int | None
) -> None:
    swarm, founder = FakeSwarm(monkeypatch), Machine(tmp_path, mode="open")
    refuses(founder, says, from_step, *sets, code=code)
    assert swarm.known == [] == run_files.read_amendments(founder.home, founder.run)


def test_only_founder_and_delegates_sign_and_a_banned_delegate_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, founder = FakeSwarm(monkeypatch), Machine(tmp_path / "founder", mode="ticket")
    other = Machine(tmp_path / "delegate", founder.signed)
    refuses(other, "only the founder .* or a delegate can sign", 200, "optimizer.total_steps=4000")
    invite = founder.invite(capsys, InviteRequest(other.identity.peer, role="delegate"))
    proof = InviteTicket.parse(invite.ticket).proof_for(other.identity.peer, other.run)
    run_files.write_proof(other.home, other.run, proof)
    assert amend(other, 200, "optimizer.total_steps=4000") == 0 and len(swarm.known) == 1
    ban = Revocation(founder.identity.peer, other.identity.peer, int(time.time()), b"")
    run_files.write_revocations(other.home, other.run, [seal_revocation(ban, other.run, founder.identity)])
    refuses(other, "the founder has banned this machine's key", 300, "optimizer.total_steps=5000")


def test_nothing_is_amended_or_kept_when_nobody_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm, founder = FakeSwarm(monkeypatch, step=None), Machine(tmp_path, mode="open")
    refuses(founder, "which step it has come to", 200, "optimizer.total_steps=4000", code=EXIT_STALLED)
    swarm.step, swarm.refuses = 100, "Step 200 is too near or over"
    refuses(founder, "does not accept it: Step 200 is too near", 200, "optimizer.total_steps=4000")
    assert run_files.read_amendments(founder.home, founder.run) == []


def test_a_run_without_amendments_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSwarm(monkeypatch, step=None)
    founder = Machine(tmp_path, mode="open")
    assert amend_command.list_amendments(founder.run, founder.home.root, as_json=False) == 0
    assert "no amendments" in capsys.readouterr().err
