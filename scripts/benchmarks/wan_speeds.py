"""Measures the speeds of real swarms of one width, over links whose rates follow the pace of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agora_protocol.errors import AgoraError

from benchmarks.children import BenchFailed, ChildProcesses
from benchmarks.machine import usable_cores
from benchmarks.turns import Readings, start, take_turns
from benchmarks.wan_rates import RATES, RTT_MS, PacedLink, Speed, Turn, link_text, speed_of
from benchmarks.wan_settings import DENSE, PRESET, PUBLISHED, SAME_SPEED, Effort, Setting
from benchmarks.wan_swarm import SteadySwarm
from benchmarks.window import print_progress

START_RATE: Final = "100Mbit"
FILE_NAME: Final = str.maketrans(" /=,", "____")


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of one width.

    paces: tokens per second of the pace in each of its windows.
    free: the speeds of dense bf16 and of the published recipe without a link.
    over: the speeds over links, by setting and name of the link.
    others: the most cores that the rest of the machine used.
    """

    paces: Sequence[float]
    free: Mapping[Setting, Speed]
    over: Mapping[tuple[Setting, str], Speed]
    others: float
    failures: Sequence[str] = ()  # why swarms that should have been measured were not

    @property
    def pace(self) -> float:
        return statistics.median(self.paces)

    def of(self, setting: Setting, rate: str) -> Speed | None:
        """Returns the speed of a setting over a link; None where it was not measured."""
        return self.over.get((SAME_SPEED.get(setting, setting), rate))

    def tokens_per_s(self, setting: Setting, rate: str) -> float | None:
        """Returns the tokens per second of a setting over a link, at the median pace; None where not measured."""
        speed = self.of(setting, rate)
        return None if speed is None else speed.pace_share * self.pace


class Swarms:
    """Swarms of one width, each of which takes turns with the same swarm: the pace, the presets' boundary unlinked.

    Before every window of a swarm comes a window of the pace. The swarm's link gets the rate that follows from that
    pace, and the swarm's speed counts as a share of it: what drifts hits every setting alike, and the wire as much as
    the processors.
    """

    def __init__(self, effort: Effort, width: int, folder: Path, nursery: ChildProcesses) -> None:
        self._effort, self._width, self._folder, self._nursery = effort, width, folder, nursery
        self._pace = self.new_swarm(PRESET, None)
        self._paces: list[float] = []
        self._others = 0.0
        start([self._pace])

    def speeds(self, settings: Mapping[Setting, Sequence[str]]) -> Speeds:
        """Measures dense bf16 and the published recipe without a link, and each setting over its named links.

        A swarm that fails over a link is left out, with the reason in `failures`: the loss runs have taken an hour and
        should not be lost. Raises BenchFailed where a swarm fails without a link.
        """
        free = {setting: self._measure(setting, [None])[None] for setting in (DENSE, PUBLISHED)}
        over: dict[tuple[Setting, str], Speed] = {}
        failures: list[str] = []
        for setting, names in settings.items():
            links = [PacedLink(RATES[name], free[RATES[name].reference].pace_share) for name in names]
            try:
                found = self._measure(setting, links)
            except (BenchFailed, AgoraError) as failed:
                failures.append(f"{setting.name}: {failed}")
                print_progress(f"not measured: {failures[-1]}")
            else:
                over |= {(setting, link.rate.name): found[link] for link in links}
        return Speeds(self._paces, free, over, self._others, failures)

    def _measure(self, setting: Setting, links: Sequence[PacedLink | None]) -> dict[PacedLink | None, Speed]:
        # Returns the speed of one swarm over each of the links, which it has one after the other in every turn. [None]
        # measures it without a link, in twice as many turns, since the rates of links follow from that.
        is_free = None in links
        swarm = self.new_swarm(setting, None if is_free else f"{START_RATE},{RTT_MS}ms")
        turns: dict[PacedLink | None, list[Turn]] = {link: [] for link in links}
        try:
            start([swarm])
            for number in range(self._effort.turns * (1 + is_free)):
                for link in links if number % 2 == 0 else reversed(links):
                    turns[link].append(self._take_turn(swarm, link))
        finally:
            swarm.stop()
        sent = setting.sent_per_token(self._width)
        speeds = {link: speed_of(taken, sent, usable_cores()) for link, taken in turns.items()}
        for link, speed in speeds.items():
            over = "no link" if link is None else f"the link {link.rate.name}"
            busy = f"busy: wire {speed.wire:.2f}, processors {speed.processor:.2f}"
            print_progress(f"{swarm.name}, {over}: {speed.pace_share:.3f} of the pace; {busy}")
        return speeds

    def _take_turn(self, swarm: SteadySwarm, link: PacedLink | None) -> Turn:
        pace, bits_per_s = self._window(self._pace).rates[0], None
        if link is not None:
            bits_per_s = link.bits_per_s(self._width, pace)
            swarm.change_rate(link_text(bits_per_s))
        own = self._window(swarm)
        self._paces.append(pace)
        return Turn(pace, own.rates[0], bits_per_s, own.costs[0], own.elsewhere[0])

    def _window(self, swarm: SteadySwarm) -> Readings:
        found = take_turns([swarm], 1, self._effort.window_s)[swarm.name]
        self._others = max(self._others, *found.elsewhere)
        return found

    def new_swarm(self, setting: Setting, link: str | None) -> SteadySwarm:
        """Returns a swarm of this setting behind a link, not yet started."""
        manifest = self._effort.swarm_manifest(setting, self._width)
        name = f"{setting.name} {self._width}{'' if link else ' unlinked'}".translate(FILE_NAME)
        return SteadySwarm(manifest, self._nursery, self._folder, name, link=link)
