"""Claims about the control socket: private, bounded, and every mistake answered with what to do."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from agora_protocol.errors import AgoraError, LocalError

from agora.node import daemon_registry, paths
from agora.node.control import control_client, control_socket
from agora.node.control.control_socket import ControlSocket, Question


async def status() -> dict[str, Any]:
    return {"state": "serving"}


async def evaluate(batches: int = 1) -> dict[str, Any]:
    if batches > 9:
        raise LocalError("too many batches; ask for fewer")
    return {"batches": batches}


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


QUESTIONS = {
    "status": Question(status, {}),
    "evaluate": Question(evaluate, {"batches": int}),
    "never": Question(never, {}, deadline_s=0.05),
}


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path))


def served(tmp_path: Path, scenario: Callable[[Path], Awaitable[None]]) -> None:
    async def main() -> None:
        socket = ControlSocket(tmp_path / "run" / "control.sock", QUESTIONS)
        await socket.start()
        try:
            await asyncio.wait_for(scenario(socket.path), 20)
        finally:
            await socket.close()
        assert not socket.path.exists()

    asyncio.run(main())


def test_only_this_user_can_open_it(tmp_path: Path) -> None:
    async def scenario(path: Path) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    served(tmp_path, scenario)


def test_what_a_killed_daemon_left_does_not_take_the_new_socket_along(tmp_path: Path) -> None:
    """A command that lists daemons removes the files of killed ones; once the restarted one's socket too."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    path = tmp_path / "a.sock"
    daemon_registry.register(daemon_registry.DaemonEntry("r", "n", "f", "p", ended.pid, str(tmp_path), str(path)))

    async def restart() -> dict[str, Any]:
        control = ControlSocket(path, QUESTIONS)
        await control.start()
        assert daemon_registry.find_running_daemons() == []
        answer = await asyncio.to_thread(control_client.ask, path, "status")
        await control.close()
        return answer

    assert asyncio.run(restart())


def test_questions_are_answered_line_by_line(tmp_path: Path) -> None:
    async def scenario(path: Path) -> None:
        assert await asyncio.to_thread(control_client.ask, path, "status") == {"state": "serving"}
        assert await asyncio.to_thread(lambda: control_client.ask(path, "evaluate", batches=4)) == {"batches": 4}
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"ask":"status"}\n{"ask":"evaluate","batches":2}\n')
        assert json.loads(await reader.readline()) == {"answer": {"state": "serving"}}
        assert json.loads(await reader.readline()) == {"answer": {"batches": 2}}
        writer.close()

    served(tmp_path, scenario)


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        (b"no json", "bad-line", "not JSON"),
        (b"[" * 10_000, "bad-line", "not JSON"),
        (b"[]", "bad-line", 'an object with "ask"'),
        (b'{"ask": 1}', "bad-line", 'an object with "ask"'),
        (b'{"ask": "statsu"}', "unknown", "did you mean 'status'?"),
        (b'{"ask": "evaluate", "batch": 1}', "unknown", "did you mean 'batches'?"),
        (b'{"ask": "evaluate", "batches": "4"}', "bad-line", "batches must be int"),
        (b'{"ask": "evaluate", "batches": true}', "bad-line", "batches must be int"),
        (b'{"ask": "evaluate", "batches": 10}', "local", "ask for fewer"),
        (b'{"ask": "never"}', "deadline", "could not answer in time"),
        (b"\xff\xfe", "bad-line", "not JSON"),
    ],
)
def test_each_mistake_gets_a_code_and_the_connection_lives_on(
    tmp_path: Path, line: bytes, code: str, text: str
) -> None:
    async def scenario(path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(line + b"\n")
        error = json.loads(await reader.readline())["error"]
        assert error["code"] == code and text in error["text"]
        writer.write(b'{"ask":"status"}\n')
        assert b"serving" in await reader.readline()
        writer.close()

    served(tmp_path, scenario)


def test_an_endless_line_ends_the_connection_and_costs_little(tmp_path: Path) -> None:
    async def scenario(path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"x" * (control_socket.MAX_LINE_BYTES + 10))
        assert b"too-large" in await reader.readline()
        assert await reader.read() == b""
        writer.close()
        assert await asyncio.to_thread(control_client.ask, path, "status") == {"state": "serving"}

    served(tmp_path, scenario)


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "MAX_CONNECTIONS", 2)

    async def scenario(path: Path) -> None:
        held = [await asyncio.open_unix_connection(path) for _ in range(2)]
        for reader, writer in held:
            writer.write(b'{"ask":"status"}\n')
            assert b"serving" in await reader.readline()
        reader, extra = await asyncio.open_unix_connection(path)
        assert b'"busy"' in await reader.readline()
        for _, writer in [*held, (reader, extra)]:
            writer.close()

    served(tmp_path, scenario)


def test_a_second_close_and_a_client_that_left_are_no_trouble(tmp_path: Path) -> None:
    async def scenario(path: Path) -> None:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"ask":"never"}\n')
        await writer.drain()
        writer.transport.abort()

    served(tmp_path, scenario)


def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(control_client.DaemonUnreachable):
        control_client.ask(tmp_path / "none.sock", "status", timeout_s=1.0)


@pytest.mark.parametrize("answer", [b"[1]\n", b"{}\n", b'{"answer": 1}\n', b'{"error": "x"}\n', b'{"error": {}}\n'])
def test_a_malformed_answer_is_said_so(tmp_path: Path, answer: bytes) -> None:
    async def main() -> None:
        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(answer)
            writer.close()

        path = tmp_path / "x.sock"
        async with await asyncio.start_unix_server(reply, str(path)):
            with pytest.raises(control_client.DaemonUnreachable, match="malformed"):
                await asyncio.to_thread(control_client.ask, path, "status")

    asyncio.run(main())


def test_refusals_reach_the_asker_with_their_code(tmp_path: Path) -> None:
    async def scenario(path: Path) -> None:
        with pytest.raises(control_client.DaemonRefused) as caught:
            await asyncio.to_thread(lambda: control_client.ask(path, "evaluate", batches=10))
        assert caught.value.code == "local"

    served(tmp_path, scenario)


def test_a_socket_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def main() -> None:
        await ControlSocket(tmp_path / "file" / "control.sock", QUESTIONS).start()

    with pytest.raises(AgoraError, match=f"set {paths.RUNTIME_VARIABLE}"):
        asyncio.run(main())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_work_ends_when_the_asker_goes_away_and_not_when_it_only_stops_writing(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def long() -> dict[str, Any]:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return {}

    async def short() -> dict[str, Any]:
        await asyncio.sleep(3 * control_socket.POLL_INTERVAL_S)
        return {"patient": True}

    async def main() -> None:
        socket = ControlSocket(
            tmp_path / "run" / "control.sock", {"long": Question(long, {}, 600), "short": Question(short, {})}
        )
        await socket.start()
        try:
            reader, writer = await asyncio.open_unix_connection(socket.path)
            writer.write(b'{"ask":"short"}\n')
            writer.write_eof()
            assert json.loads(await reader.readline()) == {"answer": {"patient": True}}
            writer.close()
            _, writer = await asyncio.open_unix_connection(socket.path)
            writer.write(b'{"ask":"long"}\n')
            await asyncio.wait_for(begun.wait(), 60)
            assert not ended.is_set()
            writer.close()
            await asyncio.wait_for(ended.wait(), 60)
        finally:
            await socket.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
