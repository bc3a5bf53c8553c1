"""Claims about single answers of the control socket: what a ban does while the daemon works, starts or is paused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agora_protocol.errors import InputError, LocalError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId

from agora.node import run_files
from agora.node.paths import Home
from agora.node.process.control_api import ControlApi

PEER = Identity(bytes([7]) * 32).peer


def answers_of(home: Path, banned_now: list[PeerId] | None = None, pause_reason: str = "") -> ControlApi:
    """The answers of a daemon that works and bans into `banned_now`; without that, one that starts or is paused."""
    daemon = SimpleNamespace(
        context=SimpleNamespace(home=Home(home)),
        pausing=SimpleNamespace(reason=pause_reason),
        describe_state=lambda: pause_reason or "still starting",
        local_peer=None,
    )
    if banned_now is not None:
        daemon.local_peer = cast(Any, SimpleNamespace(bans=SimpleNamespace(ban_here=banned_now.append)))
    return ControlApi(cast(Any, daemon))


def test_a_ban_is_noted_and_holds_at_once(tmp_path: Path) -> None:
    banned_now: list[PeerId] = []
    asyncio.run(answers_of(tmp_path, banned_now).ban(PEER))
    assert banned_now == run_files.read_banned(Home(tmp_path)) == [PEER]


def test_a_ban_while_the_daemon_starts_is_refused_and_not_noted(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="still starting"):
        asyncio.run(answers_of(tmp_path).ban(PEER))
    assert not run_files.read_banned(Home(tmp_path)), "a refused ban must not hold at the next start"


def test_a_ban_in_a_pause_is_noted_for_when_the_daemon_joins_again(tmp_path: Path) -> None:
    answer = asyncio.run(answers_of(tmp_path, pause_reason="paused by its owner").ban(PEER))
    assert "banned.txt" in answer["text"]
    assert run_files.read_banned(Home(tmp_path)) == [PEER]


def test_what_is_no_peer_id_is_not_banned(tmp_path: Path) -> None:
    banned_now: list[PeerId] = []
    with pytest.raises(InputError, match="not a peer id"):
        asyncio.run(answers_of(tmp_path, banned_now).ban("12D3"))
    assert not banned_now
