"""The results of the benchmark of slow links: times to a target loss, rows, ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.report import Cell, Ratio
from benchmarks.wan_settings import DENSE, OPTIMIZERS, PRESET, PUBLISHED, Effort, Optimizer, Recipe
from benchmarks.wan_speeds import Speeds
from benchmarks.wan_steps import LossRuns


@dataclass(frozen=True, slots=True)
class Results:
    """Of one width: the loss runs, and the speeds, or None where only losses were measured."""

    runs: LossRuns
    speeds: Speeds | None

    @property
    def effort(self) -> Effort:
        return self.runs.effort

    def tokens_per_s(self, recipe: Recipe, rate: str) -> float:
        """Returns the tokens per second over a link; NaN where they were not measured."""
        found = self.speeds.tokens_per_s(recipe.setting, rate) if self.speeds is not None else None
        return math.nan if found is None else found

    def times(self, recipe: Recipe, rate: str, of: Optimizer | None = None) -> list[float]:
        """Returns the seconds to the target for each seed over a link, infinite where it was not reached.

        of: whose target, by default that of the recipe's own optimizer. NaN where the speed was not measured.
        """
        step_s = self.effort.tokens_per_step / self.tokens_per_s(recipe, rate)
        return [steps * step_s for steps in self.runs.steps(recipe, of)]

    def ratio(self, ours: Recipe, theirs: Recipe, rate: str, of: Optimizer | None = None) -> float:
        """Returns the median over seeds of the time to the target, ours / theirs; NaN when one of them is not finite.

        of: whose target, by default that of their optimizer.
        """
        target = of or theirs.optimizer
        return _median_ratio(self.times(ours, rate, target), self.times(theirs, rate, target))

    def against_published(self, optimizer: Optimizer, rate: str) -> float:
        """Returns the ratio of our boundary to the published recipe, with this optimizer on both sides."""
        return self.ratio(self.runs.chosen(optimizer, rate), Recipe(PUBLISHED, optimizer), rate)

    def against_dense(self, optimizer: Optimizer) -> float:
        """Returns the ratio of our boundary to dense bf16 over today's link, with this optimizer on both sides."""
        dense = self.runs.dense(optimizer)
        return self.ratio(self.runs.chosen(optimizer, "today"), dense, "today", optimizer)

    def against_adamw(self, rate: str) -> float:
        """Returns the ratio of our boundary with Muon to the published recipe with AdamW."""
        return self.ratio(self.runs.chosen("muon", rate), Recipe(PUBLISHED, "adamw"), rate)

    def boundarys_part(self, rate: str) -> float:
        """Returns the factor of `against_adamw` that is the boundary's: both sides with Muon, to the same target."""
        return self.ratio(self.runs.chosen("muon", rate), Recipe(PUBLISHED, "muon"), rate, "adamw")

    def optimizers_part(self, rate: str) -> float:
        """Returns the factor of `against_adamw` that is the optimizer's: the published recipe with Muon and AdamW."""
        return self.ratio(Recipe(PUBLISHED, "muon"), Recipe(PUBLISHED, "adamw"), rate)

    @property
    def kept(self) -> float:
        found = self.speeds.of(PRESET, "today") if self.speeds is not None else None
        return math.nan if found is None else found.pace_share


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    if len(ours) != len(theirs) or not all(map(math.isfinite, (*ours, *theirs))):
        return math.nan
    return statistics.median(own / their for own, their in zip(ours, theirs, strict=True))


