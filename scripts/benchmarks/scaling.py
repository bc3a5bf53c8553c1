"""`./scripts/bench scaling`: how many times faster more machines are, and what they wait for.

Every machine is a real daemon whose device is emulated: a pass takes a set time, and hardly any processor time. Its
gradients are real ones of a small model, so that a loss is reached or not.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks.children import Child, ChildProcesses
from benchmarks.learning_curves import Point, times_to_common_loss
from benchmarks.machine import Watch, describe
from benchmarks.report import Cell, Ratio, Report
from benchmarks.scaling_settings import (
    EIGHT,
    EIGHT_LINKED,
    MICROBATCH,
    MICROBATCHES_PER_STEP,
    MODEL_MS,
    ONE,
    SLOW_FACTOR,
    WARM_STEPS,
    WITH_SLOW,
    Effort,
    Fleet,
    effort_of,
)
from benchmarks.scaling_swarm import FleetRun, Observation, queued_s, share
from benchmarks.task import corpus_cache, prepare_corpus
from benchmarks.window import print_progress

TIMEOUT_S: Final = 600.0
MAX_OVERRUN: Final = 1.05  # above it, the processor was too busy for the emulation
Curves = Mapping[Fleet, Sequence[Sequence[Point]]]
Found = Mapping[Fleet, Sequence[Observation]]


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it fails."""
    return run_with_options(quick, folder, ())


def run_with_options(quick: bool, folder: Path, options: Sequence[str]) -> Report:
    """Runs the comparison with what the options change, see scaling_settings.effort_of."""
    effort = effort_of(options, quick)
    report = Report("scaling", "Scaling: more machines, on emulated accelerators", describe())
    prepare_corpus(folder, effort.manifest(ONE, 0))
    watch = Watch([])
    found: dict[Fleet, list[Observation]] = {}
    curves: dict[Fleet, list[list[Point]]] = {}
    with ChildProcesses(folder) as nursery:
        spec = {"cache": str(corpus_cache(folder)), "threads": 1}
        evaluator = nursery.start("evaluator", "learning", spec)
        for seed in range(effort.rounds):
            for fleet, seen, curve in _run_round(effort, seed, folder, evaluator):
                found.setdefault(fleet, []).append(seen)
                curves.setdefault(fleet, []).append(curve)
    report.rows = [row(fleet, found, curves) for fleet in (ONE, *effort.fleets)]
    report.ratios = ratios(found, curves)
    report.notes = notes(effort, found, watch.elsewhere())
    return report


def _run_round(
    effort: Effort, seed: int, folder: Path, evaluator: Child
) -> list[tuple[Fleet, Observation, list[Point]]]:
    # The one machine, which takes as long as all others together, trains beside them: it needs a tenth of a core.
    stop, results = threading.Event(), []
    alone = FleetRun(ONE, effort.manifest(ONE, seed), effort.single_steps, folder, stop)
    with ThreadPoolExecutor(1) as pool:
        single: Future[Observation] = pool.submit(alone.run)
        try:
            for fleet in effort.fleets:
                print_progress(f"training: {fleet.name}, seed {seed}")
                training = FleetRun(fleet, effort.manifest(fleet, seed), effort.steps, folder, stop)
                seen = training.run()
                print_progress(f"  {seen.rate:,.0f} tokens/s, devices work {share(seen.waits, 'busy'):.0%} of the time")
                results.append((fleet, training, seen))
            seen = single.result()
        except BaseException:
            stop.set()
            raise
    print_progress(f"{ONE.name}: {seen.rate:,.0f} tokens/s")
    results.insert(0, (ONE, alone, seen))
    measured = []
    for fleet, training, seen in results:
        measured.append((fleet, seen, _curve(effort, seed, seen, folder, evaluator)))
        training.clear()
    return measured


def _curve(effort: Effort, seed: int, seen: Observation, folder: Path, evaluator: Child) -> list[Point]:
    whole = effort.manifest(ONE, seed).with_values(name="evaluated", stages={"count": 1, "first_layers": ()})
    file = folder / "evaluated.toml"
    file.write_text(whole.to_toml(), encoding="utf-8")
    models = [snapshot.files for snapshot in seen.snapshots]
    order = {"manifest": str(file), "evaluate": models, "heldout": effort.heldout_batches}
    losses: list[float] = evaluator.ask(order, TIMEOUT_S)["losses"]
    return [Point(at.tokens, at.seconds, loss) for at, loss in zip(seen.snapshots, losses, strict=True)]


# --- the results; pure


