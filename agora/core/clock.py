"""The clocks of a daemon: the loop's for deadlines, and one that counts evenly through steps of the wall clock.

Pure decisions never import this: they take `now` as an argument.
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
    """Returns the seconds since this machine was booted, including suspended time; this clock cannot be set.

    Where the system has no such clock, suspended time is missing.
    """
    return time.clock_gettime(_BOOT_CLOCK)


def time_with_suspend() -> float:
    """Returns the running event loop's time plus the seconds for which this machine has been suspended since its boot.

    The loop's clock does not count these seconds, although other machines work on in that time. They are known to
    within some microseconds; where the system has no clock that counts them, they are about 0.
    """
    return loop_time() + boot_time() - time.clock_gettime(time.CLOCK_MONOTONIC)
