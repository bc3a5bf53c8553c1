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


def tell_daemons(found: FoundRun, question: str, *, refusal: str = "", **signed: Any) -> list[str]:
    """Asks each daemon of the run on this machine to take what was signed; returns those that have, in words.

    refusal: the code of a refusal that says that what was signed is wrong: raises Failure. Others are passed over.
    """
    receivers = []
    for entry in found.daemons:
        with contextlib.suppress(control_client.DaemonUnreachable):
            try:
                control_client.ask(Path(entry.socket), question, **signed)
            except control_client.DaemonRefused as error:
                if error.code == refusal:
                    raise Failure(str(error)) from None
                continue
            receivers.append(f"the daemon in {entry.root}")
    return receivers


def homes_not_told(found: FoundRun, receivers: Sequence[str]) -> list[Home]:
    """Returns the data directories that know the run and whose daemons are not among `receivers`: those keep it."""
    known = [home for home in found.homes if home.manifest(found.signed.run_id).is_file()]
    return [home for home in known if f"the daemon in {home.root}" not in receivers]
