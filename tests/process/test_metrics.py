"""A real daemon's metrics: every name is there, Prometheus reads them, trackers get each row once, Host is checked."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agora.observe import metrics
from agora.observe.journal import JournalTail
from tests.metric_names import all_names
from tests.process.harness import WAIT_S, Daemon, Swarm, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def url_of(made: Swarm, daemon: Daemon) -> str:
    """Where the daemon says that its metrics are."""
    made.until(lambda: daemon.events("StartStep", name="metrics"), "the metrics' address")
    return str(daemon.events("StartStep", name="metrics")[0]["note"])


def scraped(url: str) -> dict[str, float]:
    """The sum of each metric's samples, by name."""
    text = urllib.request.urlopen(url, timeout=WAIT_S).read().decode()
    families = list(text_string_to_metric_families(text))
    sums: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums | {f"# {family.name}": 0.0 for family in families}


def test_a_daemon_shows_every_metric_and_trackers_get_its_rows_once(tmp_path: Path) -> None:
    """Two stages in one daemon; the tracker is TensorBoard's own package, run as a user runs it."""
    with swarm(tmp_path, tiny(2)) as made:
        daemon = made.start("only", "0-1", flags=["--metrics", "127.0.0.1:0"])
        url = url_of(made, daemon)
        made.serving()
        made.until(lambda: scraped(url).get("agora_run_step", 0.0) >= 2.0, "two steps to be shown")
        every_documented_name_is_there(url)
        only_this_machine_s_names_are_answered(url)
        the_figures_are_the_status_s(made, daemon, url)
        promtool_accepts(url)
        rows_are_sent_once(made, daemon, tmp_path)
        prometheus_reads_them(made, url, tmp_path)
        assert made.stop() == {"only": 0}


def every_documented_name_is_there(url: str) -> None:
    found = scraped(url)
    missing = [name for name in all_names() if f"# {name.removesuffix('_total')}" not in found]
    assert not missing
    moved = ("microbatches_started_total", "microbatches_counted_total", "tokens_counted_total", "steps_total")
    moved += ("step_seconds_count", "run_step", "run_tokens_per_second", "stage_replicas", "held_stages")
    moved += ("device_busy_ratio", "run_loss_nats", "learning_rate", "gradient_norm", "run_peers")
    assert not [name for name in moved if not found[f"agora_{name}"] > 0]
    assert found["agora_run_health"] == 1, "one state at a time"


def only_this_machine_s_names_are_answered(url: str) -> None:
    address = url.removeprefix("http://").removesuffix("/metrics")
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    connection.request("GET", "/metrics", headers={"Host": "rebound.example"})
    assert connection.getresponse().status == 421
    connection.close()


def the_figures_are_the_status_s(made: Swarm, daemon: Daemon, url: str) -> None:
    def agree() -> bool:
        before, shown, after = daemon.ask("status"), scraped(url), daemon.ask("status")
        return bool(before["step"] == shown["agora_run_step"] == after["step"]) and all(
            shown["agora_stage_step"] == sum(stage["step"] for stage in status["stages"]) for status in (before, after)
        )

    made.until(agree, "status and metrics to be of one moment")


def promtool_accepts(url: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        print("not checked by promtool: the package `prometheus` is not installed")
        return
    text = urllib.request.urlopen(url, timeout=WAIT_S).read()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def prometheus_reads_them(made: Swarm, url: str, directory: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        print("not scraped by Prometheus: its package is not installed")
        return
    config = directory / "prometheus.yml"
    target = url.removeprefix("http://").removesuffix("/metrics")
    scrape = f"[{{job_name: agora, scrape_interval: 1s, static_configs: [{{targets: ['{target}']}}]}}]"
    config.write_text(f"scrape_configs: {scrape}\n")
    port = 20_000 + os.getpid() % 20_000
    command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    server = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def is_scraped() -> bool:
        try:
            query = f"http://127.0.0.1:{port}/api/v1/query?query=agora_run_step"
            found = json.load(urllib.request.urlopen(query, timeout=5))["data"]["result"]
        except OSError:
            return False
        return bool(found) and float(found[0]["value"][1]) >= 2.0

    try:
        made.until(is_scraped, "Prometheus to have the steps")
    finally:
        server.terminate()
        server.wait(60)


def rows_of(daemon: Daemon) -> list[metrics.Row]:
    """The rows in the daemon's file."""
    found = map(metrics.Row.from_json, JournalTail(daemon.root, metrics.FILE_NAME).read_new())
    return [row for row in found if row is not None]


def rows_are_sent_once(made: Swarm, daemon: Daemon, directory: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    folder = directory / "tb"

    def track() -> dict[int, float]:
        """Sends what is there; returns the run's step by step, as TensorBoard reads it."""
        arguments = ["track", made.invite, "--to", f"tensorboard:{folder}", "--once", "--dir", str(directory / "home")]
        command = [sys.executable, "-m", "agora.cli.main_swarm", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stderr
        (run,) = folder.iterdir()
        read = EventAccumulator(str(run), size_guidance={"tensors": 0})
        read.Reload()
        found = [(one.step, float(make_ndarray(one.tensor_proto))) for one in read.Tensors("run_step")]
        assert len(found) == len(dict(found)), "each row once"
        return dict(found)

    made.until(lambda: len(rows_of(daemon)) >= 3, "three rows")
    first = track()
    known = len(rows_of(daemon))
    made.until(lambda: len(rows_of(daemon)) >= known + 2, "two more rows, while nothing is tracked")
    second = track()
    assert set(first) < set(second) and all(value == step for step, value in second.items())
    sent = {row.step for row in rows_of(daemon)}
    assert {step for step in sent if step <= max(second)} == set(second), "the gap is filled"
