"""`swarm mesh`: writes the WireGuard configurations of a group's own network, and makes a machine's key.

No configuration holds a private key: each machine makes its own, which stays there, and only the public ones are in the
list. Machines with an endpoint are dialled by all others. Two machines without an endpoint sit behind NATs and cannot
dial each other: the first machine with an endpoint, the hub, forwards between them.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agora_protocol.errors import DiskError, InputError
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from agora.cli import console

DEFAULT_NETWORK: Final = "10.88.0.0/16"
DEFAULT_PORT: Final = 51820
INTERFACE: Final = "agora"
KEY_FILE: Final = f"/etc/wireguard/{INTERFACE}.key"
# Seconds after which a machine behind a NAT sends something, so that the NAT keeps the machine's mapping.
KEEPALIVE_INTERVAL_S: Final = 25
MAX_MACHINES: Final = 1000
MAX_FILE_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", re.ASCII)
_ENDPOINT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9.-]*)(:(\d{1,5}))?", re.ASCII)
_FILE_FIELDS: Final = ("network", "port", "machine")
_MACHINE_FIELDS: Final = ("name", "public_key", "endpoint", "address")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class MeshMachine:
    """One machine of the mesh. address: in the mesh. endpoint: HOST:PORT at which others dial it, "" behind a NAT."""

    name: str
    public_key: str
    address: Address
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A WireGuard mesh: its address range, the UDP port on which all machines listen, and its machines."""

    network: Network
    port: int
    machines: tuple[MeshMachine, ...]

    @property
    def hub(self) -> MeshMachine | None:
        return next((machine for machine in self.machines if machine.endpoint), None)

    def behind_nat(self) -> list[MeshMachine]:
        return [machine for machine in self.machines if not machine.endpoint]


def read_mesh(text: str, source: str) -> Mesh:
    """Machines without an address get free ones, in order. Raises InputError, which begins with `source`."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{source}: this is not valid TOML ({str(error)[:200]}); correct that line.") from None
    _check_fields(values, _FILE_FIELDS, source)
    network = _parse_network(values.get("network", DEFAULT_NETWORK), source)
    port = values.get("port", DEFAULT_PORT)
    if type(port) is not int or not 0 < port < 65536:
        raise InputError(f"{source}: port must be a number from 1 to 65535.")
    tables = values.get("machine", [])
    if not isinstance(tables, list) or not 2 <= len(tables) <= MAX_MACHINES:
        raise InputError(f"{source}: a mesh has 2 to {MAX_MACHINES} machines; write a [[machine]] table for each.")
    owners: dict[str, str] = {}
    machines: list[MeshMachine] = []
    free = iter(network.hosts())
    requested = {_address_or_none(table.get("address")) for table in tables if isinstance(table, dict)}
    for number, table in enumerate(tables, 1):
        machine = _parse_machine(table, f"{source}: machine {number}", network, port, free, requested)
        for value in (machine.name, machine.public_key, str(machine.address)):
            if value in owners:
                raise InputError(f"{source}: {machine.name} and {owners[value]} both have {value}; each needs its own.")
            owners[value] = machine.name
        machines.append(machine)
    mesh = Mesh(network, port, tuple(machines))
    if mesh.hub is None:
        raise InputError(f"{source}: no machine has an endpoint; give one that the others can reach by UDP.")
    return mesh


def configuration_of(mesh: Mesh, me: MeshMachine) -> str:
    """Returns the text of the `wg-quick` file of `me`.

    Traffic between machines behind NATs goes through the hub, which forwards if there are two or more of them.
    """
    others_behind_nat = [machine for machine in mesh.behind_nat() if machine != me]
    lines = [
        f"# {me.name}: copy to /etc/wireguard/{INTERFACE}.conf; its private key stays in {KEY_FILE} of this machine.",
        "[Interface]",
        f"Address = {me.address}/{mesh.network.prefixlen}",
        f"ListenPort = {mesh.port}",
        f"PostUp = wg set %i private-key {KEY_FILE}",
    ]
    if me == mesh.hub and len(others_behind_nat) > 1:
        version = "net.ipv6.conf.all.forwarding" if me.address.version == 6 else "net.ipv4.ip_forward"
        lines.append(f"PostUp = sysctl -q -w {version}=1")
    for machine in mesh.machines:
        if machine == me or not (machine.endpoint or me.endpoint):
            continue
        routed = [machine]
        if machine == mesh.hub and not me.endpoint:
            routed += others_behind_nat
        lines += ["", f"# {machine.name}", "[Peer]", f"PublicKey = {machine.public_key}"]
        lines.append("AllowedIPs = " + ", ".join(f"{each.address}/{each.address.max_prefixlen}" for each in routed))
        if machine.endpoint:
            lines.append(f"Endpoint = {machine.endpoint}")
        if not me.endpoint:
            lines.append(f"PersistentKeepalive = {KEEPALIVE_INTERVAL_S}")
    return "\n".join(lines) + "\n"


def ensure_key(path: Path) -> str:
    """The public key, base64, of the private key in `path`, made with mode 0600 if missing. Raises DiskError,
    InputError.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _public_key_in(path)
    except OSError as error:
        raise DiskError(f"Cannot write {path} ({error.strerror}); name another file.") from error
    private = X25519PrivateKey.generate()
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(base64.b64encode(private.private_bytes_raw()) + b"\n")
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DiskError(f"Cannot write {path} ({error.strerror}); name another file.") from error
    return _public_key_of(private)


