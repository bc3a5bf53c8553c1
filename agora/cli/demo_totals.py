"""Adds up the journals of all peers of a demo, killed ones included, and makes its result of the totals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agora.core.metrics import named_means
from agora.observe import events
from agora.observe.events import RoundDone, StepTaken
from agora.observe.journal import from_json

# How far a tuned base model's loss may end above its first one, as a fraction: losses of steps differ by 5 %.
TUNING_NOISE: Final = 0.1
SAMPLE_COUNTS: Final = ("seen", "repeated", "missed")


@dataclass
class StageSteps:
    """The optimizer steps that one stage has taken in all its replicas, and the tokens whose gradient went into them.

    A step that several replicas took counts once. Its tokens:

    | an event says that it was taken                  | counted for the step                                  |
    |--------------------------------------------------|-------------------------------------------------------|
    | with this replica's own gradient                 | its tokens, added to those of other replicas          |
    | with the mean gradient of all replicas           | `step_tokens`, those in the mean, once for all events |
    | without a gradient: the number was only skipped  | none; it is not a step                                |

    missed: tokens that were too late for the mean gradient of their step and of the next.
    """

    missed: float = 0.0
    # Tokens by step number; those in the mean include tokens that were too late for the step before.
    _with_own: Counter[int] = field(default_factory=Counter)
    _in_mean: Counter[int] = field(default_factory=Counter)
    _age_sum: float = 0.0  # sum of tokens * gradient age in steps
    _aged_tokens: int = 0  # tokens in `_age_sum`

    def add(self, taken: StepTaken) -> None:
        """Adds the event that one replica has taken a step: its tokens, and the age of its gradients.

        Ignores an event without a gradient, by which the replica only set its step number. If several events are about
        one mean gradient, the largest `step_tokens` counts.
        """
        if taken.gradient_norm is None:
            return
        if taken.step_tokens is None:
            self._with_own[taken.step] += taken.tokens
        else:
            self._in_mean[taken.step] = max(self._in_mean[taken.step], taken.step_tokens)
        self._age_sum += taken.tokens * taken.staleness
        self._aged_tokens += taken.tokens

    def add_round(self, done: RoundDone) -> None:
        """Adds the tokens that one replica lost in a round of averaging gradients to `missed`."""
        self.missed += done.lost

    @property
    def tokens(self) -> Mapping[int, int]:
        numbers = sorted({*self._with_own, *self._in_mean})
        return {number: self._with_own[number] + self._in_mean[number] for number in numbers}

    @property
    def steps(self) -> int:
        return len({*self._with_own, *self._in_mean})

    @property
    def counted_tokens(self) -> int:
        return self._with_own.total() + self._in_mean.total()

    @property
    def tokens_per_step(self) -> float | None:
        return self.counted_tokens / self.steps if self.steps else None

    @property
    def staleness(self) -> float | None:
        return self._age_sum / self._aged_tokens if self._aged_tokens else None


@dataclass
class MetricSums:
    """The metrics of several microbatches, summed over `tokens`; sums: empty before the first."""

    tokens: int = 0
    sums: list[float] = field(default_factory=list)

    def add(self, metrics: Sequence[float], tokens: int) -> None:
        """Raises ValueError for another number of sums."""
        self.tokens += tokens
        self.sums = [total + more for total, more in zip(self.sums or [0.0] * len(metrics), metrics, strict=True)]


@dataclass
class TuningTotals:
    """The totals of what all journals of a demo say about tuning: metrics of steps, and counts of samples.

    objective: the manifest's objective.kind.
    step_tokens: the target tokens of a step.
    samples: the counts of the origin that has seen the most samples.
    steps: the summed metrics of training microbatches, one entry for each `step_tokens` tokens, the last may have
        fewer.
    evaluated: the summed metrics of evaluation microbatches.
    """

    objective: str
    trainable_parameters: int
    step_tokens: int
    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SAMPLE_COUNTS, 0))
    steps: list[MetricSums] = field(default_factory=lambda: [MetricSums()])
    evaluated: MetricSums = field(default_factory=MetricSums)

    def add(self, fields: Mapping[str, Any]) -> None:
        """Adds one line, given as its JSON fields, of any peer's journal: a MicrobatchCompleted or a SamplesCounted.

        Ignores other events, and a MicrobatchCompleted without metrics. The counts of a SamplesCounted replace the
        present ones if its origin has seen as many samples or more.
        """
        if fields.get("event") == "SamplesCounted":
            if fields["seen"] >= self.samples["seen"]:  # every origin counts all samples, as far as it knows of them
                self.samples = {name: int(fields[name]) for name in SAMPLE_COUNTS}
        elif fields.get("event") == "MicrobatchCompleted" and (metrics := fields.get("metrics")):
            is_training = fields.get("purpose", "train") == "train"
            self._add_metrics(metrics, int(fields.get("tokens", 0)), is_training=is_training)

    def _add_metrics(self, metrics: Sequence[float], tokens: int, *, is_training: bool) -> None:
        if not is_training:
            self.evaluated.add(metrics, tokens)
            return
        if self.steps[-1].tokens >= self.step_tokens:
            self.steps.append(MetricSums())
        self.steps[-1].add(metrics, tokens)

    def metrics(self) -> dict[str, Any]:
        """Means of the last whole step by name, and under "first" and "eval" those of the first and of evaluation;
        rounded to 4 decimals. Without a whole step, the partial one counts as both.
        """
        whole = [step for step in self.steps if step.tokens >= self.step_tokens] or self.steps
        last, first, evaluated = (
            {name: round(value, 4) for name, value in named_means(self.objective, part.sums, part.tokens).items()}
            for part in (whole[-1], whole[0], self.evaluated)
        )
        return {**last, "first": first, "eval": evaluated}

    def fields(self) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "trainable_parameters": self.trainable_parameters,
            "samples": self.samples,
            "tuning": self.metrics(),
        }


@dataclass
class PeerTotals:
    """One peer's journal, summed up. is_killed: by the demo. start_steps: (name, seconds) of each start phase."""

    is_killed: bool = False
    has_joined: bool = False
    is_serving: bool = False
    unfinished: set[str] = field(default_factory=set)  # training microbatches that it originated and that are open
    traffic: events.Traffic = field(default_factory=lambda: events.Traffic(0, 0, 0))
    stages: range = range(0)  # those that it holds; empty before it has chosen them
    start_steps: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class DemoTotals:
    """The totals of the journals of all peers of a demo, to which `add` adds event by event.

    target_tokens: the tokens of one optimizer step.
    tuning: totals for a base model, None for other runs.
    peers: by the index that `add` was given.
    completed, dropped, tokens: of training microbatches.
    rerouted: failed attempts, after which a microbatch went to another peer.
    recent_loss: nats per token of the microbatch completed last.
    finished_rounds: the stage and number of each averaging round that is done.
    """

    target_tokens: int
    tuning: TuningTotals | None = None
    peers: dict[int, PeerTotals] = field(default_factory=dict)
    completed: int = 0
    rerouted: int = 0
    dropped: int = 0
    tokens: int = 0
    first_started_unix: float | None = None
    first_completed_unix: float | None = None
    last_completed_unix: float | None = None
    recent_loss: float | None = None
    losses: list[float] = field(default_factory=list)  # mean per token of each `target_tokens` tokens completed
    finished_rounds: set[tuple[int, int]] = field(default_factory=set)
    failed_parts: int = 0
    stage_steps: dict[int, StageSteps] = field(default_factory=dict)  # by stage
    contributors: float = 0.0  # summed over all rounds: replicas that contributed in time, of `members`
    members: int = 0
    _times_counted: dict[str, Counter[int]] = field(default_factory=dict)
    _loss_sum: float = 0.0  # of the completed microbatches that are in no entry of `losses` yet
    _loss_tokens: int = 0  # tokens of those microbatches

    def peer(self, index: int) -> PeerTotals:
        return self.peers.setdefault(index, PeerTotals())

    def steps_of(self, stage: int) -> StageSteps:
        return self.stage_steps.setdefault(stage, StageSteps())

    def add(self, index: int, fields: Mapping[str, Any]) -> None:
        """Adds one line of the journal of the peer with this index, given as its JSON fields; ignores other events."""
        peer = self.peer(index)
        if self.tuning is not None:
            self.tuning.add(fields)
        event = from_json(fields)
        self._add_microbatch_event(peer, event, at_unix=float(fields.get("at_unix", 0.0)))
        self._add_step_event(event)
        self._add_peer_event(peer, event)

    def _add_microbatch_event(self, peer: PeerTotals, event: events.Event | None, at_unix: float) -> None:
        match event:
            case events.MicrobatchStarted(microbatch, "train"):
                peer.unfinished.add(microbatch)
                self.first_started_unix = min(self.first_started_unix or at_unix, at_unix)
            case events.MicrobatchCompleted(microbatch, loss_sum, tokens, _, "train", _):
                peer.unfinished.discard(microbatch)
                self._add_completed(loss_sum, tokens, at_unix)
            case events.MicrobatchDropped(microbatch, _) if microbatch in peer.unfinished:
                peer.unfinished.discard(microbatch)
                self.dropped += 1
            case events.MicrobatchRerouted():
                self.rerouted += 1
            case events.MicrobatchCounted(microbatch, stages, _):
                self._times_counted.setdefault(microbatch, Counter()).update(stages)

    def _add_step_event(self, event: events.Event | None) -> None:
        match event:
            case events.StepTaken():
                self.steps_of(event.stage).add(event)
            case events.RoundDone():
                self.finished_rounds.add((event.stage, event.round))
                self.failed_parts += event.failed_parts
                self.contributors += event.contributors
                self.members += event.members

    def _add_peer_event(self, peer: PeerTotals, event: events.Event | None) -> None:
        match event:
            case events.StateChanged("serving", _):
                peer.is_serving = peer.has_joined = True
            case events.StateChanged("leaving" | "left", _):
                peer.is_serving = False
            case events.SpanChosen(first, last, _):
                peer.stages = range(first, last + 1)
            case events.Traffic():
                peer.traffic = event
            case events.StartStep(name, seconds, _):
                peer.start_steps.append({"name": name, "seconds": round(seconds, 3)})

    def _add_completed(self, loss_sum: float, tokens: int, at_unix: float) -> None:
        self.completed += 1
        self.tokens += tokens
        self.first_completed_unix = min(self.first_completed_unix or at_unix, at_unix)
        self.last_completed_unix = max(self.last_completed_unix or at_unix, at_unix)
        self.recent_loss = loss_sum / tokens if tokens else None
        self._loss_sum += loss_sum
        self._loss_tokens += tokens
        if self._loss_tokens >= self.target_tokens:
            self.losses.append(self._loss_sum / self._loss_tokens)
            self._loss_sum, self._loss_tokens = 0.0, 0

    @property
    def step(self) -> int:
        return self.steps_of(0).steps

    def progress(self, peers: int) -> tuple[int, int, int]:
        """Returns how far the demo is: microbatches completed, steps of stage 0, peers joined (at most `peers`)."""
        return self.completed, self.step, min(peers, sum(peer.has_joined for peer in self.peers.values()))

    def tokens_and_seconds(self) -> tuple[int, float]:
        """From the first microbatch's start to the last's end; 0.0 seconds before one is completed."""
        if self.first_started_unix is None or self.last_completed_unix is None:
            return self.tokens, 0.0
        return self.tokens, self.last_completed_unix - self.first_started_unix

    def microbatch_counts(self) -> dict[str, int]:
        """Returns the numbers of training microbatches by outcome; final when all origins have drained.

        rerouted: failed attempts, not microbatches.
        dropped: microbatches started by a living origin, given up or still open.
        counted_twice: microbatches whose gradient some stage added more than once.
        abandoned_by_killed_origin: microbatches whose origin was killed before it had the answer.
        """
        peers = self.peers.values()
        return {
            "completed": self.completed,
            "rerouted": self.rerouted,
            "dropped": self.dropped + sum(len(peer.unfinished) for peer in peers if not peer.is_killed),
            "counted_twice": sum(max(stages.values()) > 1 for stages in self._times_counted.values()),
            "abandoned_by_killed_origin": sum(len(peer.unfinished) for peer in peers if peer.is_killed),
        }


