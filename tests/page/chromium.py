"""A headless Chromium of the distribution, driven over the pipe of the DevTools protocol; and where there is none."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT_S = 120.0
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = "there is no Chromium on this machine: apt-get install chromium"
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--lang=en-US")


class Chromium:
    """One browser with one tab. What pages complained of is in `complaints`."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None, MISSING
        # Chromium reads calls from descriptor 3 and writes answers to 4.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pair in (os.pipe(), os.pipe()) for end in pair]
        theirs_in, self._calls, self._answers, theirs_out = ends

        def place_descriptors() -> None:
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=place_descriptors,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the protocol, of the tab once there is one, and returns its result."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._calls, json.dumps({"id": number, "method": method, "params": arguments, **session}).encode() + b"\0"
        )
        for message in self._messages():
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
        raise AssertionError(f"no answer to {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = time.monotonic() + WAIT_S
        while (left := deadline - time.monotonic()) > 0:
            while b"\0" in self._unread:
                line, _, self._unread = self._unread.partition(b"\0")
                message = json.loads(line)
                self._note(message)
                yield message
            if select.select([self._answers], [], [], left)[0]:
                self._unread += os.read(self._answers, 1 << 20)

    def _note(self, message: dict[str, Any]) -> None:
        match message:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(str(details))
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error" | "warning", "text": text}}}:
                self.complaints.append(str(text))
            case {"method": "Runtime.consoleAPICalled", "params": {"type": "error" | "assert"} as params}:
                self.complaints.append(str(params))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Returns the value, for JSON, of a JavaScript expression in the page; awaits a promise."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str) -> Any:
        """Waits until a JavaScript expression is true."""
        wait = f"""new Promise((done, failed) => {{
            const look = () => {{
                const value = ({condition});
                if (value) done(value); else setTimeout(look, 20);
            }};
            setTimeout(() => failed(new Error("waited too long")), {1000 * WAIT_S * 0.9});
            look();
        }})"""
        return self.evaluate(wait)

    def resize(self, width: int, height: int, *, is_dark: bool = False) -> None:
        is_phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, *, is_whole: bool = False) -> None:
        """Writes what the tab shows as a PNG; whole: also what lies below."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def press(self, key: str, code: int = 0) -> None:
        """Presses a key where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        os.close(self._calls)
        os.close(self._answers)


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    browser = Chromium(profile)
    try:
        yield browser
    finally:
        browser.close()
