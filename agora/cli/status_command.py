"""`swarm status`: what a run looks like, from a daemon on this machine or from a peer of the invite.

Knows: where to ask and how to show the answer. Must not know: how it is made (agora.swarm.status), torch, hivemind.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agora_protocol.errors import AgoraError
from agora_protocol.ids import RunId

from agora.cli import console
from agora.node import control_client, paths, runs

WATCH_SECONDS = 2.0
EXIT_CODES = {"OK": console.DONE, "PAUSED": console.DONE, "DEGRADED": console.DEGRADED}

Status = Mapping[str, Any]


def show(run: str, directory: Path | None, *, watch: bool, as_json: bool) -> int:
    """Prints the status once, or every 2 s until Ctrl-C, and returns the exit code of the last one."""
    if watch and as_json:
        raise console.Failure(
            "--json prints one object and --watch shows many; leave one out, or call with --json again and again",
            console.USAGE,
        )
    home, code = paths.home_at(directory), console.DONE
    try:
        while True:
            status = fetch(run, home)
            code = EXIT_CODES.get(status["health"]["state"], console.STALLED)
            if watch and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            (console.print_json if as_json else _print)(status)
            if not watch:
                return code
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        if not watch:
            raise
        return code


def fetch(run: str, home: paths.Home) -> Status:
    """Returns a run's status from a daemon of this machine, else from a peer over the network, else UNREACHABLE."""
    reference = runs.resolve(run, home)
    for entry in paths.daemons():
        if reference.is_of(entry):
            with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused):
                return control_client.ask(Path(entry.socket), "status")
    why = "no daemon of this run answers on this machine, and no address of a peer is known"
    do = "give the invite (agora://...), or start `agora-node join`"
    if reference.addresses:
        from agora.net import light

        try:
            return light.fetch_status(reference.addresses, RunId(reference.run))
        except AgoraError as error:
            why, do = str(error), "ask for a newer invite, or check this machine's network"
    return {
        "schema": 1,
        "run_id": reference.run,
        "name": reference.name,
        "step": 0,
        "loss": None,
        "tokens_per_second": 0.0,
        "health": {"state": "UNREACHABLE", "why": why, "do": do},
        "stages": [],
        "peers": [],
    }


def _print(status: Status) -> None:
    """Prints a status for people: a line for the run, tables of its stages and peers, and a line for its health."""
    loss = f"loss {status['loss']:.3f}" if status["loss"] is not None else "no loss yet"
    run = f"{status['name'] or 'unnamed'} ({status['run_id'][:12] or 'unsigned'})"
    print(f"run     {run}  step {status['step']}  {loss}  {status['tokens_per_second']:.0f} tokens/s")
    if status["stages"]:
        stages = [[str(row["stage"]), str(row["replicas"]), *_step_and_rate(row)] for row in status["stages"]]
        _print_table(["STAGE", "REPLICAS", "STEP", "TOK/S"], stages)
        peers = [_peer_cells(peer) for peer in status["peers"]]
        _print_table(["PEER", "NAME", "STAGES", "STATE", "STEP", "TOK/S", "PATH", "SEEN", "NOTE"], peers)
    health = status["health"]
    do = f"  do: {health['do']}" if health["do"] else ""
    print(f"health  {health['state']}  why: {health['why']}{do}", flush=True)


def _peer_cells(peer: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a peer's row: id, name, stages, state, step, tokens per second, path, last seen, note."""
    stages = "-".join(str(stage) for stage in dict.fromkeys(peer["span"]))
    beginning = [f"...{peer['peer'][-6:]}", peer["name"], stages, peer["state"]]
    return [*beginning, *_step_and_rate(peer), peer["path"], f"{peer['seen_seconds']:.0f} s", peer["note"]]


def _step_and_rate(row: Mapping[str, Any]) -> list[str]:
    """Returns two cells of a table row: the step, "-" for None, and the tokens per second."""
    return ["-" if row["step"] is None else str(row["step"]), f"{row['tokens_per_second']:.0f}"]


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints rows under their columns, each as wide as its widest cell."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