@dataclass(frozen=True, slots=True)
class DemoMeasurements:
    """What a demo has measured; heldout_loss: None if no peer could evaluate it."""

    run_id: str
    began_unix: float
    total_seconds: float  # from the demo's start until stage 0 had taken its steps
    trained: tuple[int, float]  # tokens, and seconds of training, until everything was drained
    heldout_loss: float | None


def result_of(
    totals: DemoTotals, measured: DemoMeasurements, *, peers: int, stages: int, steps: int, link: str | None = None
) -> dict[str, Any]:
    """The object of `swarm demo --json`, except "sample". Numbers that are not known, or not JSON, are None."""
    tokens, seconds = measured.trained
    losses = totals.losses
    each = sorted(totals.peers.items())
    first_unix = totals.first_completed_unix
    return {
        "schema": 1,
        "run_id": measured.run_id,
        "peers": peers,
        "stages": stages,
        "steps": steps,
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        "loss": {
            "first": _round_for_json(losses[0]) if losses else None,
            "last": _round_for_json(losses[-1]) if losses else None,
            "eval": _round_for_json(measured.heldout_loss),
        },
        "microbatches": totals.microbatch_counts(),
        "averaging": {
            "rounds": len(totals.finished_rounds),
            "participation": _round_for_json(totals.contributors / totals.members if totals.members else None),
            "failed_parts": totals.failed_parts,
        },
        "peers_killed": sum(peer.is_killed for _, peer in each),
        "peers_joined": sum(peer.has_joined for _, peer in each),
        "bytes": {
            kind: sum(getattr(peer.traffic, f"{kind}_bytes") for _, peer in each)
            for kind in ("boundary", "averaging", "state")
        },
        "link": link,
        **_step_fields(totals, stages, tokens),
        "total_seconds": _round_for_json(measured.total_seconds),
        "first_microbatch_seconds": _round_for_json(first_unix - measured.began_unix if first_unix else None),
        "start_steps": {str(index): peer.start_steps for index, peer in each},
        "spans": {str(index): [peer.stages[0], peer.stages[-1]] if peer.stages else None for index, peer in each},
        "losses": [_round_for_json(loss) for loss in losses],
        **(totals.tuning.fields() if totals.tuning is not None else {}),
    }


