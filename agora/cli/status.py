"""`swarm status`: what a run looks like, from a daemon on this machine or from a peer of the invite.

Knows: where to ask and how to show the answer. Must not know: how the answer is made (agora.swarm.status); imports
neither torch nor hivemind, the light client speaks py-libp2p in this process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agora.cli import console
from agora.node import control_client, paths

WATCH_SECONDS = 2.0
EXIT_CODES = {"OK": console.DONE, "PAUSED": console.DONE, "DEGRADED": console.DEGRADED}

Status = Mapping[str, Any]


def show(run: str, directory: Path | None, *, watch: bool, as_json: bool) -> int:
    """Prints the status, once or until Ctrl-C; the exit code is that of the last one. JSON is one object: once."""
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
    """The status as COMMANDS says; nobody to ask is a status, too: UNREACHABLE."""
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
    return _from_afar(reference.run, reference.name, reference.addresses)


def _from_afar(run: str, name: str, addresses: tuple[str, ...]) -> Status:
    from agora_protocol.errors import AgoraError
    from agora_protocol.ids import RunId

    from agora.net import light

    try:
        return light.fetch_status(addresses, RunId(run))
    except AgoraError as error:
        return _unreachable(run, name, str(error), "ask for a newer invite, or check this machine's network")


def _unreachable(run: str, name: str, why: str, do: str) -> Status:
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
    for line in header(status):
        print(line)
    if status["stages"]:
        _table(["STAGE", "REPLICAS", "STEP", "TOK/S"], stage_rows(status))
        _table(["PEER", "NAME", "STAGES", "STATE", "STEP", "TOK/S", "PATH", "SEEN", "NOTE"], peer_rows(status))
    print(health_line(status), flush=True)


def header(status: Status) -> list[str]:
    """The run in one line."""
    loss = f"loss {status['loss']:.3f}" if status["loss"] is not None else "no loss yet"
    step = f"step {status['step']}"
    run = f"{status['name'] or 'unnamed'} ({status['run_id'][:12] or 'unsigned'})"
    return [f"run     {run}  {step}  {loss}  {status['tokens_per_second']:.0f} tokens/s"]


def stage_rows(status: Status) -> list[list[str]]:
    """One row for each stage."""
    return [
        [str(s["stage"]), str(s["replicas"]), _count(s["step"]), f"{s['tokens_per_second']:.0f}"]
        for s in status["stages"]
    ]


def peer_rows(status: Status) -> list[list[str]]:
    """One row for each peer."""
    return [
        [
            f"...{peer['peer'][-6:]}",
            peer["name"],
            "-".join(str(stage) for stage in dict.fromkeys(peer["span"])),
            peer["state"],
            _count(peer["step"]),
            f"{peer['tokens_per_second']:.0f}",
            peer["path"],
            f"{peer['seen_seconds']:.0f} s",
            peer["note"],
        ]
        for peer in status["peers"]
    ]


def health_line(status: Status) -> str:
    """State, why, and what to do about it."""
    health = status["health"]
    return f"health  {health['state']}  why: {health['why']}" + (f"  do: {health['do']}" if health["do"] else "")


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _table(columns: list[str], rows: Iterable[list[str]]) -> None:
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _rich_table(columns: list[str], rows: Iterable[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=column != "NOTE")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
