"""`swarm page`: serves the page of a run from this machine, which need not take part in it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora_protocol.errors import LocalError
from agora_protocol.ids import RunId
from agora_protocol.invite import Invite
from agora_protocol.limits import MAX_ADDRESSES

from agora.cli import console, status_command
from agora.core.tasks import run_in_thread
from agora.node import daemon_registry, paths, run_files, runs
from agora.node.control import control_client
from agora.page.feed import LOOK_INTERVAL_S, Feed, Invitation
from agora.page.model_text import write_run_text
from agora.page.run_page import page_app
from agora.page.server import HttpServer, listen

if TYPE_CHECKING:
    from agora_protocol.manifest import Manifest

QUESTION_INTERVAL_S = 10.0  # seconds between two questions to a peer over the network


def serve(run: str, directory: Path | None, address: tuple[str, int]) -> int:
    """Serves the page until Ctrl-C or SIGTERM. Returns the exit code.

    Raises InputError for an unknown run, ManifestError for a bad manifest, LocalError for an address that is taken.
    """
    if run == runs.STDIN:  # `swarm sample`, which writes the text, gets no standard input
        run = runs.read_standard_input()
    home = paths.home_at(directory)
    source = SwarmSource(run, home, runs.resolve(run, home))
    asyncio.run(_serve(source, address))
    return console.EXIT_DONE


async def _serve(source: SwarmSource, address: tuple[str, int]) -> None:
    feed = Feed(source)
    server = HttpServer(page_app(feed), listen(address, "choose another with --port"))
    loop = asyncio.get_running_loop()

    def close() -> None:
        server.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # a second one ends it at once

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, close)
    console.print_to_stderr(f"the page of {source.name} is at {server.url}; end it with Ctrl-C, the run goes on")
    async with asyncio.TaskGroup() as group:
        feeding = group.create_task(feed.run(), name="feed")
        await server.run()
        feeding.cancel()


class SwarmSource:
    """A run as this machine can read it: from its daemons, else from a peer over the network."""

    def __init__(self, text: str, home: paths.Home, reference: runs.RunReference) -> None:
        """text: as the user named the run."""
        self.look_s = LOOK_INTERVAL_S
        self.name = reference.name or "the run"
        self._text = text
        self._home = home
        self._reference = reference
        self._folder: Path | None = None

    async def status(self) -> Mapping[str, Any]:
        return await run_in_thread(self._fetch)

    async def folder(self) -> Path | None:
        return self._folder

    async def invitation(self) -> Invitation | None:
        return await run_in_thread(self._find_invitation)

    async def text(self) -> str:
        manifest = await run_in_thread(self._find_manifest)
        if manifest is None:
            raise LocalError(
                "This machine does not take part in the run: `swarm sample` needs a daemon or checkpoints."
            )
        return await write_run_text(manifest, self._text, [self._home.root])

    def _fetch(self) -> Mapping[str, Any]:
        entry = self._find_daemon()
        self.look_s = LOOK_INTERVAL_S if entry is not None else QUESTION_INTERVAL_S
        self._folder = Path(entry.root) if entry is not None else None
        return status_command.fetch(self._text, self._home)

    def _find_daemon(self) -> daemon_registry.DaemonEntry | None:
        return next((entry for entry in daemon_registry.find_running_daemons() if self._reference.is_of(entry)), None)

    def _find_invitation(self) -> Invitation | None:
        manifest, reference = self._find_manifest(), self._reference
        mode = manifest.admission.mode if manifest is not None else ""
        if (entry := self._find_daemon()) is not None:
            with contextlib.suppress(control_client.DaemonUnreachable, control_client.DaemonRefused):
                return Invitation(str(control_client.ask(Path(entry.socket), "invite")["invite"]), mode)
        if not (reference.run and reference.addresses):
            return None
        invite = Invite(RunId(reference.run), reference.addresses[:MAX_ADDRESSES], reference.name)
        return Invitation(str(invite), mode)

    def _find_manifest(self) -> Manifest | None:
        # Of a draft there is one when its daemon has signed it.
        entry = self._find_daemon()
        reference = self._reference
        if entry is not None and not reference.run:
            reference = replace(reference, run=entry.run)
        if reference.signed is not None:
            return run_files.manifest_on_disk([self._home], reference.signed, time.time())
        for home in (self._home, *([paths.Home(Path(entry.root))] if entry is not None else ())):
            if reference.run and (file := home.manifest(reference.run)).is_file():
                signed = runs.from_file(file, home).signed
                return run_files.manifest_on_disk([home], signed, time.time()) if signed is not None else None
        return None
