"""`swarm status`: what a run looks like, from a daemon on this machine or from a peer of the invite.

Knows: where to ask and how to show the answer. Must not know: how the answer is made (agora.swarm.status); imports
neither torch nor hivemind, the light client speaks py-libp2p in this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agora.cli import console
from agora.node import control_client, paths

WATCH_SECONDS = 2.0
EXIT_CODES = {"OK": console.DONE, "PAUSED": console.DONE, "DEGRADED": console.DEGRADED}

Status = Mapping[str, Any]


def show(run: str, directory: Path | None, *, watch: bool, as_json: bool) -> int:
    """Prints the status once, or until Ctrl-C, and returns the exit code of the last one."""
    if watch and as_json:
        raise console.Failure(
            "--json prints one object and --watch shows many; leave one out, or call with --json again and again",
            console.USAGE,
        )
    home = paths.home_at(directory)
    if watch:
        return _watch(run, home)
    status = fetch(run, home)
    if as_json:
        console.print_json(status)
    else:
        _print(status)
    return EXIT_CODES.get(status["health"]["state"], console.STALLED)


def _watch(run: str, home: paths.Home) -> int:
    """Prints the status every 2 s until Ctrl-C, and returns the exit code of the last one."""
    status: Status = {}
    try:
        while True:
            status = fetch(run, home)
            if sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            _print(status)
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return EXIT_CODES.get(status["health"]["state"], console.STALLED) if status else console.DONE


def fetch(run: str, home: paths.Home) -> Status:
    """Returns a run's status, from a daemon of this machine or over the network; UNREACHABLE if nobody answers."""
    from agora.node import runs

    reference = runs.resolve(run, home)
    for entry in paths.daemons():
        if reference.is_of(entry):
            try:
                return control_client.ask(Path(entry.socket), "status")
            except (control_client.DaemonUnreachable, control_client.DaemonRefused):
                continue
    if not reference.addresses:
        why = "no daemon of this run answers on this machine, and no address of a peer is known"
        return _unreachable(
            reference.run, reference.name, why, "give the invite (agora://...), or start `agora-node join`"
        )
    return _fetch_over_network(reference.run, reference.name, reference.addresses)


def _fetch_over_network(run: str, name: str, addresses: tuple[str, ...]) -> Status:
    """Returns the status from a peer at one of these addresses; UNREACHABLE if none answers."""
    from agora_protocol.errors import AgoraError
    from agora_protocol.ids import RunId

    from agora.net import light

    try:
        return light.fetch_status(addresses, RunId(run))
    except AgoraError as error:
        return _unreachable(run, name, str(error), "ask for a newer invite, or check this machine's network")


def _unreachable(run: str, name: str, why: str, do: str) -> Status:
    """Returns the status of a run of which nobody answers. why, do: the reason and the remedy, in words."""
    return {
        "schema": 1,
        "run_id": run,
        "name": name,
        "step": 0,
        "loss": None,
        "tokens_per_second": 0.0,
        "health": {"state": "UNREACHABLE", "why": why, "do": do},
        "stages": [],
        "peers": [],
    }


def _print(status: Status) -> None:
    """Prints a status for people."""
    print(headline(status))
    if status["stages"]:
        _print_table(["STAGE", "REPLICAS", "STEP", "TOK/S"], stage_rows(status))
        _print_table(["PEER", "NAME", "STAGES", "STATE", "STEP", "TOK/S", "PATH", "SEEN", "NOTE"], peer_rows(status))
    print(health_line(status), flush=True)


def headline(status: Status) -> str:
    """Returns the run in one line: its name, step, loss and throughput."""
    loss = f"loss {status['loss']:.3f}" if status["loss"] is not None else "no loss yet"
    run = f"{status['name'] or 'unnamed'} ({status['run_id'][:12] or 'unsigned'})"
    return f"run     {run}  step {status['step']}  {loss}  {status['tokens_per_second']:.0f} tokens/s"


def stage_rows(status: Status) -> list[list[str]]:
    """Returns one table row for each stage."""
    return [
        [str(row["stage"]), str(row["replicas"]), _shown_step(row["step"]), f"{row['tokens_per_second']:.0f}"]
        for row in status["stages"]
    ]


def peer_rows(status: Status) -> list[list[str]]:
    """Returns one table row for each peer."""
    return [
        [
            f"...{peer['peer'][-6:]}",
            peer["name"],
            "-".join(str(stage) for stage in dict.fromkeys(peer["span"])),
            peer["state"],
            _shown_step(peer["step"]),
            f"{peer['tokens_per_second']:.0f}",
            peer["path"],
            f"{peer['seen_seconds']:.0f} s",
            peer["note"],
        ]
        for peer in status["peers"]
    ]


def health_line(status: Status) -> str:
    """Returns the state of the run, why it is so, and what to do about it."""
    health = status["health"]
    return f"health  {health['state']}  why: {health['why']}" + (f"  do: {health['do']}" if health["do"] else "")


def _shown_step(value: int | None) -> str:
    return "-" if value is None else str(value)


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints rows under their columns, each as wide as its widest cell."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
