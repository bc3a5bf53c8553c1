"""`agora-node doctor`: each fault is named, with a remedy, and nothing is named without a fault."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from agora_protocol.identity import Identity
from agora_protocol.manifest import SignedManifest, preset

from agora.cli.doctor_command import lines_of
from agora.node.doctor.checks import Check, PackageReading, PeerReading, Readings, judge_machine, worst_state
from agora.node.doctor.probes import find_listen_problem, take_readings, time_connections
from agora.node.paths import Home

TORCH = PackageReading("torch", ">=2.6", "2.13.0", True)
HEALTHY = Readings(
    python=(3, 11, 7),
    packages=(TORCH,),
    memory_free=8e9,
    memory_needed=1e9,
    disk_free=5e10,
    identity="12D3KooWx",
    open_files=65536,
    has_ipv6=False,
    has_public_address=True,
    run="tiny (0123456789ab)",
    peers=(PeerReading("/ip4/203.0.113.5/tcp/1", 0.02), PeerReading("/ip4/203.0.113.6/tcp/1", None, "refused")),
    clock_offset_s=0.1,
)

WORKING = replace(HEALTHY, daemon_pid=4242, peers_in_sight=2)

FAULTS: list[tuple[str, Readings, str, str]] = [
    ("python", replace(HEALTHY, python=(3, 9, 2)), "fail", "newer Python"),
    (
        "package torch",
        replace(HEALTHY, packages=(replace(TORCH, installed="", is_allowed=False),)),
        "fail",
        "pip install",
    ),
    (
        "package torch",
        replace(HEALTHY, packages=(replace(TORCH, installed="1.9", is_allowed=False),)),
        "fail",
        "torch>=2.6",
    ),
    ("package torch", replace(HEALTHY, packages=(replace(TORCH, problem="no libgomp"),)), "fail", "--force-reinstall"),
    ("p2pd", replace(HEALTHY, p2pd_problem="does not run"), "fail", "hivemind"),
    ("settings", replace(HEALTHY, settings_problem="agora.toml sets the unknown lisen"), "fail", "correct"),
    ("device", replace(HEALTHY, device_problem="torch sees no CUDA device"), "fail", "--device cpu"),
    ("compile", replace(HEALTHY, compile_problem="there is no C compiler"), "warn", "never"),
    ("device", replace(HEALTHY, device="mps", precision="float32"), "warn", "nothing was tested on it"),
    ("device", replace(HEALTHY, device_remark="1 NVIDIA GPU, and torch sees none"), "warn", "--device cpu"),
    ("memory", replace(HEALTHY, memory_free=1e8), "fail", "end other programs"),
    ("disk", replace(HEALTHY, disk_problem="No space left on device"), "fail", "--dir"),
    ("sockets", replace(HEALTHY, runtime_problem="belongs to somebody else"), "fail", "AGORA_RUNTIME_DIR"),
    ("identity", replace(HEALTHY, identity_problem="open to others"), "fail", "chmod 600"),
    ("open files", replace(HEALTHY, open_files=256), "fail", "ulimit"),
    ("clock", replace(HEALTHY, clock_offset_s=300.0), "fail", "timedatectl"),
    ("clock", replace(HEALTHY, clock_offset_s=-300.0), "fail", "timedatectl"),
    ("port", replace(HEALTHY, listen_problems=(("/ip4/0.0.0.0/tcp/31330", "in use"),)), "fail", "--listen"),
    ("addresses", replace(HEALTHY, has_ipv4=False, has_ipv6=True), "warn", "IPv4"),
    ("addresses", replace(HEALTHY, has_ipv4=False), "fail", "IPv4"),
    ("reachable", replace(HEALTHY, has_public_address=False), "warn", "AGORA_ANNOUNCE"),
    ("reachable", replace(HEALTHY, reachability="relayed"), "warn", "AGORA_UPNP"),
    ("reachable", replace(HEALTHY, reachability="unreachable"), "warn", "AGORA_ANNOUNCE"),
    ("run", replace(HEALTHY, run_problem="the run admits only listed peers"), "fail", "see"),
    ("names", replace(HEALTHY, names=(("seed.example.org", False),)), "fail", "resolv.conf"),
    (
        "peers",
        replace(HEALTHY, peers=(PeerReading("/ip4/203.0.113.5/tcp/1", None, "refused"),)),
        "fail",
        "newer invite",
    ),
    ("peers", replace(HEALTHY, answer_problem="the peer trains another run"), "fail", "newer invite"),
    ("peers", replace(HEALTHY, peers=(PeerReading("/ip4/203.0.113.5/tcp/1", 2.5),)), "warn", "lower latency"),
    ("service", replace(HEALTHY, unit_state="failed"), "fail", "journalctl"),
    ("service", replace(HEALTHY, unit_state="auto-restart"), "fail", "systemctl restart"),
    (
        "daemon",
        replace(HEALTHY, daemon_pid=4242, peers_in_sight=0, pause_reason="paused by its owner"),
        "warn",
        "agora-node resume",
    ),
    ("daemon", replace(HEALTHY, daemon_pid=4242, peers_in_sight=None), "fail", "kill 4242"),
    ("daemon", replace(HEALTHY, daemon_pid=4242, peers_in_sight=0), "warn", "invite"),
    ("use", replace(WORKING, mfu=0.1499, idle_in_jobs=0.6), "warn", "larger `schedule.microbatch`"),
    ("use", replace(WORKING, mfu=0.0, idle_in_jobs=0.1), "warn", "WAITS FOR"),
    ("use", replace(WORKING, mfu=0.1), "warn", "WAITS FOR"),
]


def not_passed(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.state != "pass"]


def test_a_healthy_machine_passes_every_check() -> None:
    checks = judge_machine(HEALTHY)
    assert not_passed(checks) == []
    assert worst_state(checks) == "pass"
    assert all(check.value and not check.remedy for check in checks)


@pytest.mark.parametrize(
    ("name", "readings", "state", "remedy"), FAULTS, ids=[f"{f[0]}: {n}" for n, f in enumerate(FAULTS)]
)
def test_each_fault_is_named_with_its_remedy_and_no_other(
    name: str, readings: Readings, state: str, remedy: str
) -> None:
    (found,) = not_passed(judge_machine(readings))
    assert (found.name, found.state) == (name, state)
    assert remedy in found.remedy
    assert worst_state(judge_machine(readings)) == state


@pytest.mark.parametrize(("count", "value"), [(1, "it sees 1 other peer"), (2, "it sees 2 other peers")])
def test_a_working_daemon_says_how_many_others_it_sees(count: int, value: str) -> None:
    checks = judge_machine(replace(HEALTHY, daemon_pid=4242, peers_in_sight=count))
    assert [check.value for check in checks if check.name == "daemon"] == [value]


def test_the_use_of_a_device_is_judged_only_where_it_is_known_and_a_daemon_works() -> None:
    good = replace(WORKING, mfu=0.15, idle_in_jobs=0.9)
    (check,) = [check for check in judge_machine(good) if check.name == "use"]
    assert (check.state, check.value, check.limit) == ("pass", "15.0% of the device's data sheet (MFU)", "15%")
    for other in (WORKING, replace(good, pause_reason="paused"), replace(good, daemon_pid=None)):
        assert not any(check.name == "use" for check in judge_machine(other))


def test_what_others_wrote_cannot_move_the_cursor() -> None:
    lines = lines_of(judge_machine(replace(HEALTHY, answer_problem="\x1b[2J\rall is well")))
    assert not any("\x1b" in line or "\r" in line for line in lines)


# --- faults of a real machine, injected


def wrong_mode(home: Home) -> None:
    Identity.create(home.identity)
    home.identity.chmod(0o644)


def damaged_key(home: Home) -> None:
    home.identity.write_bytes(b"no key")
    home.identity.chmod(0o600)


def unknown_setting(home: Home) -> None:
    (home.root / "agora.toml").write_text("lisen = 1\n")


def file_in_the_way(home: Home) -> None:
    home.root.rmdir()
    home.root.write_text("")


@pytest.mark.parametrize(
    ("inject", "name"),
    [(wrong_mode, "identity"), (damaged_key, "identity"), (unknown_setting, "settings"), (file_in_the_way, "disk")],
)
def test_a_fault_of_the_data_directory_is_found(tmp_path: Path, inject: Callable[[Home], None], name: str) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir()
    inject(home)
    checks = {check.name: check for check in judge_machine(take_readings(home, {"device": "cpu"}, None))}
    assert checks[name].state == "fail" and checks[name].remedy


def test_a_machine_without_a_fault_is_found_healthy(tmp_path: Path) -> None:
    home = Home(tmp_path / "new")
    checks = judge_machine(take_readings(home, {"device": "cpu"}, None))
    assert {check.name for check in checks if check.state == "fail"} == set()
    assert not home.root.exists(), "nothing is changed"


def test_a_device_that_is_not_there_and_a_taken_port_are_found(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        assert find_listen_problem(address)
        flags = {"device": "cuda:99", "listen": (address,)}
        checks = {check.name: check.state for check in judge_machine(take_readings(Home(tmp_path), flags, None))}
    assert checks["device"] == checks["port"] == "fail"
    assert not find_listen_problem(address)


def test_a_run_that_does_not_admit_this_machine_and_one_that_is_not_there_are_found(tmp_path: Path) -> None:
    home = Home(tmp_path)
    Identity.create(home.identity)
    founder = Identity.generate()
    listed = preset("tiny", admission={"mode": "listed", "peers": (Identity.generate().peer,)})
    file = tmp_path / "run.toml"
    file.write_text(SignedManifest.sign(listed, founder).to_toml())
    for run, words in ((str(file), "admits only listed peers"), (str(tmp_path / "no.toml"), "There is no manifest")):
        checks = {check.name: check for check in judge_machine(take_readings(home, {"device": "cpu"}, run))}
        assert checks["run"].state == "fail" and words in checks["run"].value


def test_addresses_that_do_not_answer_are_told_apart_from_one_that_does() -> None:
    with socket.socket() as there:
        there.bind(("127.0.0.1", 0))
        there.listen()
        port = there.getsockname()[1]
        found = time_connections(
            [f"/ip4/127.0.0.1/tcp/{port}/p2p/x", "/ip4/127.0.0.1/tcp/1/p2p/x", "/unix/tmp/x", "nonsense"]
        )
    assert [peer.round_trip_s is not None for peer in found] == [True, False, False, False]
    assert all(peer.problem for peer in found[1:])


def test_a_data_directory_that_holds_more_than_its_owner_allows_is_found(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(bytes(3 * 2**20))
    (tmp_path / "agora.toml").write_text("disk_gib = 0.002\n")
    checks = {check.name: check for check in judge_machine(take_readings(Home(tmp_path), {"device": "cpu"}, None))}
    assert checks["disk"].state == "fail" and "`disk_gib` allows" in checks["disk"].value


def test_an_identity_that_others_can_read_is_found(tmp_path: Path) -> None:
    home = Home(tmp_path)
    Identity.create(home.identity)
    home.identity.chmod(0o640)
    checks = {check.name: check for check in judge_machine(take_readings(home, {"device": "cpu"}, None))}
    assert checks["identity"].state == "fail" and "chmod 600" in checks["identity"].remedy


def test_a_directory_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    checks = {
        check.name: check.state for check in judge_machine(take_readings(Home(tmp_path), {"device": "cpu"}, None))
    }
    assert checks["disk"] == "fail"


def test_of_a_run_whose_manifest_is_elsewhere_only_what_is_known_is_said() -> None:
    (found,) = (
        check for check in judge_machine(replace(HEALTHY, run="poems", has_manifest=False)) if check.name == "run"
    )
    assert found.state == "pass" and "fetched at the join" in found.value and "admits" not in found.limit
