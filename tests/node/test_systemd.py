"""Claims about what systemd is told, against a socket of our own; and about the unit file."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from agora.node.daemon_context import SystemdNotifier
from agora.node.process.watchdog import may_feed
from agora.observe import events
from agora.observe.reporter import Reporter

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "agora-node.service"


def listener(address: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.bind(address)
    channel.settimeout(5)
    return channel


@pytest.mark.parametrize("abstract", [False, True])
def test_datagrams_are_lines_of_key_and_value(tmp_path: Path, abstract: bool) -> None:
    name = f"agora-test-{os.getpid()}"
    bound, told = (f"\0{name}", f"@{name}") if abstract else (str(tmp_path / "notify"), str(tmp_path / "notify"))
    with listener(bound) as channel:
        SystemdNotifier({"NOTIFY_SOCKET": told}).send(READY=1, STATUS="step 4\nWATCHDOG=1")
        assert channel.recv(1024) == b"READY=1\nSTATUS=step 4"


def test_without_systemd_nothing_is_sent_and_nothing_breaks(tmp_path: Path) -> None:
    SystemdNotifier({}).send(READY=1)
    SystemdNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send(READY=1)


def test_the_watchdog_is_ours_only_when_it_names_us() -> None:
    assert SystemdNotifier({"WATCHDOG_USEC": "60000000"}).watchdog_s == 60.0
    assert SystemdNotifier({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 60.0
    assert SystemdNotifier({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}).watchdog_s == 0.0
    assert SystemdNotifier({"WATCHDOG_USEC": "soon"}).watchdog_s == 0.0


@pytest.mark.parametrize(
    ("silent_s", "in_progress", "waiting_for", "pause_reason", "fed", "sentence"),
    [
        (1, 3, "", "", True, "working on 3 microbatches"),
        (90, 3, "", "", False, "no progress for 90 s with 3 open microbatches"),
        (90, 3, "a peer of stage 1", "", True, "waiting for a peer of stage 1"),
        (90, 3, "", "paused by its owner", True, "paused by its owner"),
        (90, 0, "", "", True, "idle: no open microbatch"),
    ],
)
def test_the_watchdog_is_fed_by_progress_or_by_a_stated_wait(
    silent_s: float, in_progress: int, waiting_for: str, pause_reason: str, fed: bool, sentence: str
) -> None:
    assert may_feed(silent_s, 30.0, in_progress, waiting_for, pause_reason) == (fed, sentence)


@pytest.mark.parametrize(
    ("event", "is_sign"),
    [
        (events.MicrobatchCompleted("m", 1.0, 4, 0.1), True),
        (events.MicrobatchCounted("m", (0,), 4), True),
        (events.StepTaken(0, 1, 4, None, 0.1), True),
        (events.MicrobatchRerouted("m", 1, "p", "broken"), False),
        (events.RepeatServed("m", 0), False),
        (events.HopRefused("m", 0, "busy"), False),
        (events.TaskFailed("device", "gone"), False),
        (events.MicrobatchDropped("m", "no peer"), False),
        (events.PartFailed(0, "slice", 1, 1, "late"), False),
    ],
)
def test_failures_and_retries_never_feed_the_watchdog(event: events.Event, is_sign: bool) -> None:
    reporter = Reporter(unix=lambda: 50.0)
    reporter.report(event)
    assert (reporter.snapshot().last_sign_unix == 50.0) == is_sign


def test_the_unit_parses_and_keeps_its_promises() -> None:
    parser = configparser.RawConfigParser(dict_type=dict, strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    service = parser["Service"]
    expected = {
        "Type": "notify",
        "WatchdogSec": "60",
        "DynamicUser": "yes",
        "StateDirectory": "agora",
        "RuntimeDirectory": "agora",
        "Restart": "on-failure",
        "RestartPreventExitStatus": "2",
        "ProtectSystem": "strict",
        "NoNewPrivileges": "yes",
        "KillMode": "mixed",
        "UMask": "0077",
        "TasksMax": "1024",
        "CPUQuota": "800%",
        "MemorySwapMax": "0",
        "IPAddressDeny": "link-local multicast fd00:ec2::254 100.100.100.200 168.63.129.16 192.0.0.192",
    }
    assert {key: service.get(key) for key in expected} == expected
    assert "@system-service" in UNIT.read_text()
    assert int(service["TimeoutStopSec"]) > 10
    assert service["ExecStart"].endswith("agora-node join ${RUN}")


def test_the_invite_is_in_no_argument_and_in_no_file_that_others_can_read() -> None:
    unit = UNIT.read_text()
    assert "install -m 600" in unit and "tee " not in unit
    assert not re.search(r"RUN=agora://|echo .*agora://", unit)
    assert "LoadCredential=run:/etc/agora-node.run" in unit and "Environment=RUN=%d/run" in unit


def test_the_unit_sets_only_variables_that_the_daemon_knows() -> None:
    from agora.node import settings

    known = settings.OTHER_VARIABLES | {settings.PREFIX + name.upper() for name in settings.Settings.model_fields}
    assert set(re.findall(r"\b(AGORA_\w+)=", UNIT.read_text())) <= known


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_the_units_exposure_is_at_most_two() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"Overall exposure level.*?: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= 2.0
