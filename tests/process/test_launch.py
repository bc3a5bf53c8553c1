"""Claims about `swarm launch` with real daemons: what it starts joins the run, and `--down` makes it leave."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agora.node import daemon_registry
from tests.process.harness import WAIT_S, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def executable(path: Path, text: str) -> Path:
    """Writes a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def machines_in(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in whose PATH `ssh` runs a command here, with a home of each host's own."""
    executable(
        tmp_path / "bin" / "ssh",
        f'for host in "$@"; do case $host in lab*) break;; esac; done\n'
        f'echo "$@" >> {tmp_path}/arguments\n'
        f'export HOME={tmp_path}/$host; mkdir -p $HOME; shift 3; exec "$@"',
    )
    return os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "AGORA_ALLOW_PRIVATE": "true"}


def test_machines_that_ssh_reaches_join_and_leave_again(tmp_path: Path) -> None:
    environment = machines_in(tmp_path)
    node = executable(tmp_path / "node", f'AGORA_THREADS=1 exec {sys.executable} -m agora.cli.main_node "$@"')
    with swarm(tmp_path, tiny(1)) as made:
        made.start("founder", "0")
        made.serving()
        command = [sys.executable, "-m", "agora.cli.main_swarm", "launch", made.invite, "--on", "ssh"]
        command += ["--host", "lab1", "--host", "lab2", "--program", str(node), "--dir", str(tmp_path / "home")]
        up = subprocess.run(
            [*command, "--wait", str(WAIT_S), "--json"], env=environment, capture_output=True, text=True, timeout=WAIT_S
        )
        started = [entry for entry in daemon_registry.find_running_daemons() if f"{tmp_path}/lab" in entry.root]
        processes = [psutil.Process(entry.pid) for entry in started]
        try:
            assert up.returncode == 0, up.stderr
            assert sorted(json.loads(up.stdout)["joined"]) == sorted(entry.peer for entry in started)
            assert len(started) == 2
            told = (tmp_path / "arguments").read_text()
            assert "agora://" not in told, "an invite in an argument is seen by everybody"
            kept = tmp_path / "lab1" / ".local/share/agora-launch/agora-tiny/invite"
            assert stat.S_IMODE(kept.stat().st_mode) == 0o600
            down = subprocess.run([*command, "--down"], env=environment, capture_output=True, text=True, timeout=WAIT_S)
            assert down.returncode == 0, down.stderr
            assert not any(daemon_registry.is_alive(process.pid) for process in processes)
        finally:
            for process in processes:
                if process.is_running():
                    process.kill()
