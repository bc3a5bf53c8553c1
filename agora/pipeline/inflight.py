"""The work under way at this peer: a repeat joins it instead of starting it again.

Knows tasks, who waits for them, and when one may be cancelled. Must not know what the work is. Work runs in a task of
its own, because its first caller may leave while a second one waits. When the last caller leaves, the work is
cancelled, unless it is committed: from the moment at which it may be counted it runs to its end, so that its result
is there for a repeat and is never counted a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agora_protocol.errors import AgoraError, Busy
from agora_protocol.messages import Advance

from agora.calls import OnProgress
from agora.pipeline.interfaces import HopAnswer
from agora.pipeline.results import WorkKey


class Work:
    """One piece of running work."""

    task: asyncio.Task[HopAnswer]

    def __init__(self, key: WorkKey) -> None:
        self.key = key
        self.listeners: list[OnProgress] = []
        self.news: dict[int, Advance] = {}
        self.committed = False

    def advance(self, news: Advance) -> None:
        """Tells everybody who waits, and who joins them later: of each stage the newest."""
        self.news[news.stage] = news
        for listener in list(self.listeners):
            listener(news)

    def commit(self) -> None:
        """From here on the work may be counted, so it runs to its end whoever leaves."""
        self.committed = True

    def uncommit(self) -> None:
        """Nothing was counted after all."""
        self.committed = False
        if self.abandoned:
            self.task.cancel()

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for it any more."""
        return not self.listeners


class InProgress:
    """All running work, by key."""

    def __init__(self) -> None:
        self._running: dict[WorkKey, Work] = {}
        self._ending: dict[WorkKey, asyncio.Task[HopAnswer]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def entered_elsewhere(self, key: WorkKey) -> int | None:
        """The other stage at which this microbatch is under way here, if it is."""
        keys = (*self._running, *self._ending)
        return next((k.stage for k in keys if k.microbatch == key.microbatch and k.stage != key.stage), None)

    def has(self, key: WorkKey) -> bool:
        """Whether this work can be joined."""
        return key in self._running

    async def run(
        self, key: WorkKey, deadline: float, listener: OnProgress, start: Callable[[Work], Awaitable[HopAnswer]]
    ) -> HopAnswer:
        """The answer of the work named `key`, started unless it runs already.

        A joined work that fails by its own, earlier deadline is started again for us. Raises what the work raises, Busy
        while an abandoned work of this name is still ending at `deadline`.
        """
        while True:
            await self._ended(key, deadline)
            work = self._running.get(key)
            if work is None:
                return await self._wait(self._start(key, start), listener)
            for news in work.news.values():
                listener(news)
            try:
                return await self._wait(work, listener)
            except AgoraError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise

    def _start(self, key: WorkKey, start: Callable[[Work], Awaitable[HopAnswer]]) -> Work:
        work = self._running[key] = Work(key)

        async def perform() -> HopAnswer:
            try:
                return await start(work)
            finally:
                if self._running.get(key) is work:
                    del self._running[key]

        work.task = asyncio.create_task(perform(), name=f"hop {key.microbatch.hex()} at stage {key.stage}")
        return work

    async def _wait(self, work: Work, listener: OnProgress) -> HopAnswer:
        work.listeners.append(listener)
        try:
            return await asyncio.shield(work.task)
        finally:
            work.listeners.remove(listener)
            if not work.listeners and not work.task.done():
                self._left(work)

    def _left(self, work: Work) -> None:
        """Nobody waits any more."""
        work.task.add_done_callback(_read)
        if work.committed:
            return
        self._running.pop(work.key, None)
        self._ending[work.key] = work.task
        work.task.add_done_callback(lambda task: self._over(work.key, task))
        work.task.cancel()

    def _over(self, key: WorkKey, task: asyncio.Task[HopAnswer]) -> None:
        if self._ending.get(key) is task:
            del self._ending[key]

    async def _ended(self, key: WorkKey, deadline: float) -> None:
        task = self._ending.get(key)
        if task is None:
            return
        await asyncio.wait([task], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
        if not task.done():
            raise Busy("an earlier attempt of this microbatch is still ending here", 1000)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Cancels everything and waits for it to end."""
        tasks = [work.task for work in self._running.values()] + list(self._ending.values())
        for task in tasks:
            task.add_done_callback(_read)
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)


def _read(task: asyncio.Task[HopAnswer]) -> None:
    """Takes the outcome of a task that nobody awaits any more, so that asyncio does not complain about it."""
    if not task.cancelled():
        task.exception()