def speedup(found: Found, fleet: Fleet, base: Fleet = ONE) -> float:
    """Returns the median over rounds of a fleet's tokens/s by those of `base` in the same round, or NaN."""
    pairs = [ours.rate / theirs.rate for ours, theirs in zip(found.get(fleet, ()), found.get(base, ()), strict=False)]
    return statistics.median(pairs) if pairs else math.nan


def relative_time(curves: Curves, fleet: Fleet) -> float:
    """Returns the median over rounds of the time to the lowest loss that both the fleet and one machine reached."""
    pairs = []
    for ours, theirs in zip(curves.get(fleet, ()), curves.get(ONE, ()), strict=False):
        if ours and theirs:
            own, single = times_to_common_loss(ours, theirs)
            pairs.append(own / single)
    return statistics.median(pairs) if pairs else math.nan


def ratios(found: Found, curves: Curves) -> dict[str, Ratio]:
    """Returns the ratios by their fixed names; NaN where nothing was measured."""
    slow = [value for fleet in WITH_SLOW if not math.isnan(value := speedup(found, fleet, EIGHT))]
    by_one = "tokens/s of {} by those of one"
    return {
        "speedup_2": Ratio(speedup(found, Fleet(2)), ">= 1.9", by_one.format("2 machines")),
        "speedup_4": Ratio(speedup(found, Fleet(4)), ">= 3.8", by_one.format("4 machines")),
        "speedup_8": Ratio(speedup(found, EIGHT), ">= 7.6", by_one.format("8 machines")),
        "speedup_8_link": Ratio(
            speedup(found, EIGHT_LINKED), ">= 7.2", by_one.format(f"8 machines behind {EIGHT_LINKED.link}")
        ),
        "time_to_loss_8": Ratio(
            relative_time(curves, EIGHT), "<= 0.154", "seconds to the lowest loss that both reach, 8 machines by one"
        ),
        "with_slow_ninth": Ratio(
            min(slow, default=math.nan),
            ">= 1",
            f"tokens/s with a ninth machine, {SLOW_FACTOR:g} times slower, by those without; the worse of its stages",
        ),
    }


def row(fleet: Fleet, found: Found, curves: Curves) -> dict[str, Cell]:
    """Returns a fleet's row: medians over rounds."""
    seen = found[fleet]

    def median_share(cause: str) -> float:
        return statistics.median(share(each.waits, cause) for each in seen)

    ends = [curve[-1].loss for curve in curves.get(fleet, ()) if curve]
    return {
        "fleet": fleet.name,
        "tokens_s": statistics.median(each.rate for each in seen),
        "by_one": speedup(found, fleet),
        "time_to_loss": relative_time(curves, fleet),
        "loss": statistics.median(ends) if ends else None,
        "busy": median_share("busy"),
        "for_microbatches": median_share("microbatches"),
        "for_a_mean": median_share("mean"),
        "for_peers": median_share("peer"),
        "for_the_wire": median_share("wire"),
        "queued_s": statistics.median(map(queued_s, seen)),
        "staleness": statistics.median(each.staleness for each in seen),
        "overrun": max(each.overrun for each in seen),
    }


def notes(effort: Effort, found: Found, others: float) -> list[str]:
    """Returns what makes the comparison fair, and whether the machine was calm enough for it."""
    text = [
        f"Preset tiny, {MICROBATCH} rows a microbatch, {MICROBATCHES_PER_STEP} microbatches a step. The "
        f"forward pass of the whole model over a microbatch takes {MODEL_MS:.0f} ms, a backward two times, a stage's "
        "step a quarter of its forward; each replica takes every step, so 8 machines in 2 stages can be 7.9 times one.",
        f"Speeds count after {WARM_STEPS} steps, with all machines there. {effort.steps} steps, one machine "
        f"{effort.single_steps}; medians of {effort.rounds} rounds. One machine holds the whole model.",
        "busy and for_...: parts of the machines' time. for_microbatches: no microbatch is there. for_peers: all are "
        "at the stages after it. queued_s: seconds that a microbatch waits for devices, in all its jobs. overrun: "
        f"seconds of the devices by those set. Others used {others:.1f} cores of this machine.",
    ]
    if effort.overrides:
        text.append(f"With other settings: {dict(effort.overrides)}.")
    worst = max((each.overrun for seen in found.values() for each in seen), default=1.0)
    if worst > MAX_OVERRUN:
        text.append(f"THE PROCESSOR WAS TOO BUSY: jobs took up to {worst:.2f} times what was set; speeds are too low.")
    return text
