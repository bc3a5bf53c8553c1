"""`./scripts/bench agreement`: the loss that replicas reach by gradients in few bits, by synchronous steps, and alone.

Every setting trains on the same samples from the same weights; a ratio is the median over seeds of the
ratios within a seed. Nothing is timed, so the machine need not be calm.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from agora.model import family_of
from benchmarks.agreement_settings import (
    DELAY,
    FEWEST_BITS,
    FULL,
    QUICK,
    RATES,
    SLICES,
    SYNCHRONOUS_ADAMW,
    Effort,
    Setting,
)
from benchmarks.children import ChildProcesses, deal
from benchmarks.machine import describe, usable_cores
from benchmarks.report import Cell, Ratio, Report, paired_ratio
from benchmarks.task import prepare_corpus, spec
from benchmarks.window import print_progress

TIMEOUT_S = 7200.0

Found = Mapping[str, float]  # what a child answers, see agreement_replicas.train


def run(quick: bool, folder: Path) -> Report:
    """Runs the whole comparison. Raises BenchFailed when a part of it fails."""
    effort = QUICK if quick else FULL
    report = Report("agreement", "Agreement: the loss of replicas that agree in few bits", describe())
    found = train_all(effort, folder)
    report.rows = [row(setting, found) for setting in found]
    report.ratios = ratios(found)
    report.notes = notes(effort)
    return report


def train_all(effort: Effort, folder: Path) -> dict[Setting, list[Found]]:
    """Trains every setting with every seed in child processes of one thread each; returns the answers by setting."""
    manifest = effort.manifest()
    prepare_corpus(folder, manifest)
    child_spec = spec(manifest, folder, 1, steps=effort.steps, heldout=effort.heldout_batches)
    answers: dict[tuple[Setting, int], Found] = {}
    orders = [(job, {"setting": asdict(job[0]), "seed": job[1]}) for job in effort.jobs]
    with ChildProcesses(folder) as nursery:
        count = min(usable_cores(), len(effort.jobs))
        children = [nursery.start(f"replicas-{number}", "agreement", child_spec) for number in range(count)]
        for (setting, seed), answer in deal(children, orders, TIMEOUT_S):
            answers[setting, seed] = answer
            print_progress(
                f"{setting.name}, seed {seed}: loss {answer['loss_of_replica']:.4f}, {answer['bytes']:.3g} bytes"
            )
    found: dict[Setting, list[Found]] = {}
    for setting, seed in effort.jobs:
        found.setdefault(setting, []).append(answers[setting, seed])
    return found


def ratios(found: Mapping[Setting, Sequence[Found]]) -> dict[str, Ratio]:
    """Returns the ratios of the contract. found: by setting, the results of its seeds; all of NEEDED must be in it."""

    def loss_by(setting: Setting, baseline: Setting) -> float:
        return paired_ratio(losses(found[setting]), losses(found[baseline]))

    sent = {
        setting: statistics.fmean(answer["bytes"] for answer in found[setting])
        for setting in (FEWEST_BITS, SLICES[3], SLICES[20])
    }
    synchronous = FEWEST_BITS.baseline
    meaning = "held-out loss of a replica by gradients in 2 bits / of synchronous steps with"
    return {
        "default_vs_synchronous": Ratio(loss_by(FEWEST_BITS, synchronous), "<= 1.01", f"{meaning} the same optimizer"),
        "default_vs_synchronous_adamw": Ratio(loss_by(FEWEST_BITS, SYNCHRONOUS_ADAMW), "< 1", f"{meaning} AdamW"),
        "bytes_per_parameter_step": Ratio(
            sent[FEWEST_BITS], "<= 0.28", "bytes that a replica sends for each parameter and step"
        ),
        "slices_3_vs_synchronous": Ratio(
            loss_by(SLICES[3], synchronous), "<= 1.02", f"the same of 3 slices, {sent[SLICES[3]]:.3g} bytes"
        ),
        "slices_20_vs_synchronous": Ratio(
            loss_by(SLICES[20], synchronous), "<= 1.04", f"the same of 20 slices, {sent[SLICES[20]]:.3g} bytes"
        ),
        "slices_20_vs_synchronous_adamw": Ratio(
            loss_by(SLICES[20], SYNCHRONOUS_ADAMW), "< 1", "the same of 20 slices, by synchronous AdamW"
        ),
    }


def losses(found: Sequence[Found]) -> list[float]:
    """Returns the mean held-out loss over the replicas, for each seed."""
    return [answer["loss_of_replica"] for answer in found]


def row(setting: Setting, found: Mapping[Setting, Sequence[Found]]) -> dict[str, Cell]:
    """Returns one line of the table; percentages are of the synchronous loss of the same seed."""
    baseline = setting.baseline if setting.baseline in found else FEWEST_BITS.baseline
    these, synchronous = found[setting], losses(found[baseline])
    lost = [100 * (ours / theirs - 1) for ours, theirs in zip(losses(these), synchronous, strict=False)]
    by_mean = [100 * (own["loss_of_mean"] / theirs - 1) for own, theirs in zip(these, synchronous, strict=False)]
    return {
        "name": f"{setting.name} (the ratios)" if setting == FEWEST_BITS else setting.name,
        "seeds": len(these),
        "loss_of_replica": round(statistics.fmean(losses(these)), 4),
        "lost_%": round(statistics.fmean(lost), 2),
        "low": round(min(lost), 2),
        "high": round(max(lost), 2),
        "lost_by_mean_%": round(statistics.fmean(by_mean), 2),
        "apart_%": round(100 * statistics.fmean(answer["apart"] for answer in these), 2),
        "bytes": statistics.fmean(answer["bytes"] for answer in these),
    }


def notes(effort: Effort) -> list[str]:
    """Returns what makes the comparison fair, for the published page."""
    plain = effort.manifest()
    rates = ", ".join(f"{name} {rate:g}" for name, rate in RATES.items())
    return [
        f"Replicas (4 where nothing is said) of a Llama-style decoder ({family_of(plain.model).describe().shape}, "
        f"context {plain.model.context}, float32) on the source of Python's standard library. Each of {effort.steps} "
        f"steps has {plain.optimizer.target_tokens} tokens, the same for every setting. Learning rates: {rates}, "
        "the best of three for synchronous steps; their decay ends with the run.",
        "`synchronous`: every step takes the mean gradient of all, in float32, at once. `none`: every replica trains "
        "alone on its share of the tokens. `every gradient as`: the same mean in few bits, by the code that the "
        "daemons run: contributions with error feedback, the reducer's mean with its own, the same bytes to all; a "
        f"share of a step's sequences ({DELAY} unless told, more than measured of daemons) begins before the mean "
        "of the step before is applied, at predicted weights as in daemons. `all weights in n inner steps`: a slice "
        "after each step, as its difference to the anchor, taken in a step later.",
        "unequal shares: replica i of n computes in proportion to i + 1. missing: a reducer does not count these "
        "contributions, drawn at random; each is in the next round.",
        "loss_of_replica: held-out nats per token, the mean over the replicas: what a peer holds. lost: that against "
        "synchronous steps with the same optimizer and seed, the mean over seeds, the lowest and the highest; "
        "lost_by_mean: the same of the model whose weights are the replicas' mean. apart: root mean square distance of "
        "the replicas to that mean, against its own root mean square. Every seed has its weights, samples and held-out "
        "text.",
        "bytes: what a replica puts in, per parameter and optimizer step, payload alone. What comes back is as much "
        "again.",
    ]