def _step_fields(totals: DemoTotals, stage_count: int, computed: int) -> dict[str, Any]:
    stages = [totals.steps_of(stage) for stage in range(stage_count)]
    counted = min(stage.counted_tokens for stage in stages)
    return {
        "optimizer_steps": [stage.steps for stage in stages],
        "steps_taken": min(stage.steps for stage in stages),
        "tokens_counted": counted,
        "share_counted": _round_for_json(counted / computed if computed else None),
        "target_tokens": totals.target_tokens,
        "tokens_per_step": [_round_for_json(stage.tokens_per_step) for stage in stages],
        "staleness": [_round_for_json(stage.staleness) for stage in stages],
    }


def failure_of(result: Mapping[str, Any]) -> str:
    """Why the demo failed, with what to do; "" if it did not. For a base model the last loss may be TUNING_NOISE above
    the first.
    """
    loss = result["loss"]
    microbatches = result["microbatches"]
    steps = result["optimizer_steps"][0]
    if steps < result["steps"]:
        return f"stage 0 took {steps} of {result['steps']} steps"
    if microbatches["dropped"]:
        return f"{microbatches['dropped']} microbatches were dropped; keep the data with --dir and look at the journals"
    if loss["eval"] is None:
        return "the held-out loss could not be evaluated through the swarm; look at the log of a peer with --dir"
    # a base model may know most of the data already, and the first steps of tuning are small
    most = math.inf if loss["first"] is None else loss["first"] * (1.0 + TUNING_NOISE * ("objective" in result))
    if loss["first"] is None or (result["steps"] > 1 and not min(loss["last"], loss["eval"]) < most):
        return f"the loss did not fall ({loss['first']} -> {loss['last']}); train for more --steps"
    return ""


