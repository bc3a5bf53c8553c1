"""A daemon's metrics: everything that Prometheus gets, and its rows over time in DIR/metrics.jsonl."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import prometheus_client

from agora.core.clock import loop_time
from agora.core.tasks import BackgroundTasks
from agora.node.control.node_report import NodeReport, report_json, status_json
from agora.node.daemon_context import DaemonContext
from agora.observe import events
from agora.observe.journal import LineFile
from agora.observe.metrics import (
    FILE_NAME,
    MAX_FILE_BYTES,
    REPORT_METRICS,
    STATUS_METRICS,
    EventMetrics,
    SnapshotCollector,
    is_row_due,
    make_row,
)

POLL_INTERVAL_S = 1.0  # seconds between two looks whether a row is due


class DaemonMetrics:
    """All metrics of a daemon, in `registry`; `run` writes their rows."""

    def __init__(
        self,
        counted: EventMetrics,
        directory: Path,
        sample_node_report: Callable[[], NodeReport],
        report_event: events.Report,
    ) -> None:
        """counted: the metrics that events count; all others are added to its registry. directory: of the file."""
        self.registry = counted.registry
        self._path = directory / FILE_NAME
        self._sample_node_report = sample_node_report
        self._report_event = report_event
        self.registry.register(SnapshotCollector(STATUS_METRICS, lambda: status_json(sample_node_report())))
        self.registry.register(SnapshotCollector(REPORT_METRICS, lambda: report_json(sample_node_report())))
        prometheus_client.ProcessCollector(registry=self.registry)

    async def run(self) -> None:
        """Writes a row whenever one is due, until cancelled. A full disk is reported once; then none is written."""
        began = written_at = loop_time()
        step = -1
        try:
            file = LineFile(self._path, MAX_FILE_BYTES)
            while True:
                await asyncio.sleep(POLL_INTERVAL_S)
                now = loop_time()
                if not is_row_due(now - began, now - written_at, has_stepped=True):
                    continue
                report = self._sample_node_report()
                reached = status_json(report)["step"]
                if report.run.stage_count and is_row_due(now - began, now - written_at, has_stepped=reached != step):
                    step, written_at = reached, now
                    file.append(make_row(self.registry, report.run.run_id, step, report.now_unix).to_line())
        except OSError as error:
            self._report_event(events.DiskTrouble(str(self._path), error.strerror or str(error)))
            await asyncio.Event().wait()  # the daemon goes on without rows, and would end with this task


def serve_metrics(context: DaemonContext, metrics: DaemonMetrics, tasks: BackgroundTasks) -> None:
    """Serves the metrics to Prometheus at the address of `--metrics`, in one of `tasks`.

    Raises LocalError if that address is taken.
    """
    if address := context.settings.metrics_address:
        from agora.page.server import HttpServer, listen, metrics_app

        with context.phases.enter("metrics") as note:
            listening = listen(address, "choose another address with --metrics")
            server = HttpServer(metrics_app(metrics.registry), listening)
            note.text = f"{server.url}/metrics"
        tasks.start("metrics server", server.run())
