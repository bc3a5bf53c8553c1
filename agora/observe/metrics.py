"""Metrics for Prometheus and for trackers: one list of names, filled by the events, a daemon's report and the status.

Names follow https://prometheus.io/docs/practices/naming/: a unit at the end, `_total` for what only grows. Labels take
few values: stages, closed lists of reasons; never peers. See docs/use/metrics.md.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final, Literal

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agora.observe import events
from agora.observe.events import Event

FILE_NAME: Final = "metrics.jsonl"
MAX_FILE_BYTES: Final = 32 * 2**20
MAX_SERIES: Final = 256  # of one metric; values of labels that would be more are counted as OTHER
OTHER: Final = "other"
ROW_INTERVAL_S: Final = 30.0  # seconds between two rows of a long run
QUIET_ROW_INTERVAL_S: Final = 300.0  # seconds between two rows while the run takes no step
STATES: Final = ("OK", "COMPLETED", "DEGRADED", "STALLED", "PAUSED", "UNREACHABLE")
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
# The code with which most reasons begin, or a phrase without numbers and names.
_REASON: Final = re.compile(r"([a-z][a-z ,'-]{0,63})(?::|$)")

Kind = Literal["counter", "gauge", "histogram"]
Snapshot = Mapping[str, Any]
Value = tuple[tuple[str, ...], Any]  # the values of the labels, and the number; None is left out


@dataclass(frozen=True, slots=True)
class EventMetric:
    """A metric of one kind of event.

    labels: names of the event's fields. value: the field that is added, set or observed; "" counts the events.
    """

    name: str
    event: type[Event]
    help: str
    labels: tuple[str, ...] = ()
    value: str = ""
    kind: Kind = "counter"


@dataclass(frozen=True, slots=True)
class SnapshotMetric:
    """A metric that `read` finds in a snapshot: the status, or a daemon's report."""

    name: str
    help: str
    read: Callable[[Snapshot], Iterable[Value]]
    labels: tuple[str, ...] = ()
    kind: Kind = "gauge"


