"""`agora-node`: what a contributor runs.

Knows: the commands and their flags. Must not know: how a daemon works (agora.node).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agora.cli import console, node_commands

app = console.new_app("Contribute this machine to a training run: one daemon, started and stopped by you.")

DIRECTORY = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="DIR", help="The daemon's data directory; default $AGORA_HOME or ~/.local/share/agora."
    ),
]
RUN_OR_NONE = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Which run's daemon, where several run; a manifest, invite or name."),
]


@app.command()
def join(
    run: console.RUN,
    device: Annotated[str | None, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1. Default auto.")] = None,
    stages: Annotated[
        str | None,
        typer.Option(metavar="auto|A-B", help="The stages to hold; auto (default) takes those with the fewest peers."),
    ] = None,
    directory: DIRECTORY = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDR", help="Where to listen, /ip4/0.0.0.0/tcp/31330 or 0.0.0.0:31330; may be repeated."),
    ] = None,
    link: console.LINK = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Compute threads; default all cores.")] = None,
    corpus_cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where tokenised texts are kept; default in the data directory.")
    ] = None,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="Let an invited run read the files that its manifest names.")
    ] = False,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. Default info.")] = None,
) -> None:
    """Join a run and train until stopped.

    The daemon checks this machine, finds the other peers, claims the stages that the swarm needs most and computes
    microbatches for them. The first to join a manifest signs it with its own key if it is unsigned, and prints the
    invite for the others. Stop it with Ctrl-C, SIGTERM or `agora-node leave`: it finishes what it holds and ends
    within 10 seconds.

    \b
    Examples:
      agora-node join run.toml
      agora-node join agora://... --dir /data/agora --listen 0.0.0.0:31330
    """
    from agora.node import daemon, paths

    flags = {
        "device": device,
        "stages": stages,
        "listen": tuple(listen) if listen else None,
        "link": link,
        "threads": threads,
        "allow_files": allow_files or None,
        "corpus_cache": str(corpus_cache.absolute()) if corpus_cache else None,
        "log_level": log_level,
    }
    given = {key: value for key, value in flags.items() if value is not None}
    raise typer.Exit(daemon.run(run, paths.home_at(directory), given))


@app.command()
def leave(run: RUN_OR_NONE = None, directory: DIRECTORY = None) -> None:
    """Make the daemon on this machine leave its run, as SIGTERM would.

    It tells the other peers first, finishes what it holds and exits. Nothing is lost, and it can join again later.

    \b
    Example:
      agora-node leave
    """
    node_commands.leave(run, directory)


@app.command()
def pause(run: RUN_OR_NONE = None, directory: DIRECTORY = None) -> None:
    """Use the machine for something else for a while: the daemon stays connected but computes nothing.

    It finishes the microbatches that it holds and refuses new ones at once, so the other peers route around it.

    \b
    Example:
      agora-node pause
    """
    node_commands.ask_and_print("pause", run, directory)


@app.command()
def resume(run: RUN_OR_NONE = None, directory: DIRECTORY = None) -> None:
    """Let a paused daemon compute again.

    It offers its stages again, and work arrives within seconds.

    \b
    Example:
      agora-node resume
    """
    node_commands.ask_and_print("resume", run, directory)


@app.command()
def move(
    stages: Annotated[str, typer.Option(metavar="A-B", help="The stages to hold from now on; one stage is A.")],
    run: RUN_OR_NONE = None,
    directory: DIRECTORY = None,
) -> None:
    """Let the running daemon hold other stages, without leaving the run.

    It finishes or hands back what it holds, fetches the state of the new stages from their replicas and serves them.
    Its connections stay, and a microbatch that it has finished is still answered. The command ends when it serves.

    \b
    Examples:
      agora-node move --stages 2-3
      agora-node move --stages 0 --dir /data/agora
    """
    node_commands.ask_and_print("move", run, directory, node_commands.MOVE_SECONDS, stages=stages)


def main() -> None:
    """Runs the command `agora-node` and exits."""
    console.run(app)


if __name__ == "__main__":
    main()
