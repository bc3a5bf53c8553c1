"""An internet in network namespaces: machines with public addresses, and machines behind home routers. Needs root, nft.

Every machine is a namespace of its own. A router is one too: it translates addresses as one kind of NAT does, and
drops what nobody inside has asked for. Nothing of it touches the namespace that the tests run in. The addresses count
as public everywhere, since a peer treats private ones in another way; no packet leaves the namespaces.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from agora.cli.local_swarm import start_interpreter
from tests.process.sites import Namespaces, can_make_sites

FULL_CONE: Final = "full cone"
"""A port of the machine is the same port outside, for whoever dials it."""
RESTRICTED: Final = "restricted"
"""A port of the machine is the same port outside, but only for whom the machine has dialled from it."""
SYMMETRIC: Final = "symmetric"
"""As restricted, but a random port outside for each address that the machine dials."""

_UNASKED: Final = 'iifname "wan" ct state new drop;'
_RULES: Final = """
table ip nat {{
  chain leaving {{ type nat hook postrouting priority srcnat; oifname "wan" masquerade {how}; }}
  chain coming {{ type nat hook prerouting priority dstnat; {forward} }}
}}
table ip shield {{
  chain to_router {{ type filter hook input priority filter; iifname "wan" ct state new drop; }}
  chain to_machine {{ type filter hook forward priority filter; {shield} }}
}}
"""


def can_make_nats() -> bool:
    """Whether this machine lets the tests make network namespaces with NAT between them."""
    if not can_make_sites() or shutil.which("nft") is None:
        return False
    with Namespaces("try") as namespaces:
        namespaces.add("nat")
        rules = _RULES.format(how="", forward="", shield=_UNASKED)
        within = namespaces.within("nat")
        return subprocess.run([*within, "nft", "-f", "-"], input=rules.encode(), capture_output=True).returncode == 0


class NatLab(Namespaces):
    """Machines on one internet, from the start of the block to its end."""

    def __init__(self) -> None:
        super().__init__("nat")
        self._numbers: dict[str, int] = {}

    def __enter__(self) -> NatLab:
        super().__enter__()
        try:
            self.add("internet")
            self.ip_in("internet", "link", "add", "bridge", "type", "bridge")
            self.ip_in("internet", "link", "set", "bridge", "up")
        except BaseException:
            self.close()
            raise
        return self

    def add_public(self, name: str) -> None:
        """Adds a machine with a public address."""
        self.add(name)
        self._attach(name, name, "eth0")

    def add_behind(self, name: str, kind: str) -> None:
        """Adds a machine with a private address, and its router, which is a NAT of this kind."""
        router = f"{name}-r"
        self.add(router)
        self._attach(name, router, "wan")
        self.add(name)
        self.connect(router, "lan", name, "eth0")
        self.ip_in(router, "address", "add", "192.168.1.1/24", "dev", "lan")
        self.ip_in(name, "address", "add", "192.168.1.2/24", "dev", "eth0")
        self.ip_in(name, "route", "add", "default", "via", "192.168.1.1")
        rules = _RULES.format(
            how="fully-random" if kind == SYMMETRIC else "",
            forward='iifname "wan" dnat to 192.168.1.2;' if kind == FULL_CONE else "",
            shield="" if kind == FULL_CONE else _UNASKED,
        )
        self.run_in(router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        self.run_in(router, "nft", "-f", "-", text=rules)

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Starts `agora-node ARGUMENTS` on the machine that has the name of the log's directory, on all addresses."""
        listen = "/ip4/0.0.0.0/tcp/0"
        changed = [listen if argument.startswith("/ip4/127.0.0.1/") else argument for argument in arguments]
        changed_environment = {**environment, "AGORA_ALLOW_PRIVATE": "false"}
        return start_interpreter(changed, changed_environment, log, within=self.within(log.parent.name))

    def public_address(self, name: str) -> str:
        """The address under which the internet sees a machine."""
        return f"44.77.0.{self._numbers[name]}"

    def limit(self, name: str, rate: str) -> None:
        """Limits what a machine sends, and what is sent to it, to `rate`, such as 200mbit."""
        bucket = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        self.run_in(name, "tc", "qdisc", "add", "dev", "eth0", *bucket)
        self.run_in("internet", "tc", "qdisc", "add", "dev", f"port{self._numbers[name]}", *bucket)

    def _attach(self, name: str, namespace: str, interface: str) -> None:
        """Connects a namespace to the internet, with the public address of machine `name`."""
        number = self._numbers[name] = len(self._numbers) + 1
        self.connect("internet", f"port{number}", namespace, interface)
        self.ip_in("internet", "link", "set", f"port{number}", "master", "bridge")
        self.ip_in(namespace, "address", "add", f"{self.public_address(name)}/16", "dev", interface)
