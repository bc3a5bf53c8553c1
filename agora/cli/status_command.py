"""`swarm status`: shows the state of a run, as a daemon on this machine or a peer of the invite reports it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora_protocol.errors import AgoraError, NotAdmitted, ProtocolError
from agora_protocol.ids import RunId
from agora_protocol.limits import PROTOCOL_VERSION

from agora.cli import console
from agora.core.terminal_text import printable
from agora.node import daemon_registry, paths, run_files, runs
from agora.node.control import control_client
from agora.observe.events import DeviceUsed

if TYPE_CHECKING:
    from agora_protocol.identity import Identity

REFRESH_INTERVAL_S = 2.0
# A peer wrote the status: one wide cell would widen every row, and a megabyte of it has tens of thousands of rows.
MAX_CELL, MAX_ROWS, MAX_LINE = 64, 1000, 1024
MAX_AMENDED = 3  # how many of the latest amendments are shown
MAX_TASKS = 8  # of how many tasks the latest result is shown
OF_THIS_MACHINE = ("result", "machine")  # fields that only a daemon here may fill
STAGE_COLUMNS = ["STAGE", "REPLICAS", "STEP", "TOKENS/STEP", "COUNTED", "STALENESS", "TOK/S", "WAITS FOR"]
PEER_COLUMNS = ["PEER", "NAME", "STAGES", "STATE", "STEP", "TOK/S", "PATH", "SEEN"]
EXIT_CODES = {
    "OK": console.EXIT_DONE,
    "COMPLETED": console.EXIT_DONE,
    "PAUSED": console.EXIT_DONE,
    "DEGRADED": console.EXIT_DEGRADED,
}

Status = Mapping[str, Any]


def show(run: str, directory: Path | None, *, watch: bool, as_json: bool) -> int:
    """`watch`: every REFRESH_INTERVAL_S until Ctrl-C. Returns the exit code for the health shown last. Raises Failure
    for `watch` with `as_json`, and what fetch raises.
    """
    if watch and as_json:
        raise console.Failure(
            "--json prints one object and --watch shows many; leave one out, or call with --json again and again",
            console.EXIT_USAGE,
        )
    home = paths.home_at(directory)
    code = console.EXIT_DONE
    try:
        while True:
            status = fetch(run, home)
            code = EXIT_CODES.get(status["health"]["state"], console.EXIT_STALLED)
            if watch and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            if as_json:
                console.print_json(status)
            else:
                console.print_to_stdout("\n".join(lines_of(status)))
            if not watch:
                return code
            time.sleep(REFRESH_INTERVAL_S)
    except KeyboardInterrupt:
        if not watch:
            raise
        return code


def fetch(run: str, home: paths.Home) -> Status:
    """Returns a run's status from a daemon of this machine; if none answers, from a peer over the network.

    If no peer answers either, or its status is malformed, returns a status without stages and peers, with health
    UNREACHABLE and the reason. run: as the user named it. home: the data directory in which the run, this machine's key
    and its ticket are looked up. Raises InputError for an unknown run or a malformed invite, ManifestError for a bad
    manifest, DiskError for a manifest that cannot be read.
    """
    reference = runs.resolve(run, home)
    for entry in daemon_registry.find_running_daemons():
        if reference.is_of(entry):
            with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused):
                return control_client.ask(Path(entry.socket), "status")
    why = "no daemon of this run answers on this machine, and no address of a peer is known"
    do = "give the invite (agora://...), or start `agora-node join`"
    if reference.addresses:
        from agora.net.dht import status_client

        try:
            identity, proof = _credentials(reference, home)
            credentials = status_client.Credentials(identity, proof) if identity is not None else None
            status = status_client.fetch_status(reference.addresses, RunId(reference.run), credentials=credentials)
            check_status(status)
            return {name: value for name, value in status.items() if name not in OF_THIS_MACHINE}
        except AgoraError as error:
            why, do = str(error).rstrip("."), "ask for a newer invite, or check this machine's network"
            if isinstance(error, NotAdmitted):
                do = "ask the founder for a reader's invite (`swarm invite RUN --role reader`)"
            elif error.code == "wrong-version":
                do = _advice_on_versions(str(error))
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


def _advice_on_versions(refusal: str) -> str:
    # The other side wrote it; nothing but the choice between these sentences follows from it.
    found = sorted(map(int, re.findall(r"version (\d{1,6})", refusal)))
    if len(found) == 2 and found[0] == PROTOCOL_VERSION < found[1]:
        return f"upgrade agora on this machine, which is the older side (protocol version {PROTOCOL_VERSION})"
    if len(found) == 2 and found[0] < PROTOCOL_VERSION == found[1]:
        text = f"this machine is the newer side (protocol version {PROTOCOL_VERSION})"
        return f"{text}: have the run's peers upgrade, or join with their version"
    return "install the newer version where the older one is, and try again"


def check_status(status: Status) -> None:
    """Raises ProtocolError unless a peer's status has all that is shown of it, in types that can be shown."""
    try:
        lines_of(status)
        EXIT_CODES.get(status["health"]["state"])
        json.dumps(status, allow_nan=False)
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"[:100]
        raise ProtocolError("bad-message", f"The peer that was asked sent a malformed status ({reason}).") from None


