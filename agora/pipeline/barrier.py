"""Waiting: for a change of any kind, and for the stages here to have taken a step.

Knows: one event loop, steps by number. Must not know: what changes, who takes steps, or what a microbatch is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from agora_protocol.errors import Busy
from agora_protocol.ids import Span

from agora.clock import loop_time

MAX_WAIT_SHARE = 0.5
"""A microbatch waits here for at most this share of its remaining time; the rest is for a peer that is further."""
MAX_STEPS_AHEAD = 1
"""An origin opens a step's microbatches when all tokens of the step before were counted at every stage, by replicas
that had taken all steps before that. A replica that is two steps behind must first fetch new state."""
RETRY_MS = 200


class ChangeNotifier:
    """A condition without a lock: `notify` wakes all that `wait`, in order of arrival; each checks what has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes every waiter. Call it on the loop."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, until: float | None = None) -> None:
        """Returns at the next `notify`, or at `until` on the loop's clock; None: no time limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._event.wait()


class StepBarrier:
    """Makes a synchronous run's microbatches wait until the stages here have taken the steps before theirs.

    One that is too far ahead, or waits too long, is refused with Busy. So no gradient of one step is ever counted into
    another, however far apart the replicas are. A microbatch that waits takes no seat. step_of(stage): steps that a
    stage of `span` has taken.
    """

    def __init__(self, span: Span, step_of: Callable[[int], int]) -> None:
        self._span = span
        self._step_of = step_of
        self._changed = ChangeNotifier()

    def stepped(self) -> None:
        """Wakes the waiting microbatches; call it after each step of a stage of the span."""
        self._changed.notify()

    def refuse_early(self, first: int, step: int) -> None:
        """Raises Busy at once when a stage from `first` on has taken fewer than `step` - MAX_STEPS_AHEAD steps."""
        behind = self._behind(first, step - MAX_STEPS_AHEAD)
        if behind is not None:
            raise _not_there(behind, step - MAX_STEPS_AHEAD)

    async def wait_for_step(self, first: int, step: int, deadline: float) -> None:
        """Returns when the stages from `first` to the span's last have taken `step` steps.

        Raises Busy after MAX_WAIT_SHARE of the time until `deadline`, so that the caller can still ask another peer.
        """
        until = loop_time() + MAX_WAIT_SHARE * (deadline - loop_time())
        while (behind := self._behind(first, step)) is not None:
            if loop_time() >= until:
                raise _not_there(behind, step)
            await self._changed.wait(until)

    def _behind(self, first: int, step: int) -> int | None:
        """Returns the first stage from `first` on that has taken fewer than `step` steps, None when there is none."""
        return next((s for s in range(first, self._span.last + 1) if self._step_of(s) < step), None)


def _not_there(stage: int, step: int) -> Busy:
    """Returns the Busy to raise for a microbatch that comes before `stage` has taken `step` steps here."""
    return Busy(f"stage {stage} has not taken step {step} here yet", RETRY_MS)