EVENT_METRICS: Final = (
    EventMetric(
        "agora_microbatches_started_total",
        events.MicrobatchStarted,
        "Microbatches that this peer started as an origin.",
        ("purpose",),
    ),
    EventMetric(
        "agora_microbatches_completed_total",
        events.MicrobatchCompleted,
        "Microbatches that this peer started and that were answered.",
        ("purpose",),
    ),
    EventMetric(
        "agora_microbatches_dropped_total",
        events.MicrobatchDropped,
        "Microbatches that this peer started and gave up.",
        ("purpose", "reason"),
    ),
    EventMetric(
        "agora_microbatch_seconds",
        events.MicrobatchCompleted,
        "Time from a microbatch's start to its answer.",
        ("purpose",),
        "seconds",
        "histogram",
    ),
    EventMetric(
        "agora_microbatches_rerouted_total",
        events.MicrobatchRerouted,
        "Calls that failed, after which the microbatch was sent again.",
        ("stage", "reason"),
    ),
    EventMetric(
        "agora_microbatches_counted_total",
        events.MicrobatchCounted,
        "Microbatches whose gradient this peer added to its sums.",
    ),
    EventMetric(
        "agora_tokens_counted_total",
        events.MicrobatchCounted,
        "Tokens of the microbatches that this peer counted.",
        value="tokens",
    ),
    EventMetric(
        "agora_repeats_served_total",
        events.RepeatServed,
        "Microbatches that came again and were not counted again.",
        ("stage",),
    ),
    EventMetric(
        "agora_hops_refused_total",
        events.HopRefused,
        "Microbatches that this peer refused before any work, by the refusal's code.",
        ("stage", "code"),
    ),
    EventMetric(
        "agora_slots", events.SlotsChanged, "Microbatches that this peer takes at a time.", (), "slots", "gauge"
    ),
    EventMetric(
        "agora_heldout_loss_nats",
        events.EvaluationDone,
        "Held-out loss per token of this origin's last evaluation.",
        (),
        "loss",
        "gauge",
    ),
    EventMetric(
        "agora_task_value",
        events.TaskEvaluated,
        "What `swarm evaluate` last measured of a task through this origin, by metric.",
        ("task", "metric"),
        "value",
        "gauge",
    ),
    EventMetric("agora_steps_total", events.StepTaken, "Optimizer steps taken, or followed, here.", ("stage",)),
    EventMetric("agora_step_tokens_total", events.StepTaken, "Own tokens in these steps.", ("stage",), "tokens"),
    EventMetric(
        "agora_step_seconds",
        events.StepTaken,
        "Time between two steps of a stage.",
        ("stage",),
        "seconds",
        "histogram",
    ),
    EventMetric("agora_step", events.StepTaken, "The newest step of a stage held here.", ("stage",), "step", "gauge"),
    EventMetric(
        "agora_step_loss_nats",
        events.StepTaken,
        "Training loss per token of this peer's microbatches in the last step; of the last stage alone.",
        ("stage",),
        "loss",
        "gauge",
    ),
    EventMetric(
        "agora_learning_rate",
        events.StepTaken,
        "Learning rate of the last step.",
        ("stage",),
        "learning_rate",
        "gauge",
    ),
    EventMetric(
        "agora_gradient_norm",
        events.StepTaken,
        "Norm of the last step's gradient.",
        ("stage",),
        "gradient_norm",
        "gauge",
    ),
    EventMetric(
        "agora_gradient_staleness_steps",
        events.StepTaken,
        "Mean age of this peer's gradients in the last step.",
        ("stage",),
        "staleness",
        "gauge",
    ),
    EventMetric(
        "agora_steps_skipped_total",
        events.StepsSkipped,
        "Steps that this peer missed, so that it set its number to that of its replicas.",
        ("stage",),
        "steps",
    ),
    EventMetric(
        "agora_tokens_late_total",
        events.StepsSkipped,
        "Own tokens dropped with the steps that were missed.",
        ("stage",),
        "tokens",
    ),
    EventMetric(
        "agora_gradients_late_total",
        events.GradientLate,
        "Gradients that came after their step, in synchronous runs.",
        ("stage",),
    ),
    EventMetric(
        "agora_gradients_refused_total",
        events.GradientRefused,
        "Microbatches and sums of gradients refused: a value was not finite, or the loss was too large.",
        ("stage",),
    ),
    EventMetric("agora_rounds_total", events.RoundDone, "Averaging rounds that ended here.", ("stage", "what")),
    EventMetric(
        "agora_round_seconds",
        events.RoundDone,
        "Duration of an averaging round.",
        ("what",),
        "seconds",
        "histogram",
    ),
    EventMetric("agora_round_parts_total", events.RoundDone, "Shards of the rounds.", ("stage", "what"), "parts"),
    EventMetric(
        "agora_round_parts_failed_total",
        events.RoundDone,
        "Shards for which no mean could be used.",
        ("stage", "what"),
        "failed_parts",
    ),
    EventMetric(
        "agora_round_members",
        events.RoundDone,
        "Replicas in the last round.",
        ("stage", "what"),
        "members",
        "gauge",
    ),
    EventMetric(
        "agora_round_contributors",
        events.RoundDone,
        "How many of them contributed in time, a mean over the shards.",
        ("stage", "what"),
        "contributors",
        "gauge",
    ),
    EventMetric(
        "agora_round_sent_bytes_total", events.RoundDone, "Bytes sent for rounds.", ("stage", "what"), "bytes_out"
    ),
    EventMetric("agora_checkpoints_total", events.CheckpointWritten, "Checkpoints written.", ("stage",)),
    EventMetric(
        "agora_checkpoint_seconds",
        events.CheckpointWritten,
        "Time to write a checkpoint.",
        (),
        "seconds",
        "histogram",
    ),
    EventMetric("agora_checkpoints_damaged_total", events.CheckpointDamaged, "Checkpoints found damaged."),
    EventMetric("agora_states_fetched_total", events.StateFetched, "States fetched from peers.", ("stage",)),
    EventMetric("agora_state_fetched_bytes_total", events.StateFetched, "Bytes of these states.", ("stage",), "bytes"),
    EventMetric("agora_state_fetch_seconds", events.StateFetched, "Time to fetch a state.", (), "seconds", "histogram"),
    EventMetric(
        "agora_stages_behind_total",
        events.StageFellBehind,
        "Times that a stage fell so far behind that it fetched a state.",
        ("stage",),
    ),
    EventMetric(
        "agora_stages_diverged_total",
        events.StageDiverged,
        "Times that a stage's history lost against its replicas' and it fetched their state.",
        ("stage",),
    ),
    EventMetric("agora_peers_seen_total", events.PeerSeen, "Peers that came or changed their claim.", ("state",)),
    EventMetric("agora_peers_gone_total", events.PeerGone, "Peers that left the view.", ("reason",)),
    EventMetric("agora_moves_total", events.MoveChosen, "Moves that rebalancing chose, whether they succeeded or not."),
    EventMetric("agora_health_changes_total", events.HealthChanged, "Changes of the swarm's health.", ("state",)),
    EventMetric("agora_offences_total", events.OffenceRecorded, "What peers did and honest ones do not.", ("offence",)),
    EventMetric("agora_amendments_total", events.AmendmentTaken, "Amendments that came to count."),
    EventMetric(
        "agora_amendments_refused_total",
        events.AmendmentRefused,
        "Amendments that were false or not allowed.",
        (),
        "count",
    ),
    EventMetric("agora_bans_total", events.PeerBanned, "Peers banned for good."),
    EventMetric(
        "agora_directory_failures_total",
        events.DirectoryTrouble,
        "Reads and writes of the DHT that failed.",
        ("what", "reason"),
    ),
    EventMetric("agora_tasks_failed_total", events.TaskFailed, "Tasks of the daemon that failed."),
    EventMetric("agora_disk_failures_total", events.DiskTrouble, "Files that could not be written."),
)