def _credentials(reference: runs.RunReference, home: paths.Home) -> tuple[Identity | None, bytes]:
    # Otherwise this machine's key is used, with the invite's ticket or the stored one. No key is used if this machine
    # has none, or if a daemon of the same data directory runs: two programs with one key would perturb each other's
    # connections.
    from agora_protocol.identity import Identity
    from agora_protocol.tickets import InviteTicket

    run = RunId(reference.run)
    ticket = InviteTicket.parse(reference.ticket) if reference.ticket else None
    if ticket is not None and ticket.secret:
        fresh = Identity.generate()
        return fresh, ticket.proof_for(fresh.peer, run)
    is_used = any(Path(entry.root).resolve() == home.root.resolve() for entry in daemon_registry.find_running_daemons())
    if is_used or not home.identity.exists():
        return None, b""
    own = Identity.load(home.identity)
    return own, ticket.proof_for(own.peer, run) if ticket is not None else run_files.read_proof(home, run)


def lines_of(status: Status) -> list[str]:
    """Unprintable characters are replaced, since peers wrote some of the texts."""
    loss = f"loss {status['loss']:.3f}" if status["loss"] is not None else "no loss yet"
    if spread := status.get("loss_spread"):
        low, high = (f"{bound:.3f}" for bound in spread)
        loss += f" ({low} to {high})" if low != high else ""
    run = f"{status['name'] or 'unnamed'} ({status['run_id'][:12] or 'unsigned'})"
    lines = [f"run     {run}  step {status['step']}  {loss}  {status['tokens_per_second']:.0f} tokens/s"]
    if tuning := status.get("tuning"):
        lines.append("tuning  " + "  ".join(f"{name} {value:.3f}" for name, value in tuning.items()))
    if samples := status.get("samples"):
        lines.append(_samples_line(samples))
    if status["stages"]:
        lines += _table(STAGE_COLUMNS, "stages", [_stage_cells(row) for row in status["stages"]])
        lines += _table(PEER_COLUMNS, "peers", [_peer_cells(peer) for peer in status["peers"]])
    amended = [
        f"amended {one['changes']}  from step {one['from_step']}{'' if one['in_force'] else ', not yet in force'}"
        for one in status.get("amendments") or []
    ]
    lines += amended[-MAX_AMENDED:]
    lines += _task_lines(status.get("evaluations") or [])
    if upgrade := status.get("upgrade"):
        lines.append(_upgrade_line(upgrade))
    devices = [
        f"device  {peer['name']}: {_describe_device(used)}" for peer in status["peers"] if (used := peer.get("device"))
    ]
    lines += [*devices[:MAX_ROWS], *_left_out("devices", len(devices))]
    notes = [f"note    {peer['name']}: {note}" for peer in status["peers"] for note in [peer["note"]] if note]
    lines += [*notes[:MAX_ROWS], *_left_out("notes", len(notes))]
    if result := status.get("result"):
        lines += _result_lines(result)
    if machine := status.get("machine"):
        lines += _machine_lines(machine)
    health = status["health"]
    do = f"  do: {health['do']}" if health["do"] else ""
    lines.append(f"health  {health['state']}  why: {health['why']}{do}")
    return [_cut(printable(line, keep=""), MAX_LINE) for line in lines]  # peers wrote parts of it


def _describe_device(used: Mapping[str, Any]) -> str:
    fields = ("name", "memory_used", "memory_total", "mfu", "idle_in_jobs")
    told = DeviceUsed(*(used[field] for field in fields))
    return dataclasses.replace(told, precision=used.get("precision", "")).in_words()  # an older peer's has none


def _result_lines(result: Mapping[str, Any]) -> list[str]:
    match result["state"]:
        case "exported":
            return [f"result  exported to {result['folder']}"]
        case "exporting":
            return [f"result  is being exported to {result['folder']}"]
        case "failed":
            return [f"result  could not be exported: {result['why']}"]
    return []


