"""A daemon with a queue of runs: it joins the next when one is over, and passes over one that does not admit it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from agora_protocol.identity import Identity
from agora_protocol.manifest import SignedManifest

from agora.node import runs
from agora.node.paths import Home
from tests.process.harness import WAIT_S, Daemon, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_a_queue_goes_from_a_run_that_is_over_past_one_that_refuses_to_one_that_trains(tmp_path: Path) -> None:
    """One process, with one number, is a peer of two runs one after the other; its owner leaves both by one command."""
    short = tiny(1, optimizer={"total_steps": 3, "warmup_steps": 1}).model_copy(update={"name": "short"})
    first = tmp_path / "short.toml"
    first.write_text(short.to_toml())
    others = {"mode": "listed", "peers": (Identity.generate().peer,)}
    closed = tiny(1, admission=others).model_copy(update={"name": "closed"})
    second = tmp_path / "closed.toml"
    second.write_text(SignedManifest.sign(closed, Identity.generate()).to_toml())
    with swarm(tmp_path, tiny(1).model_copy(update={"name": "long"})) as made:
        founder = made.start("founder", "0")
        made.serving()
        guest = made.start(
            "guest", run=str(first), flags=[str(second), made.invite], settings={"AGORA_AT_END": "serve"}
        )
        made.until(lambda: len(guest.events("PeerStarted")) == 2, "it to serve the last run")
        began_first, began_last = guest.events("PeerStarted")
        assert began_first["pid"] == began_last["pid"] == guest.process.pid
        assert began_first["run"] != began_last["run"] == founder.events("PeerStarted")[0]["run"]
        assert "has taken its 3 steps" in guest.events("StateChanged", state="completed")[0]["reason"]
        queue = guest.ask("status", WAIT_S)["machine"]["queue"]
        assert queue["next"] == [] and queue["done"][0] == {"run": "short", "why": "it has taken its steps"}
        assert queue["done"][1]["run"] == "closed" and "is not one of them" in queue["done"][1]["why"]
        made.until(lambda: len(founder.ask("status")["peers"]) == 2, "the founder to see it")
        command = Path(f"/proc/{guest.process.pid}/cmdline").read_text()
        assert "agora://" not in command, "an invite may hold a ticket"
        assert runs.resolve("short", Home(guest.root)).run == began_first["run"]
        guest.end_is_intended = True
        guest.ask("leave")
        assert guest.process.wait(WAIT_S) == 0


def test_the_daemons_of_several_devices_go_to_the_next_run_together(tmp_path: Path) -> None:
    """The supervisor keeps its number; each device's daemon has trained in both runs."""
    short = tiny(1, optimizer={"total_steps": 3, "warmup_steps": 1}).model_copy(update={"name": "short"})
    first = tmp_path / "short.toml"
    first.write_text(short.to_toml())
    with swarm(tmp_path, tiny(1).model_copy(update={"name": "long"})) as made:
        founder = made.start("founder", "0")
        made.serving()
        flags = [made.invite, "--device", "cpu,cpu"]
        machine = made.start("machine", run=str(first), flags=flags, settings={"AGORA_AT_END": "serve"})
        second = Daemon("second", machine.root / "devices" / "cpu.1", machine.process)
        run = founder.events("PeerStarted")[0]["run"]
        for device in (machine, second):
            made.until(lambda each=device: each.events("PeerStarted", run=run), "each device to serve the last run")
            assert [event["run"] == run for event in device.events("PeerStarted")] == [False, True]
            assert device.ask("status", WAIT_S)["machine"]["queue"]["done"] == [
                {"run": "short", "why": "it has taken its steps"}
            ]
        made.until(lambda: len(founder.ask("status")["peers"]) == 3, "the founder to see both")
        machine.end_is_intended = True
        machine.kill(signal.SIGTERM)
        assert machine.process.wait(WAIT_S) == 0