def _field(name: str) -> Callable[[Snapshot], Iterable[Value]]:
    return lambda snapshot: [((), _number(snapshot.get(name)))]


def _bytes(kind: str) -> Callable[[Snapshot], Iterable[Value]]:
    return lambda report: [((), _number(report["bytes"].get(kind)))]


def _by_stage(name: str) -> Callable[[Snapshot], Iterable[Value]]:
    return lambda status: [((str(row["stage"])[:64],), _number(row.get(name))) for row in status["stages"]]


def _counted(name: str) -> Callable[[Snapshot], Iterable[Value]]:
    def read(status: Snapshot) -> Iterable[Value]:
        counts: defaultdict[str, int] = defaultdict(int)
        for peer in status["peers"]:
            counts[str(peer[name])[:64]] += 1
        return [((value,), count) for value, count in sorted(counts.items())]

    return read


def _by_key(name: str, inner: str = "") -> Callable[[Snapshot], Iterable[Value]]:
    def read(snapshot: Snapshot) -> Iterable[Value]:
        found = snapshot.get(name)
        pairs = found.items() if isinstance(found, dict) else ()  # a peer may have sent anything
        return [((str(key)[:64],), _number(value[inner] if inner else value)) for key, value in pairs]

    return read


def _task_values(status: Snapshot) -> Iterable[Value]:
    found = status.get("evaluations")
    newest: dict[str, Any] = {}
    for each in found if isinstance(found, list) else ():  # a peer may have sent anything
        task = str(each["task"])[:64]
        if task not in newest or (each["step"], each["unix"]) > (newest[task]["step"], newest[task]["unix"]):
            newest[task] = each
    return [
        ((task, str(metric)[:64]), _number(value))
        for task, each in sorted(newest.items())
        for metric, value in each["values"].items()
    ]


def _health(status: Snapshot) -> Iterable[Value]:
    return [((state,), int(status["health"]["state"] == state)) for state in STATES]


def _held_stages(report: Snapshot) -> Iterable[Value]:
    first, last = report.get("span", (0, -1))
    return [((), last - first + 1)]