def _machine_lines(machine: Mapping[str, Any]) -> list[str]:
    lines = []
    if day := machine["day"]:
        costs = [f"{day['sent_bytes'] / 1e9:.2f} GB sent, {day['received_bytes'] / 1e9:.2f} GB received"]
        if day["kwh"] is not None:
            costs.append(f"{day['kwh']:.2f} kWh at {day['watts']:.0f} W by {day['watts_from']}")
        if day["cost"] is not None:
            costs.append(f"{day['cost']:.2f} at {day['price_per_kwh']:g} per kWh")
        lines.append(f"machine a day costs an estimated {', '.join(costs)}")
    if idle := machine["when_idle"]:
        watched = [name for name, state in idle["observers"].items() if state == "watched"]
        others = [f"{name} ({state})" for name, state in idle["observers"].items() if state != "watched"]
        lines.append(
            f"idle    the daemon works once nobody has used this machine for {idle['idle_minutes']:g} min; "
            f"it watches {', '.join(watched) or 'nothing'}" + (f"; not watched: {', '.join(others)}" if others else "")
        )
    if queue := machine.get("queue"):
        done = [f"{one['run']} ({one['why']})" for one in queue["done"]]
        lines.append(f"queue   next: {', '.join(queue['next']) or 'none'}{'; before: ' * bool(done)}{', '.join(done)}")
    return lines


def _task_lines(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    newest: dict[str, Mapping[str, Any]] = {}
    for each in sorted(evaluations, key=lambda each: (each["step"], each["unix"])):
        newest[each["task"]] = each
    lines = [
        f"task    {task}: {'  '.join(f'{metric} {value:.4f}' for metric, value in each['values'].items())}  "
        f"({each['items']:,} items, step {each['step']}, by {each['name']})"
        for task, each in sorted(newest.items())
    ]
    more = f"... and {len(lines) - MAX_TASKS} more tasks; --json has all of them"
    return [*lines[:MAX_TASKS], *([more] if len(lines) > MAX_TASKS else [])]


def _upgrade_line(upgrade: Mapping[str, Any]) -> str:
    since = f" from {upgrade['from']} (UTC)" if upgrade["from"] else ""
    line = f"upgrade agora {upgrade['oldest_version']} or later is asked for{since}; "
    peers = ", ".join(f"{one['name']} ({one['software']})" for one in upgrade["peers"][:MAX_ROWS])
    more = len(upgrade["peers"]) - MAX_ROWS
    if not peers:
        return f"{line}every connected peer has it"
    return f"{line}not yet: {peers}{f' and {more} more' if more > 0 else ''}  do: {upgrade['do']}"


def _samples_line(samples: Mapping[str, Any]) -> str:
    return (
        f"samples epoch {samples['epoch']}: {samples['seen']:,} seen, {samples['repeated']:,} repeated, "
        f"{samples['missed']:,} missed, as {samples['told_by']} knew at step {samples['step']}"
    )


def _stage_cells(row: Mapping[str, Any]) -> list[str]:
    is_counted = row.get("replicas_known", row["replicas"]) == row["replicas"]  # otherwise an estimate
    held, counted, age = (row.get(key) for key in ("tokens_per_step", "share_counted", "staleness"))
    return [
        str(row["stage"]),
        f"{'' if is_counted else '~'}{row['replicas']}",
        str(row["step"]),
        f"{held:,.0f} of {row['target_tokens']:,}" if held is not None else "-",
        f"{100 * counted:.1f} %" if counted is not None else "-",
        f"{age:.2f}" if age is not None else "-",
        f"{row['tokens_per_second']:.0f}",
        row.get("waits_for") or "-",
    ]


def _peer_cells(peer: Mapping[str, Any]) -> list[str]:
    return [
        f"...{peer['peer'][-6:]}",
        peer["name"],
        "-".join(str(stage) for stage in dict.fromkeys(peer["span"])),
        peer["state"],
        "-" if peer["step"] is None else str(peer["step"]),
        f"{peer['tokens_per_second']:.0f}",
        peer["path"],
        f"{peer['seen_seconds']:.0f} s",
    ]


def _table(columns: list[str], kind: str, rows: list[list[str]]) -> list[str]:
    cells = [columns, *([_cut(cell, MAX_CELL) for cell in row] for row in rows[:MAX_ROWS])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return [*lines, *_left_out(kind, len(rows))]


def _left_out(kind: str, count: int) -> list[str]:
    return [f"... and {count - MAX_ROWS:,} more {kind}; --json has all of them"] if count > MAX_ROWS else []


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
