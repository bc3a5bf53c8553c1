"""Every metric that a daemon documents and shows."""

from __future__ import annotations

from agora.observe.metrics import EVENT_METRICS, REPORT_METRICS, STATUS_METRICS, EventMetric, SnapshotMetric


def all_names() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Kind, labels and description of every metric, by name."""
    every: tuple[EventMetric | SnapshotMetric, ...] = (*STATUS_METRICS, *REPORT_METRICS, *EVENT_METRICS)
    return {metric.name: (metric.kind, metric.labels, metric.help) for metric in every}
