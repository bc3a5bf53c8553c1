"""`./scripts/bench join`: how long a newcomer needs until it counts, on loopback and over a shaped link.

A swarm of two stages trains; then one more daemon joins, and its journal has when it served, what it fetched, and when
its values first had a weight in an average.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.manifest import Manifest

from agora.cli.local_swarm import LocalSwarm
from benchmarks.children import ChildProcesses
from benchmarks.machine import describe
from benchmarks.report import Cell, Ratio, Report
from benchmarks.task import corpus_cache, prepare_corpus
from benchmarks.window import print_progress

LINK, LINK_BYTES_PER_S = "200Mbit,50ms", 200e6 / 8
START_S, JOIN_S = 180.0, 300.0
WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class Joined:
    """Seconds from the newcomer's process to its serving and to its first weight, and of the transfer; its bytes."""

    serving_s: float
    weight_s: float
    transfer_s: float
    size: int


def manifest() -> Manifest:
    """Returns a manifest of two stages of 26 M parameters each; steps last seconds, in which LINK carries a mean."""
    model = {"width": 1024, "layers": 4, "heads": 8, "key_value_heads": 4, "feed_forward": 3072, "context": 32}
    values = {
        "name": "join",
        "model": model,
        "stages": {"count": 2},
        "schedule": {"kind": "asynchronous", "microbatch": 1, "max_in_flight": 2},
        "optimizer": {"target_tokens": 320, "warmup_steps": 10},
        "checkpoint": {"every": 10**6},
    }
    return Manifest.from_values(values, "benchmark")


def run(quick: bool, folder: Path) -> Report:
    """Joins over each link. Raises SwarmFailed when a newcomer never counts."""
    wanted = manifest()
    prepare_corpus(folder, wanted)
    repeats = 1 if quick else 3
    report = Report("join", "Join: from `agora-node join` to a weight in an average", describe())
    found = {link: [_join(folder, wanted, link, number) for number in range(repeats)] for link in ("", LINK)}
    report.rows = [_row(link or "loopback", joined, link == LINK) for link, joined in found.items()]
    report.ratios = {
        "join_loopback_s": Ratio(
            _median(found[""], "weight_s"), "< 30", "seconds from the process to its first weight"
        ),
        "transfer_vs_wire": Ratio(
            _median(found[LINK], "transfer_s") * LINK_BYTES_PER_S / found[LINK][0].size,
            "<= 1.3",
            f"seconds of the transfer over {LINK} against its bytes at the link's rate",
        ),
    }
    report.notes = [
        f"A swarm of two daemons trains two stages of {_megabytes(found[''][0]):.0f} MB of state each (weights, two "
        "moments, average, float32; a quarter of it are weights); a third daemon joins, places itself, and fetches the "
        "state while the others train on. to_weight_s ends with the first mean gradient that has its "
        f"share. The link ({LINK}) shapes the newcomer, in its process. Medians of {repeats} joins.",
    ]
    return report


def _row(name: str, joined: list[Joined], shaped: bool) -> dict[str, Cell]:
    return {
        "name": name,
        "state_mb": _megabytes(joined[0]),
        "to_serving_s": _median(joined, "serving_s"),
        "to_weight_s": _median(joined, "weight_s"),
        "transfer_s": _median(joined, "transfer_s"),
        "wire_s": joined[0].size / LINK_BYTES_PER_S if shaped else None,
    }


def _megabytes(joined: Joined) -> float:
    return joined.size / 1e6


def _median(joined: list[Joined], what: str) -> float:
    return statistics.median(float(getattr(each, what)) for each in joined)


def _join(folder: Path, wanted: Manifest, link: str, number: int) -> Joined:
    place = folder / f"join-{link or 'loopback'}-{number}"
    place.mkdir()
    swarm = LocalSwarm(place, wanted.to_toml(), corpus=corpus_cache(folder), flags=["--allow-files"])
    with ChildProcesses(place) as nursery:
        nursery.adopt(swarm.terminate, swarm.stop)
        peers = [swarm.start("peer-0"), swarm.start("peer-1")]
        swarm.until(lambda: min(len(peer.events("StepTaken")) for peer in peers) >= WARM_STEPS, "training", START_S)
        print_progress(f"joining over {link or 'loopback'}")
        began = time.time()
        newcomer = swarm.start("peer-2", flags=["--link", link] if link else [])
        counted = swarm.until(
            lambda: [event for event in newcomer.events("RoundDone") if event["weight"] > 0],
            "the newcomer to count in a round",
            JOIN_S,
        )
        fetched = newcomer.events("StateFetched")[0]
        serving = newcomer.events("StateChanged", state="serving")[0]
        return Joined(
            serving["at_unix"] - began, counted[0]["at_unix"] - began, float(fetched["seconds"]), int(fetched["bytes"])
        )
