"""The clock of all deadlines: seconds of the event loop.

Knows: the running event loop. Pure decisions never import this: they take `now` as an argument.
"""

from __future__ import annotations

import asyncio


def loop_time() -> float:
    """Returns the running event loop's monotonic time in seconds; under virtual time in tests, the simulated time."""
    return asyncio.get_running_loop().time()
