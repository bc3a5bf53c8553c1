"""Claims about background tasks."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from agora_protocol.errors import LocalError

from agora.core.tasks import BackgroundTasks, run_in_thread


def test_tasks_end_when_they_are_closed_and_one_that_ends_before_is_told_by_name() -> None:
    cancelled: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)

    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(_raise())

    async def _raise() -> None:
        raise LocalError("no disk")

    async def work() -> None:
        ended = asyncio.Queue[tuple[str, BaseException | None]]()
        tasks = BackgroundTasks(lambda name, error: ended.put_nowait((name, error)))
        tasks.start("one", forever("one"))
        tasks.start("two", forever("two"))
        await asyncio.sleep(0)
        assert ended.empty()
        tasks.start("three", fails())
        name, error = await ended.get()
        assert name == "three" and str(error) == "no disk"
        tasks.start("four", asyncio.sleep(0))
        assert await ended.get() == ("four", None)
        await tasks.close()
        assert cancelled == ["one", "two"] and ended.empty(), "an end that `close` has made is none to be told of"

    asyncio.run(work())


def test_results_and_errors_come_back() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        assert await run_in_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await run_in_thread(fail)

    asyncio.run(main())


def test_the_process_ends_while_the_work_goes_on() -> None:
    code = (
        "import asyncio, time\n"
        "from agora.core.tasks import run_in_thread\n"
        "async def main():\n"
        "    task = asyncio.create_task(run_in_thread(lambda: time.sleep(600)))\n"
        "    await asyncio.sleep(0.05)\n"
        "    task.cancel()\n"
        "    await asyncio.wait([task])\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
