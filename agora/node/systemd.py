"""Sends systemd its notifications: READY, WATCHDOG, STATUS, STOPPING.

Knows: sd_notify's datagrams. Must not know: when which of them is due (watchdog.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends sd_notify datagrams to NOTIFY_SOCKET; does nothing when that is not set (not under systemd).

    `watchdog_s` is the watchdog's interval in seconds, 0 when systemd watches no watchdog of this process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and is_ours else 0.0

    def send(self, **fields: str | int) -> None:
        """Sends one datagram of KEY=value lines. A datagram that cannot be sent is lost without an error."""
        if not self._address:
            return
        lines = "\n".join(f"{key}={str(value).splitlines()[0] if str(value) else ''}" for key, value in fields.items())
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as channel:
            channel.connect(self._address)
            channel.send(lines.encode())
