"""What systemd is told: READY after the first hop served, WATCHDOG by progress or a stated wait, STATUS, STOPPING.

Knows: sd_notify's datagrams, and the rule when the dog may be patted. Must not know: timers; whoever calls `heartbeat`
passes what is known about progress, a healthy timer proves nothing about the work.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


class Notifier:
    """Sends sd_notify datagrams to NOTIFY_SOCKET; without it (not under systemd) every call does nothing."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and ours else 0.0

    def send(self, **fields: str | int) -> None:
        """One datagram of KEY=value lines; a lost one is no error, the next will follow."""
        if not self._address:
            return
        lines = "\n".join(f"{key}={str(value).splitlines()[0] if str(value) else ''}" for key, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as channel:
            try:
                channel.connect(self._address)
                channel.send(lines.encode())
            except OSError:
                return


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is known about this daemon's work at one moment; times are loop seconds."""

    now: float
    last_progress: float  # when something was last finished: a microbatch, a step, a stage of the start
    in_hand: int  # microbatches accepted or originated and not finished
    waiting_for: str  # a stated wait, "" when there is none
    paused: bool


def may_pat(pulse: Pulse, silence_s: float) -> tuple[bool, str]:
    """Whether the watchdog may be fed, and the sentence for STATUS.

    Work that is in hand must move within `silence_s`, else the dog goes hungry and systemd restarts the daemon. Idle,
    paused and waiting daemons are content, and say so.
    """
    if pulse.paused:
        return True, "paused by the owner"
    if pulse.waiting_for:
        return True, f"waiting for {pulse.waiting_for}"
    if pulse.in_hand == 0:
        return True, "idle: no microbatch in hand"
    quiet_s = pulse.now - pulse.last_progress
    if quiet_s <= silence_s:
        return True, f"working on {pulse.in_hand} microbatches"
    return False, f"no progress for {quiet_s:.0f} s with {pulse.in_hand} microbatches in hand"
