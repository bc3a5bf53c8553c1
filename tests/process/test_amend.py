"""Daemons of a run that its founder changes while it trains: all change at one step, and nobody else changes it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agora_protocol.amendments import NOTICE, Amendment, open_amendment, seal_amendment
from agora_protocol.identity import Identity
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_sections import OptimizerSection
from agora_protocol.packing import pack_canonical

from agora.cli import amend_command
from agora.cli.console import Failure
from agora.node.control.control_client import DaemonRefused
from agora.node.paths import Home
from agora.train.optimizer import learning_rate
from tests.process.harness import Daemon, Swarm, checkpoint_at, last_step, steps_of, swarm, tiny

pytestmark = pytest.mark.process

OPTIMIZER = {"target_tokens": 1024, "warmup_steps": 4, "total_steps": 10_000, "learning_rate": 0.003}
CHANGED = {"learning_rate": 0.001, "total_steps": 4000, "target_tokens": 2048}
NAMES = ("founder", "mate")
AHEAD = 60  # steps from the one at which the founder signs to the first one that is amended


def run_manifest(**sections: Any) -> Manifest:
    return tiny(2, **({"optimizer": OPTIMIZER, "checkpoint": {"every": 5, "keep": 1000}} | sections))


def amend(made: Swarm, capsys: pytest.CaptureFixture[str], from_step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """What `swarm amend --json` prints on the founder's machine."""
    capsys.readouterr()
    sets = [f"{key}={value}" for key, value in named(values).items()]
    amend_command.amend(str(made.file), from_step, sets, made.directory / "founder", as_json=True)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key if "." in key else f"optimizer.{key}": value for key, value in values.items()}


def listed(made: Swarm, capsys: pytest.CaptureFixture[str], name: str) -> list[dict[str, Any]]:
    """What `swarm amend --list --json` prints on that machine."""
    capsys.readouterr()
    amend_command.list_amendments(str(made.file), made.directory / name, as_json=True)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["amendments"]
    return found


def inject(daemon: Daemon, run: str) -> int:
    """Hands amendments to a daemon that must not count, and returns how many it has refused."""
    founder = Identity.load(Home(daemon.root.parent / "founder").identity)
    member = Identity.load(Home(daemon.root).identity)
    known = [open_amendment(bytes.fromhex(data), run) for data in daemon.ask("amendments")["known"]]
    step = int(daemon.ask("amendments")["step"])
    last = known[-1] if known else None
    ahead = step + 10 * NOTICE

    def signed(by: Identity, of: str = run, **fields: Any) -> bytes:
        values = {
            "number": last.amendment.number + 1 if last else 1,
            "previous": last.hash if last else bytes.fromhex(run),
            "signed_step": step,
            "from_step": ahead,
            "issued_unix": 5,
            "changes": pack_canonical({"optimizer.learning_rate": 99.0}),
            "proof": b"",
        }
        return seal_amendment(Amendment(by.peer, **(values | fields)), of, by)

    false = bytearray(signed(founder))
    false[-1] ^= 1
    wrong = [
        bytes(false),  # another's signature
        signed(member),  # of who is no founder
        signed(founder, "ab" * 32, previous=bytes.fromhex("ab" * 32), number=1),  # of another run
        signed(founder, from_step=max(step - 1, NOTICE), signed_step=0),  # signed long ago
        signed(founder, from_step=step + 1),  # too near
        signed(founder, previous=bytes(32)),  # after one that nobody knows
        signed(founder, changes=pack_canonical({"optimizer.target_tokens": 1000})),  # no whole microbatches
    ]
    refused = 0
    for data in wrong:
        try:
            daemon.ask("amend", amendment=data.hex())
        except DaemonRefused:
            refused += 1
    assert len(daemon.events("AmendmentRefused")) >= refused == len(wrong)
    return refused


def slowest_step(daemon: Daemon) -> int:
    """Returns the step of its stage that has taken the fewest."""
    return min(max((int(e["step"]) for e in steps_of(daemon, stage)), default=0) for stage in (0, 1))


def has_changed_at(daemon: Daemon, stage: int, step: int) -> bool:
    """Whether the rates of the stage's steps are the manifest's before `step`, and the amended ones from it on."""
    before = OptimizerSection(**OPTIMIZER)
    after = OptimizerSection(**(OPTIMIZER | CHANGED))
    taken = [event for event in steps_of(daemon, stage) if event["learning_rate"]]
    expected = [learning_rate(e["step"] - 1, before if e["step"] - 1 < step else after) for e in taken]
    return [event["learning_rate"] for event in taken] == expected


def has_other_text_from(daemon: Daemon, step: int) -> bool:
    """Whether the loss falls once stage 0, whose peer draws, is at `step`: from 26 letters to three.

    The last stage, which knows the loss, may be at another step then.
    """
    (changed_at,) = [event["at_unix"] for event in steps_of(daemon, 0) if event["step"] == step]
    losses = [(event["at_unix"], event["loss"]) for event in steps_of(daemon, 1) if event["loss"] is not None]
    before = [loss for at, loss in losses if at < changed_at][-6:-1]
    after = [loss for at, loss in losses if at > changed_at][-5:]
    return bool(before and after) and max(after) + 0.5 < min(before)


def common_step(daemons: list[Daemon], stage: int, least: int) -> int | None:
    """A step from `least` on of which all have a checkpoint of the stage with the same bits; None without one."""
    written = [{int(e["step"]) for e in daemon.events("CheckpointWritten", stage=stage)} for daemon in daemons]
    for step in sorted(set.intersection(*written), reverse=True):
        if step < least:
            return None
        first, *others = (checkpoint_at(daemon, stage, step) for daemon in daemons)
        if all(np.array_equal(first[name], other[name]) for other in others for name in first):
            return step
    return None


