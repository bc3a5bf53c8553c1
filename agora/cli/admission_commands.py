"""The commands `swarm invite` and `swarm ban`: their flags and help."""

from __future__ import annotations

from typing import Annotated

import typer

from agora.cli import console


def add_to(app: typer.Typer) -> None:
    """Adds the commands `invite` and `ban` to `app`, the typer application of `swarm`."""
    app.command()(invite)
    app.command()(ban)


def invite(
    run: console.RUN,
    peer: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this machine may use it; default whoever has the invite.")
    ] = None,
    days: Annotated[float, typer.Option(metavar="N", help="For how many days the ticket counts.")] = 30.0,
    role: Annotated[
        str, typer.Option(metavar="member|reader|delegate", help="To train, to read the status, or to invite others.")
    ] = "member",
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Print an invite of a run, with a ticket where it needs one.

    Only the founder's machine, or a delegate's, can sign tickets. Keep an invite with a ticket secret unless --peer
    names its machine: whoever has it may join. The run's id does not change, and no peer needs to be told.

    \b
    Examples:
      swarm invite run.toml
      swarm invite run.toml --peer 12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB --days 365
      swarm invite run.toml --role reader --days 7
    """
    from agora.cli import signing_command as command

    raise typer.Exit(command.print_invite(run, command.InviteRequest(peer, days, role), directory, as_json=as_json))


def ban(
    run: console.RUN,
    peer: Annotated[
        str, typer.Argument(metavar="PEER", help="A peer's id, or that of a bearer ticket as `swarm invite` prints it.")
    ],
    directory: console.DIRECTORY = None,
    as_json: console.JSON = False,
) -> None:
    """Ban a peer from a run for good, in every mode.

    Signed with the founder's key, or a delegate's, and handed to a daemon here or to any peer of the run. Within
    seconds every peer has it, ends its connection with the banned one, and keeps the ban over restarts.

    \b
    Example:
      swarm ban run.toml 12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB
    """
    from agora.cli import signing_command as command

    raise typer.Exit(command.ban(run, peer, directory, as_json=as_json))
