"""The clock that deadlines are on.

Knows: the running event loop. Pure decisions never import this: they take `now` as an argument.
"""

from __future__ import annotations

import asyncio
import time


def loop_time() -> float:
    """Returns seconds on the running event loop's monotonic clock; in tests under virtual time, the simulated clock."""
    return asyncio.get_running_loop().time()


def slept_s() -> float:
    """Returns the seconds that this machine has been suspended since it was started; 0.0 where nobody can tell.

    The loop's clock does not count them, but other machines went on meanwhile.
    """
    boot_clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(boot_clock) - time.clock_gettime(time.CLOCK_MONOTONIC) if boot_clock is not None else 0.0
