"""What the page costs with few and with very many peers: python -m tests.page.figures [PEERS...]

For each: the time to the first paint in Chromium, the main thread's time for an update, and the processor time that a
daemon spends on one look, which is what it pays for as long as pages are open.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agora.observe.events import MicrobatchCounted
from agora.observe.journal import FILE_NAME, LineFile, encode
from agora.page.feed import STATUS_INTERVAL_S, Feed, pause_s
from agora.swarm.view import View
from tests.page.chromium import Chromium, chromium
from tests.page.made import Fixed, peer, serving, status_of, write_history
from tests.swarm.makers import view

STAGES = 8
UPDATES = 10
LOOKS = 10
EVENTS = 400  # that the daemon has written to its journal between two looks


class Living(Fixed):
    """A source that makes its status of a view each time, as a daemon does."""

    def __init__(self, known: View, folder: Path) -> None:
        super().__init__({}, folder)
        self._known = known
        self._journal = LineFile(folder / FILE_NAME, 10**8)
        counted = (MicrobatchCounted(f"{at:032x}", (0,), 1024) for at in range(EVENTS))
        self._block = b"".join(encode(event, 1_800_000_000.0) for event in counted)

    async def status(self) -> Mapping[str, Any]:
        self.asked += 1
        self._journal.append(self._block)
        return status_of(self._known, STAGES) | {"unix": 1_800_000_000.0 + self.asked, "step": 184 + self.asked}


def often(peers: int, least_s: float) -> float:
    """A pause that shows many updates soon, each with a status of its own."""
    return 1.05 * STATUS_INTERVAL_S


def view_of(count: int) -> View:
    return view(*(peer(f"p{at}", str(at % STAGES), note=f"note {at}") for at in range(count)))


def in_the_browser(browser: Chromium, source: Fixed) -> tuple[float, float, float]:
    """Milliseconds to the first paint, and of the main thread for an update: the mean of all its work, the longest."""
    with serving(source, often) as url:
        browser.open("about:blank")
        browser.resize(1280, 900)
        browser.call("Performance.enable")
        browser.open(url)
        browser.until("performance.getEntriesByName('update').length >= 2")
        paint = browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        browser.evaluate("performance.clearMeasures('update')")
        busy = task_ms(browser)
        browser.until(f"performance.getEntriesByName('update').length >= {UPDATES}")
        spent = task_ms(browser) - busy
        times = browser.evaluate("performance.getEntriesByName('update').map((one) => one.duration)")
        return paint, spent / len(times), max(times)


def task_ms(browser: Chromium) -> float:
    metrics = {one["name"]: one["value"] for one in browser.call("Performance.getMetrics")["metrics"]}
    return 1000.0 * float(metrics["TaskDuration"])


async def look_ms(source: Fixed) -> float:
    """Milliseconds of processor time for a look that one page follows, all threads together."""
    feed = Feed(source, often)
    looking = asyncio.create_task(feed.run())
    updates = feed.follow()
    await anext(updates)
    began = time.process_time()
    for _ in range(LOOKS):
        await anext(updates)
    spent = time.process_time() - began
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    await updates.aclose()
    return 1000.0 * spent / LOOKS


def main() -> None:
    print("| peers | first paint, ms | update, main thread's ms | script at most, ms | look, ms | every s | a core's |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        write_history(Path(place))
        with chromium(Path(place) / "profile") as browser:
            in_the_browser(browser, Living(view_of(2), Path(place)))  # the browser's own start
            for count in [int(text) for text in sys.argv[1:]] or [2, 100, 10_000]:
                known = view_of(count)
                paint, update, longest = in_the_browser(browser, Living(known, Path(place)))
                look = asyncio.run(look_ms(Living(known, Path(place))))
                pause = pause_s(count)
                share = f"{look / 10 / pause:.2f} %"
                print(
                    f"| {count:,} | {paint:.0f} | {update:.1f} | {longest:.1f} | {look:.1f} | {pause:.0f} | {share} |"
                )


if __name__ == "__main__":
    main()
