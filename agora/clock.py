"""The clock that deadlines are on.

Knows: the running event loop. Pure decisions never import this: they take `now` as an argument.
"""

from __future__ import annotations

import asyncio


def loop_time() -> float:
    """Returns seconds on the running event loop's monotonic clock; in tests under virtual time, the simulated clock."""
    return asyncio.get_running_loop().time()
