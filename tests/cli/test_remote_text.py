"""What peers, files and daemons say reaches a terminal only as text, never as a command to it, or not at all."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.messages import Refusal
from agora_protocol.refusals import error_of_refusal

import agora.net.dht
from agora.cli import console, sample_command
from agora.cli.status_command import fetch, lines_of
from agora.core.terminal_text import printable
from agora.node import paths
from agora.observe import events
from agora.observe.log import EventLog

COMMANDS = [
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b]0;title\x07",  # sets the window's title
    "\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\",  # a link with another text
    "\x9b31m",  # the same as ESC [ in one character
    "ok\rhealth  OK",  # overwrites the line
    "\u202etxt.exe",  # shown from right to left
    "\x08\x08\x08",
]


def is_harmless(text: str) -> bool:
    return all(sign.isprintable() or sign in "\n\t" for sign in text)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_for_a_terminal_passes_whatever_a_peer_wrote(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console.print_to_stderr(f"error: {command}")
    console.print_to_stdout(f"exported  {command}")
    with console.ProgressDisplay(f"waits for {command}") as display:
        display.note(f"[red]{command}")
    sample_command._show(command)
    peer = {"peer": "12D3KooW", "name": command, "span": [0, 0], "state": command, "step": 1, "tokens_per_second": 1.0}
    peer |= {"path": command, "seen_seconds": 1.0, "note": command}
    health = {"state": "OK", "why": command, "do": command}
    stage = {"stage": 0, "replicas": 1, "step": 1, "target_tokens": 1, "tokens_per_second": 1.0, "waits_for": command}
    status = {"name": command, "run_id": "ab", "step": 1, "loss": 1.0, "tokens_per_second": 1.0, "health": health}
    assert all(map(is_harmless, lines_of(status | {"stages": [stage], "peers": [peer]})))
    log = io.StringIO()
    EventLog(log).take(events.TaskFailed("fetch", command), 1000.0)
    written = capsys.readouterr()
    assert is_harmless(written.out + written.err + log.getvalue())
    assert "?" in written.out
    assert "?" in written.err
    assert "?" in log.getvalue()


@pytest.mark.parametrize("code", ["busy", "unavailable", "refused", "not-admitted", "bad-message", "failed", "another"])
def test_a_refusal_forges_no_line_of_what_a_command_prints(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    forged = "not now\nhealth  OK\r\u2028exported  /tmp/model\x85invite agora://x\x1b[2J"
    error = error_of_refusal(Refusal(code, forged))
    text, _ = console.explain(error)
    console.print_to_stderr(f"error: {text}")
    written = capsys.readouterr().err
    assert len(written.splitlines()) == 1
    assert "not now?health  OK" in written


GOOD_STATUS: dict[str, Any] = {
    "name": "poems",
    "run_id": "ab",
    "step": 1,
    "loss": 1.0,
    "tokens_per_second": 1.0,
    "health": {"state": "OK", "why": "", "do": ""},
    "stages": [{"stage": 0, "replicas": 1, "step": 1, "target_tokens": 1, "tokens_per_second": 1.0}],
    "peers": [],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"health": {}},
        {"health": {"state": [], "why": "", "do": ""}},
        {"loss": "low"},
        {"loss": math.nan},
        {"peers": [1]},
        {"stages": [{"stage": 0, "replicas": 1, "step": 1, "tokens_per_second": 1.0, "waits_for": 1}]},
    ],
)
def test_a_peers_malformed_status_is_a_sentence(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path))
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity(bytes([1]) * 32).peer}"
    invite = str(Invite(RunId("ab" * 32), (address,), "poems"))
    status = dict(GOOD_STATUS)
    light = SimpleNamespace(fetch_status=lambda *_args, **_kwargs: status)  # py-libp2p and hivemind exclude each other
    monkeypatch.setattr(agora.net.dht, "status_client", light, raising=False)
    assert fetch(invite, paths.Home(tmp_path)) == GOOD_STATUS
    status |= wrong
    shown = fetch(invite, paths.Home(tmp_path))
    assert shown["health"]["state"] == "UNREACHABLE"
    assert "malformed status" in shown["health"]["why"]


def row_of_peer(number: int, **texts: str) -> dict[str, Any]:
    row = {
        "peer": f"12D3KooW{number:06}",
        "name": "n",
        "span": [0, 0],
        "state": "training",
        "step": 1,
        "path": "direct",
    }
    return row | {"tokens_per_second": 1.0, "seen_seconds": 1.0, "note": ""} | texts


@pytest.mark.parametrize("field", ["name", "state", "path", "note"])
def test_one_wide_text_of_a_peer_widens_no_other_line(field: str) -> None:
    peers = [row_of_peer(0, **{field: "x" * 2**19}), *(row_of_peer(number) for number in range(1, 3000))]
    lines = lines_of(GOOD_STATUS | {"peers": peers})
    assert len(lines) < 1020 and sum(map(len, lines)) < 200_000
    assert any("2,000 more peers; --json has all of them" in line for line in lines)


def test_the_texts_of_a_run_and_its_health_are_cut_and_many_notes_and_stages_left_out() -> None:
    health = {"state": "OK", "why": "w" * 2**19, "do": "d" * 2**19}
    stage = GOOD_STATUS["stages"][0] | {"waits_for": "w" * 2**19, "tokens_per_second": 1e300}
    peers = [row_of_peer(number, note="note") for number in range(1500)]
    lines = lines_of(GOOD_STATUS | {"name": "n" * 2**19, "health": health, "stages": [stage] * 2000, "peers": peers})
    assert max(map(len, lines)) <= 1024 and len(lines) < 3100 and sum(map(len, lines)) < 500_000
    for left_out in ("1,000 more stages", "500 more peers", "500 more notes"):
        assert any(left_out in line for line in lines)


def test_the_loss_is_shown_with_its_spread() -> None:
    assert "loss 1.000 (0.900 to 1.200)" in lines_of(GOOD_STATUS | {"loss_spread": [0.9, 1.2]})[0]
    assert "loss 1.000  1 tokens/s" in lines_of(GOOD_STATUS | {"loss_spread": [1.0, 1.0]})[0]
    assert "loss 1.000  1 tokens/s" in lines_of(GOOD_STATUS)[0], "of an older peer"


def test_text_in_any_language_stays_as_it_is() -> None:
    text = "größer, 模型, модель, 3 × 4\n\tnext line"
    assert printable(text) == text
    assert printable(text, keep="") == text.replace("\n", "?").replace("\t", "?")


def test_a_progress_bar_shows_markup_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with console.ProgressDisplay("[link=https://example.org]run[/link]", total=1.0) as display:
        display.show(1.0, "[blink]step[/blink]")
        display.note("[bold]note")
    assert "[blink]step[/blink]" in terminal.getvalue()
    assert "[bold]note" in terminal.getvalue()
