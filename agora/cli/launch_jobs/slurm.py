"""Daemons in a cluster of Slurm: one for each task of a job array."""

from __future__ import annotations

import shlex
from pathlib import Path

from agora.cli.launch_jobs.job import LEAVE_TIMEOUT_S, Command, Job, LaunchRequest


def write_job(request: LaunchRequest, label: str, invite: str, folder: Path) -> Job:
    kind, _, number = request.gpus.partition(":")
    gpus = f"#SBATCH --gres=gpu:{kind}:{number or 1}\n" if kind else ""
    place, program = shlex.quote(str(folder)), shlex.quote(request.program or "agora-node")
    text = f"""\
#!/bin/sh
# One daemon for each task of the array. {folder} must be on a file system that the nodes share.
#SBATCH --job-name={label}
#SBATCH --array=1-{request.count}
#SBATCH --ntasks=1
{gpus}#SBATCH --output="{folder}/%a.log"
#SBATCH --open-mode=append
#SBATCH --requeue
# It leaves its run in order when the time is over, or when the job is preempted.
#SBATCH --signal=B:TERM@{LEAVE_TIMEOUT_S}
exec {program} join {place}/invite --dir {place}/node-"$SLURM_ARRAY_TASK_ID" --device all
"""
    return Job(
        files={"job.sbatch": text, "invite": f"{invite}\n"},
        up=(Command(("sbatch", str(folder / "job.sbatch"))),),
        # --full: the batch script itself, which is the daemon, gets the signal.
        down=(Command(("scancel", "--signal=TERM", "--full", f"--name={label}")),),
        logs=f"tail -f {place}/*.log",
    )
