"""`agora-node`: what a contributor runs.

Knows: the commands and their flags. Must not know: how a daemon works (agora.node).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agora.cli import console

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


@app.callback()
def _root() -> None:
    """Contribute this machine to a training run: one daemon, started and stopped by you."""


@app.command()
def join(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A manifest file, an invite, or the name of a joined run.")],
    device: Annotated[str | None, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1. Default auto.")] = None,
    stages: Annotated[
        str | None, typer.Option(metavar="auto|A-B", help="The stages to hold; auto (default) raises the thinnest.")
    ] = None,
    directory: DIRECTORY = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDR", help="Where to listen, /ip4/0.0.0.0/tcp/31330 or 0.0.0.0:31330; may be repeated."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE,RTT[,JITTER[,LOSS]]",
            help="Behave as behind a link like 200Mbit,50ms; see docs/links.md. Default the network as it is.",
        ),
    ] = None,
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

    Checks this machine, finds the other peers, claims the stages that the swarm needs most and computes microbatches
    for them. The first to join a manifest signs it with its own key if it is unsigned, and prints the invite for the
    others. Stop it with Ctrl-C, SIGTERM or `agora-node leave`: it finishes what it holds and goes within 10 seconds.

    \b
    Examples:
      agora-node join run.toml
      agora-node join agora://... --dir /data/agora --listen 0.0.0.0:31330
    """
    from agora.cli import join as command

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
    raise typer.Exit(command.join(run, directory, {key: value for key, value in flags.items() if value is not None}))


@app.command()
def leave(run: RUN_OR_NONE = None, directory: DIRECTORY = None) -> None:
    """Make the daemon on this machine leave its run, as SIGTERM would.

    It says so to the others first, finishes what it holds and exits; nothing is lost and it can join again at any time.

    \b
    Example:
      agora-node leave
    """
    from agora.cli import join as command

    command.tell("leave", run, directory)


@app.command()
def pause(run: RUN_OR_NONE = None, directory: DIRECTORY = None) -> None:
    """Give the machine back for a while: the daemon stays connected but computes nothing.

    Microbatches in hand are finished, new ones are refused at once, so the others route around this peer.

    \b
    Example:
      agora-node pause
    """
    from agora.cli import join as command

    command.tell("pause", run, directory)


@app.command()
def resume(run: RUN_OR_NONE = None, directory: DIRECTORY = None) -> None:
    """Go on after a pause.

    The daemon offers its stages again; work arrives within seconds.

    \b
    Example:
      agora-node resume
    """
    from agora.cli import join as command

    command.tell("resume", run, directory)


def main() -> None:
    """The console script."""
    console.run(app)


if __name__ == "__main__":
    main()
