"""Claims about a daemon's life: what it answers to whoever asked it to move, and the order of pauses and work."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.ids import PeerId, Span

from agora.node.limits.pausing import Hours
from agora.node.paths import RUNTIME_VARIABLE, Home
from agora.node.process.daemon import Daemon
from agora.node.startup import Notifier
from agora.observe.reporter import Reporter
from agora.swarm.swarm_clock import SwarmClock


class LoadsNothing(Daemon):
    """Holds the first of two stages, gives it up when it is to move, and cannot load any stage."""

    def __init__(self, home: Path) -> None:
        startup = SimpleNamespace(
            me=PeerId("12D3KooW"),
            reference=SimpleNamespace(run="", name="poems"),
            home=Home(home),
            settings=SimpleNamespace(work_hours=Hours.parse(""), link=""),
            incarnation=1,
            clock=SwarmClock(0.0, lambda: 0.0),
            reporter=Reporter(),
            report_event=lambda _event: None,
            notifier=Notifier({}),
            phases=SimpleNamespace(current=""),
            age_s=lambda: 0.0,
        )
        super().__init__(cast(Any, startup))
        self.signed = cast(Any, SimpleNamespace(manifest=SimpleNamespace(stage_count=2)))
        self.loaded = cast(Any, SimpleNamespace(span=Span(0, 0)))

    async def _give_up_span(self, local_peer: Any, loaded: Any) -> None:
        self.loaded = None

    async def _serve_span(self, local_peer: Any, wanted: Span | None) -> Any:
        raise LocalError(f"no memory for stages {wanted}")


def test_a_failed_move_says_why_also_when_the_former_stages_cannot_be_loaded_again(tmp_path: Path) -> None:
    async def main() -> None:
        daemon = LoadsNothing(tmp_path)
        move = asyncio.create_task(daemon.move(Span(1, 1)))
        await asyncio.sleep(0)
        with pytest.raises(LocalError, match="no memory for stages 0"):
            await daemon._carry_out_move(cast(Any, None))
        with pytest.raises(LocalError, match="no memory for stages 1"):
            await move

    asyncio.run(main())


def test_a_move_that_a_pause_ends_leaves_no_move_behind(tmp_path: Path) -> None:
    class NeverGivesUp(LoadsNothing):
        async def _give_up_span(self, local_peer: Any, loaded: Any) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        daemon = NeverGivesUp(tmp_path)
        move = asyncio.create_task(daemon.move(Span(1, 1)))
        await asyncio.sleep(0)
        carrying_out = asyncio.create_task(daemon._carry_out_move(cast(Any, None)))
        await asyncio.sleep(0)
        assert daemon.describe_state() == "moving to stages 1"
        carrying_out.cancel()
        with pytest.raises(LocalError, match="has not moved"):
            await move
        assert daemon.describe_state() == "still starting"
        assert daemon._movable_span() is daemon.loaded, "after the pause the daemon can move again"

    asyncio.run(main())


def test_a_paused_or_leaving_daemon_does_not_promise_to_move(tmp_path: Path) -> None:
    async def main() -> None:
        daemon = LoadsNothing(tmp_path)
        daemon.pause.pause()
        with pytest.raises(LocalError, match="paused by its owner"):
            await asyncio.wait_for(daemon.move(Span(1, 1)), 5)
        daemon.pause.resume()
        daemon.leave("asked to")
        with pytest.raises(LocalError, match="is leaving"):
            await asyncio.wait_for(daemon.move(Span(1, 1)), 5)

    asyncio.run(main())


def test_a_pause_that_ends_while_the_work_is_being_cancelled_still_closes_what_was_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ResumedWhileItEnds(LoadsNothing):
        def __init__(self, home: Path) -> None:
            super().__init__(home)
            self.signed = self.loaded = None
            self.happened: list[str] = []

        async def _start_and_serve(self) -> None:
            self.happened.append("opened")
            if self.happened.count("opened") == 2:
                self.leave("asked to")
            else:
                self.pause.pause()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.pause.resume()
                raise

        async def _stay_paused(self) -> None:
            assert not self.pause.reason
            self.happened.append("closed")

    async def main() -> None:
        monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path))
        daemon = ResumedWhileItEnds(tmp_path)
        await asyncio.wait_for(daemon.run(), 20)
        assert daemon.happened == ["opened", "closed", "opened"]

    asyncio.run(main())
