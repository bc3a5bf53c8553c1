"""Shows how a run ends on the owner's desktop, by notify-send or the session bus (org.freedesktop.Notifications)."""

from __future__ import annotations

import html
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from agora.core.terminal_text import one_line, printable
from agora.observe import events
from agora.observe.events import Event

MAX_BODY_CHARACTERS: Final = 300

Compose = Callable[[str, str], Sequence[str]]  # of a title and a body, the command that shows them


def find_notifier(environment: Mapping[str, str] = os.environ) -> tuple[Compose | None, str]:
    """Returns what composes the command for a notification, or None and why nothing can be shown, with what to do."""
    bus = environment.get("DBUS_SESSION_BUS_ADDRESS", "")
    socket = Path(environment.get("XDG_RUNTIME_DIR") or "/nonexistent") / "bus"
    if not bus and not socket.exists():
        return None, "no desktop session can be reached from here (no session bus); leave out --notify"
    if shutil.which("notify-send", path=environment.get("PATH")):
        return _by_notify_send, ""
    if shutil.which("busctl", path=environment.get("PATH")):
        return _by_busctl, ""
    return None, "neither notify-send nor busctl is installed; install libnotify-bin"


def _by_notify_send(title: str, body: str) -> Sequence[str]:
    return ["notify-send", "--app-name=Agora", "--", title, body]


def _by_busctl(title: str, body: str) -> Sequence[str]:
    # Application, id of one to replace, icon, title, body, no actions, no hints, the server's usual time.
    call = ["susssasa{sv}i", "Agora", "0", "", title, body, "0", "0", "-1"]
    name, path = "org.freedesktop.Notifications", "/org/freedesktop/Notifications"
    return ["busctl", "--user", "--", "call", name, path, name, "Notify", *call]


class DesktopNotifier:
    """A reporter's sink that shows that the run is completed, that its result is written, and that the daemon ends."""

    path = "a notification on the desktop"  # as the reporter names what cannot be written

    def __init__(self, run: str, compose: Compose) -> None:
        """run: its name."""
        self._run = run
        self._compose = compose
        self._shown: list[subprocess.Popen[bytes]] = []

    def take(self, event: Event, at_unix: float) -> None:
        del at_unix
        match event:
            case events.StateChanged("completed", reason):
                self._show(" is completed", reason)
            case events.StateChanged("left", reason):
                self._show(": the daemon has ended", reason)
            case events.ResultExported(folder):
                self._show(" has a result", f"The result is in {folder}")

    def _show(self, what: str, body: str) -> None:
        # Not waited for: the event may be the last thing that this process does. Peers wrote parts of the texts, and
        # servers read the body as markup.
        title = one_line(printable(f"Run {self._run or 'unnamed'}{what}"), MAX_BODY_CHARACTERS)
        command = self._compose(title, html.escape(one_line(printable(body), MAX_BODY_CHARACTERS), quote=False))
        self._shown = [process for process in self._shown if process.poll() is None]
        quiet = subprocess.DEVNULL
        self._shown.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True))
