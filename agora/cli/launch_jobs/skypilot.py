"""Daemons on machines that SkyPilot rents: one for each node of a cluster."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from agora.cli.launch_jobs.job import Command, Job, LaunchRequest

PORT: Final = 31330
INVITE_VARIABLE: Final = "SWARM_INVITE"  # without the prefix of settings


def write_job(request: LaunchRequest, label: str, invite: str, folder: Path) -> Job:
    gpus = f"  accelerators: {request.gpus}\n" if request.gpus else ""
    text = f"""\
# Machines that SkyPilot finds and rents near each other; one daemon on each.
name: {label}
num_nodes: {request.count}
resources:
{gpus}  ports: {PORT}
secrets:
  {INVITE_VARIABLE}: null
setup: |
  pip install --quiet {shlex.quote(request.package)}
run: |
  umask 077
  printf '%s\\n' "${INVITE_VARIABLE}" > ~/agora-invite
  exec agora-node join ~/agora-invite --dir ~/agora-data --listen 0.0.0.0:{PORT} --device all
"""
    launch = ("sky", "launch", "--yes", "--detach-run", "--cluster", label, "--secret", INVITE_VARIABLE)
    return Job(
        files={"job.yaml": text},
        up=(Command((*launch, str(folder / "job.yaml")), environment={INVITE_VARIABLE: invite}),),
        # Cancelled first: the daemons leave their run; taking the machines away does not ask them.
        down=(Command(("sky", "cancel", "--yes", "--all", label)), Command(("sky", "down", "--yes", label))),
        logs=f"sky logs {label}",
    )
