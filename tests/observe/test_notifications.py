"""Claims about notifications: the ends of a run are shown on the desktop, as text and never as markup."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from agora.observe import events
from agora.observe.notifications import DesktopNotifier, find_notifier


def a_program(folder: Path, name: str, script: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o700)


def until_it_has(file: Path, text: str) -> str:
    deadline = time.monotonic() + 30
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < deadline, file.read_text() if file.exists() else "nothing was shown"
        time.sleep(0.02)
    return file.read_text()


def test_only_ends_are_shown_and_texts_of_others_are_no_markup(tmp_path: Path) -> None:
    shown: list[Sequence[str]] = []

    def compose(title: str, body: str) -> Sequence[str]:
        shown.append((title, body))
        return ["true"]

    notifier = DesktopNotifier("poems\x1b", compose)
    for event in (
        events.StateChanged("serving", "stages 0-1"),
        events.StateChanged("paused", "paused by its owner"),
        events.StateChanged("completed", "the run has taken its 40 steps"),
        events.ResultExported("/data/result"),
        events.StateChanged("left", "the daemon has ended: <a href='x'>look</a>\n" + 500 * "x"),
    ):
        notifier.take(event, 0.0)
    assert [title for title, _ in shown] == [
        "Run poems? is completed",
        "Run poems? has a result",
        "Run poems?: the daemon has ended",
    ]
    assert shown[0][1] == "the run has taken its 40 steps"
    assert "&lt;a href" in shown[2][1] and "<" not in shown[2][1] and len(shown[2][1]) < 400


def test_notify_send_gets_the_title_and_the_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_program(tmp_path / "bin", "notify-send", f'printf "%s|" "$@" >> {tmp_path}/shown')
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/x"}
    compose, why = find_notifier(environment)
    assert compose is not None and not why
    monkeypatch.setenv("PATH", environment["PATH"])
    DesktopNotifier("poems", compose).take(events.StateChanged("left", "asked to leave"), 0.0)
    assert (
        until_it_has(tmp_path / "shown", "leave|")
        == "--app-name=Agora|--|Run poems: the daemon has ended|asked to leave|"
    )


def test_without_a_session_or_a_program_the_owner_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert find_notifier({"PATH": str(tmp_path)}) == (
        None,
        "no desktop session can be reached from here (no session bus); leave out --notify",
    )
    bus = {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/x"}
    compose, why = find_notifier({"PATH": str(tmp_path / "empty"), **bus})
    assert compose is None and "libnotify-bin" in why


@pytest.mark.skipif(
    not all(map(shutil.which, ("dbus-run-session", "dbus-monitor", "busctl"))), reason="needs dbus-daemon and busctl"
)
def test_a_real_session_bus_carries_the_call_of_busctl(tmp_path: Path) -> None:
    a_program(tmp_path / "bin", "show", "")
    compose, _ = find_notifier({"PATH": path_without_notify_send(tmp_path), "DBUS_SESSION_BUS_ADDRESS": "x"})
    assert compose is not None
    command = compose("Run poems is completed", "-it's done")
    script = tmp_path / "session"
    # busctl itself fails, since nobody shows notifications on this bus; dbus-monitor is on it before the call.
    script.write_text(
        f"heard={tmp_path}/heard; dbus-monitor --session > $heard &\n"
        "until grep -q NameAcquired $heard; do sleep 0.05; done\n"
        '"$@"; until grep -q Notify $heard; do sleep 0.05; done; kill $!\n'
    )
    session = ["dbus-run-session", "--", "/bin/sh", str(script), *command]
    subprocess.run(session, timeout=60, capture_output=True, check=False)
    heard = (tmp_path / "heard").read_text()
    assert "interface=org.freedesktop.Notifications; member=Notify" in heard
    assert 'string "Run poems is completed"' in heard and 'string "-it\'s done"' in heard and "int32 -1" in heard


def path_without_notify_send(folder: Path) -> str:
    (folder / "only").mkdir()
    (folder / "only" / "busctl").symlink_to(str(shutil.which("busctl")))
    return str(folder / "only")
