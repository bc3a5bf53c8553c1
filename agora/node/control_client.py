"""Asks a daemon of this machine a question over its control socket, with a deadline.

Knows: one JSON line out, one JSON line back. Must not know: what is asked; imports the standard library only.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

MAX_ANSWER_BYTES = 4 * 2**20


class DaemonUnreachable(Exception):
    """No daemon answers on the socket in time."""


class DaemonRefused(Exception):
    """The daemon answered with an error: `code` is its word, the text a sentence."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def ask(path: Path, question: str, *, timeout_s: float = 5.0, **arguments: Any) -> dict[str, Any]:
    """Returns the daemon's answer. Raises DaemonUnreachable or DaemonRefused."""
    deadline = time.monotonic() + timeout_s
    line = json.dumps({"ask": question, **arguments}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(timeout_s)
            channel.connect(str(path))
            channel.sendall(line)
            answer = json.loads(_read_line(channel, deadline))
    except (OSError, ValueError) as error:
        raise DaemonUnreachable(f"no answer on {path}: {error}") from error
    if "error" in answer:
        raise DaemonRefused(str(answer["error"].get("code", "")), str(answer["error"].get("text", "")))
    content = answer.get("answer")
    if not isinstance(content, dict):
        raise DaemonUnreachable(f"an answer on {path} that is no object")
    return content


def _read_line(channel: socket.socket, deadline: float) -> bytes:
    """Returns the next line without its end. Raises an OSError at `deadline`, or when the line does not end."""
    parts: list[bytes] = []
    total = 0
    while not parts or b"\n" not in parts[-1]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        channel.settimeout(left_s)
        part = channel.recv(65536)
        if not part:
            raise ConnectionError("the daemon closed the connection")
        parts.append(part)
        total += len(part)
        if total > MAX_ANSWER_BYTES:
            raise ConnectionError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return b"".join(parts).partition(b"\n")[0]
