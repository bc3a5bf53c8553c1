"""Decides from readings whether this machine can join a run, and what to do if it cannot. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from agora.node.limits.disk import MIN_FREE_BYTES
from agora.swarm.swarm_clock import MAX_TOLERATED_S, REMEDY

State = Literal["pass", "warn", "fail"]

MIN_PYTHON: Final = (3, 11)
MIN_OPEN_FILES: Final = 1024
# Seconds; a clock that is further off is corrected to the swarm's time, but should be set right.
MAX_CLOCK_OFFSET_S: Final = MAX_TOLERATED_S
SLOW_ROUND_TRIP_S: Final = 1.0
MIN_MFU: Final = 0.15  # of a GPU that trains
MAX_IDLE_IN_JOBS: Final = 0.3  # with more, the device waits for the host, which launches too little at a time
MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the doctor's result."""

    name: str
    state: State
    value: str  # what was read
    limit: str = ""  # what is required of the value; "" for nothing
    remedy: str = ""  # what the owner can do; "" if the check passes


@dataclass(frozen=True, slots=True)
class PackageReading:
    """One package that the daemon needs."""

    name: str
    required: str  # a version specifier, such as ">=2.0"; "" for any version
    installed: str  # its version; "" if it is missing
    is_allowed: bool  # whether `installed` fits `required`
    problem: str = ""  # why the package cannot be used; "" if it can


@dataclass(frozen=True, slots=True)
class PeerReading:
    """The result of opening a TCP connection to one address of the run."""

    address: str
    round_trip_s: float | None  # how many seconds it took; None if it failed
    problem: str = ""  # why it failed; "" if it did not


@dataclass(frozen=True, slots=True)
class Readings:
    """All facts about the machine and, if one was named, about the run. In a field `..._problem`, "" means none."""

    python: tuple[int, int, int] = (3, 11, 0)
    packages: tuple[PackageReading, ...] = ()
    p2pd_problem: str = ""
    settings_problem: str = ""
    device: str = "cpu"
    device_problem: str = ""
    precision: str = ""  # in which the device multiplies, in words
    device_remark: str = ""  # why a GPU of the machine stays unused
    compile_problem: str = ""  # what is missing to compile layers for the device
    memory_free: float = 0.0  # bytes
    memory_limit: str = ""  # what limits that, in words
    processors: float = 1.0  # how many it may use; a fraction for a quota
    processors_limit: str = ""  # what limits that, in words
    memory_needed: float = 0.0  # bytes that the daemon and the smallest stage need
    disk_free: float = 0.0  # bytes
    disk_problem: str = ""
    runtime_problem: str = ""  # of the directory of sockets
    identity: str = ""  # the peer id; "" before the first start
    identity_problem: str = ""
    open_files: int = 0  # how many a process may have
    clock_is_synchronised: bool | None = None
    clock_offset_s: float | None = None  # the swarm's time minus this clock's; None if no peer reported it
    listen_problems: tuple[tuple[str, str], ...] = ()  # addresses, and why they cannot be listened on
    has_ipv4: bool = True
    has_ipv6: bool = True
    has_public_address: bool = False
    announces: bool = False  # whether the owner names addresses to announce
    names: tuple[tuple[str, bool], ...] = ()  # host names in the run's addresses, and whether each was resolved
    run: str = ""  # its name and id; "" if none was named
    run_problem: str = ""
    has_manifest: bool = True  # whether this machine knows the run's manifest
    peers: tuple[PeerReading, ...] = ()  # one for each address that was dialled
    answer_problem: str = ""  # why no peer knows the run
    daemon_pid: int | None = None  # of the daemon in this data directory; None without one
    peers_in_sight: int | None = None  # how many others that daemon sees; None if it does not answer
    pause_reason: str = ""  # why that daemon is paused; "" if it works
    mfu: float | None = None  # of that daemon; None if unknown, as on a CPU
    idle_in_jobs: float | None = None  # of that daemon; None if unknown
    reachability: str = ""  # of that daemon; "" if unknown
    unit_state: str = ""  # systemd's state of the unit agora-node; "" without one


def judge_machine(readings: Readings) -> list[Check]:
    """Returns all checks, in the order in which a start would meet them; those of the run only if one was named."""
    checks = [check for judge_one in _MACHINE for check in judge_one(readings)]
    if readings.run:
        checks += [check for judge_one in _RUN for check in judge_one(readings)]
    return checks


def worst_state(checks: list[Check]) -> State:
    """Returns "fail" if any check fails, otherwise "warn" if any warns; "pass" otherwise, and for an empty list."""
    states = {check.state for check in checks}
    return "fail" if "fail" in states else "warn" if "warn" in states else "pass"


