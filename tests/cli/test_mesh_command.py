"""`swarm mesh`: who is told of whom, what no configuration holds, and what is said of a wrong list."""

from __future__ import annotations

import base64
import json
import resource
import stat
from pathlib import Path

import pytest
from agora_protocol.errors import DiskError, InputError
from typer.testing import CliRunner

from agora.cli.main_swarm import app
from agora.cli.mesh_command import configuration_of, ensure_key, read_mesh

EXAMPLE = Path(__file__).parents[2] / "deploy" / "wireguard" / "machines.toml"


def key(number: int) -> str:
    return base64.b64encode(bytes([number] * 32)).decode()


def listed(*machines: str, head: str = "") -> str:
    tables = (f'[[machine]]\nname = "m{n}"\npublic_key = "{key(n)}"\n{extra}' for n, extra in enumerate(machines))
    return head + "\n" + "\n".join(tables)


PUBLIC = 'endpoint = "a.example.org"\n'


def peers_in(text: str) -> dict[str, list[str]]:
    """The AllowedIPs of a configuration, by public key."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" = ")
        if name == "PublicKey":
            latest = value
        elif name == "AllowedIPs":
            found[latest] = value.split(", ")
    return found


def test_the_example_is_one() -> None:
    mesh = read_mesh(EXAMPLE.read_text(), "machines.toml")
    assert [str(machine.address) for machine in mesh.machines] == ["10.88.0.1", "10.88.0.2", "10.88.0.9"]
    assert mesh.hub is mesh.machines[0] and mesh.hub.endpoint == "attic.example.org:51820"


def test_an_address_in_another_form_is_not_given_to_a_second_machine() -> None:
    text = listed(PUBLIC, 'address = "fd00:0::1"', head='network = "fd00::/64"')
    assert [str(machine.address) for machine in read_mesh(text, "list").machines] == ["fd00::2", "fd00::1"]


def test_machines_with_endpoints_know_all_and_those_without_reach_each_other_through_the_first() -> None:
    mesh = read_mesh(listed("", PUBLIC, 'endpoint = "192.0.2.7:99"\n', ""), "list")
    hidden, hub, other, also_hidden = mesh.machines
    assert mesh.hub == hub
    for machine in (hub, other):
        others = {each.public_key: [f"{each.address}/32"] for each in mesh.machines if each != machine}
        assert peers_in(configuration_of(mesh, machine)) == others
    assert peers_in(configuration_of(mesh, hidden)) == {
        hub.public_key: [f"{hub.address}/32", f"{also_hidden.address}/32"],
        other.public_key: [f"{other.address}/32"],
    }
    assert "ip_forward" in configuration_of(mesh, hub) and "ip_forward" not in configuration_of(mesh, other)
    assert "PersistentKeepalive" in configuration_of(mesh, hidden)
    assert "PersistentKeepalive" not in configuration_of(mesh, hub)


def test_a_key_is_made_once_is_private_and_stands_in_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "agora.key"
    public = ensure_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ensure_key(file) == public and len(base64.b64decode(public)) == 32
    mesh = read_mesh(listed(PUBLIC, "").replace(key(0), public), "list")
    for machine in mesh.machines:
        text = configuration_of(mesh, machine)
        assert file.read_text().strip() not in text and "PrivateKey" not in text
    file.write_text("no key")
    with pytest.raises(InputError, match="not a WireGuard key"):
        ensure_key(file)


def test_a_key_that_the_disk_does_not_take_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "agora.key"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(DiskError, match="Cannot write .*; name another file"):
            ensure_key(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not file.exists() and len(ensure_key(file)) == 44


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "2 to 1000 machines"),
        ("network = ", "not valid TOML"),
        (listed("", ""), "no machine has an endpoint"),
        (listed(PUBLIC, "", head="netwerk = 1"), "did you mean network"),
        (listed(PUBLIC, 'adress = "10.88.0.3"'), "did you mean address"),
        (listed(PUBLIC, 'address = "192.168.0.1"'), "not of network"),
        (listed(PUBLIC, 'address = "10.88.0.7"', 'address = "10.88.0.7"'), "m2 and m1 both have 10.88.0.7"),
        (listed(PUBLIC, "").replace("m1", "m0"), "both have m0"),
        (listed(PUBLIC, "").replace(key(1), key(0)), "both have"),
        (listed(PUBLIC, "").replace(key(1), "abc"), "--new-key"),
        (listed(PUBLIC, "").replace("m1", "../etc"), "becomes a file's name"),
        (listed('endpoint = "a b"', ""), "must look like"),
        (listed('endpoint = "a.example.org:99999"', ""), "must look like"),
        (listed(PUBLIC, "", head='network = "10.88"'), "network must look like"),
        (listed(PUBLIC, "", head="port = 0"), "port must be"),
        (listed(PUBLIC, "", "", "", head='network = "10.88.0.0/30"'), "no address left"),
        (listed(PUBLIC, "endpoint = 3"), "must be text"),
    ],
)
def test_a_wrong_list_is_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_mesh(text, "machines.toml")


def test_the_command_writes_a_file_for_each_machine(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["mesh", str(EXAMPLE), "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)["machines"]
    assert [row["name"] for row in rows] == ["attic", "laptop", "lab"]
    assert all(Path(row["file"]).read_text().startswith("#") for row in rows)