def row(results: Results, recipe: Recipe) -> dict[str, Cell]:
    """Returns one line of the table: the recipe, its steps to both targets, its speed and time over each link."""
    runs, setting = results.runs, recipe.setting
    steps, chosen, speeds = runs.steps(recipe), runs.chosen_over(recipe), results.speeds
    forward, backward = setting.bytes_per_token(runs.width)
    cells: dict[str, Cell] = {
        "width": runs.width,
        "optimizer": recipe.optimizer,
        "boundary": setting.name + (f" (chosen: {', '.join(chosen)})" if chosen else ""),
        "k": setting.subspace(runs.width),
        "bytes_forward": forward,
        "bytes_backward": backward,
        "seeds": len(steps),
        "equal_loss": round(runs.equal_loss(recipe), 4),
        "steps": _whole(statistics.median(steps)),
        "low": _whole(min(steps)),
        "high": _whole(max(steps)),
        "steps_to_adamw": _whole(statistics.median(runs.steps(recipe, "adamw"))),
    }
    for rate in results.effort.rates if speeds is not None else ():
        speed = speeds.of(setting, rate) if speeds is not None and len(steps) == len(results.effort.seeds) else None
        cells |= {
            f"tokens_per_s_{rate}": _whole(results.tokens_per_s(recipe, rate)) if speed else None,
            f"wire_%_{rate}": round(100 * speed.wire) if speed else None,
            f"cpu_%_{rate}": round(100 * speed.processor) if speed else None,
            f"T_s_{rate}": _whole(statistics.median(results.times(recipe, rate))) if speed else None,
        }
    return cells


# By link: the end of a ratio's name, and of its meaning.
LINK_NAMES = {"today": ("", ""), "bound": ("_bound", ", the wire-bound link"), "fast": ("_fast", ", the fast link")}


def ratios(found: Sequence[Results]) -> dict[str, Ratio]:
    """Returns the ratios by their fixed names: of the worse width, but for dense bf16, which is of the widest."""
    made: dict[str, Ratio] = {}
    for rate, (end, over) in LINK_NAMES.items():
        made |= _ratios_over(found, rate, end, over)
    widest = max(found, key=lambda results: results.runs.width)
    dense, width = "time to the target loss, our boundary against dense bf16", widest.runs.width
    made["time_to_loss_vs_dense_bf16"] = Ratio(
        widest.against_dense("muon"), "<= 0.2 at width 128", f"{dense}, both Muon, width {width}"
    )
    made["time_to_loss_vs_dense_bf16_adamw"] = Ratio(
        widest.against_dense("adamw"), "shown", f"{dense}, both AdamW, width {width}"
    )
    kept = worst([results.kept for results in found], min)
    made["throughput_kept_50ms"] = Ratio(
        kept, ">= 0.95", f"tokens/s of {PRESET.name}, over today's link against without it"
    )
    return made


def _ratios_over(found: Sequence[Results], rate: str, end: str, over: str) -> dict[str, Ratio]:
    name, what = "time_to_loss_vs_subspace_reference", f"our boundary against {PUBLISHED.name}"
    muon, adamw = (
        worst([results.against_published(each, rate) for results in found], max) for each in OPTIMIZERS[::-1]
    )
    mixed = worst([results.against_adamw(rate) for results in found], max)
    slowest = max(found, key=lambda results: results.against_adamw(rate))
    target = {"today": "<= 0.7", "bound": "<= 0.5"}.get(rate, "shown")
    return {
        f"{name}{end}": Ratio(muon, target, f"time to the target loss, {what}, both Muon{over}"),
        f"{name}_adamw{end}": Ratio(adamw, "shown", f"the same, both AdamW{over}"),
        f"time_to_loss_vs_adamw_reference{end}": Ratio(
            mixed, "<= 0.4" if rate == "today" else "shown", f"{what}, ours with Muon, the other with AdamW{over}"
        ),
        f"of_it_boundary{end}": Ratio(slowest.boundarys_part(rate), "shown", f"of that, the boundary's factor{over}"),
        f"of_it_optimizer{end}": Ratio(slowest.optimizers_part(rate), "shown", f"of that, the optimizer's{over}"),
    }


def worst(values: Sequence[float], which: Callable[[Sequence[float]], float]) -> float:
    """Returns the worst of the values; NaN when one is NaN or there is none."""
    return math.nan if not values or any(map(math.isnan, values)) else which(values)


def _whole(value: float) -> Cell:
    return round(value) if math.isfinite(value) else None


def slower(results: Results) -> float:
    """Returns how many times as long dense bf16 takes over today's link as without one; NaN where not measured."""
    if results.speeds is None or (over := results.speeds.of(DENSE, "today")) is None:
        return math.nan
    return results.speeds.free[DENSE].pace_share / over.pace_share
