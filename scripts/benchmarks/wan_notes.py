"""What the published page says below the table of slow links: speeds, what limits them, and what makes it fair."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.wan_rates import FREE_SHARE, RTT_MS, Speed
from benchmarks.wan_results import LINK_NAMES, Results, slower
from benchmarks.wan_settings import (
    DENSE,
    LEARNING_RATE,
    OPTIMIZERS,
    PRESET,
    PUBLISHED,
    SWARM_MICROBATCHES,
    SWARM_SEQUENCES,
    Effort,
    Recipe,
)
from benchmarks.wan_speeds import Speeds


def notes(found: Sequence[Results]) -> list[str]:
    """Returns the speeds and what limits them for each width, the factors of each gain, and the rules."""
    effort = found[0].effort
    measured = [(results, results.speeds) for results in found if results.speeds is not None]
    told = [_speeds(results, speeds) for results, speeds in measured]
    told += [
        _over_link(results, speeds, rate, published.bits_per_s)
        for results, speeds in measured
        for rate in effort.rates
        if (published := speeds.of(PUBLISHED, rate)) is not None
    ]
    told += [f"NOT MEASURED, {failure}" for _, speeds in measured for failure in speeds.failures]
    return [*told, _steps_rules(effort), _loss_rules(effort), *([_speed_rules(effort)] if measured else [])]


def _speeds(results: Results, speeds: Speeds) -> str:
    dense, published = (speeds.free[setting].pace_share * speeds.pace for setting in (DENSE, PUBLISHED))
    return (
        f"Width {results.runs.width}: without a link {dense:,.0f} tokens/s in dense bf16, {published:,.0f} by the "
        f"published recipe, {speeds.pace:,.0f} by the presets' boundary, the pace, whose windows lay between "
        f"{min(speeds.paces):,.0f} and {max(speeds.paces):,.0f}. Over today's link dense bf16 takes "
        f"{_text(slower(results))} times as long, the presets' boundary keeps {_text(results.kept)}. Others used up "
        f"to {speeds.others:.2f} cores, the swarm that was at rest among them."
    )


def _over_link(results: Results, speeds: Speeds, rate: str, bits_per_s: float) -> str:
    ours, published = results.runs.chosen("muon", rate), Recipe(PUBLISHED, "muon")
    sides = [(recipe.setting, speeds.of(recipe.setting, rate)) for recipe in (published, ours)]
    limits = "; ".join(f"{setting.name}: {_limit(speed)}" for setting, speed in sides if speed is not None)
    both = {name: results.against_published(name, rate) for name in OPTIMIZERS}
    total, parts = results.against_adamw(rate), (results.boundarys_part(rate), results.optimizers_part(rate))
    return (
        f"Width {results.runs.width}, link {rate} ({bits_per_s / 1e6:.3f} Mbit/s, {RTT_MS} ms): {limits}. Time against "
        f"the published recipe: both Muon {_text(both['muon'])}, both AdamW {_text(both['adamw'])}; ours with Muon "
        f"against its AdamW {_text(total)}, of which the boundary is {_text(parts[0])} and the optimizer "
        f"{_text(parts[1])}."
    )


def _limit(speed: Speed) -> str:
    words = {
        "wire": "the wire limits",
        "processor": "PROCESSOR TIME, not the wire, limits",
        "neither": "neither wire nor processors are busy all the time",
    }[speed.limit]
    return f"{words} (wire busy {speed.wire:.0%}, processors {speed.processor:.0%}, others' {speed.others:.0%})"


def _text(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"


def _steps_rules(effort: Effort) -> str:
    most = " and ".join(
        f"{effort.max_steps_at('adamw', width):,} steps with AdamW and "
        f"{effort.max_steps_at('muon', width):,} with Muon at width {width}"
        for width in effort.widths
    )
    return (
        "T = steps to the target x seconds of a step, as the public record of Protocol NanoGPT defines it. The target "
        f"of an optimizer, for each seed, is the loss of the published recipe ({PUBLISHED.name}) with it after {most}; "
        "others may take a quarter more. steps and T: to the target of the row's own optimizer; steps_to_adamw: to "
        "AdamW's. Loss is on held-out text, the mean of up to five evaluations in a row; between two a straight line. "
        "A ratio is the median over seeds of the ratios within a seed, and the worse of the widths (dense bf16: the "
        "widest); steps, low and high are the median, the least and the most of the seeds; - was not reached, or not "
        "measured. equal_loss: after the steps that all have. Our boundary for a link (chosen) is the one that the "
        "first seed's steps and the bytes let expect to be first; the other seeds train only what is compared. "
        "The factors: the time of our boundary by that of the published recipe, both with Muon, and of the published "
        "recipe with Muon by AdamW, all to AdamW's target; their product is the whole, but for the medians."
    )


def _loss_rules(effort: Effort) -> str:
    return (
        f"Loss runs: {effort.stages} stages of one layer each, boundaries crossing by the daemons' codecs within one "
        f"process, {effort.tokens_per_step} bytes of the source of Python's standard library in each step, float32. "
        f"The learning rate ({LEARNING_RATE:g}) is the same for both optimizers, and constant after its warm-up: so "
        "one curve has the steps to every target. The asynchronous pipeline's delay is left out, as if it were the "
        "same for all."
    )


def _speed_rules(effort: Effort) -> str:
    links = ", ".join(LINK_NAMES)
    return (
        f"Speeds: {effort.stages} daemons, one for each stage, each behind a link of its own with a round trip of "
        f"{RTT_MS} ms, and {SWARM_MICROBATCHES} microbatches of {SWARM_SEQUENCES} sequences (loss runs: one of "
        f"{effort.sequences}) in an optimizer step. All take Muon's step, which AdamW's times so contain, too: 1 to 2 "
        f"% of a stage's work (`bench optimizer`). Links ({links}): over today's the bytes of dense bf16, over `bound` "
        "those of the published recipe, forward and backward sharing a peer's uplink, take 1 / "
        f"{FREE_SHARE:g} of a step without a link, so that 85 % of the step is the wire's doing; `fast` is five times "
        f"as fast as today's. A machine's speed drifts, so each swarm takes {effort.turns} turns over each link, each "
        f"just after one of the pace, {PRESET.name} without a link: the rate of the link follows from that window of "
        "the pace, and the speed is a share of it. tokens_per_s is the median share times the median of all windows of "
        "the pace. wire: the share of the time for which a middle stage's uplink carries boundaries; cpu: the share of "
        "all cores that the daemons use. Dense with a learnt embedding is taken to be as fast as dense."
    )
