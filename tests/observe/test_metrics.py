"""Claims about metrics: which events they count, bounded labels, names as Prometheus wants them, rows for trackers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agora.observe import events, metrics
from agora.observe.metrics import (
    EVENT_METRICS,
    MAX_SERIES,
    REPORT_METRICS,
    STATUS_METRICS,
    EventMetrics,
    Row,
    SnapshotCollector,
)
from agora.observe.reporter import Reporter
from tests.metric_names import all_names

STATUS = {
    "schema": 1,
    "run_id": "ab" * 32,
    "name": "poems",
    "step": 7,
    "loss": 2.5,
    "tokens_per_second": 9870.0,
    "health": {"state": "DEGRADED", "why": "because", "do": "this"},
    "stages": [
        {"stage": 0, "replicas": 3, "step": 7, "tokens_per_second": 10.0, "staleness": 0.5, "share_counted": None},
        {"stage": 1, "replicas": 1, "step": 6, "tokens_per_second": 9.0},
    ],
    "peers": [{"state": "training", "path": "direct"}, {"state": "training", "path": "relayed"}],
    "tuning": {"token_accuracy": 0.5},
}
REPORT = {
    "paused": False,
    "span": [0, 1],
    "busy_fraction": 0.75,
    "in_progress": 3,
    "tokens_per_second": 12.5,
    "loss": None,
    "behind": {"0": 2},
    "accounts": {"0": {"tokens_waiting": 5, "tokens_lost": 6}},
    "bytes": {"boundary": 1, "sent": 20, "received": 30, "averaging": 4, "state": 5},
}


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Every sample as Prometheus would read it, by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def after(*reported: events.Event) -> dict[str, float]:
    """The samples after a reporter was told of these events."""
    sink = EventMetrics()
    reporter = Reporter([sink])
    for event in reported:
        reporter.report(event)
    return samples(sink.registry)


def test_every_metric_of_an_event_reads_fields_that_the_event_has() -> None:
    for metric in EVENT_METRICS:
        fields = {field.name for field in dataclasses.fields(metric.event)}
        assert set(metric.labels) <= fields, metric.name
        assert metric.value in fields | {""}, metric.name


def test_names_follow_prometheus() -> None:
    named = all_names()
    assert len(named) == len(EVENT_METRICS) + len(STATUS_METRICS) + len(REPORT_METRICS), "one name, one metric"
    for name, (kind, labels, text) in named.items():
        assert name.startswith("agora_") and name == name.lower()
        assert name.endswith("_total") == (kind == "counter"), name
        assert kind != "histogram" or name.endswith("_seconds"), name
        assert not {"peer", "microbatch", "le"} & set(labels), "a label takes few values"
        assert text.endswith("."), name


def test_events_are_counted_by_their_labels_and_their_fields_are_added_set_and_observed() -> None:
    found = after(
        events.MicrobatchStarted("m"),
        events.MicrobatchStarted("n", "evaluate"),
        events.MicrobatchCompleted("m", 3.0, 64, 0.5),
        events.MicrobatchCounted("m", (0, 1), 64),
        events.MicrobatchCounted("o", (0, 1), 32),
        events.StepTaken(0, 4, 96, 2.5, 1.5, 0.01, 0.75, 0.25),
        events.StepTaken(0, 5, 96, None, 1.5, 0.02, None, 0.5),
        events.RoundDone(0, "gradient", 1, 4, 1, 1.5, 2, 96.0, 0.0, 0.3, 1000),
    )
    assert found["agora_microbatches_started_total{purpose=train}"] == 1
    assert found["agora_microbatches_started_total{purpose=evaluate}"] == 1
    assert found["agora_microbatch_seconds_sum{purpose=train}"] == 0.5
    assert found["agora_tokens_counted_total"] == 96
    assert found["agora_steps_total{stage=0}"] == 2 and found["agora_step{stage=0}"] == 5
    assert found["agora_step_loss_nats{stage=0}"] == 2.5, "a step without a loss leaves the last one"
    assert found["agora_learning_rate{stage=0}"] == 0.02
    assert found["agora_gradient_norm{stage=0}"] == 0.75
    assert found["agora_round_parts_failed_total{stage=0,what=gradient}"] == 1
    assert not any("_created" in name for name in found)


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("busy: peer 12D3KooW has no slot for 3 s", "busy"),
        ("its connection broke, and it cannot be dialled", "its connection broke, and it cannot be dialled"),
        ("12D3KooWExample: no answer in time", "other"),
        ("stage 7 is empty", "other"),
        ("", "other"),
        ("\n\x1b[2J", "other"),
    ],
)
def test_a_reason_is_a_code_or_a_phrase_without_names_and_numbers(reason: str, label: str) -> None:
    found = after(events.MicrobatchRerouted("m", 1, "p", reason))
    assert found[f"agora_microbatches_rerouted_total{{reason={label},stage=1}}"] == 1


def test_a_metric_has_a_bounded_number_of_series() -> None:
    found = after(*(events.HopRefused("m", stage, "busy") for stage in range(10 * MAX_SERIES)))
    series = {name: value for name, value in found.items() if name.startswith("agora_hops_refused_total")}
    assert len(series) == MAX_SERIES + 1
    assert series["agora_hops_refused_total{code=other,stage=other}"] == 9 * MAX_SERIES
    status = STATUS | {"stages": [{"stage": stage, "replicas": 1} for stage in range(10 * MAX_SERIES)]}
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(STATUS_METRICS, lambda: status))
    assert sum(name.startswith("agora_stage_replicas") for name in samples(registry)) == MAX_SERIES


def test_values_that_are_not_finite_are_left_out() -> None:
    found = after(events.EvaluationDone(math.nan, 3, 1.0), events.StepTaken(0, 1, 8, math.inf, math.nan))
    assert math.isnan(found["agora_heldout_loss_nats"]) and "agora_step_loss_nats{stage=0}" not in found


def test_what_is_measured_of_a_task_is_a_gauge_by_task_and_metric_also_for_trackers() -> None:
    sink = EventMetrics()
    for value in (0.25, 0.5):
        sink.take(events.TaskEvaluated("lm-eval:arc_easy", "acc,none", value, 8, 0, 1.0), 1.0)
    found = samples(sink.registry)
    assert found["agora_task_value{metric=acc,none,task=lm-eval:arc_easy}"] == 0.5
    tags = metrics.make_row(sink.registry, "run", 3, 2.0).metrics
    assert tags["task_value/task_lm-eval_arc_easy/metric_acc_none"] == 0.5


def test_what_members_have_signed_is_a_gauge_of_the_run_the_last_of_each_task() -> None:
    def evaluation(task: str, step: int, value: float) -> dict[str, Any]:
        return {"task": task, "step": step, "unix": 1.0, "values": {"accuracy": value, "by": "nobody"}}

    found = [evaluation("sums", 400, 0.5), evaluation("sums", 300, 0.25), evaluation("repeats", 100, 1.0)]
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(STATUS_METRICS, lambda: STATUS | {"evaluations": found}))
    shown = {name: value for name, value in samples(registry).items() if name.startswith("agora_run_task_value")}
    assert shown == {
        "agora_run_task_value{metric=accuracy,task=repeats}": 1.0,
        "agora_run_task_value{metric=accuracy,task=sums}": 0.5,
    }
    tags = metrics.make_row(registry, "run", 400, 2.0).metrics
    assert tags["run_task_value/task_sums/metric_accuracy"] == 0.5


def both() -> CollectorRegistry:
    """A registry with a status and a report."""
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(STATUS_METRICS, lambda: STATUS))
    registry.register(SnapshotCollector(REPORT_METRICS, lambda: REPORT))
    return registry


def test_status_and_report_are_shown_as_they_are() -> None:
    found = samples(both())
    assert found["agora_run_step"] == 7 and found["agora_run_loss_nats"] == 2.5
    health = {name for name, value in found.items() if name.startswith("agora_run_health") and value}
    assert health == {"agora_run_health{state=DEGRADED}"}
    assert found["agora_stage_replicas{stage=0}"] == 3
    assert found["agora_stage_staleness_steps{stage=0}"] == 0.5
    assert "agora_stage_staleness_steps{stage=1}" not in found and "agora_stage_counted_ratio{stage=0}" not in found
    assert found["agora_run_peers{state=training}"] == 2 and found["agora_run_peer_paths{path=relayed}"] == 1
    assert found["agora_run_objective{name=token_accuracy}"] == 0.5
    assert found["agora_held_stages"] == 2 and found["agora_device_busy_ratio"] == 0.75
    assert found["agora_stage_behind_steps{stage=0}"] == 2 and found["agora_tokens_lost{stage=0}"] == 6
    assert found["agora_sent_bytes_total"] == 20


def test_a_daemon_without_a_span_has_a_report_and_no_stages() -> None:
    bare = {"paused": True, "in_progress": 0, "bytes": REPORT["bytes"]}
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(REPORT_METRICS, lambda: bare))
    found = samples(registry)
    assert found["agora_paused"] == 1 and found["agora_held_stages"] == 0 and "agora_device_busy_ratio" not in found


def test_a_row_has_every_value_but_buckets_under_a_tag_that_trackers_take() -> None:
    sink = EventMetrics()
    sink.take(events.MicrobatchCompleted("m", 3.0, 64, 0.5), 1.0)
    sink.take(events.PeerGone("p", "its connection broke, and it cannot be dialled"), 1.0)
    sink.registry.register(SnapshotCollector(STATUS_METRICS, lambda: STATUS))
    row = metrics.make_row(sink.registry, "ab" * 32, 7, 1000.5)
    assert row.metrics["run_loss_nats"] == 2.5
    assert row.metrics["stage_replicas/stage_0"] == 3
    assert row.metrics["microbatch_seconds_sum/purpose_train"] == 0.5
    assert row.metrics["peers_gone/reason_its_connection_broke__and_it_cannot_be_dialled"] == 1
    assert not any("bucket" in tag for tag in row.metrics)
    assert Row.from_json(json.loads(row.to_line())) == row


@pytest.mark.parametrize("fields", [{}, {"unix": "1"}, {"unix": 1.0, "run": "r", "step": 1, "metrics": []}])
def test_what_is_no_row_is_none(fields: dict[str, object]) -> None:
    assert Row.from_json(fields) is None


def test_rows_are_frequent_at_first_and_bounded_in_a_long_run() -> None:
    def written(seconds: int, stepping_until: int) -> list[int]:
        last, times = 0, []
        for now in range(1, seconds):
            if metrics.is_row_due(float(now), float(now - last), has_stepped=now < stepping_until):
                times.append(now)
                last = now
        return times

    assert len(written(100, 100)) > 90, "a row each second in the first minutes"
    day = written(86_400, 86_400)
    assert len(day) < 3300 and day[-1] - day[-2] == 30
    assert len([now for now in written(10_000, 5000) if now > 5000]) == pytest.approx(5000 / 300, abs=2)
