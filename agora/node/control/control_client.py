"""Asks a daemon of this machine a question over its control socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

MAX_ANSWER_BYTES = 4 * 2**20


class DaemonUnreachable(Exception):
    """Raised by `ask` when no daemon answers on the socket in time, or its answer is malformed."""


class DaemonRefused(Exception):
    """Raised by `ask` when the daemon answers with an error: `code` is one word for it, the text a sentence."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


def ask(path: Path, question: str, *, timeout_s: float = 5.0, **arguments: Any) -> dict[str, Any]:
    """Asks the daemon whose control socket is `path` a question, and returns its answer. Blocks.

    question: its name. arguments: those of the question. Raises DaemonRefused when the daemon answers with an error,
    DaemonUnreachable when there is no socket, nothing comes for `timeout_s` seconds, or the answer is malformed.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(timeout_s)
            channel.connect(str(path))
            channel.sendall(json.dumps({"ask": question, **arguments}).encode() + b"\n")
            with channel.makefile("rb") as lines:
                answer = json.loads(lines.readline(MAX_ANSWER_BYTES) or "null")
    except (OSError, ValueError) as error:
        raise DaemonUnreachable(f"no answer on {path}: {error}") from error
    match answer:
        case {"answer": dict(answered)}:
            return answered
        case {"error": {"code": str(code), "text": str(text)}}:
            raise DaemonRefused(code, text)
        case None:
            raise DaemonUnreachable(f"the daemon closed its connection on {path} without an answer")
    raise DaemonUnreachable(f"the daemon's answer on {path} is malformed")
