"""Decides by readings whether this machine can join a run, and if not, what is to be done. Pure.

Knows: readings, limits, remedies. Must not know: how anything is measured (readings.py), how checks are printed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from agora.node.doctor import MIN_FREE_BYTES
from agora.swarm.swarm_clock import MAX_TOLERATED_S, REMEDY

State = Literal["pass", "warn", "fail"]

MIN_PYTHON: Final = (3, 11)
MIN_OPEN_FILES: Final = 1024
MAX_CLOCK_OFFSET_S: Final = MAX_TOLERATED_S
"""Seconds; a clock that is further off is corrected by the swarm's, but something is wrong with this machine's."""
SLOW_ROUND_TRIP_S: Final = 1.0
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """One result: the measured value, its limit, and what to do about it; remedy: "" if it passes. Immutable."""

    name: str
    state: State
    value: str
    limit: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class PackageReading:
    """One package that the daemon needs. installed: its version, "" when it is missing.

    required: a version specifier, such as ">=2.0". is_allowed: whether `installed` fits it. problem: "" for none.
    """

    name: str
    required: str
    installed: str
    is_allowed: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PeerReading:
    """One address of the run. round_trip_s: of a TCP connection, None when there was none, for the reason `problem`."""

    address: str
    round_trip_s: float | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Readings:
    """All facts about the machine and, if one was named, about the run. Immutable; a problem of "" is none.

    memory_needed: bytes that the daemon and the smallest stage take at least. clock_offset_s: of the swarm's clocks
    minus this one's, None when no peer told. names: host names in the run's addresses, and whether each was resolved.
    daemon_pid: of the daemon in this data directory, None without one; peers_in_sight: others that it sees, None
    when it does not answer; resting: why that daemon rests, "" when it works; reachability: as that daemon has found
    out, "" when unknown. unit_state: see readings.py.
    """

    python: tuple[int, int, int] = (3, 11, 0)
    packages: tuple[PackageReading, ...] = ()
    p2pd_problem: str = ""
    settings_problem: str = ""
    device: str = "cpu"
    device_problem: str = ""
    memory_free: float = 0.0
    memory_needed: float = 0.0
    disk_free: float = 0.0
    disk_problem: str = ""
    runtime_problem: str = ""
    identity: str = ""
    identity_problem: str = ""
    open_files: int = 0
    clock_is_synchronised: bool | None = None
    clock_offset_s: float | None = None
    listen_problems: tuple[tuple[str, str], ...] = ()
    has_ipv4: bool = True
    has_ipv6: bool = True
    has_public_address: bool = False
    announces: bool = False
    names: tuple[tuple[str, bool], ...] = ()
    run: str = ""
    run_problem: str = ""
    peers: tuple[PeerReading, ...] = ()
    answer_problem: str = ""
    daemon_pid: int | None = None
    peers_in_sight: int | None = None
    resting: str = ""
    reachability: str = ""
    unit_state: str = ""


def judge_machine(readings: Readings) -> list[Check]:
    """Returns all checks, in the order in which a start would meet them."""
    checks = [check for judge_one in _MACHINE for check in judge_one(readings)]
    if readings.run:
        checks += [check for judge_one in _RUN for check in judge_one(readings)]
    return checks


def worst(checks: list[Check]) -> State:
    """Returns "fail" if any check fails, otherwise "warn" if any warns, otherwise "pass"."""
    states = {check.state for check in checks}
    return "fail" if "fail" in states else "warn" if "warn" in states else "pass"


def _python(readings: Readings) -> list[Check]:
    """Judges the interpreter's version."""
    value, limit = ".".join(map(str, readings.python)), ".".join(map(str, MIN_PYTHON)) + " or newer"
    if readings.python[:2] >= MIN_PYTHON:
        return [Check("python", "pass", value, limit)]
    return [Check("python", "fail", value, limit, "make the virtual environment with a newer Python")]


def _packages(readings: Readings) -> list[Check]:
    """Judges each package that the daemon needs, and hivemind's network process, p2pd.

    Fails for a missing, broken or wrong version, and if p2pd does not run.
    """
    checks = []
    for package in readings.packages:
        install = f"run `pip install '{package.name}{package.required}'` in this environment"
        limit = package.required or "any version"
        if not package.installed:
            checks.append(Check(f"package {package.name}", "fail", "missing", limit, install))
        elif package.problem:
            again = f"run `pip install --force-reinstall {package.name}` in this environment"
            checks.append(Check(f"package {package.name}", "fail", package.problem, "importable", again))
        elif not package.is_allowed:
            checks.append(Check(f"package {package.name}", "fail", package.installed, limit, install))
        else:
            checks.append(Check(f"package {package.name}", "pass", package.installed, limit))
    if readings.p2pd_problem:
        remedy = "run `pip install --force-reinstall hivemind`; its wheel brings p2pd for Linux on x86-64 and ARM"
        return [*checks, Check("p2pd", "fail", readings.p2pd_problem, "runs", remedy)]
    return [*checks, Check("p2pd", "pass", "runs", "runs")]


