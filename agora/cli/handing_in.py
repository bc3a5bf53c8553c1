"""Hands what was signed for a run to the daemons of this machine, and finds where none of them keeps it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agora.cli.console import Failure
from agora.cli.stage_sources import FoundRun
from agora.node.control import control_client
from agora.node.paths import Home


def tell_daemons(found: FoundRun, question: str, *, refusal: str = "", **signed: Any) -> list[Path]:
    """Asks each daemon of the run on this machine to take what was signed; returns the data directories of those that
    have.

    refusal: the code of a refusal that says that what was signed is wrong: raises Failure. Others are passed over.
    """
    told = []
    for entry in found.daemons:
        with contextlib.suppress(control_client.DaemonUnreachable):
            try:
                control_client.ask(Path(entry.socket), question, **signed)
            except control_client.DaemonRefused as error:
                if error.code == refusal:
                    raise Failure(str(error)) from None
                continue
            told.append(Path(entry.root))
    return told


def homes_not_told(found: FoundRun, told: Sequence[Path]) -> list[Home]:
    """Returns the data directories that know the run, without those in `told`: what was signed is to be kept there."""
    return [home for home in found.homes if home.manifest(found.signed.run_id).is_file() and home.root not in told]


def in_words(told: Sequence[Path]) -> list[str]:
    """Returns the daemons of the data directories in words."""
    return [f"the daemon in {root}" for root in told]
