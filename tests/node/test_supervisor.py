"""Claims about the daemons of several devices: what each gets, when one starts again, what systemd is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agora.core.clock import loop_time
from agora.node import daemon_registry, paths
from agora.node.daemon_context import SystemdNotifier
from agora.node.paths import Home
from agora.node.process import supervisor
from agora.node.process.supervisor import (
    FIRST_RESTART_DELAY_S,
    MAX_RESTART_DELAY_S,
    RESTART_WINDOW_S,
    Supervisor,
    homes_of,
    parse_notice,
    restart_delay_s,
    settings_per_device,
)
from agora.node.runs import RunReference
from agora.node.settings import Settings, load, without_settings
from agora.observe.events import Event

HOME = Home(Path("/data/agora"))
CARDS = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_daemon_that_goes_on_dying_waits_longer_each_time_and_one_that_has_run_long_does_not() -> None:
    ends: list[float] = []
    waits = []
    now = 1000.0
    for _ in range(10):
        ends.append(now)
        waits.append(restart_delay_s(ends, now))
        now += waits[-1]
    assert waits[:4] == [
        FIRST_RESTART_DELAY_S,
        2 * FIRST_RESTART_DELAY_S,
        4 * FIRST_RESTART_DELAY_S,
        8 * FIRST_RESTART_DELAY_S,
    ]
    assert waits == sorted(waits) and max(waits) <= MAX_RESTART_DELAY_S
    later = now + RESTART_WINDOW_S
    assert restart_delay_s([*ends, later], later) == FIRST_RESTART_DELAY_S


def test_the_first_device_keeps_the_data_directory_and_its_key() -> None:
    assert homes_of(HOME, CARDS[:2]) == [HOME, Home(HOME.root / "devices" / "cuda-1")]
    places = homes_of(HOME, ["cpu", "cpu", "cpu"])
    assert len({place.root for place in places}) == 3


def test_cards_share_what_the_machine_and_its_owner_have() -> None:
    chosen = Settings(
        memory_gib=40.0,
        threads=9,
        disk_gib=100.0,
        upload_limit="8Mbit/s",
        listen=("0.0.0.0:31330", "/ip6/::/tcp/0"),
        announce=("/dns4/home.example/tcp/31330",),
        metrics="127.0.0.1:9464",
        page=True,
    )
    shares = settings_per_device(chosen, CARDS, HOME, free_bytes=2.0**36)
    assert [each.device for each in shares] == CARDS
    assert {each.threads for each in shares} == {2}
    assert {each.owners_memory.gpu for each in shares} == {40 * 2**30}
    assert {each.owners_memory.host for each in shares} == {10 * 2**30}
    assert {each.rate_limits.upload for each in shares} == {250_000.0}
    assert {each.rate_limits.download for each in shares} == {float("inf")}
    assert [each.listen[0] for each in shares] == [f"/ip4/0.0.0.0/tcp/{31330 + at}" for at in range(4)]
    assert {each.listen[1] for each in shares} == {"/ip6/::/tcp/0"}
    assert [each.metrics_address for each in shares] == [("127.0.0.1", 9464 + at) for at in range(4)]
    assert [each.page_endpoint for each in shares] == [("127.0.0.1", 8800), None, None, None]
    assert [len(each.announce) for each in shares] == [1, 0, 0, 0]
    assert {each.corpus_cache for each in shares} == {"/data/agora/corpus"}
    assert sum(each.disk_gib for each in shares[1:]) < shares[0].disk_gib == 100.0


def test_without_an_owners_limit_the_machines_free_memory_is_divided() -> None:
    on_cards = settings_per_device(Settings(), CARDS, HOME, free_bytes=2.0**36)
    assert {(each.owners_memory.gpu, each.owners_memory.host) for each in on_cards} == {(0, 2**34)}
    on_cpus = settings_per_device(Settings(), ["cpu", "cpu"], HOME, free_bytes=2.0**36)
    assert {each.owners_memory.host for each in on_cpus} == {2**35}


def test_a_small_limit_stays_one_that_settings_accept() -> None:
    (first, *_) = settings_per_device(Settings(upload_limit="20kB/s"), CARDS, HOME, free_bytes=2.0**36)
    assert load(Path("/none"), {}, first.to_environment()) == first


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"data": ("/a,b/x.jsonl", "/c"), "listen": ("0.0.0.0:1", "[::]:2"), "announce": ("/dns4/a/tcp/1",)},
        {"allow_files": True, "rebalance": False, "hours": "22-07,12:30-13", "stages": "1-2", "link": "20Mbit,50ms"},
        {"memory_gib": 1.5, "host_memory_gib": 0.25, "slowdown": 8.0, "at_end": "leave", "device": "cuda:3"},
    ],
)
def test_settings_cross_an_environment_unchanged(changed: dict[str, object]) -> None:
    chosen = Settings.model_validate(changed)
    environment = {"PATH": "/bin", "AGORA_THREADS": "7", "AGORA_FAULTS": "x", "AGORA_RUNTIME_DIR": "/run/x"}
    handed_on = without_settings(environment) | chosen.to_environment()
    assert load(Path("/none"), {}, handed_on) == chosen
    assert handed_on["AGORA_FAULTS"] == "x" and handed_on["AGORA_RUNTIME_DIR"] == "/run/x"


def test_a_notice_is_its_fields_whatever_its_bytes_are() -> None:
    assert parse_notice(b"READY=1\nSTATUS=step=4\nnothing") == {"READY": "1", "STATUS": "step=4"}
    assert parse_notice(b"\xff\xfe=\x00") == {"\ufffd\ufffd": "\x00"}
    assert parse_notice(b"") == {}


WATCHDOG_S = 1.0
# Sends the notices of its first argument once, and then, for as long as it lives, those of the second again and again.
FAKE_DAEMON = """
import os, socket, sys, time
channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
channel.connect(os.environ["NOTIFY_SOCKET"])
for notice in sys.argv[1].split():
    channel.send(notice.encode())
