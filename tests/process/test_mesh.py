"""A swarm inside a WireGuard network that `swarm mesh` has written, in network namespaces."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agora.cli.local_swarm import LocalSwarm
from agora.cli.mesh_command import KEY_FILE, configuration_of, ensure_key, read_mesh
from tests.process.harness import last_step, tiny
from tests.process.sites import Sites, can_make_sites

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (can_make_sites() and shutil.which("wg") and shutil.which("wireguard-go")),
        reason="needs root, ip, wg and wireguard-go",
    ),
]

KEPT = ("[", "ListenPort", "PublicKey", "AllowedIPs", "Endpoint", "PersistentKeepalive")
"""What `wg setconf` takes of a file that wg-quick takes."""


def bring_up(sites: Sites, name: str, interface: str, text: str, key: Path, folder: Path) -> None:
    """As wg-quick does, but with names of interfaces that are not shared between namespaces."""
    assert KEY_FILE in text
    kept = [line for line in text.splitlines() if line.startswith(KEPT)]
    file = folder / f"{name}.conf"
    file.write_text("\n".join(kept) + "\n")
    address = next(line for line in text.splitlines() if line.startswith("Address")).partition(" = ")[2]
    for command in (
        ["wireguard-go", interface],
        ["wg", "setconf", interface, str(file)],
        ["wg", "set", interface, "private-key", str(key)],
        ["ip", "address", "add", address, "dev", interface],
        ["ip", "link", "set", interface, "up"],
        *([["sysctl", "-q", "-w", "net.ipv4.ip_forward=1"]] if "ip_forward" in text else []),
    ):
        subprocess.run([*sites.within(name), *command], check=True, capture_output=True)


def test_machines_behind_nats_train_together_through_the_hub_of_a_mesh(tmp_path: Path) -> None:
    names = ("hub", "left", "right")
    with Sites() as sites:
        for name in names:
            sites.add_machine("a", name)
        keys = {name: tmp_path / f"{name}.key" for name in names}
        tables = [f'[[machine]]\nname = "{name}"\npublic_key = "{ensure_key(keys[name])}"' for name in names]
        tables[0] += f'\nendpoint = "{sites.address_of("hub")}"'
        mesh = read_mesh("\n".join(tables), "machines.toml")
        swarm = LocalSwarm(tmp_path, tiny(2).to_toml(), corpus=tmp_path.parent / "corpus", launch=sites.launch)
        try:
            for number, machine in enumerate(mesh.machines):
                interface = f"agmesh{number}"
                text = configuration_of(mesh, machine)
                bring_up(sites, machine.name, interface, text, keys[machine.name], tmp_path)
                sites.listen_on(machine.name, str(machine.address))
            swarm.start("left", flags=["--stages", "0"])
            swarm.start("right", flags=["--stages", "1"])
            daemons = list(swarm.daemons.values())
            swarm.until(
                lambda: min(map(last_step, daemons)) >= 5, "steps of two machines that cannot dial each other", 120
            )
            swarm.stop()
        finally:
            swarm.kill_all()
            for name in names:
                sites.kill_all_in(name)
