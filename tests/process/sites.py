"""Two sites with a link between them that a test can cut: network namespaces, bridges and veth pairs. Needs root.

Every machine of a site is a namespace of its own, with an address in 10.77.0.0/16 that all machines of both sites reach
while the link is up. Nothing of it touches the namespace that the tests run in.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from agora.cli.local_swarm import start_interpreter


def can_make_sites() -> bool:
    """Whether this machine lets the tests make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"agora-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made


class Sites:
    """Two sites, "a" and "b", from the start of the block to its end."""

    def __init__(self) -> None:
        self._prefix = f"agora{os.getpid()}"
        self._namespaces: list[str] = []
        self._addresses: dict[str, str] = {}
        self.cuts = 0

    def __enter__(self) -> Sites:
        try:
            for site in "ab":
                self._add_namespace(f"{self._prefix}-{site}")
                self._in_bridge_of(site, "link", "add", "bridge", "type", "bridge")
                self._in_bridge_of(site, "link", "set", "bridge", "up")
            self._connect(f"{self._prefix}-a", "uplink", f"{self._prefix}-b", "uplink")
            for site in "ab":
                self._in_bridge_of(site, "link", "set", "uplink", "master", "bridge")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes all namespaces, and with them what is in them."""
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        self._namespaces.clear()

    def add_machine(self, site: str, name: str) -> None:
        """Adds a machine to a site; a program that is started in it has its own address and its own loopback."""
        number = len(self._addresses) + 1
        namespace, port = f"{self._prefix}-{name}", f"port{number}"
        self._add_namespace(namespace)
        self._connect(f"{self._prefix}-{site}", port, namespace, "eth0")
        self._in_bridge_of(site, "link", "set", port, "master", "bridge")
        self._addresses[name] = f"10.77.0.{number}"
        _ip("-n", namespace, "address", "add", f"{self._addresses[name]}/16", "dev", "eth0")

    def cut(self) -> None:
        """Cuts the link between the sites: packets are lost, no connection is told."""
        self.cuts += 1
        self._in_bridge_of("a", "link", "set", "uplink", "down")

    def mend(self) -> None:
        """Brings the link between the sites back."""
        self._in_bridge_of("a", "link", "set", "uplink", "up")

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Starts `agora-node ARGUMENTS` on the machine that has the name of the log's directory, listening there."""
        name = log.parent.name
        listen = f"/ip4/{self._addresses[name]}/tcp/0"
        changed = [listen if argument.startswith("/ip4/127.0.0.1/") else argument for argument in arguments]
        return start_interpreter(changed, environment, log, within=self.within(name))

    def address_of(self, name: str) -> str:
        """The address of a machine, at which its daemon listens."""
        return self._addresses[name]

    def listen_on(self, name: str, address: str) -> None:
        """Makes a machine's daemon listen on another address that the machine has."""
        self._addresses[name] = address

    def within(self, name: str) -> tuple[str, ...]:
        """What stands before a command that runs on that machine."""
        return "ip", "netns", "exec", f"{self._prefix}-{name}"

    def kill_all_in(self, name: str) -> None:
        """Ends every process that a test has left on that machine."""
        found = subprocess.run(["ip", "netns", "pids", f"{self._prefix}-{name}"], capture_output=True, text=True)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _add_namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._namespaces.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _connect(self, one: str, interface: str, other: str, other_interface: str) -> None:
        """A cable between two namespaces, both ends up."""
        _ip("-n", one, "link", "add", interface, "type", "veth", "peer", "name", other_interface, "netns", other)
        _ip("-n", one, "link", "set", interface, "up")
        _ip("-n", other, "link", "set", other_interface, "up")

    def _in_bridge_of(self, site: str, *arguments: str) -> None:
        _ip("-n", f"{self._prefix}-{site}", *arguments)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