def _settings(readings: Readings) -> list[Check]:
    """Judges agora.toml and the AGORA_* variables."""
    if readings.settings_problem:
        return [Check("settings", "fail", readings.settings_problem, "", "correct that setting")]
    return [Check("settings", "pass", "as they should be")]


def _device(readings: Readings) -> list[Check]:
    """Judges the device on which the daemon would compute."""
    if readings.device_problem:
        remedy = "say --device cpu, or install the driver and a build of torch that fits it"
        return [Check("device", "fail", readings.device_problem, "multiplies two matrices", remedy)]
    return [Check("device", "pass", readings.device, "multiplies two matrices")]


def _memory(readings: Readings) -> list[Check]:
    """Judges the free memory of this machine."""
    value, limit = f"{readings.memory_free / MIB:,.0f} MiB free", f"{readings.memory_needed / MIB:,.0f} MiB"
    if readings.memory_free >= readings.memory_needed:
        return [Check("memory", "pass", value, limit)]
    return [Check("memory", "fail", value, limit, "end other programs, or join a run whose stages are smaller")]


def _disk(readings: Readings) -> list[Check]:
    """Judges the data directory, by space and permissions, and, if it is wrong, the directory of sockets."""
    limit = f"{MIN_FREE_BYTES / MIB:,.0f} MiB"
    checks = [Check("disk", "pass", f"{readings.disk_free / MIB:,.0f} MiB free", limit)]
    if readings.disk_problem:
        remedy = "free some space there, make it writable, or choose another directory with --dir"
        checks = [Check("disk", "fail", readings.disk_problem, limit, remedy)]
    if readings.runtime_problem:
        remedy = "make it yours and writable, or set AGORA_RUNTIME_DIR to a directory with a short path"
        checks.append(Check("sockets", "fail", readings.runtime_problem, "writable", remedy))
    return checks


def _identity(readings: Readings) -> list[Check]:
    """Judges the file with this machine's key."""
    if readings.identity_problem:
        remedy = "run `chmod 600` and `chown` on it as the user who runs the daemon, or move it away to get a new key"
        return [Check("identity", "fail", readings.identity_problem, "yours alone, mode 0600", remedy)]
    return [Check("identity", "pass", readings.identity or "made at the first start", "yours alone, mode 0600")]


def _open_files(readings: Readings) -> list[Check]:
    """Judges how many files and connections the process may have open."""
    value, limit = f"{readings.open_files:,}", f"{MIN_OPEN_FILES:,}"
    if readings.open_files >= MIN_OPEN_FILES:
        return [Check("open files", "pass", value, limit)]
    return [Check("open files", "fail", value, limit, "raise it with `ulimit -n 65536` or LimitNOFILE=")]


def _clock(readings: Readings) -> list[Check]:
    """Judges the clock: fails beyond MAX_CLOCK_OFFSET_S from the swarm's; passes if no peer has told the time."""
    offset = readings.clock_offset_s
    if offset is not None:
        value = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'before'} the swarm"
        state: State = "pass" if abs(offset) <= MAX_CLOCK_OFFSET_S else "fail"
        return [Check("clock", state, value, f"{MAX_CLOCK_OFFSET_S:.0f} s", REMEDY if state == "fail" else "")]
    value = "follows a time server" if readings.clock_is_synchronised else "not compared: name a run whose peers tell"
    return [Check("clock", "pass", value, f"{MAX_CLOCK_OFFSET_S:.0f} s")]


def _network(readings: Readings) -> list[Check]:
    """Judges addresses and ports: fails without any address or if a port cannot be listened on; warns without IPv4."""
    families = [name for name, has in (("IPv4", readings.has_ipv4), ("IPv6", readings.has_ipv6)) if has]
    checks = [Check("addresses", "pass", " and ".join(families), "IPv4")]
    if not readings.has_ipv4:
        remedy = "most peers have IPv4 only: get an IPv4 address, or a tunnel with one"
        state: State = "warn" if families else "fail"
        checks = [Check("addresses", state, families[0] if families else "none", "IPv4", remedy)]
    for address, problem in readings.listen_problems:
        remedy = "choose another port with --listen, or stop the program that listens there"
        checks.append(Check("port", "fail", f"{address}: {problem}", "free", remedy))
    if not readings.listen_problems:
        checks.append(Check("port", "pass", "can be listened on", "free"))
    return checks


_REACHED: Final[dict[str, tuple[State, str]]] = {
    "public": ("pass", "another peer has dialled it back"),
    "punched": ("pass", "behind a NAT; others meet it through punched holes"),
    "relayed": ("warn", "behind a NAT; others reach it through other peers' relays"),
    "unreachable": ("warn", "behind a NAT, and no peer relays for it"),
}
"""Of a daemon's reachability: the state of the check, and the value."""