STATUS_METRICS: Final = (
    SnapshotMetric("agora_run_step", "Optimizer steps of stage 0.", _field("step")),
    SnapshotMetric("agora_run_loss_nats", "Training loss per token, as the peers report it.", _field("loss")),
    SnapshotMetric("agora_run_tokens_per_second", "Tokens/s of the slowest stage.", _field("tokens_per_second")),
    SnapshotMetric("agora_run_health", "1 for the swarm's present health, 0 for the others.", _health, ("state",)),
    SnapshotMetric("agora_run_peers", "Live peers in the view, by state.", _counted("state"), ("state",)),
    SnapshotMetric("agora_run_peer_paths", "Live peers in the view, by path.", _counted("path"), ("path",)),
    SnapshotMetric(
        "agora_run_objective", "The objective's own measures, such as token_accuracy.", _by_key("tuning"), ("name",)
    ),
    SnapshotMetric(
        "agora_run_task_value",
        "What a member has last measured of a task, and signed, by metric.",
        _task_values,
        ("task", "metric"),
    ),
    SnapshotMetric("agora_stage_replicas", "Peers that serve a stage.", _by_stage("replicas"), ("stage",)),
    SnapshotMetric("agora_stage_step", "Optimizer steps of a stage.", _by_stage("step"), ("stage",)),
    SnapshotMetric("agora_stage_tokens_per_second", "Tokens/s of a stage.", _by_stage("tokens_per_second"), ("stage",)),
    SnapshotMetric(
        "agora_stage_step_tokens",
        "Tokens that went into a step, in the mean.",
        _by_stage("tokens_per_step"),
        ("stage",),
    ),
    SnapshotMetric(
        "agora_stage_counted_ratio", "Computed tokens that went into a step.", _by_stage("share_counted"), ("stage",)
    ),
    SnapshotMetric(
        "agora_stage_staleness_steps", "Mean age of a stage's gradients.", _by_stage("staleness"), ("stage",)
    ),
)

