"""./scripts/fuzz [CASES] [--seconds S] [--first N]: damages what strangers may send, and says how many it tried.

Ends with 1 at the first case that is neither accepted nor refused by a typed error, takes too long, or if memory grows.
"""

from __future__ import annotations

import argparse
import time

import psutil

from .conftest import load_make_script, load_vectors
from .fuzz_cases import MEMORY_SAMPLE, SHARE, judge, make_cases, memory

ROUND = 5000  # cases of each kind, by its share, between two looks at the clock and at memory
WARM_ROUNDS = 20  # in which caches fill
MAX_GROWTH = 100 << 20  # bytes from there to the end


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("cases", nargs="?", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    asked = parser.parse_args()
    cases = make_cases(load_vectors, load_make_script())
    tried, rounds, began, shown = dict.fromkeys(SHARE, 0), 0, time.monotonic(), 0.0
    start = warm = resident()
    while (total := sum(tried.values())) < asked.cases and time.monotonic() - began < asked.seconds:
        for name, share in SHARE.items():
            count = int(ROUND * share)
            judge(cases[name], asked.first + tried[name], count)
            tried[name] += count
        rounds += 1
        warm = resident() if rounds <= WARM_ROUNDS else warm
        if time.monotonic() - shown > 60.0:
            shown = time.monotonic()
            print(f"{sum(tried.values()):,} cases, {resident() >> 20} MiB", flush=True)
    seconds, grown = time.monotonic() - began, resident() - warm
    for name in cases:
        memory(cases[name], MEMORY_SAMPLE)
    kinds = ", ".join(f"{name} {count:,}" for name, count in tried.items())
    print(f"{total:,} cases in {seconds:.0f} s ({kinds})")
    print(
        f"resident: {start >> 20} MiB at the start, {warm >> 20} after {WARM_ROUNDS} rounds, {grown / 2**20:+.1f} since"
    )
    return int(grown > MAX_GROWTH)


if __name__ == "__main__":
    raise SystemExit(main())
