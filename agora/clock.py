"""The clocks of a daemon: the loop's for deadlines, and one that counts evenly through steps of the wall clock.

Knows: the running event loop, the kernel's clocks. Pure decisions never import this: they take `now` as an argument.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

_BOOT_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def loop_time() -> float:
    """Returns the running event loop's monotonic time in seconds; under virtual time in tests, the simulated time."""
    return asyncio.get_running_loop().time()


def boot_time() -> float:
    """Returns seconds since this machine was started, its sleep included; nobody can set this clock."""
    return time.clock_gettime(_BOOT_CLOCK)


def slept_s() -> float:
    """Returns the seconds that this machine has been suspended since it was started; 0.0 where nobody can tell.

    The loop's clock does not count them, but other machines went on meanwhile.
    """
    return boot_time() - time.clock_gettime(time.CLOCK_MONOTONIC)
