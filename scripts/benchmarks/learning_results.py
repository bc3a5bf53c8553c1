"""The results of the learning benchmark: losses at equal tokens, times to a loss; rows, ratios, notes. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.learning_accounts import Accounts
from benchmarks.learning_curves import Point, loss_at, times_to_common_loss
from benchmarks.learning_settings import KILL_EVERY_S, OVER_LINK, STAGES, Effort, Job, SwarmSetting
from benchmarks.report import Cell, Ratio
from benchmarks.turns import CALM_CORES


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run. curve: its held-out losses. end: the curve's point at which the run had the tokens of its length.

    accounts: of a swarm; None for the plain loop, whose curve goes on beyond the end, since swarms may compute a few
    tokens more. processes: how many there were in all. others: cores that other programs used meanwhile.
    """

    curve: Sequence[Point]
    end: Point
    accounts: Accounts | None
    processes: int
    others: float


@dataclass(frozen=True, slots=True)
class Group:
    """The runs of one setting and length, one for each seed, each with the plain loop of that seed and length."""

    job: Job
    runs: Sequence[Trained]
    plain: Sequence[Trained]

    def relative_losses(self) -> list[float]:
        """Returns for each seed the loss at the end / that of the plain loop at the same tokens."""
        pairs = zip(self.runs, self.plain, strict=True)
        return [run.end.loss / loss_at(plain.curve, run.end.tokens) for run, plain in pairs]

    def relative_times(self) -> list[float]:
        """Returns for each seed the time to the lowest loss that both reached / that of the plain loop."""
        times = [times_to_common_loss(run.curve, plain.curve) for run, plain in zip(self.runs, self.plain, strict=True)]
        return [own / plain if plain > 0 else math.nan for own, plain in times]

    def from_accounts(self, value: Callable[[Accounts], float]) -> list[float]:
        """Returns a value of each seed's accounts; [] for the plain loop, which has none."""
        return [value(run.accounts) for run in self.runs if run.accounts is not None]


def groups_of(found: Mapping[Job, Trained]) -> list[Group]:
    """Returns the runs grouped by setting and length, in their order."""
    seeds: dict[tuple[SwarmSetting | None, int], list[Job]] = {}
    for job in found:
        seeds.setdefault((job.setting, job.steps), []).append(job)
    return [
        Group(jobs[0], [found[job] for job in jobs], [found[Job(None, job.steps, job.seed)] for job in jobs])
        for jobs in seeds.values()
    ]


Measure = Callable[[Group], Sequence[float]]
EIGHT: Final = SwarmSetting(8)
RATIOS: Final[Mapping[str, tuple[SwarmSetting, Measure, str, str]]] = {
    **{
        f"loss_at_equal_tokens_{peers}": (
            SwarmSetting(peers),
            Group.relative_losses,
            "<= 1.02",
            f"held-out loss of {peers} peers by that of the plain loop at the same tokens",
        )
        for peers in (2, 4, 8)
    },
    "steps_per_token_8": (
        EIGHT,
        lambda group: group.from_accounts(lambda accounts: accounts.steps_per_token),
        ">= 0.98",
        "optimizer steps taken x target / tokens computed, 8 peers",
    ),
    "tokens_counted_8": (
        EIGHT,
        lambda group: group.from_accounts(lambda accounts: accounts.counted),
        ">= 0.99",
        "tokens whose gradient went into a step / tokens computed, 8 peers",
    ),
    "time_to_loss_4_vs_single": (
        SwarmSetting(4),
        Group.relative_times,
        "<= 1.1",
        "seconds to the lowest loss that both reach, 4 daemons by the plain loop on the same cores",
    ),
    "loss_over_link": (
        OVER_LINK,
        Group.relative_losses,
        "<= 1.03",
        "held-out loss of 4 peers behind links of 50 ms by that of the plain loop at the same tokens",
    ),
}


def ratios(groups: Sequence[Group]) -> dict[str, Ratio]:
    """Returns the ratios by their fixed names: the median over seeds, of the worse length; NaN if not measured."""
    return {
        name: Ratio(worst(groups, setting, measure, target.startswith(">")), target, meaning)
        for name, (setting, measure, target, meaning) in RATIOS.items()
    }


def worst(groups: Sequence[Group], setting: SwarmSetting, measure: Measure, more_is_better: bool) -> float:
    """Returns the worst, over the lengths of a setting's runs, of the median over seeds; NaN without such runs."""
    medians = [statistics.median(measure(group)) for group in groups if group.job.setting == setting]
    return (min if more_is_better else max)(medians, default=math.nan)


