"""Claims about the daemons of several devices: what each gets, when one starts again, what systemd is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from agora.node.paths import Home
from agora.node.process.supervisor import (
    FIRST_RESTART_DELAY_S,
    MAX_RESTART_DELAY_S,
    RESTART_WINDOW_S,
    homes_of,
    parse_notice,
    restart_delay_s,
    settings_per_device,
)
from agora.node.settings import Settings, load, without_settings

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
