"""Daemons on machines that are reached by ssh: a script on their standard input starts each."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final

from agora.cli.launch_jobs.job import Command, Job, LaunchRequest, hide

_INVITE_END: Final = "END_OF_INVITE"


def write_job(request: LaunchRequest, label: str, invite: str, folder: Path) -> Job:
    install, program = "", shlex.quote(request.program)
    if not request.program:
        program = '"$dir/venv/bin/agora-node"'
        install = f"""\
[ -x "$dir/venv/bin/agora-node" ] || {{
  python3 -m venv "$dir/venv" && "$dir/venv/bin/pip" install --quiet {shlex.quote(request.package)}
}}
"""
    # The home directory is the other machine's: only $HOME in it is expanded there.
    start = f"""\
set -eu
umask 077
dir="$HOME/.local/share/agora-launch/{label}"
mkdir -p "$dir"
cat > "$dir/invite" <<'{_INVITE_END}'
{invite}
{_INVITE_END}
{install}nohup setsid {program} join "$dir/invite" --dir "$dir/data" --device all >> "$dir/log.txt" 2>&1 < /dev/null &
echo "started; its log is $dir/log.txt"
"""
    stop = f"""\
set -eu
dir="$HOME/.local/share/agora-launch/{label}"
{program} leave --dir "$dir/data"
"""
    ssh = ("ssh", "-o", "BatchMode=yes")
    return Job(
        files={"start.sh": hide(invite, start)},
        up=tuple(Command((*ssh, host, "sh", "-s"), start) for host in request.hosts),
        down=tuple(Command((*ssh, host, "sh", "-s"), stop) for host in request.hosts),
        logs=f"ssh {request.hosts[0]} tail -f .local/share/agora-launch/{label}/log.txt",
    )