def row(group: Group) -> dict[str, Cell]:
    """Returns one line of the table: means over the seeds; of lost_% the median, with the least and the most."""
    lost = [100 * (relative - 1) for relative in group.relative_losses()]
    return {
        "name": group.job.name,
        "length": group.job.steps,
        "seeds": len(group.runs),
        "loss": round(statistics.fmean(run.end.loss for run in group.runs), 4),
        "lost_%": round(statistics.median(lost), 2),
        "low": round(min(lost), 2),
        "high": round(max(lost), 2),
        "steps": _steps(group),
        "computed_M": round(statistics.fmean(run.end.tokens for run in group.runs) / 1e6, 3),
        "counted_%": _mean(group, lambda accounts: 100 * accounts.counted),
        "missed_%": _mean(group, lambda accounts: 100 * accounts.missed),
        "step_fill": _mean(group, lambda accounts: statistics.fmean(accounts.fills)),
        "fill_spread": _mean(group, lambda accounts: accounts.spread),
        "fill_max": _mean(group, lambda accounts: max(accounts.fills)),
        "staleness": _mean(group, lambda accounts: accounts.staleness),
        "tokens_per_s": statistics.fmean(run.end.tokens / run.end.seconds for run in group.runs),
        "time_vs_plain": round(statistics.median(group.relative_times()), 3),
        "processes": statistics.fmean(run.processes for run in group.runs),
        "others": round(statistics.fmean(run.others for run in group.runs), 2),
    }


def _steps(group: Group) -> str:
    steps = [run.accounts.steps for run in group.runs if run.accounts is not None] or [[group.job.steps]]
    return "/".join(f"{statistics.fmean(of_stage):.0f}" for of_stage in zip(*steps, strict=True))


def _mean(group: Group, value: Callable[[Accounts], float]) -> float | None:
    values = group.from_accounts(value)
    return round(statistics.fmean(values), 3) if values else None


def notes(effort: Effort, chunk: int, others: float) -> list[str]:
    """Returns what makes the comparison fair and what the columns mean, for the published page.

    chunk: sequences of one forward of the plain loop. others: the most cores that other programs used during a run.
    """
    busy = f"Other programs used up to {others:.1f} cores: times mean little; losses at equal tokens hardly feel it."
    manifest = effort.manifest(effort.jobs[-1])
    optimizer = manifest.optimizer
    overrides = [
        f"{section}.{key} = {value}" for section in effort.overrides for key, value in effort.overrides[section].items()
    ]
    return [
        *([busy] if others > CALM_CORES else []),
        f"All train the demo's model (preset tiny, {STAGES} stages, a step of {optimizer.target_tokens:,} tokens) on "
        f"the same text from the same weights, by {optimizer.name} with the learning rate's decay ending at `length` "
        f"steps, on as many tokens as `length` steps should have ({'; '.join(overrides) or 'default settings'}). "
        "Swarms: `agora-node` daemons, schedule "
        f"{manifest.schedule.kind}; the first ones train while the others join, as in `swarm demo`.",
        f"The plain loop: one process, all cores, no codec, the daemons' optimizer, {chunk} sequences in one forward "
        "and OpenMP's way to wait as they were fastest here just before.",
        f"loss: nats per held-out token over {effort.heldout_batches} microbatches, the same for each run of a seed, "
        "by the same code in one process, without a codec, of the moving averages of the weights on both sides "
        "(`optimizer.average_decay`), as an export has them. A swarm's are copied from its daemons (all of them at the "
        "end: the mean over its replicas). lost: how much higher that is than "
        "the loss of the plain loop at the very same number of tokens, between two of its points on a straight line; "
        "the median over seeds, with low and high. A ratio is the median over seeds, and the worse of the lengths.",
        "All else comes from the journals: steps, the optimizer steps that each stage has taken; computed, the tokens "
        "of completed microbatches; counted, those whose gradient went into a step of every stage; missed, those that "
        "came too late for the mean of their step and for the next one; step_fill, the tokens that a step holds by its "
        "target: mean, standard deviation, most; staleness, the mean age of a gradient: how many steps its weights "
        "were behind those before the step that it went into, of the stage where it is highest.",
        "time_vs_plain: seconds from the first microbatch to the lowest loss that both reach, by those of the plain "
        "loop; start-up and evaluations are left out on both sides. others: cores that other programs used; daemons "
        f"that were killed (every {KILL_EVERY_S:g} s, where the name says so) are partly among them.",
    ]
