"""Claims about long work beside the loop: results and errors come back, and a cancelled wait holds up nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from agora.core.threads import run_in_thread


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
        "from agora.core.threads import run_in_thread\n"
        "async def main():\n"
        "    task = asyncio.create_task(run_in_thread(lambda: time.sleep(600)))\n"
        "    await asyncio.sleep(0.05)\n"
        "    task.cancel()\n"
        "    await asyncio.wait([task])\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)
