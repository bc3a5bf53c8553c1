"""The jobs of `swarm launch`, in the language of each tool; one module for each, which is called through JOBS. Pure.

An invite may be a secret: it travels in a file, a Secret, a variable of the environment or on standard input, never as
an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from agora.cli.launch_jobs import kubernetes, skypilot, slurm, ssh
from agora.cli.launch_jobs.job import Job, LaunchRequest, Tool

# Each writes a job: of these flags, with this name, this invite, and the folder in which its files will lie.
JOBS: Final[Mapping[Tool, Callable[[LaunchRequest, str, str, Path], Job]]] = {
    "ssh": ssh.write_job,
    "slurm": slurm.write_job,
    "kubernetes": kubernetes.write_job,
    "skypilot": skypilot.write_job,
}
