"""Where a hop makes microbatches wait: for a step that its stages have not taken, or for a mean that is awaited."""

from __future__ import annotations

from collections.abc import Callable

from agora_protocol.errors import Busy
from agora_protocol.ids import Span
from agora_protocol.messages import Process

from agora.core.clock import loop_time
from agora.core.tasks import ChangeNotifier

BEHIND_RETRY_MS = 200  # a stage here has not taken the microbatch's step yet
# A microbatch waits here for at most this fraction of its remaining time. The rest is for asking another peer.
MAX_WAIT_FRACTION = 0.5
# A microbatch of step s is sent only after step s - 1 was counted. A stage that is two steps behind has missed a state:
# waiting does not help, so it refuses.
MAX_STEPS_AHEAD = 1
POLL_INTERVAL_S = 0.05  # seconds between two checks of whether a mean is still awaited


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
        """Waits until all stages from the request's to the span's last have taken the request's step.

        Raises Busy at once if one is more than MAX_STEPS_AHEAD steps behind it; otherwise after MAX_WAIT_FRACTION of
        the time until the loop time `deadline`, so that the requester can still ask another peer.
        """
        until = loop_time() + MAX_WAIT_FRACTION * (deadline - loop_time())
        stages, step = range(request.stage, self._span.last + 1), request.step
        while behind := [stage for stage in stages if self._step_of(stage) < step]:
            is_too_early = any(self._step_of(stage) < step - MAX_STEPS_AHEAD for stage in behind)
            if is_too_early or loop_time() >= until:
                raise Busy(f"stage {behind[0]} has not taken step {step} here yet", BEHIND_RETRY_MS)
            await self._changed.wait(until)


class MeanBarrier:
    """In an asynchronous run, holds microbatches back while the replicas average a gradient and the mean is due soon.

    Usually the held microbatches are then computed on weights that include the mean, and count for the step after it.
    If it is late, they go on after MAX_WAIT_FRACTION of their time. They take no slot of the ledger. must_wait: whether
    a mean is due soon for a stage, and no more microbatches may begin before it; must become False by itself.
    """

    def __init__(self, span: Span, must_wait: Callable[[int], bool]) -> None:
        self._span = span
        self._must_wait = must_wait
        self._changed = ChangeNotifier()

    def notify_step(self) -> None:
        """Makes the waiting microbatches check again; call it after each step of a stage of the span."""
        self._changed.notify()

    async def hold(self, request: Process, deadline: float) -> None:
        """Waits while `must_wait` says so for a stage that a training microbatch enters; raises nothing.

        A mean is due soon then, and no more may begin before it. Returns at the latest after MAX_WAIT_FRACTION of the
        time until the loop time `deadline`.
        """
        if request.purpose != "train":
            return
        until = loop_time() + MAX_WAIT_FRACTION * (deadline - loop_time())
        stages = range(request.stage, self._span.last + 1)
        while (now := loop_time()) < until and any(map(self._must_wait, stages)):
            await self._changed.wait(min(until, now + POLL_INTERVAL_S))
