"""Gathers the facts about this machine and a run that `agora-node doctor` checks.

Nothing here raises: a fact that cannot be read becomes a sentence in a field `..._problem`. Takes some seconds, for
torch's import and for addresses that do not answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psutil
from agora_protocol.errors import AgoraError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.tickets import InviteTicket
from packaging.requirements import Requirement

from agora.core.machine_limits import least_memory, least_processors
from agora.node import daemon_registry, paths, run_files, runs, settings
from agora.node.control import control_client
from agora.node.doctor.checks import PackageReading, PeerReading, Readings
from agora.node.limits.disk import MIN_FREE_BYTES, check_disk, stored_bytes
from agora.node.limits.memory import BASE_BYTES, OWNERS_LIMIT, needed_memory
from agora.swarm.admission import AdmissionBook, AdmissionPolicy

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest, SignedManifest

PRODUCT: Final = "agora-swarm"  # the name of the installed package
CONNECT_TIMEOUT_S: Final = 3.0  # within which an address of the run must accept a TCP connection
STATUS_TIMEOUT_S: Final = 6.0  # within which a peer of the run must send its status
MAX_ADDRESSES_TRIED: Final = 16
UNIT: Final = "agora-node"  # the systemd unit
MINIMUM_STAGE_BYTES: Final = 256 * 2**20  # needed in addition to the daemon's own memory while no run is named
TIME_ERROR: Final = 5  # what adjtimex(2) returns while the kernel's clock is not synchronised


def take_readings(home: paths.Home, flags: Mapping[str, Any], run: str | None) -> Readings:
    """Measures this machine for a daemon in `home`; unless `run` is None, also finds that run and asks its peers.

    flags: the command line's settings. run: an invite, file, name or id. Tries ports only if no daemon runs in `home`.
    """
    chosen, settings_problem = _read_settings(home, flags)
    identity, identity_problem = _read_identity(home)
    daemon = _read_daemon(home)
    device, device_problem, device_remark = _try_device(chosen.device)
    listen = [] if daemon.pid is not None else [(address, find_listen_problem(address)) for address in chosen.listen]
    addresses = [address for family in psutil.net_if_addrs().values() for address in family]
    of_run = _read_run(run, home, identity) if run else {}
    manifest = of_run.pop("manifest", None)
    memory_free, memory_limit = _read_free_memory(chosen)
    processors = least_processors()
    return Readings(
        python=sys.version_info[:3],
        packages=tuple(map(_read_package, _read_requirements())),
        p2pd_problem=_find_p2pd_problem(),
        settings_problem=settings_problem,
        device=device,
        device_problem=device_problem,
        device_remark=device_remark,
        precision=_precision_of(device, chosen.precision) if not device_problem else "",
        compile_problem=_find_compile_problem(device, chosen.compile) if not device_problem else "",
        memory_free=memory_free,
        memory_limit=memory_limit,
        processors=processors.amount,
        processors_limit=processors.source,
        memory_needed=_compute_needed_memory(manifest),
        has_manifest=manifest is not None,
        disk_free=_read_free_disk(home.root),
        disk_problem=_find_disk_problem(home.root, chosen.disk_bytes),
        runtime_problem=_find_runtime_problem(),
        identity=identity,
        identity_problem=identity_problem,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        clock_is_synchronised=_read_clock_sync(),
        listen_problems=tuple((address, problem) for address, problem in listen if problem),
        has_ipv4=any(_is_routable(a.address) for a in addresses if a.family == socket.AF_INET),
        has_ipv6=any(_is_routable(a.address) for a in addresses if a.family == socket.AF_INET6),
        has_public_address=any(_is_public(a.address) for a in addresses),
        announces=bool(chosen.announce),
        daemon_pid=daemon.pid,
        peers_in_sight=daemon.in_sight,
        pause_reason=daemon.pause_reason,
        reachability=daemon.reachability,
        mfu=daemon.mfu,
        idle_in_jobs=daemon.idle_in_jobs,
        unit_state=_read_unit_state(),
        **of_run,
    )


# --- this machine


def _read_requirements() -> list[Requirement]:
    try:
        texts = importlib.metadata.requires(PRODUCT) or []
    except importlib.metadata.PackageNotFoundError:
        texts = ["torch", "hivemind", "libp2p", "msgpack", "uvloop", "cryptography", "numpy", "safetensors"]
    needed = [Requirement(text) for text in texts]
    return [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]


def _read_package(required: Requirement) -> PackageReading:
    spec = str(required.specifier)
    try:
        version = importlib.metadata.version(required.name)
    except importlib.metadata.PackageNotFoundError:
        return PackageReading(required.name, spec, "", False)
    return PackageReading(required.name, spec, version, required.specifier.contains(version, prereleases=True))


def _find_p2pd_problem() -> str:
    found = importlib.util.find_spec("hivemind")
    if found is None or found.origin is None:
        return "hivemind, which ships p2pd, is not installed"
    binary = Path(found.origin).parent / "hivemind_cli" / "p2pd"
    try:
        done = subprocess.run([str(binary), "-help"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{binary} does not run ({getattr(error, 'strerror', None) or 'no answer in 10 s'})"
    return "" if b"Usage" in done.stdout + done.stderr else f"{binary} ended with exit code {done.returncode}"


def _read_settings(home: paths.Home, flags: Mapping[str, Any]) -> tuple[settings.Settings, str]:
    try:
        return settings.load(home.root / "agora.toml", flags), ""
    except AgoraError as error:
        return settings.load(Path(os.devnull), {}, {}), str(error)


def _read_identity(home: paths.Home) -> tuple[str, str]:
    if not os.path.lexists(home.identity):
        return "", ""
    try:
        return Identity.load(home.identity).peer, ""
    except AgoraError as error:
        return "", str(error)


def _try_device(name: str) -> tuple[str, str, str]:
    # Returns the device that is chosen, why it cannot be used, and why a GPU stays unused; "" for none.
    try:
        import torch

        from agora.train.device import all_devices, choose_device
        from agora.train.gpu_support import unused_gpus_remark

        remark = unused_gpus_remark() if name in ("auto", "all") else ""
        devices = [choose_device(each) for each in (all_devices() if name == "all" else name.split(","))]
        for device in devices:
            ones = torch.ones(64, 64, device=device)
            if float((ones @ ones).sum()) != 64.0**3:
                return str(device), f"{device} multiplies two matrices wrongly", remark
        return ",".join(map(str, devices)), "", remark
    except (AgoraError, ImportError, OSError, RuntimeError) as error:
        return name, (str(error).splitlines() or [repr(error)])[0][:300], ""


def _precision_of(device: str, setting: str) -> str:
    import torch

    from agora.train.device import PRECISIONS, product_dtype
    from agora.train.machine_profile import cpu_has_bf16

    first = torch.device(device.split(",")[0])
    if setting == "float32":
        return f'float32, as precision = "{setting}" says'
    if first.type == "cpu" and cpu_has_bf16():
        return "bf16 where a run's layers are faster with it, else float32"
    return PRECISIONS[product_dtype(first)]


def _find_compile_problem(device: str, setting: str) -> str:
    import torch

    from agora.train.compiled_layers import compiles_on, missing_for_compiling

    return missing_for_compiling() if compiles_on(torch.device(device.split(",")[0]), setting) else ""


def _read_free_memory(chosen: settings.Settings) -> tuple[float, str]:
    # Of the host (never of a GPU), and what limits it.
    least = least_memory()
    owners = chosen.owners_memory.host
    return (owners, OWNERS_LIMIT) if owners and owners < least.amount else (least.amount, least.source)


def _compute_needed_memory(manifest: Manifest | None) -> float:
    if manifest is None:
        return float(BASE_BYTES + MINIMUM_STAGE_BYTES)
    spans = [Span(stage, stage) for stage in range(manifest.stage_count)]
    with contextlib.suppress(ImportError, AgoraError):
        return float(min(needed_memory(manifest, span) for span in spans))
    return float(BASE_BYTES)


def _nearest_existing(directory: Path) -> Path:
    # Returns the directory if it exists, otherwise the nearest of its parents that does.
    return next(path for path in (directory, *directory.parents) if path.exists())


def _read_free_disk(directory: Path) -> float:
    # Returns the free bytes of the disk where the data directory is or would be; 0 if that cannot be read.
    try:
        return float(shutil.disk_usage(_nearest_existing(directory)).free)
    except OSError:
        return 0.0


def _find_disk_problem(directory: Path, limit_bytes: int) -> str:
    existing = _nearest_existing(directory)
    try:
        if not existing.is_dir():
            return f"{existing} is not a directory"
        check_disk(existing)
    except AgoraError as error:
        return str(error)
    held = stored_bytes(directory) if limit_bytes else 0
    if limit_bytes and held + MIN_FREE_BYTES > limit_bytes:
        return f"{directory} holds {held / 2**20:,.0f} MiB of the {limit_bytes / 2**20:,.0f} MiB that `disk_gib` allows"
    return ""


def _find_runtime_problem() -> str:
    directory = paths.runtime_directory()
    try:
        paths.make_private(directory)
        return "" if os.access(directory, os.W_OK | os.X_OK) else f"{directory} is not writable"
    except OSError as error:
        return error.strerror or str(error)


def _read_clock_sync() -> bool | None:
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # struct timex, all zero: read only
    return None if state < 0 else bool(state != TIME_ERROR)


def find_listen_problem(multiaddr: str) -> str:
    """Binds the TCP port of `multiaddr` for a moment; returns why that fails, or "" (untried for a name or port 0)."""
    parts = multiaddr.strip("/").split("/")
    fields = dict(zip(parts[::2], parts[1::2], strict=False))
    host, port = fields.get("ip4") or fields.get("ip6"), fields.get("tcp")
    if host is None or port is None or port == "0":
        return ""
    family = socket.AF_INET6 if "ip6" in fields else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
            probe.listen(1)
    except (OSError, ValueError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


def _is_routable(address: str) -> bool:
    with contextlib.suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        return not (parsed.is_loopback or parsed.is_link_local)
    return False


def _is_public(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.partition("%")[0]).is_global
    return False


# What the daemon in a data directory reports of itself; None and "" for what is not known. pid: None without a daemon.
# in_sight: how many other peers it sees. pause_reason: why it is paused, "" if it works.
class _DaemonReading(NamedTuple):
    pid: int | None = None
    in_sight: int | None = None
    pause_reason: str = ""
    reachability: str = ""
    mfu: float | None = None
    idle_in_jobs: float | None = None


def _read_daemon(home: paths.Home) -> _DaemonReading:
    root = str(home.root.resolve())
    entries: list[daemon_registry.DaemonEntry] = []
    with contextlib.suppress(paths.UntrustedDirectory):  # which the check of the sockets names
        entries = daemon_registry.find_running_daemons()
    entry = next((entry for entry in entries if str(Path(entry.root).resolve()) == root), None)
    if entry is None:
        return _DaemonReading()
    with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused):
        status = control_client.ask(Path(entry.socket), "status")
        own: Mapping[str, Any] = next((peer for peer in status["peers"] if peer["peer"] == entry.peer), {})
        used = own.get("device") or {}
        pause_reason = status["health"]["why"] if status["health"]["state"] == "PAUSED" else ""
        return _DaemonReading(
            entry.pid,
            len(status["peers"]) - bool(own),
            pause_reason,
            str(own.get("reachability", "")),
            used.get("mfu"),
            used.get("idle_in_jobs"),
        )
    return _DaemonReading(entry.pid)


def _read_unit_state() -> str:
    if shutil.which("systemctl") is None:
        return ""
    command = ["systemctl", "show", "--property=ActiveState,SubState,LoadState", UNIT]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
        shown = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        if shown.get("LoadState") == "loaded":
            restarts = shown.get("SubState", "") == "auto-restart"
            return "auto-restart" if restarts else shown.get("ActiveState", "")
    return ""


# --- the run


def _find_admission_problem(signed: SignedManifest, ticket: str, home: paths.Home, me: PeerId) -> str:
    run = signed.run_id
    try:
        policy = AdmissionPolicy.of(run_files.manifest_on_disk([home], signed, time.time()))
        proof = InviteTicket.parse(ticket).proof_for(me, run) if ticket else run_files.read_proof(home, run)
        is_member = AdmissionBook(run, policy).judge(me, proof, time.time()).is_member
    except AgoraError as error:
        return str(error)
    return "" if is_member else "the run lets this machine only read its status: ask its founder for a ticket"


def _read_run(run: str, home: paths.Home, me: str) -> dict[str, Any]:
    try:
        reference = runs.resolve(run, home)
    except AgoraError as error:
        return {"run": run, "run_problem": str(error)}
    signed = reference.signed
    manifest = signed.manifest if signed is not None else reference.draft
    problem = _find_admission_problem(signed, reference.ticket, home, PeerId(me)) if signed and me else ""
    peers = time_connections(reference.addresses[:MAX_ADDRESSES_TRIED])
    found: dict[str, Any] = {
        "run": f"{reference.name or 'unnamed'} ({reference.run[:12] or 'unsigned'})",
        "run_problem": problem,
        "names": tuple((name, _is_resolved(name)) for name in _dns_names_in(reference.addresses)),
        "peers": peers,
        "manifest": manifest,
    }
    if any(peer.round_trip_s is not None for peer in peers):
        found |= _ask_peers(reference.addresses, reference.run)
    return found


def _ask_peers(addresses: Sequence[str], run: str) -> dict[str, Any]:
    from agora.net.dht import status_client

    asked_unix = time.time()
    try:
        status = status_client.fetch_status(addresses, RunId(run), STATUS_TIMEOUT_S)
    except AgoraError as error:
        return {"answer_problem": str(error)}
    their_unix = status.get("unix")
    if not isinstance(their_unix, int | float):
        return {}
    earliest, latest = asked_unix - their_unix, time.time() - their_unix
    # Their clock was read at some moment between question and answer, so an offset within that time is unknown.
    return {"clock_offset_s": -earliest if earliest > 0 else -latest if latest < 0 else 0.0}


def time_connections(addresses: Iterable[str]) -> tuple[PeerReading, ...]:
    """Opens a TCP connection to each distinct address, concurrently; returns how long each took, or why it failed."""
    listed = list(dict.fromkeys(addresses))
    with ThreadPoolExecutor(max_workers=max(1, len(listed))) as pool:
        return tuple(pool.map(_time_connection, listed))


def _time_connection(multiaddr: str) -> PeerReading:
    parts = multiaddr.strip("/").split("/")
    fields = dict(zip(parts[::2], parts[1::2], strict=False))
    host = next((fields[kind] for kind in ("ip4", "ip6", "dns4", "dns6", "dns") if kind in fields), None)
    if host is None or "tcp" not in fields:
        return PeerReading(multiaddr, None, "no TCP address")
    began = time.monotonic()
    try:
        with socket.create_connection((host, int(fields["tcp"])), timeout=CONNECT_TIMEOUT_S):
            return PeerReading(multiaddr, time.monotonic() - began)
    except (OSError, ValueError, OverflowError) as error:
        return PeerReading(multiaddr, None, getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _dns_names_in(addresses: Iterable[str]) -> list[str]:
    parts = [address.strip("/").split("/") for address in addresses]
    named = [fields[1] for fields in parts if len(fields) > 1 and fields[0] in ("dns", "dns4", "dns6")]
    return list(dict.fromkeys(named))


def _is_resolved(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False
