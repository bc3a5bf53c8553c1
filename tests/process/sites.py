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


class Namespaces:
    """Network namespaces with names of their own, from the start of the block to its end."""

    def __init__(self, kind: str) -> None:
        self._prefix = f"agora{kind}{os.getpid()}"
        self._namespaces: list[str] = []

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes all namespaces, and with them what is in them."""
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "delete", f"{self._prefix}-{name}"], capture_output=True)
        self._namespaces.clear()

    def add(self, name: str) -> None:
        """Adds a namespace, in which only loopback is up."""
        ip("netns", "add", f"{self._prefix}-{name}")
        self._namespaces.append(name)
        self.ip_in(name, "link", "set", "lo", "up")

    def connect(self, one: str, interface: str, other: str, other_interface: str) -> None:
        """Lays a cable between two namespaces, both ends up."""
        peer = ("peer", "name", other_interface, "netns", f"{self._prefix}-{other}")
        self.ip_in(one, "link", "add", interface, "type", "veth", *peer)
        self.ip_in(one, "link", "set", interface, "up")
        self.ip_in(other, "link", "set", other_interface, "up")

    def ip_in(self, name: str, *arguments: str) -> None:
        """Runs the command ip for a namespace."""
        ip("-n", f"{self._prefix}-{name}", *arguments)

    def run_in(self, name: str, *command: str, text: str = "") -> None:
        """Runs a command in a namespace, with `text` as its input."""
        done = subprocess.run([*self.within(name), *command], input=text, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def within(self, name: str) -> tuple[str, ...]:
        """What stands before a command that runs in that namespace."""
        return "ip", "netns", "exec", f"{self._prefix}-{name}"

    def kill_all_in(self, name: str) -> None:
        """Ends every process that a test has left in that namespace."""
        found = subprocess.run(["ip", "netns", "pids", f"{self._prefix}-{name}"], capture_output=True, text=True)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Sites(Namespaces):
    """Two sites, "a" and "b", from the start of the block to its end."""

    def __init__(self) -> None:
        super().__init__("")
        self._addresses: dict[str, str] = {}
        self.cuts = 0

    def __enter__(self) -> Sites:
        super().__enter__()
        try:
            for site in "ab":
                self.add(site)
                self.ip_in(site, "link", "add", "bridge", "type", "bridge")
                self.ip_in(site, "link", "set", "bridge", "up")
            self.connect("a", "uplink", "b", "uplink")
            for site in "ab":
                self.ip_in(site, "link", "set", "uplink", "master", "bridge")
        except BaseException:
            self.close()
            raise
        return self

    def add_machine(self, site: str, name: str) -> None:
        """Adds a machine to a site; a program that is started in it has its own address and its own loopback."""
        number = len(self._addresses) + 1
        self.add(name)
        self.connect(site, f"port{number}", name, "eth0")
        self.ip_in(site, "link", "set", f"port{number}", "master", "bridge")
        self._addresses[name] = f"10.77.0.{number}"
        self.ip_in(name, "address", "add", f"{self._addresses[name]}/16", "dev", "eth0")

    def cut(self) -> None:
        """Cuts the link between the sites: packets are lost, no connection is told."""
        self.cuts += 1
        self.ip_in("a", "link", "set", "uplink", "down")

    def mend(self) -> None:
        """Brings the link between the sites back."""
        self.ip_in("a", "link", "set", "uplink", "up")

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


def ip(*arguments: str) -> None:
    """Runs the command ip; fails with what it says."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