def summary_of(result: Mapping[str, Any]) -> list[str]:
    loss = result["loss"]
    microbatches = result["microbatches"]
    counted = result["share_counted"]
    steps = _join_stages(list(map(str, result["optimizer_steps"])))
    held = _join_stages([_format_number(tokens, 0) for tokens in result["tokens_per_step"]])
    return [
        f"loss          {_format_number(loss['first'])} -> {_format_number(loss['last'])}, "
        f"held-out {_format_number(loss['eval'])}",
        f"steps         {steps} in {result['seconds']:.1f} s, each of {held} tokens "
        f"(target {result['target_tokens']:,})",
        f"tokens        {result['tokens']:,} computed, {result['tokens_per_second']:,.0f} per second; "
        f"{_format_number(None if counted is None else 100 * counted, 1)} % counted in a step of every stage",
        f"staleness     gradients are {_join_stages([_format_number(age, 2) for age in result['staleness']])} "
        "steps old on average",
        f"microbatches  {microbatches['completed']} completed, {microbatches['rerouted']} rerouted, "
        f"{microbatches['dropped']} dropped, {microbatches['counted_twice']} counted twice",
        f"peers         {result['peers_joined']} joined, {result['peers_killed']} killed; first microbatch after "
        f"{_format_number(result['first_microbatch_seconds'], 1)} s",
        *(tuning_lines(result) if "objective" in result else ()),
    ]


def tuning_lines(result: Mapping[str, Any]) -> list[str]:
    metrics = [f"{name} {value:.3f}" for name, value in result["tuning"].items() if isinstance(value, float)]
    lines = [f"tuning        {'  '.join([result['objective'], *metrics])}"]
    lines[0] += f"; {result['trainable_parameters']:,} parameters are trained"
    if result["objective"] != "lm":
        samples = result["samples"]
        lines.append(
            f"samples       {samples['seen']:,} seen, {samples['repeated']:,} repeated, {samples['missed']:,} missed"
        )
    return lines


def _join_stages(texts: Sequence[str]) -> str:
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _format_number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _round_for_json(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
