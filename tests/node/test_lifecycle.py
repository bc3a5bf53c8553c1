"""What a daemon answers to whoever asked it to move, when it cannot load the stages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.ids import Span

from agora.node.hours import Hours
from agora.node.lifecycle import Daemon


class LoadsNothing(Daemon):
    """Holds the first of two stages, gives it up when it is to move, and cannot load any stage."""

    def __init__(self, home: Path) -> None:
        startup = SimpleNamespace(
            home=SimpleNamespace(paused=home / "paused"),
            settings=SimpleNamespace(work_hours=Hours.parse("")),
            clock=SimpleNamespace(unix=lambda: 0.0),
            report_event=lambda _event: None,
            notifier=None,
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
