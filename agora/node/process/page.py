"""The page that a daemon serves with `--page`, of the run as this daemon sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agora_protocol.errors import LocalError

from agora.core.tasks import BackgroundTasks
from agora.node.process.control_api import ControlApi
from agora.page.feed import LOOK_INTERVAL_S, Feed, Invitation
from agora.page.model_text import write_run_text

if TYPE_CHECKING:
    from agora.node.process.daemon import Daemon


class DaemonSource:
    """A run as one daemon, in this process, sees it."""

    look_s = LOOK_INTERVAL_S

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def status(self) -> Mapping[str, Any]:
        return await ControlApi(self._daemon).status()

    async def folder(self) -> Path | None:
        return self._daemon.context.home.root

    async def invitation(self) -> Invitation | None:
        if self._daemon.signed is None:
            return None
        try:
            local_peer = self._daemon.local_peer
            manifest = local_peer.live.last if local_peer is not None else self._daemon.signed.manifest
            return Invitation(str(self._daemon.invite()), manifest.admission.mode)
        except LocalError:  # it has no address yet
            return None

    async def text(self) -> str:
        if self._daemon.signed is None or self._daemon.loaded is None:
            raise LocalError("This daemon holds no stages yet.")
        signed = self._daemon.signed
        return await write_run_text(signed.manifest, signed.run_id, [self._daemon.context.home.root])


def serve_page(daemon: Daemon, tasks: BackgroundTasks) -> None:
    """Serves the page at the address of `--page`, in two of `tasks`. Raises LocalError if that address is taken."""
    if address := daemon.context.settings.page_endpoint:
        from agora.page.run_page import page_app
        from agora.page.server import HttpServer, listen

        with daemon.context.phases.enter("page") as note:
            feed = Feed(DaemonSource(daemon))
            server = HttpServer(page_app(feed), listen(address, "choose another address with AGORA_PAGE_ADDRESS"))
            note.text = server.url
        tasks.start("page", feed.run())
        tasks.start("page server", server.run())
