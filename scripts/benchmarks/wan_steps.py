"""How many steps each recipe of one width needs to a target, and which settings the first seed's runs choose. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.wan_curves import Curve, final, steps_to, until
from benchmarks.wan_rates import RATES, choose
from benchmarks.wan_settings import (
    CANDIDATES,
    OPTIMIZERS,
    PUBLISHED,
    SAME_SPEED,
    Effort,
    Job,
    Optimizer,
    Recipe,
    Setting,
)


@dataclass(frozen=True, slots=True)
class LossRuns:
    """The loss runs of one width.

    The target of an optimizer is, for each seed, the loss that the published recipe has with it at its run's end.
    """

    effort: Effort
    width: int
    curves: Mapping[Job, Curve]

    @property
    def recipes(self) -> list[Recipe]:
        return [recipe for recipe in self.effort.recipes if self.seeds(recipe)]

    def seeds(self, recipe: Recipe) -> list[int]:
        """Returns the seeds with which the recipe was trained."""
        return [seed for seed in self.effort.seeds if Job(recipe, self.width, seed) in self.curves]

    def target(self, optimizer: Optimizer, seed: int) -> float:
        """Returns the target of an optimizer at this seed; NaN for a run without a finite loss."""
        return final(self.curves[Job(Recipe(PUBLISHED, optimizer), self.width, seed)])

    def enough(self, optimizer: Optimizer, seed: int) -> float:
        """Returns the loss at which a run may end: the lower of the optimizer's target and AdamW's."""
        return min(self.target(optimizer, seed), self.target("adamw", seed))

    def steps(self, recipe: Recipe, of: Optimizer | None = None) -> list[float]:
        """Returns the steps to the target for each seed that was trained; infinite where it was not reached.

        of: whose target, by default that of the recipe's own optimizer.
        """
        counts = [
            steps_to(self.curves[Job(recipe, self.width, seed)], self.target(of or recipe.optimizer, seed))
            for seed in self.seeds(recipe)
        ]
        return [math.inf if count is None else count for count in counts]

    def equal_loss(self, recipe: Recipe) -> float:
        """Returns the loss after the steps that all have, the mean over seeds; NaN where one has no finite loss."""
        return statistics.fmean(
            final(until(self.curves[Job(recipe, self.width, seed)], self.effort.steps)) for seed in self.seeds(recipe)
        )

    def dense(self, optimizer: Optimizer) -> Recipe:
        """Returns dense bf16 with the embedding that needs fewer steps with the first seed."""
        forms = [Recipe(setting, optimizer) for setting in self.effort.dense]
        return min(forms, key=lambda recipe: self.steps(recipe)[0])

    def chosen(self, optimizer: Optimizer, rate: str) -> Recipe:
        """Returns our boundary for a link, which is expected to reach the target first by the first seed's steps."""
        steps = {setting: self.steps(Recipe(setting, optimizer))[0] for setting in CANDIDATES[optimizer]}
        return Recipe(choose(RATES[rate], self.width, steps), optimizer)

    def chosen_over(self, recipe: Recipe) -> list[str]:
        """Returns the names of the links for which the recipe is chosen."""
        return [rate for rate in self.effort.rates if self.chosen(recipe.optimizer, rate) == recipe]

    def compared(self) -> list[Recipe]:
        """Returns what every seed trains beside the published recipe: dense bf16, the presets', the chosen ones."""
        ours = {Recipe(CANDIDATES[name][0], name) for name in OPTIMIZERS}
        chosen = {self.chosen(name, rate) for name in OPTIMIZERS for rate in self.effort.rates}
        needed = ours | chosen | {self.dense(name) for name in OPTIMIZERS}
        return [recipe for recipe in self.effort.recipes if recipe in needed]

    def links_to_measure(self) -> dict[Setting, tuple[str, ...]]:
        """Returns over which links each setting's speed is to be measured.

        Dense bf16 is left out where the published recipe is bound by the wire: its pipeline would fill for minutes.
        """
        compared = [recipe.setting for recipe in self.compared()]
        settings = dict.fromkeys(SAME_SPEED.get(setting, setting) for setting in (PUBLISHED, *compared))
        slow = [rate for rate in self.effort.rates if RATES[rate].reference == PUBLISHED]
        found = {}
        for setting in settings:
            is_dense = setting in self.effort.dense
            found[setting] = tuple(rate for rate in self.effort.rates if not (is_dense and rate in slow))
        return found
