"""Where a microbatch of a synchronous step waits until the stages here have taken the steps before it.

Knows: steps by number. Must not know: who takes them, or what a microbatch is. So no gradient of one step is ever
counted into another, however far apart the replicas are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agora_protocol.errors import Busy
from agora_protocol.ids import Span

from agora.pipeline.signal import Signal

SHARE = 0.5
"""Of what is left of a deadline, a microbatch waits at most this much here; then another peer may be further."""
RETRY_MS = 200


class StepGate:
    """`stepped` is told of each step on the loop; a waiting microbatch holds no seat."""

    def __init__(self, span: Span, step_of: Callable[[int], int]) -> None:
        self._span = span
        self._step_of = step_of
        self._changed = Signal()

    def stepped(self) -> None:
        """A stage of the span has taken a step."""
        self._changed.notify()

    async def passed(self, first: int, step: int, deadline: float) -> None:
        """Returns when the stages from `first` to the span's last have taken `step` steps. Raises Busy in time."""
        now = asyncio.get_running_loop().time
        until = now() + SHARE * (deadline - now())
        while behind := [s for s in range(first, self._span.last + 1) if self._step_of(s) < step]:
            if now() >= until:
                raise Busy(f"stage {behind[0]} has not taken step {step} here yet", RETRY_MS)
            await self._changed.wait(until)
