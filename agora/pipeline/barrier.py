"""Lets coroutines wait: for any change, for a step of this peer's stages, for a mean gradient that is expected soon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from agora_protocol.errors import Busy
from agora_protocol.ids import Span
from agora_protocol.messages import Process

from agora.core.clock import loop_time

MAX_WAIT_FRACTION = 0.5  # of its remaining time a microbatch waits here at most; the rest is for asking another peer
# Step s opens only after s - 1 is counted. Two behind means that state was missed: waiting would not help, so refuse.
MAX_STEPS_AHEAD = 1
LOOK_S = 0.05  # seconds between two checks of whether a mean is still awaited
RETRY_MS = 200  # after which a caller may ask again if it was refused because a stage here is behind


class ChangeNotifier:
    """Wakes the coroutines that wait for some change; each then checks by itself whether its condition holds now.

    It is an asyncio.Condition without a lock, whose `wait` may have a time limit.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all coroutines that are in `wait` now, in the order of their arrival. Call it on the event loop."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, until: float | None = None) -> None:
        """Returns at the next `notify`, or at loop time `until` without an error; None means no time limit.

        A `notify` before the call does not end the wait: check the condition before each call.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._event.wait()


class StepBarrier:
    """In a synchronous run, holds a microbatch of step s back until this peer's stages have taken s steps.

    So no gradient of one step is counted into another, however far apart the replicas are. A microbatch that waits
    takes no slot of the ledger. step_of: how many steps a stage of `span` has taken here.
    """

    def __init__(self, span: Span, step_of: Callable[[int], int]) -> None:
        self._span = span
        self._step_of = step_of
        self._changed = ChangeNotifier()

    def notify_step(self) -> None:
        """Makes the waiting microbatches check again; call it after each step of a stage of the span."""
        self._changed.notify()

    async def hold(self, request: Process, deadline: float) -> None:
        """Waits until this peer's stages have taken the request's step; see refuse_early and wait_for_step."""
        if request.step:
            self.refuse_early(request.stage, request.step)
            await self.wait_for_step(request.stage, request.step, deadline)

    def refuse_early(self, entry_stage: int, step: int) -> None:
        """Raises Busy if a microbatch of `step` would have to wait for more than MAX_STEPS_AHEAD steps; never waits."""
        self._require_step(entry_stage, step - MAX_STEPS_AHEAD)

    async def wait_for_step(self, entry_stage: int, step: int, deadline: float) -> None:
        """Waits until all stages from `entry_stage` to the span's last have taken at least `step` steps.

        Raises Busy after MAX_WAIT_FRACTION of the time until the loop time `deadline`, so that the caller can still ask
        another peer.
        """
        until = loop_time() + MAX_WAIT_FRACTION * (deadline - loop_time())
        while loop_time() < until and self._stages_behind(entry_stage, step):
            await self._changed.wait(until)
        self._require_step(entry_stage, step)

    def _stages_behind(self, entry_stage: int, step: int) -> list[int]:
        return [stage for stage in range(entry_stage, self._span.last + 1) if self._step_of(stage) < step]

    def _require_step(self, entry_stage: int, step: int) -> None:
        if behind := self._stages_behind(entry_stage, step):
            raise Busy(f"stage {behind[0]} has not taken step {step} here yet", RETRY_MS)


class MeanBarrier:
    """In an asynchronous run, holds microbatches back while the replicas average a gradient and the mean is due soon.

    The held microbatches are then computed on weights that include the mean, and count for the step after it. They take
    no slot of the ledger. awaits_mean: whether such a mean is awaited for a stage; must become False by itself.
    """

    def __init__(self, span: Span, awaits_mean: Callable[[int], bool]) -> None:
        self._span = span
        self._awaits_mean = awaits_mean
        self._changed = ChangeNotifier()

    def notify_step(self) -> None:
        """Makes the waiting microbatches check again; call it after each step of a stage of the span."""
        self._changed.notify()

    async def hold(self, request: Process, deadline: float) -> None:
        """Waits while a mean is awaited for any stage that a training microbatch enters; raises nothing.

        Returns at the latest after MAX_WAIT_FRACTION of the time until the loop time `deadline`.
        """
        if request.purpose != "train":
            return
        until = loop_time() + MAX_WAIT_FRACTION * (deadline - loop_time())
        stages = range(request.stage, self._span.last + 1)
        while (now := loop_time()) < until and any(map(self._awaits_mean, stages)):
            await self._changed.wait(min(until, now + LOOK_S))