def _reachable(readings: Readings) -> list[Check]:
    """Judges whether others can connect to this machine: as its daemon has found out, else by its addresses.

    Warns if it has only private ones and announces none.
    """
    remedy = (
        "forward the port of --listen in the router and say AGORA_ANNOUNCE=/ip4/ADDRESS/tcp/PORT, or AGORA_UPNP=true; "
        "on one LAN or VPN say AGORA_ALLOW_PRIVATE=true"
    )
    if readings.reachability in _REACHED:
        state, value = _REACHED[readings.reachability]
    elif readings.has_public_address or readings.announces:
        state, value = "pass", "it has or announces an address of its own"
    else:
        state, value = "warn", "only private addresses: behind a NAT; public peers of the run will relay"
    return [Check("reachable", state, value, "a public address", remedy if state != "pass" else "")]


def _service(readings: Readings) -> list[Check]:
    """Judges the systemd unit, where there is one, and the daemon in the data directory, where one runs.

    Fails if the unit has failed or the daemon does not answer; warns if it rests or sees no other peer.
    """
    checks = []
    if readings.unit_state in ("failed", "auto-restart"):
        remedy = "read `journalctl -u agora-node -n 50`, then start it with `systemctl restart agora-node`"
        checks.append(Check("service", "fail", readings.unit_state, "active", remedy))
    elif readings.unit_state:
        checks.append(Check("service", "pass", readings.unit_state, "active"))
    if readings.daemon_pid is None:
        return checks
    if readings.peers_in_sight is None:
        remedy = f"stop it with `kill {readings.daemon_pid}`, then start it again"
        return [*checks, Check("daemon", "fail", "it does not answer", "it answers", remedy)]
    if readings.resting:
        remedy = "run `agora-node resume`, or look at `hours` in agora.toml"
        return [*checks, Check("daemon", "warn", readings.resting, "it works", remedy)]
    if readings.peers_in_sight == 0:
        remedy = "wait for others to come, or start it with another peer's invite"
        return [*checks, Check("daemon", "warn", "it sees no other peer", "1 other peer", remedy)]
    return [*checks, Check("daemon", "pass", f"it sees {readings.peers_in_sight} other peers", "1 other peer")]


def _run(readings: Readings) -> list[Check]:
    """Judges the manifest: whether it can be read, and whether it admits this machine."""
    if readings.run_problem:
        return [Check("run", "fail", readings.run_problem, "readable, and it admits this peer", "see the sentence")]
    return [Check("run", "pass", readings.run, "readable, and it admits this peer")]


def _names(readings: Readings) -> list[Check]:
    """Judges whether the host names in the run's addresses can be resolved; [] if they have none."""
    lost = [name for name, is_resolved in readings.names if not is_resolved]
    if lost:
        remedy = "look at /etc/resolv.conf and the network's name server"
        return [Check("names", "fail", f"cannot resolve {', '.join(lost)}", "all", remedy)]
    return [Check("names", "pass", f"{len(readings.names)} resolved", "all")] if readings.names else []


def _peers(readings: Readings) -> list[Check]:
    """Judges how many of the run's addresses answer, how fast, and whether they speak of the same run.

    Passes if no address is known. Fails if none answers, or none tells of the run; warns beyond SLOW_ROUND_TRIP_S.
    """
    if not readings.peers:
        return [Check("peers", "pass", "no address is known: this machine would begin the run", "")]
    round_trips = [peer.round_trip_s for peer in readings.peers if peer.round_trip_s is not None]
    value, limit = f"{len(round_trips)} of {len(readings.peers)} answer", "1"
    if not round_trips:
        why = readings.peers[0].problem
        remedy = "ask for a newer invite; look whether a firewall lets this machine out to that port"
        return [Check("peers", "fail", f"{value} ({why})", limit, remedy)]
    if readings.answer_problem:
        return [Check("peers", "fail", readings.answer_problem, "they tell of the run", "ask for a newer invite")]
    nearest = min(round_trips)
    value += f", the nearest in {1000 * nearest:.0f} ms"
    if nearest > SLOW_ROUND_TRIP_S:
        return [
            Check("peers", "warn", value, f"{SLOW_ROUND_TRIP_S:.0f} s", "use a line with less delay, if there is one")
        ]
    return [Check("peers", "pass", value, limit)]


_MACHINE: Final[tuple[Callable[[Readings], list[Check]], ...]] = (
    _python,
    _packages,
    _settings,
    _device,
    _memory,
    _disk,
    _identity,
    _open_files,
    _clock,
    _network,
    _reachable,
    _service,
)
_RUN: Final[tuple[Callable[[Readings], list[Check]], ...]] = (_run, _names, _peers)