def _check_python(readings: Readings) -> list[Check]:
    value, limit = ".".join(map(str, readings.python)), ".".join(map(str, MIN_PYTHON)) + " or newer"
    if readings.python[:2] >= MIN_PYTHON:
        return [Check("python", "pass", value, limit)]
    return [Check("python", "fail", value, limit, "make the virtual environment with a newer Python")]


def _check_packages(readings: Readings) -> list[Check]:
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


def _check_settings(readings: Readings) -> list[Check]:
    if readings.settings_problem:
        return [Check("settings", "fail", readings.settings_problem, "", "correct that setting")]
    return [Check("settings", "pass", "valid")]


def _check_device(readings: Readings) -> list[Check]:
    if readings.device_problem:
        remedy = "pass --device cpu, or install the driver and a build of torch that fits it"
        return [Check("device", "fail", readings.device_problem, "multiplies two matrices", remedy)]
    if readings.device_remark:
        remedy = "until then it trains on the CPU; with --device cpu this is no warning"
        return [Check("device", "warn", readings.device_remark, "uses the machine's GPU", remedy)]
    value = f"{readings.device}, {readings.precision}" if readings.precision else readings.device
    if readings.device == "mps":
        remedy = "nothing was tested on it: compare the run's loss with that of --device cpu"
        return [Check("device", "warn", value, "multiplies two matrices; tested", remedy)]
    checks = [Check("device", "pass", value, "multiplies two matrices")]
    if readings.compile_problem:
        remedy = (
            'until then layers are not compiled, and it trains more slowly; with `compile = "never"` this is no warning'
        )
        checks.append(Check("compile", "warn", readings.compile_problem, "compiles layers", remedy))
    return checks


def _check_memory(readings: Readings) -> list[Check]:
    value, limit = f"{readings.memory_free / MIB:,.0f} MiB free", f"{readings.memory_needed / MIB:,.0f} MiB"
    value += f", by {readings.memory_limit}" if readings.memory_limit else ""
    processors = f"{readings.processors:g}, by {readings.processors_limit or 'the machine'}"
    checks = [Check("processors", "pass", processors)]
    if readings.memory_free >= readings.memory_needed:
        return [Check("memory", "pass", value, limit), *checks]
    remedy = "end other programs, raise that limit, or join a run whose stages are smaller"
    return [Check("memory", "fail", value, limit, remedy), *checks]


def _check_disk(readings: Readings) -> list[Check]:
    limit = f"{MIN_FREE_BYTES / MIB:,.0f} MiB"
    checks = [Check("disk", "pass", f"{readings.disk_free / MIB:,.0f} MiB free", limit)]
    if readings.disk_problem:
        remedy = "free some space there, make it writable, or choose another directory with --dir"
        checks = [Check("disk", "fail", readings.disk_problem, limit, remedy)]
    if readings.runtime_problem:
        remedy = "make it yours and writable, or set AGORA_RUNTIME_DIR to a directory with a short path"
        checks.append(Check("sockets", "fail", readings.runtime_problem, "writable", remedy))
    return checks


def _check_identity(readings: Readings) -> list[Check]:
    if readings.identity_problem:
        remedy = "run `chmod 600` and `chown` on it as the user who runs the daemon, or move it away to get a new key"
        return [Check("identity", "fail", readings.identity_problem, "yours alone, mode 0600", remedy)]
    return [Check("identity", "pass", readings.identity or "created at first start", "yours alone, mode 0600")]


def _check_open_files(readings: Readings) -> list[Check]:
    value, limit = f"{readings.open_files:,}", f"{MIN_OPEN_FILES:,}"
    if readings.open_files >= MIN_OPEN_FILES:
        return [Check("open files", "pass", value, limit)]
    return [Check("open files", "fail", value, limit, "raise it with `ulimit -n 65536` or LimitNOFILE=")]


def _check_clock(readings: Readings) -> list[Check]:
    offset = readings.clock_offset_s
    if offset is not None:
        value = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} the swarm"
        state: State = "pass" if abs(offset) <= MAX_CLOCK_OFFSET_S else "fail"
        return [Check("clock", state, value, f"{MAX_CLOCK_OFFSET_S:.0f} s", REMEDY if state == "fail" else "")]
    unknown = "not checked: name a run to compare with its peers"
    value = "follows a time server" if readings.clock_is_synchronised else unknown
    return [Check("clock", "pass", value, f"{MAX_CLOCK_OFFSET_S:.0f} s")]


def _check_network(readings: Readings) -> list[Check]:
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


# By a daemon's reachability: the state and the value of the check.
_REACHED: Final[dict[str, tuple[State, str]]] = {
    "public": ("pass", "another peer has dialled it back"),
    "punched": ("pass", "behind a NAT; others meet it through punched holes"),
    "relayed": ("warn", "behind a NAT; others reach it through other peers' relays"),
    "unreachable": ("warn", "behind a NAT, and no peer relays for it"),
}


