"""`swarm mesh`: writes the WireGuard configurations of a group's own network, and makes a machine's key."""

from __future__ import annotations

from pathlib import Path

from agora_protocol.errors import DiskError, InputError

from agora.cli import console
from agora.node import wireguard


def make_key(path: Path, *, as_json: bool) -> int:
    """Writes a new WireGuard private key to the file `path`, unless there is one, and prints its public key.

    Returns exit code DONE. Raises DiskError when the key cannot be written, InputError for a file that does not contain
    a key.
    """
    public = wireguard.ensure_key(path)
    console.print_to_stderr(
        f"the private key is in {path} and stays there; this is the public one, for the list of machines:"
    )
    if as_json:
        console.print_json({"schema": 1, "key_file": str(path), "public_key": public})
    else:
        print(public, flush=True)
    return console.DONE


def write_configurations(machines: Path, out: Path, *, as_json: bool) -> int:
    """Writes a WireGuard configuration OUT/NAME.conf for each machine of a list, and prints what to do with the files.

    Returns exit code DONE. machines: the list's file. out: the folder, made if missing; files of these names are
    replaced. as_json: prints the machines as one JSON object instead. Raises InputError for a wrong list, DiskError
    when OUT cannot be written.
    """
    mesh = wireguard.read_mesh(_read_list(machines), str(machines))
    written: dict[str, str] = {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for machine in mesh.machines:
            file = out / f"{machine.name}.conf"
            file.write_text(wireguard.configuration_of(mesh, machine), encoding="utf-8")
            written[machine.name] = str(file)
    except OSError as error:
        raise DiskError(f"Cannot write {out} ({error.strerror}); choose another folder with --out.") from error
    if as_json:
        rows = [
            {"name": machine.name, "address": str(machine.address), "file": written[machine.name]}
            for machine in mesh.machines
        ]
        console.print_json({"schema": 1, "hub": mesh.hub.name if mesh.hub else None, "machines": rows})
        return console.DONE
    for machine in mesh.machines:
        print(f"{machine.name:<32}  {machine.address!s:<15}  {written[machine.name]}")
    print(f"Copy each to its machine as /etc/wireguard/{wireguard.INTERFACE}.conf; there:")
    print(f"  wg-quick up {wireguard.INTERFACE}")
    print("  agora-node join RUN --listen ADDRESS:31330        # with the machine's address above")
    return console.DONE


def _read_list(path: Path) -> str:
    try:
        if path.stat().st_size > wireguard.MAX_FILE_BYTES:
            raise InputError(f"{path} has more than {wireguard.MAX_FILE_BYTES} bytes; is it a list of machines?")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot read {path} ({error.strerror}); name the list of machines.") from error
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file; name the list of machines.") from None
