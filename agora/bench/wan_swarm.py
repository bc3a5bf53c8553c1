"""How fast a real swarm trains over links of a given rate and latency, once everything has settled.

Knows: the local swarm of daemons, their reports and journals. Must not know: codecs, losses, what is compared with
what.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agora_protocol.manifest import Manifest

from agora.bench.children import BenchFailed, Nursery
from agora.bench.machine import Watch
from agora.bench.swarm import STALL_S, SwarmContender
from agora.bench.task import prepare_corpus
from agora.bench.window import Window, tell

PARTS = 5
"""Into so many equal parts a window is cut for `low` and `high`."""
LOOK_S = 1.0
LOOKS = 6
SETTLED = 0.1
PATIENCE_S = 90.0


@dataclass(frozen=True, slots=True)
class Steady:
    """What a swarm did in a window of `window_s` seconds, from one completion to another.

    `low` and `high` are the slowest and the fastest fifth of it, tokens per second. `boundary_bytes_per_token` is per
    boundary and direction. `credit` is how many microbatches the origin allowed itself at the end, `others_cores` what
    the rest of the machine used meanwhile.
    """

    tokens_per_second: float
    window_s: float
    low: float
    high: float
    boundary_bytes_per_token: float
    cpu_s_per_1000_tokens: float
    credit: int
    others_cores: float


def measure(manifest: Manifest, link: str | None, folder: Path, nursery: Nursery, seconds: float, name: str) -> Steady:
    """Starts one daemon per stage behind `link` (None: as it is), measures for `seconds`, and ends them again.

    The daemons' files lie in folder/name. Raises BenchFailed.
    """
    prepare_corpus(folder, manifest)
    swarm = SteadySwarm(manifest, nursery, folder, name=name, link=link)
    try:
        swarm.gather()  # not start, which lets them come to rest: over a slow link that takes long, and is for nothing
        swarm.settle()
        return swarm.steady(seconds)
    finally:
        swarm.stop()


class SteadySwarm(SwarmContender):
    """A swarm that is watched while it trains on: its pipeline stays full from one window to the next.

    Where it takes turns with another, it settles anew in each, so that both ways to measure it mean the same.
    """

    def measure(self, seconds: float) -> Window:
        """See Contender."""
        self._ask("resume")
        self.settle()
        found = self.steady(seconds)
        self._rest()
        tokens = round(found.tokens_per_second * found.window_s)
        return Window(tokens, found.window_s, tokens)

    def settle(self) -> None:
        """Lets it train until the origin's credit has found its level, and as much is home again as was in flight."""
        credits: list[int] = []
        until = time.monotonic() + PATIENCE_S
        self._completed.clear()
        while time.monotonic() < until:
            credits.append(self._origin_credit())
            home = len(self._completed)
            if home > 2 * credits[-1] and is_settled(credits[-LOOKS:]):
                return
            self._pass_time(LOOK_S)
        tell(f"{self.name}: the credit has not settled within {PATIENCE_S:.0f} s: {credits[-LOOKS:]}")

    def steady(self, seconds: float) -> Steady:
        """What it does in the next `seconds`."""
        self._wait_until("train", lambda: bool(self._completed), STALL_S)
        self._completed.clear()
        watch, sent = Watch(self.groups()), self._boundary_bytes()
        self._wait_until("train", lambda: _span_s(self._completed) >= seconds, seconds + STALL_S)
        done, others, used = list(self._completed), watch.elsewhere(), watch.ours()
        sent = self._boundary_bytes() - sent
        tokens = sum(count for _, count in done[1:])
        if tokens <= 0:
            raise BenchFailed(f"{self.name} trained nothing in {seconds:.0f} s")
        rates = parts_of(done, PARTS)
        crossings = 2 * (self._manifest.stage_count - 1)
        everything = sum(count for _, count in self._completed)
        return Steady(
            tokens_per_second=tokens / _span_s(done),
            window_s=_span_s(done),
            low=min(rates),
            high=max(rates),
            boundary_bytes_per_token=sent / max(everything * crossings, 1),
            cpu_s_per_1000_tokens=1000 * used / tokens,
            credit=self._origin_credit(),
            others_cores=others,
        )

    def _pass_time(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._wait_until("go on", lambda: time.monotonic() >= end, seconds + STALL_S)

    def _origin_credit(self) -> int:
        origin = next(daemon for daemon in self._daemons if self._spans.get(daemon.index, (-1, -1))[0] == 0)
        return credit_of(origin.ask("report") or {})

    def _boundary_bytes(self) -> int:
        reports = [daemon.ask("report") or {} for daemon in self._daemons]
        return sum(int(report.get("bytes", {}).get("boundary", 0)) for report in reports)


def credit_of(report: dict[str, Any]) -> int:
    """The credit that a daemon's report gives, 0 when it gives none."""
    found = re.match(r"[0-9]+", str(report.get("credit", "")))
    return int(found[0]) if found else 0


def is_settled(credits: Sequence[int]) -> bool:
    """Whether these looks at the credit, of which there are LOOKS, say the same but for a tenth, or one microbatch."""
    return len(credits) >= LOOKS and max(credits) - min(credits) <= max(1.0, SETTLED * max(credits))


def parts_of(done: Sequence[tuple[float, int]], parts: int) -> list[float]:
    """Tokens per second in each of `parts` equal parts of a window of (time, tokens), which begins at the first."""
    begin, length = done[0][0], _span_s(done) / parts
    sums = [0] * parts
    for at, tokens in done[1:]:
        sums[min(parts - 1, int((at - begin) / length))] += tokens
    return [total / length for total in sums]


def _span_s(done: Sequence[tuple[float, int]]) -> float:
    return done[-1][0] - done[0][0] if done else 0.0