def _check_reachable(readings: Readings) -> list[Check]:
    # Warns if others need a relay, or if it has only private addresses and announces none; never fails.
    remedy = (
        "forward the port of --listen in the router and set AGORA_ANNOUNCE=/ip4/ADDRESS/tcp/PORT, or AGORA_UPNP=true; "
        "on one LAN or VPN set AGORA_ALLOW_PRIVATE=true"
    )
    if readings.reachability in _REACHED:
        state, value = _REACHED[readings.reachability]
    elif readings.has_public_address or readings.announces:
        state, value = "pass", "it has or announces an address of its own"
    else:
        state, value = "warn", "only private addresses: behind a NAT; public peers of the run will relay"
    return [Check("reachable", state, value, "a public address", remedy if state != "pass" else "")]


def _check_use(readings: Readings) -> list[Check]:
    # Only of a daemon that works; one that is paused or alone is named by the check before.
    if readings.mfu is None or readings.pause_reason or readings.daemon_pid is None:
        return []
    value, limit = f"{readings.mfu:.1%} of the device's data sheet (MFU)", f"{MIN_MFU:.0%}"
    if readings.mfu >= MIN_MFU:
        return [Check("use", "pass", value, limit)]
    if readings.idle_in_jobs is not None and readings.idle_in_jobs > MAX_IDLE_IN_JOBS:
        value += f", and it is idle for {readings.idle_in_jobs:.0%} of the time within its jobs"
        remedy = (
            "its layers are too small for it: hold more stages (--stages), look whether they are compiled (notes of "
            "`swarm status` say why not), or found runs with larger `schedule.microbatch` or width"
        )
    else:
        remedy = (
            "it waits for microbatches, not for itself: look at WAITS FOR and the notes in `swarm status`, raise "
            "`schedule.max_in_flight` or the upload limit, or hold the stage that has fewest replicas"
        )
    return [Check("use", "warn", value, limit, remedy)]


def _check_service(readings: Readings) -> list[Check]:
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
    if readings.pause_reason:
        remedy = "run `agora-node resume`, or look at `hours` in agora.toml"
        return [*checks, Check("daemon", "warn", readings.pause_reason, "it works", remedy)]
    if readings.peers_in_sight == 0:
        remedy = "wait for others to come, or start it with another peer's invite"
        return [*checks, Check("daemon", "warn", "it sees no other peer", "1 other peer", remedy)]
    sees = f"it sees {readings.peers_in_sight} other peer{'s' * (readings.peers_in_sight > 1)}"
    return [*checks, Check("daemon", "pass", sees, "1 other peer")]


def _check_run(readings: Readings) -> list[Check]:
    if readings.run_problem:
        return [Check("run", "fail", readings.run_problem, "readable, and it admits this peer", "see the message")]
    if not readings.has_manifest:
        return [Check("run", "pass", f"{readings.run}: its manifest is fetched at the join", "readable")]
    return [Check("run", "pass", readings.run, "readable, and it admits this peer")]


def _check_names(readings: Readings) -> list[Check]:
    lost = [name for name, is_resolved in readings.names if not is_resolved]
    if lost:
        remedy = "look at /etc/resolv.conf and the network's name server"
        return [Check("names", "fail", f"cannot resolve {', '.join(lost)}", "all", remedy)]
    return [Check("names", "pass", f"{len(readings.names)} resolved", "all")] if readings.names else []


def _check_peers(readings: Readings) -> list[Check]:
    if not readings.peers:
        return [Check("peers", "pass", "no address is known: this machine would begin the run", "")]
    round_trips = [peer.round_trip_s for peer in readings.peers if peer.round_trip_s is not None]
    value, limit = f"{len(round_trips)} of {len(readings.peers)} answer", "1"
    if not round_trips:
        why = readings.peers[0].problem
        remedy = "ask for a newer invite; check that no firewall blocks outgoing connections to that port"
        return [Check("peers", "fail", f"{value} ({why})", limit, remedy)]
    if readings.answer_problem:
        return [Check("peers", "fail", readings.answer_problem, "one knows the run", "ask for a newer invite")]
    nearest = min(round_trips)
    value += f", the nearest in {1000 * nearest:.0f} ms"
    if nearest > SLOW_ROUND_TRIP_S:
        remedy = "use a connection with lower latency, if there is one"
        return [Check("peers", "warn", value, f"{SLOW_ROUND_TRIP_S:.0f} s", remedy)]
    return [Check("peers", "pass", value, limit)]


_MACHINE: Final[tuple[Callable[[Readings], list[Check]], ...]] = (
    _check_python,
    _check_packages,
    _check_settings,
    _check_device,
    _check_memory,
    _check_disk,
    _check_identity,
    _check_open_files,
    _check_clock,
    _check_network,
    _check_reachable,
    _check_service,
    _check_use,
)
_RUN: Final[tuple[Callable[[Readings], list[Check]], ...]] = (_check_run, _check_names, _check_peers)
