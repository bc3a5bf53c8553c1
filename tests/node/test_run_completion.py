"""Claims about what follows once a run is over: who exports it, when a daemon may leave, what its owner is told."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from agora_protocol.ids import PeerId, Span

from agora.cli.status_command import check_status, lines_of
from agora.node.process import run_completion
from agora.node.process.run_completion import (
    FETCH_IDLE_TIMEOUT_S,
    LEAVE_DELAY_S,
    MAX_SERVE_S,
    choose_exporter,
    may_leave,
)
from agora.swarm.view import PeerView, View

PYTHON = sys.executable
FOUNDER, ANN, BEN = PeerId("12D3KooWfounder"), PeerId("12D3KooWann"), PeerId("12D3KooWben")


def seen(peer: PeerId, stage: int, state: str = "serving") -> PeerView:
    return PeerView(peer, Span(stage, stage), 1, state=state)


def view_of(*peers: PeerView) -> View:
    return View({peer.peer: peer for peer in peers})


@pytest.mark.parametrize(
    ("peers", "chosen"),
    [
        ([seen(FOUNDER, 1), seen(ANN, 0), seen(BEN, 1)], FOUNDER),
        ([seen(FOUNDER, 1, "leaving"), seen(BEN, 0), seen(ANN, 0)], ANN),
        ([seen(BEN, 0), seen(ANN, 1)], BEN),
        ([seen(ANN, 0, "joining"), seen(BEN, 0)], BEN),
        ([seen(ANN, 1)], None),
    ],
)
def test_the_founder_exports_and_without_one_the_first_peer_of_stage_0(
    peers: list[PeerView], chosen: PeerId | None
) -> None:
    assert choose_exporter(view_of(*peers), FOUNDER) == chosen
    assert choose_exporter(view_of(*reversed(peers)), FOUNDER) == chosen, "the same one for all"


@pytest.mark.parametrize(
    ("since_end_s", "since_last_fetch_s", "is_needed", "may"),
    [
        (LEAVE_DELAY_S - 1, None, False, False),
        (LEAVE_DELAY_S, None, False, True),
        (LEAVE_DELAY_S, None, True, False),
        (MAX_SERVE_S, None, True, True),
        (LEAVE_DELAY_S, 0.5, True, False),
        (MAX_SERVE_S + 1, 0.5, False, False),
        (LEAVE_DELAY_S + FETCH_IDLE_TIMEOUT_S, FETCH_IDLE_TIMEOUT_S, True, True),
    ],
)
def test_a_peer_leaves_once_nobody_needs_its_state(
    since_end_s: float, since_last_fetch_s: float | None, is_needed: bool, may: bool
) -> None:
    assert may_leave(since_end_s, since_last_fetch_s, is_needed=is_needed) is may


STATUS = {
    "run_id": "ab" * 32,
    "name": "run",
    "step": 6,
    "loss": None,
    "tokens_per_second": 0.0,
    "health": {"state": "COMPLETED", "why": "", "do": ""},
    "stages": [],
    "peers": [],
}


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("exported", "result  exported to /data/result"),
        ("exporting", "result  is being exported to /data/result"),
        ("failed", "result  could not be exported: no tokenizer"),
        ("none", None),
    ],
)
def test_status_names_the_folder_of_the_result(state: str, line: str | None) -> None:
    lines = lines_of({**STATUS, "result": {"state": state, "folder": "/data/result", "why": "no tokenizer"}})
    assert [one for one in lines if one.startswith("result")] == ([line] if line else [])
    assert not any(one.startswith("result") for one in lines_of({**STATUS, "result": None}))
    check_status(STATUS)


def interpreter(folder: Path, text: str) -> str:
    """An executable that takes the place of Python in the export's command line."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{text}\n")
    path.chmod(0o700)
    return str(path)


async def attempt(folder: Path, text: str) -> str:
    """Exports by a program that takes the place of Python in the command line."""
    program = folder / "python"
    program.write_text(f"#!{PYTHON}\nimport os, sys, time\n{text}\n")
    program.chmod(0o700)
    sys.executable = str(program)
    return await run_completion._try_export("ab" * 32, folder, folder / "result", {"A": "b"})


async def cancelled(folder: Path) -> None:
    started = folder / "pid"
    text = f"open({str(started)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)"
    running = asyncio.create_task(attempt(folder, text))
    while not started.exists() or not started.read_text().endswith("\n"):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_failed_export_says_the_last_line_and_a_cancelled_one_ends_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)
    for text, why in (
        ("assert os.environ['A'] == 'b' and '--out' in sys.argv", ""),
        ("sys.exit('looking\\nerror: stage 1 is missing')", "stage 1 is missing"),
        ("sys.exit(3)", "its process ended with exit code 3"),
    ):
        assert asyncio.run(attempt(tmp_path, text)) == why
    asyncio.run(cancelled(tmp_path))
    sys.executable = str(tmp_path / "nowhere")
    assert "no process could be started" in asyncio.run(run_completion._try_export("", tmp_path, tmp_path, {}))