@pytest.mark.timeout(900)
def test_a_live_run_is_amended_while_one_is_killed_and_one_is_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    # Of either text gradients stay of one size. Of a single letter they would vanish in few steps, and a mean with a
    # replica's older ones would then be rejected as implausible.
    random = np.random.default_rng(0)
    for name, letters in (("noise.txt", 26), ("letters.txt", 3)):
        (texts / name).write_bytes(random.integers(97, 97 + letters, 200_000).astype(np.uint8).tobytes())
    data, changed = (
        {"corpus": ["noise.txt", "letters.txt"], "weights": [1.0, 0.0]},
        CHANGED | {"data.weights": [0.0, 1.0], "averaging.gradient_wire": "normal4"},
    )
    flags = ["--allow-files", "--data", str(texts)]
    with swarm(tmp_path, run_manifest(data=data)) as made:
        four = [made.start(name, "0-1", flags=flags) for name in ("founder", "mate", "killed", "away")]
        founder, mate, killed, away = four
        made.until(lambda: min(map(last_step, (founder, mate, killed, away))) >= 2 * NOTICE, "steps of all four")
        away.ask("pause")
        made.until(lambda: away.ask("report")["paused"], "one to be away")
        run = founder.events("PeerStarted")[0]["run"]
        assert inject(mate, run) == 7 and listed(made, capsys, "mate") == []

        step = founder.ask("amendments")["step"] + AHEAD
        said = amend(made, capsys, step, changed)
        assert said["amendment"]["number"] == 1 and f"the daemon in {founder.root}" in said["told"]
        with pytest.raises(Failure, match="use --from-step"):
            amend(made, capsys, said["step"] + 1, {"learning_rate": 0.5})
        made.until(lambda: killed.events("AmendmentTaken") and mate.events("AmendmentTaken"), "the amendment to spread")
        killed.kill()
        live = [founder, mate]
        made.until(lambda: min(map(slowest_step, live)) >= step + 10, "steps beyond the amendment")
        away.ask("resume")
        back = made.start("killed", "0-1", flags=flags)
        made.serving("founder", "mate", "killed", "away")
        assert inject(mate, run) == 7
        made.until(lambda: min(map(slowest_step, (founder, mate, back, away))) >= step + 30, "steps of all four again")

        for daemon in live:
            assert has_other_text_from(daemon, step), steps_of(daemon, 1)
        for stage in (0, 1):
            for daemon in live:
                assert [e["step"] for e in daemon.events("AmendmentInForce", stage=stage)] == [step]
                assert has_changed_at(daemon, stage, step), steps_of(daemon, stage)
                diverged = daemon.events("StageDiverged", stage=stage)
                assert not [event for event in diverged if step <= event["step"] < step + 10], "they changed together"
            for daemon in (back, away):
                assert has_changed_at(daemon, stage, step), steps_of(daemon, stage)
            equal = made.until(lambda stage=stage: common_step([*live, back, away], stage, step + 10), "the same bits")
            assert equal > step
        for daemon in (*live, back, away):
            (only,) = listed(made, capsys, daemon.name)
            assert only["in_force"] and only["changes"] == named(changed)
            assert daemon.ask("status")["amendments"][0]["number"] == 1
        made.stop()


def bytes_per_microbatch(peer: Daemon, microbatches: int) -> float:
    """Returns how many bytes of boundaries or gradients the daemon sends for each of the next `microbatches`."""

    def look() -> tuple[int, int]:
        return int(peer.ask("report")["bytes"]["boundary"]), len(peer.events("MicrobatchCompleted"))

    sent, completed = look()
    while (now := look())[1] < completed + microbatches:
        time.sleep(0.05)
    return (now[0] - sent) / (now[1] - completed)


def test_staleness_and_codec_are_amended_while_microbatches_are_on_their_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    boundary = {"codec": "float32"}
    with swarm(tmp_path, run_manifest(schedule={"staleness": 0.01, "max_in_flight": 0}, boundary=boundary)) as made:
        founder, mate = (made.start(name, stage) for name, stage in zip(NAMES, "01", strict=True))

        def is_limited() -> bool:
            return "by schedule.staleness" in str(founder.ask("report")["credit"])

        made.until(lambda: last_step(founder) >= 5 and is_limited(), "a window that staleness limits")
        step = founder.ask("amendments")["step"] + AHEAD
        before = bytes_per_microbatch(founder, 30)
        amend(made, capsys, step, {"schedule.staleness": 8.0, "boundary.codec": "int4"})
        made.until(lambda: last_step(founder) >= step + 1 and not is_limited(), "a window without that limit")
        assert bytes_per_microbatch(founder, 30) < 0.3 * before
        for daemon in (founder, mate):
            for name in ("MicrobatchDropped", "HopRefused", "MicrobatchRerouted", "OffenceRecorded"):
                assert not daemon.events(name), name
        made.stop()


def test_a_run_that_has_ended_goes_on_when_it_is_amended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--at-end", "serve", "--export-at-end", "never"]
    with swarm(tmp_path, run_manifest(optimizer=OPTIMIZER | {"total_steps": 6})) as made:
        peers = [made.start(name, stage, flags=flags) for name, stage in zip(NAMES, "01", strict=True)]

        def have_completed(times: int) -> bool:
            return all(len(peer.events("StateChanged", state="completed")) == times for peer in peers)

        made.until(lambda: have_completed(1), "the run to end")
        step = peers[0].ask("amendments")["step"]
        amend(made, capsys, step, {"total_steps": step + NOTICE})
        made.until(lambda: have_completed(2), "the run to end again")
        for peer in peers:
            assert last_step(peer) >= step + NOTICE
            health = peer.ask("status")["health"]
            assert health["state"] == "COMPLETED", health
        made.stop()
