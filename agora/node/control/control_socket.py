"""The control socket, on which commands of this machine ask a running daemon questions.

A Unix socket that only this user can open; JSON lines, one answer for each question.

    {"ask": "status"}                          ->  {"answer": {...}}
    {"ask": "evaluate", "batches": 4}          ->  {"answer": {"loss": 3.05, ...}}
    {"ask": "nonsense"}                        ->  {"error": {"code": "unknown", "text": "..."}}
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import select
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agora_protocol.errors import AgoraError, LocalError

from agora.node import daemon_registry, paths

MAX_LINE_BYTES = 16 * 1024
MAX_CONNECTIONS = 32
IDLE_TIMEOUT_S = 300.0  # seconds after which a connection without a question is closed
POLL_INTERVAL_S = 0.5  # seconds between two checks whether the client is still connected

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A question that can be asked: its handler, and the types of its arguments by name; all arguments are optional.

    deadline_s: seconds after which the handler is cancelled and the question is answered with an error.
    """

    handler: Callable[..., Awaitable[Answer]]
    arguments: Mapping[str, type]
    deadline_s: float = 5.0


# Raised for a line that is not a valid question; its `code`, one word, and its text answer the line.
class _BadQuestion(Exception):
    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ControlSocket:
    """Listens on the Unix socket `path` (mode 0600) from `start` until `close`, and answers `questions` by their names.

    Refuses further clients while MAX_CONNECTIONS are connected, and hangs up on one that is idle for IDLE_TIMEOUT_S. A
    connection may ask one question after another.
    """

    def __init__(self, path: Path, questions: Mapping[str, Question]) -> None:
        self.path = path
        self._questions = questions
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Creates the socket's directory if missing, removes a dead daemon's socket and registry file, and listens.

        Raises LocalError if the directory is another user's or not writable.
        """
        try:
            paths.make_private(self.path.parent)
            # A dead daemon's registry file too: find_running_daemons() would remove our socket with it.
            daemon_registry.unregister(self.path)
            self._server = await asyncio.start_unix_server(self._accept, str(self.path), limit=MAX_LINE_BYTES)
            self.path.chmod(0o600)
        except OSError as error:
            raise LocalError(
                f"Cannot open the control socket {self.path}: {error.strerror or error}; "
                f"set {paths.RUNTIME_VARIABLE} to a directory of yours."
            ) from error

    async def close(self) -> None:
        """Stops listening, cancels open connections and their answers, removes the socket and its registry file."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        daemon_registry.unregister(self.path)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.write(_error("busy", f"{MAX_CONNECTIONS} connections are open; close some"))
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="control connection")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                line = await asyncio.wait_for(reader.readuntil(b"\n"), IDLE_TIMEOUT_S)
                writer.write(await self._answer_unless_gone(line, writer))
                await asyncio.wait_for(writer.drain(), IDLE_TIMEOUT_S)
        except asyncio.LimitOverrunError:
            writer.write(_error("too-large", f"a line of more than {MAX_LINE_BYTES} bytes"))
        except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
            pass
        finally:
            with contextlib.suppress(ConnectionError, TimeoutError):
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), 1.0)

    async def _answer_unless_gone(self, line: bytes, writer: asyncio.StreamWriter) -> bytes:
        work = asyncio.create_task(self._answer(line))
        gone = asyncio.create_task(_wait_until_gone(writer))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionAbortedError("the client has hung up")
            return work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, line: bytes) -> bytes:
        try:
            question, arguments = self._parse_question(line)
            answer = await asyncio.wait_for(question.handler(**arguments), question.deadline_s)
        except (_BadQuestion, AgoraError) as error:
            return _error(error.code, str(error))
        except TimeoutError:
            return _error("deadline", "the daemon could not answer in time; ask again, or look at its log")
        return json.dumps({"answer": answer}).encode() + b"\n"

    def _parse_question(self, line: bytes) -> tuple[Question, dict[str, Any]]:
        try:
            asked = json.loads(line)
        except (ValueError, RecursionError):
            raise _BadQuestion("bad-line", "a line that is not JSON") from None
        if not isinstance(asked, dict) or not isinstance(asked.get("ask"), str):
            raise _BadQuestion("bad-line", 'a question is an object with "ask"')
        name = asked.pop("ask")
        question = self._questions.get(name)
        if question is None:
            raise _BadQuestion("unknown", f"cannot be asked for {name[:40]!r}; {_suggest(name, self._questions)}")
        for key, value in asked.items():
            if key not in question.arguments:
                raise _BadQuestion("unknown", f"{name} takes no {key[:40]!r}; {_suggest(key, question.arguments)}")
            if type(value) is not question.arguments[key]:
                raise _BadQuestion("bad-line", f"{name}: {key} must be {question.arguments[key].__name__}")
        return question, asked


async def _wait_until_gone(writer: asyncio.StreamWriter) -> None:
    hung_up = select.poll()
    hung_up.register(writer.get_extra_info("socket").fileno(), 0)
    while not writer.is_closing() and not hung_up.poll(0):  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(POLL_INTERVAL_S)


def _suggest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known)) or 'nothing'}"


def _error(code: str, text: str) -> bytes:
    return json.dumps({"error": {"code": code, "text": text}}).encode() + b"\n"