while True:
    for notice in sys.argv[2].split():
        channel.send(notice.encode())
    time.sleep(0.05)
"""


class KeptNotices(SystemdNotifier):
    """Keeps when each field was sent to systemd, in loop times."""

    def __init__(self) -> None:
        super().__init__({"WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))})
        self.sent: list[tuple[float, str]] = []

    def send(self, **fields: str | int) -> None:
        self.sent += [(loop_time(), name) for name in fields]


class Supervised:
    """What became of one daemon that sends `first` once and then `always`, watched for `seconds`."""

    def __init__(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, always: str, seconds: float
    ) -> None:
        self.starts: list[float] = []
        self.events: list[Event] = []
        self.notifier = KeptNotices()
        self._first, self._always = first, always
        self._popen = subprocess.Popen
        monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "run"))
        monkeypatch.setattr(supervisor, "FIRST_RESTART_DELAY_S", 0.1)
        monkeypatch.setattr(subprocess, "Popen", self._start)
        asyncio.run(self._watch(Home(tmp_path / "data"), seconds))

    def _start(self, _: list[str], **chosen: Any) -> subprocess.Popen[bytes]:
        self.starts.append(loop_time())
        return self._popen([sys.executable, "-S", "-c", FAKE_DAEMON, self._first, self._always], **chosen)

    async def _watch(self, home: Home, seconds: float) -> None:
        home.root.mkdir()
        entry = daemon_registry.socket_of(home).with_suffix(".json")
        entry.parent.mkdir(mode=0o700)
        entry.touch()
        reference = RunReference("", "poems", file=Path("/poems.toml"))
        daemons = Supervisor(reference, home, [Settings(device="cpu")], self.events.append, self.notifier)
        running = asyncio.create_task(daemons.run())
        await asyncio.wait([running], timeout=seconds)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled(), running

    def longest_unfed_s(self) -> float:
        fed = [at for at, name in self.notifier.sent if name == "WATCHDOG"]
        return max(later - earlier for earlier, later in zip(fed, fed[1:], strict=False))


def test_a_daemon_that_works_on_nothing_though_its_loop_runs_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Supervised(tmp_path, monkeypatch, "WATCHDOG=1 READY=1", "STATUS=unfed", 3 * WATCHDOG_S)
    assert len(found.starts) >= 2, "it says STATUS, and does not feed its watchdog"
    assert found.starts[1] - found.starts[0] > WATCHDOG_S
    assert "no sign of progress" in found.events[0].describe()
    assert found.longest_unfed_s() > WATCHDOG_S / 3, "systemd's watchdog gets no food of a daemon that stands still"


@pytest.mark.parametrize(
    ("first", "always"),
    [
        ("", "STATUS=starting EXTEND_TIMEOUT_USEC=1"),  # a start
        ("WATCHDOG=1", "STATUS=working"),  # its first microbatch, before READY
        ("READY=1", "WATCHDOG=1 STATUS=working"),
    ],
)
def test_a_daemon_that_starts_or_feeds_its_watchdog_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, always: str
) -> None:
    found = Supervised(tmp_path, monkeypatch, first, always, 2.5 * WATCHDOG_S)
    assert len(found.starts) == 1 and not found.events
    assert found.longest_unfed_s() < WATCHDOG_S
