"""Claims about `swarm page`: which run it serves, from where it knows it, and what it never shows."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import InputError, LocalError
from agora_protocol.identity import Identity
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.manifest import Manifest, SignedManifest, preset

from agora.cli import page_command, status_command
from agora.cli.page_command import QUESTION_INTERVAL_S, SwarmSource
from agora.node import daemon_registry, paths, run_files, runs
from agora.page.feed import LOOK_INTERVAL_S
from agora.page.model_text import MAX_PARAMETERS, text_problem, write_run_text
from tests.page.made import RUN, good_view, status_of
from tests.swarm.makers import peer_id

ADDRESS = f"/ip4/203.0.113.4/tcp/31330/p2p/{peer_id('a')}"
TICKET = "c2VjcmV0"


def source_of(text: str, home: Path) -> SwarmSource:
    return SwarmSource(text, paths.Home(home), runs.resolve(text, paths.Home(home)))


def test_an_invite_is_shown_without_its_ticket(tmp_path: Path) -> None:
    secret = f"agora://{RUN}/poems/{TICKET}@{ADDRESS}"
    found = asyncio.run(source_of(secret, tmp_path).invitation())
    assert found is not None and TICKET not in found.invite and found.mode == ""
    assert Invite.parse(found.invite) == Invite(RunId(RUN), (ADDRESS,), "poems")


def test_the_mode_is_that_of_the_manifest(tmp_path: Path) -> None:
    draft = Manifest.model_validate(Manifest(name="poems").model_dump() | {"admission": {"mode": "ticket"}})
    signed = SignedManifest.sign(draft, Identity.generate())
    run_files.remember_manifest(paths.Home(tmp_path), signed)
    run_files.remember_addresses(paths.Home(tmp_path), signed.run_id, [ADDRESS])
    found = asyncio.run(source_of("poems", tmp_path).invitation())
    assert found is not None and found.mode == "ticket" and Invite.parse(found.invite).run == signed.run_id


def test_a_daemon_is_looked_at_more_often_than_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_command, "fetch", lambda run, home: status_of(good_view()))
    source = source_of(f"agora://{RUN}/poems@{ADDRESS}", tmp_path)
    asyncio.run(source.status())
    assert source.look_s == QUESTION_INTERVAL_S and asyncio.run(source.folder()) is None
    entry = daemon_registry.DaemonEntry(RUN, "poems", "", "", os.getpid(), str(tmp_path / "daemon"), "/nowhere.sock")
    monkeypatch.setattr(daemon_registry, "find_running_daemons", lambda: [entry])
    asyncio.run(source.status())
    assert source.look_s == LOOK_INTERVAL_S and asyncio.run(source.folder()) == tmp_path / "daemon"
    entry_of_another = daemon_registry.DaemonEntry("cd" * 32, "x", "", "", os.getpid(), str(tmp_path), "/nowhere.sock")
    monkeypatch.setattr(daemon_registry, "find_running_daemons", lambda: [entry_of_another])
    asyncio.run(source.status())
    assert asyncio.run(source.folder()) is None, "of another run"


def test_who_does_not_take_part_has_no_text_and_is_told_why(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="`swarm sample` needs a daemon or checkpoints"):
        asyncio.run(source_of(f"agora://{RUN}/poems@{ADDRESS}", tmp_path).text())


def test_only_small_models_are_fetched_for_a_text() -> None:
    assert text_problem(preset("tiny")) == text_problem(preset("small")) == ""
    assert "is not fetched for a page: `swarm sample RUN PROMPT`" in text_problem(preset("150m"))
    assert MAX_PARAMETERS == 25_000_000, "100 MB, as docs/use/page.md says"


def test_a_text_that_cannot_be_made_says_why_in_the_command_s_words(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="'nobody-knows-it' is not a file, an invite or a run"):
        asyncio.run(write_run_text(Manifest(name="poems"), "nobody-knows-it", [tmp_path]))


def test_an_unknown_run_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a file, an invite or a run"):
        page_command.serve("nobody-knows-it", tmp_path, ("127.0.0.1", 0))


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address: Any = taken.getsockname()
        with pytest.raises(LocalError, match="choose another with --port"):
            page_command.serve(f"agora://{RUN}/poems@{ADDRESS}", tmp_path, address)


def test_an_invite_on_standard_input_is_read_once_and_ctrl_c_ends_the_command(tmp_path: Path) -> None:
    """Of a run of which nobody answers: the page is there, and says so."""
    invite = f"agora://{RUN}/poems@/ip4/127.0.0.1/tcp/1/p2p/{peer_id('a')}"
    command = [sys.executable, "-m", "agora.cli.main_swarm", "page", "-", "--port", "0", "--dir", str(tmp_path)]
    environment = os.environ | {"AGORA_RUNTIME_DIR": str(tmp_path / "run")}
    served = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert served.stdin is not None and served.stderr is not None
    try:
        served.stdin.write(f"{invite}\n")
        served.stdin.close()
        line = served.stderr.readline()
        assert line.startswith("the page of poems is at http://127.0.0.1:") and "the run goes on" in line
        url = line.split(" is at ")[1].split(";")[0]
        for _ in range(2):
            status = urllib.request.urlopen(f"{url}/status.json", timeout=60).read().decode()
            assert "UNREACHABLE" in status and "No peer of the run answered" in status
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0
    finally:
        served.kill()
        served.wait(60)