def _public_key_in(path: Path) -> str:
    try:
        raw = base64.b64decode(path.read_bytes().strip(), validate=True)
        return _public_key_of(X25519PrivateKey.from_private_bytes(raw))
    except OSError as error:
        raise DiskError(f"Cannot read {path} ({error.strerror}); check its owner and mode.") from error
    except (binascii.Error, ValueError):
        raise InputError(f"{path} exists and is not a WireGuard key; name another file.") from None


def _public_key_of(private: X25519PrivateKey) -> str:
    return base64.b64encode(private.public_key().public_bytes_raw()).decode()


def _parse_machine(
    table: Any, source: str, network: Network, port: int, free: Iterator[Any], requested: Container[Address | None]
) -> MeshMachine:
    if not isinstance(table, dict):
        raise InputError(f"{source}: it must be a [[machine]] table.")
    _check_fields(table, _MACHINE_FIELDS, source)
    values = {key: table.get(key, "") for key in _MACHINE_FIELDS}
    if wrong := next((key for key, value in values.items() if not isinstance(value, str)), None):
        raise InputError(f"{source}: {wrong} must be text in quotes.")
    if not _NAME.fullmatch(values["name"]):
        raise InputError(f"{source}: name must be letters, digits, - and _, at most 32; it becomes a file's name.")
    _check_key(values["public_key"], f"{source} ({values['name']})")
    return MeshMachine(
        values["name"],
        values["public_key"],
        _parse_address(values["address"], network, free, requested, source),
        _parse_endpoint(values["endpoint"], port, source),
    )


def _check_fields(values: Mapping[str, Any], known: Sequence[str], source: str) -> None:
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
            raise InputError(f"{source}: {key[:40]!r} is unknown; {hint}")


def _check_key(text: str, source: str) -> None:
    try:
        is_key = len(base64.b64decode(text, validate=True)) == 32 and len(text) == 44
    except (binascii.Error, ValueError):
        is_key = False
    if not is_key:
        remedy = f"make one on that machine with `swarm mesh --new-key {KEY_FILE}`"
        raise InputError(f"{source}: public_key must be 44 characters of base64; {remedy}.")


def _parse_network(text: Any, source: str) -> Network:
    try:
        return ipaddress.ip_network(text if isinstance(text, str) else "")
    except ValueError:
        raise InputError(f"{source}: network must look like {DEFAULT_NETWORK}.") from None


def _parse_address(
    text: str, network: Network, free: Iterator[Any], requested: Container[Address | None], source: str
) -> Address:
    if not text:
        found: Address | None = next((address for address in free if address not in requested), None)
        if found is None:
            raise InputError(f"{source}: network {network} has no address left; use a larger one.")
        return found
    address = _address_or_none(text)
    if address is None or address not in network:
        raise InputError(f"{source}: address {text[:60]!r} is not of network {network}.")
    return address


def _address_or_none(value: Any) -> Address | None:
    try:
        return ipaddress.ip_address(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _parse_endpoint(text: str, port: int, source: str) -> str:
    if not text:
        return ""
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match[3] or port) < 65536:
        raise InputError(f"{source}: endpoint {text[:60]!r} must look like 203.0.113.5:{port} or a.example.org:{port}.")
    return f"{match[1]}:{match[3] or port}"


def make_key(path: Path, *, as_json: bool) -> int:
    public = ensure_key(path)
    console.print_to_stderr(
        f"the private key is in {path} and stays there; this is the public one, for the list of machines:"
    )
    if as_json:
        console.print_json({"schema": 1, "key_file": str(path), "public_key": public})
    else:
        print(public, flush=True)
    return console.EXIT_DONE


def write_configurations(machines: Path, out: Path, *, as_json: bool) -> int:
    """Raises InputError for a wrong list, DiskError when OUT cannot be written. Files of these names are replaced."""
    mesh = read_mesh(_read_list(machines), str(machines))
    written: dict[str, str] = {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for machine in mesh.machines:
            file = out / f"{machine.name}.conf"
            file.write_text(configuration_of(mesh, machine), encoding="utf-8")
            written[machine.name] = str(file)
    except OSError as error:
        raise DiskError(f"Cannot write {out} ({error.strerror}); choose another folder with --out.") from error
    if as_json:
        rows = [
            {"name": machine.name, "address": str(machine.address), "file": written[machine.name]}
            for machine in mesh.machines
        ]
        console.print_json({"schema": 1, "hub": mesh.hub.name if mesh.hub else None, "machines": rows})
        return console.EXIT_DONE
    for machine in mesh.machines:
        print(f"{machine.name:<32}  {machine.address!s:<15}  {written[machine.name]}")
    print(f"Copy each to its machine as /etc/wireguard/{INTERFACE}.conf; there:")
    print(f"  wg-quick up {INTERFACE}")
    print("  agora-node join RUN --listen ADDRESS:31330        # with the machine's address above")
    return console.EXIT_DONE


def _read_list(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path} has more than {MAX_FILE_BYTES} bytes; is it a list of machines?")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot read {path} ({error.strerror}); name the list of machines.") from error
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file; name the list of machines.") from None