REPORT_METRICS: Final = (
    SnapshotMetric("agora_paused", "1 while this daemon is paused.", _field("paused")),
    SnapshotMetric("agora_held_stages", "Stages that this peer holds.", _held_stages),
    SnapshotMetric("agora_device_busy_ratio", "Part of its time that the device computes.", _field("busy_fraction")),
    SnapshotMetric("agora_microbatches_in_progress", "Microbatches in work here now.", _field("in_progress")),
    SnapshotMetric("agora_tokens_per_second", "Tokens counted here, over 15 s.", _field("tokens_per_second")),
    SnapshotMetric("agora_origin_loss_nats", "Training loss per token of this origin.", _field("loss")),
    SnapshotMetric(
        "agora_stage_behind_steps", "Steps that a stage is behind its replicas.", _by_key("behind"), ("stage",)
    ),
    SnapshotMetric(
        "agora_tokens_waiting", "Tokens that wait for a step.", _by_key("accounts", "tokens_waiting"), ("stage",)
    ),
    SnapshotMetric(
        "agora_tokens_lost", "Tokens that went into no step.", _by_key("accounts", "tokens_lost"), ("stage",)
    ),
    SnapshotMetric("agora_sent_bytes_total", "All bytes sent on streams.", _bytes("sent"), (), "counter"),
    SnapshotMetric("agora_received_bytes_total", "All bytes received on streams.", _bytes("received"), (), "counter"),
    SnapshotMetric("agora_boundary_sent_bytes_total", "Bytes of boundaries sent.", _bytes("boundary"), (), "counter"),
    SnapshotMetric("agora_averaging_sent_bytes_total", "Bytes of averaging sent.", _bytes("averaging"), (), "counter"),
    SnapshotMetric("agora_state_sent_bytes_total", "Bytes of states sent.", _bytes("state"), (), "counter"),
)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class EventMetrics:
    """A reporter's sink that counts events in the instruments of `registry`; see EVENT_METRICS."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # a useless series for each counter
        self.registry = CollectorRegistry()
        self._instruments: defaultdict[type[Event], list[_Instrument]] = defaultdict(list)
        for metric in EVENT_METRICS:
            self._instruments[metric.event].append(_Instrument(metric, self.registry))

    def take(self, event: Event, at_unix: float) -> None:
        for instrument in self._instruments.get(type(event), ()):
            instrument.take(event)


class _Instrument:
    def __init__(self, metric: EventMetric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._series: set[tuple[str, ...]] = set()
        name, text, labels = metric.name, metric.help, metric.labels
        self._gauge = prometheus_client.Gauge(name, text, labels, registry=registry) if metric.kind == "gauge" else None
        self._histogram: prometheus_client.Histogram | None = None
        self._counter: prometheus_client.Counter | None = None
        if self._gauge is not None and not labels:
            self._gauge.set(math.nan)  # not 0, which would be a value
        if metric.kind == "histogram":
            self._histogram = prometheus_client.Histogram(name, text, labels, registry=registry, buckets=_SECONDS)
        if metric.kind == "counter":
            self._counter = prometheus_client.Counter(name, text, labels, registry=registry)

    def take(self, event: Event) -> None:
        value = _number(getattr(event, self._metric.value)) if self._metric.value else 1.0
        if value is None:
            return
        labels = self._bounded(tuple(_label(name, getattr(event, name)) for name in self._metric.labels))
        if self._gauge is not None:
            (self._gauge.labels(*labels) if labels else self._gauge).set(value)
        if self._histogram is not None:
            (self._histogram.labels(*labels) if labels else self._histogram).observe(value)
        if self._counter is not None:
            (self._counter.labels(*labels) if labels else self._counter).inc(max(0.0, value))

    def _bounded(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels not in self._series and len(self._series) >= MAX_SERIES:
            return (OTHER,) * len(labels)
        self._series.add(labels)
        return labels


def _label(name: str, value: object) -> str:
    if name != "reason":
        return str(value)[:64]
    code = _REASON.match(str(value))
    return code[1] if code is not None else OTHER


class SnapshotCollector(Collector):
    """Gives a registry the metrics of a snapshot, which is taken anew for each collection."""

    def __init__(self, metrics: Iterable[SnapshotMetric], take_snapshot: Callable[[], Snapshot]) -> None:
        self._metrics = tuple(metrics)
        self._take_snapshot = take_snapshot

    def describe(self) -> Iterable[Metric]:
        return [_family(metric) for metric in self._metrics]

    def collect(self) -> Iterator[Metric]:
        snapshot = self._take_snapshot()
        for metric in self._metrics:
            family = _family(metric)
            known = (found for found in metric.read(snapshot) if found[1] is not None)
            for labels, value in islice(known, MAX_SERIES):
                family.add_metric(labels, value)
            yield family


def _family(metric: SnapshotMetric) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return kind(metric.name, metric.help, labels=metric.labels)


# --- rows: what trackers get, and what metrics.jsonl keeps


@dataclass(frozen=True, slots=True)
class Row:
    """The values of all metrics at one moment, by tag: the name without "agora_" and "_total", then "/LABEL_VALUE"s.

    step: the run's, of stage 0.
    """

    unix: float
    run: str
    step: int
    metrics: Mapping[str, float]

    def to_line(self) -> bytes:
        return (json.dumps(asdict(self), separators=(",", ":"), allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row | None:
        """None for what is no row."""
        match fields:
            case {"unix": int() | float() as unix, "run": str(run), "step": int(step), "metrics": dict(metrics)}:
                numbers = {str(tag): number for tag, value in metrics.items() if (number := _number(value)) is not None}
                return cls(float(unix), run, step, numbers)
        return None


def make_row(registry: CollectorRegistry, run: str, step: int, unix: float) -> Row:
    """Returns the present values, without the buckets of histograms."""
    metrics = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.startswith("agora_") and not sample.name.endswith("_bucket") and math.isfinite(sample.value):
                metrics[_tag(sample.name, sample.labels)] = round(sample.value, 6)
    return Row(round(unix, 3), run, step, metrics)


def _tag(name: str, labels: Mapping[str, str]) -> str:
    plain = name.removeprefix("agora_").removesuffix("_total")
    return "/".join([plain, *(re.sub(r"[^A-Za-z0-9_.-]", "_", f"{key}_{value}") for key, value in labels.items())])


def is_row_due(age_s: float, since_s: float, *, has_stepped: bool) -> bool:
    """Returns whether a row is to be made: every second at first, every ROW_INTERVAL_S in the end; seldom without a
    step.

    age_s: for how long rows have been made. since_s: since the last one.
    """
    interval_s = min(ROW_INTERVAL_S, max(1.0, age_s / 100.0))
    return since_s >= (interval_s if has_stepped else max(interval_s, QUIET_ROW_INTERVAL_S))
