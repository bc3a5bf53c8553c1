"""(e) as the benchmark sees it: alternating repeats of round trips and flows.

Agora.net's calls beside a bare stream.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.children import Child, ChildProcesses
from benchmarks.report import Cell, Ratio, paired_ratio
from benchmarks.turns import alternating
from benchmarks.window import START_S, TIMEOUT_S, print_progress

CARRIERS: Mapping[str, str] = {
    "agora": "agora.net calls: Process and its answer, tensors as payload, checked frames",
    "bare": "bare hivemind P2P binary stream: length, payload, readexactly",
}
KIB, MIB = 1024, 1024**2
TRIPS: Mapping[str, tuple[int, int]] = {"round trip 64 KB": (64 * KIB, 50), "round trip 4 MB": (4 * MIB, 8)}
FLOW_BYTES, FLOW_COUNT = 4 * MIB, 48


@dataclass(slots=True)
class Streams:
    """The measured streams: rows, the ratio, and notes for the page."""

    ratio: Ratio
    rows: list[dict[str, Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# Per carrier: milliseconds of round trips by name, megabytes per second of flows, one entry per repeat.
@dataclass(slots=True)
class _Readings:
    trips_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TRIPS})
    flows: list[float] = field(default_factory=list)


def measure_streams(nursery: ChildProcesses, repeats: int) -> Streams:
    """Starts the two processes and measures; both carriers take turns in every repeat."""
    print_progress("measuring streams")
    folder = str(nursery.folder)
    met = nursery.start("stream-echo", "stream-echo", {"folder": folder}).hear(START_S)
    caller = nursery.start("stream-caller", "stream-caller", {"folder": folder, **met})
    caller.hear(START_S)
    found = {name: _Readings() for name in CARRIERS}
    for carrier in CARRIERS:
        _once(caller, carrier, _Readings())
    for _, carrier in alternating(list(CARRIERS), repeats):
        _once(caller, carrier, found[carrier])
    return summary(found)


def summary(found: Mapping[str, _Readings]) -> Streams:
    """Returns rows, ratio and notes of the readings."""
    ratio = paired_ratio(found["agora"].flows, found["bare"].flows)
    streams = Streams(Ratio(ratio, ">= 0.9", "MB/s of one stream, agora.net's calls against a bare P2P stream"))
    for carrier in CARRIERS:
        for name, readings in found[carrier].trips_ms.items():
            streams.rows.append(_row(f"{carrier}: {name}", "ms", readings))
        streams.rows.append(_row(f"{carrier}: one stream", "MB/s", found[carrier].flows))
    streams.notes += [f"`{carrier}:` {what}." for carrier, what in CARRIERS.items()]
    streams.notes.append(
        "Streams: two processes, each with its own libp2p daemon, on uvloop; a round trip carries the payload both "
        f"ways; MB/s is of {FLOW_COUNT} payloads of 4 MB one way, four on their way at once. Both carriers take turns."
    )
    return streams


def _once(caller: Child, carrier: str, into: _Readings) -> None:
    for name, (size, count) in TRIPS.items():
        order = {"carrier": carrier, "shape": "trip", "bytes": size, "count": count}
        into.trips_ms[name].append(1000 * statistics.median(caller.ask(order, TIMEOUT_S)["seconds"]))
    order = {"carrier": carrier, "shape": "flow", "bytes": FLOW_BYTES, "count": FLOW_COUNT}
    seconds = float(caller.ask(order, TIMEOUT_S)["seconds"][0])
    into.flows.append(FLOW_BYTES * FLOW_COUNT / 1e6 / seconds)


def _row(name: str, unit: str, readings: list[float]) -> dict[str, Cell]:
    return {
        "name": name,
        "unit": unit,
        "median": statistics.median(readings),
        "low": min(readings),
        "high": max(readings),
        "rounds": len(readings),
    }
