"""The control socket: JSON lines over a Unix socket that only this user can open; one question, one answer per line.

Knows: the socket, limits, deadlines, errors as data. Must not know: what the questions do (the daemon gives handlers).

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

from agora.node import paths

MAX_LINE_BYTES = 16 * 1024
MAX_CONNECTIONS = 32
IDLE_SECONDS = 300.0
LOOK_SECONDS = 0.5
"""Between two looks at whether who asked is still there."""

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing that can be asked: the arguments it takes (with their JSON types) and how long an answer may take."""

    handler: Callable[[Mapping[str, Any]], Awaitable[Answer]]
    arguments: Mapping[str, type]
    deadline_s: float = 5.0


class _BadQuestion(Exception):
    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ControlSocket:
    """Serves `asks` at `path` (mode 0600) until `close`."""

    def __init__(self, path: Path, asks: Mapping[str, Ask]) -> None:
        self.path = path
        self._asks = asks
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Binds the socket; raises LocalError when its directory is not this user's or cannot be written."""
        try:
            paths.make_private(self.path.parent)
            self.path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._accept, str(self.path), limit=MAX_LINE_BYTES)
            self.path.chmod(0o600)
        except OSError as error:
            raise LocalError(
                f"cannot open the control socket {self.path}: {error.strerror or error}; "
                f"set {paths.RUNTIME_VARIABLE} to a directory of yours"
            ) from error

    async def close(self) -> None:
        """Stops listening, ends open connections, removes the socket."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        paths.unregister(self.path)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.write(_error("busy", f"{MAX_CONNECTIONS} connections are open; close some"))
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="control connection")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await asyncio.wait_for(_line(reader), IDLE_SECONDS):
                writer.write(await self._answer_while_there(line, writer))
                await asyncio.wait_for(writer.drain(), IDLE_SECONDS)
        except _BadQuestion as error:
            writer.write(_error(error.code, str(error)))
        except (TimeoutError, ConnectionError):
            pass
        finally:
            with contextlib.suppress(ConnectionError, TimeoutError):
                writer.close()
                await asyncio.wait_for(writer.wait_closed(), 1.0)

    async def _answer_while_there(self, line: bytes, writer: asyncio.StreamWriter) -> bytes:
        """The answer; ConnectionError, and the work is cancelled, when nobody is there any more to read it."""
        work, gone = asyncio.create_task(self._answer(line)), asyncio.create_task(_gone(writer))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ConnectionAbortedError("the asker has gone away")
            return work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, line: bytes) -> bytes:
        try:
            ask, arguments = self._read(line)
            answer = await asyncio.wait_for(ask.handler(arguments), ask.deadline_s)
        except _BadQuestion as error:
            return _error(error.code, str(error))
        except TimeoutError:
            return _error("deadline", "the daemon could not answer in time; ask again, or look at its log")
        except AgoraError as error:
            return _error(error.code, str(error))
        return json.dumps({"answer": answer}).encode() + b"\n"

    def _read(self, line: bytes) -> tuple[Ask, dict[str, Any]]:
        try:
            question = json.loads(line)
        except ValueError:
            raise _BadQuestion("bad-line", "a line that is not JSON") from None
        if not isinstance(question, dict) or not isinstance(question.get("ask"), str):
            raise _BadQuestion("bad-line", 'a question is an object with "ask"')
        name = question.pop("ask")
        ask = self._asks.get(name)
        if ask is None:
            raise _BadQuestion("unknown", f"cannot be asked for {name[:40]!r}{_nearest(name, self._asks)}")
        for key, value in question.items():
            if key not in ask.arguments:
                raise _BadQuestion("unknown", f"{name} takes no {key[:40]!r}{_nearest(key, ask.arguments)}")
            if type(value) is not ask.arguments[key]:
                raise _BadQuestion("bad-line", f"{name}: {key} must be {ask.arguments[key].__name__}")
        return ask, question


async def _line(reader: asyncio.StreamReader) -> bytes:
    """The next line, b"" at the end; a longer one than the limit ends the connection with an error."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return b""
    except asyncio.LimitOverrunError:
        raise _BadQuestion("too-large", f"a line of more than {MAX_LINE_BYTES} bytes") from None


async def _gone(writer: asyncio.StreamWriter) -> None:
    """Returns when the other end is closed; one that only writes no more is still there and waits for its answer."""
    hung_up = select.poll()
    hung_up.register(writer.get_extra_info("socket").fileno(), 0)
    while not writer.is_closing() and not hung_up.poll(0):  # noqa: ASYNC110 - no event tells of it
        await asyncio.sleep(LOOK_SECONDS)


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known)) or 'nothing'}"


def _error(code: str, text: str) -> bytes:
    return json.dumps({"error": {"code": code, "text": text}}).encode() + b"\n"
