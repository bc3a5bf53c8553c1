"""The dashboard, the alerts and the page on metrics name what daemons show, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.metric_names import all_names

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "metrics"
PAGE = ROOT / "docs" / "use" / "metrics.md"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = (DEPLOY / "alerts.yml").read_text(encoding="utf-8")


def shown_names() -> set[str]:
    """The names of all series, as Prometheus has them."""
    names = set()
    for name, (kind, _, _) in all_names().items():
        names |= {f"{name}_{end}" for end in ("sum", "count", "bucket")} if kind == "histogram" else {name}
    return names


def table() -> str:
    """The page's table of all metrics."""
    lines = ["| name | kind | labels | |", "|---|---|---|---|"]
    for name, (kind, labels, text) in sorted(all_names().items()):
        named = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {kind} | {named} | {text.rstrip('.')} |")
    return "\n".join(lines)


def test_every_name_in_the_dashboard_and_the_alerts_exists() -> None:
    used = set(re.findall(r"agora_[a-z0-9_]+", " ".join((*EXPRESSIONS, ALERTS))))
    assert used and not used - shown_names()
    queried = " ".join(variable["query"] for variable in DASHBOARD["templating"]["list"])
    assert set(re.findall(r"agora_[a-z0-9_]+", queried)) <= shown_names()


def test_every_label_that_the_dashboard_shows_is_one_of_its_metric() -> None:
    labels = {name: set(labels) for name, (_, labels, _) in all_names().items()}
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            named = re.findall(r"agora_[a-z0-9_]+", target["expr"])
            bases = [re.sub(r"_(sum|count|bucket)$", "", name) for name in named]
            known = set().union(*(labels.get(name, set()) for name in bases), {"instance", "job", "le"})
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            shown |= {label.strip() for group in grouped for label in group.split(",")}
            assert shown <= known, panel["title"]


def test_the_page_lists_every_metric() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert table() in text, f"put this table into {PAGE.name}:\n{table()}"
    alerts = set(re.findall(r"alert: (\w+)", ALERTS))
    assert alerts and not [name for name in alerts if f"`{name}`" not in text]


@pytest.fixture
def promtool(tmp_path: Path) -> Callable[..., None]:
    """Runs promtool in a folder that has the files of deploy/metrics, and asserts that it finds nothing."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: apt install prometheus")
    shutil.copytree(DEPLOY, tmp_path, dirs_exist_ok=True)

    def run(*arguments: str) -> None:
        done = subprocess.run(
            [found, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def test_promtool_accepts_the_alerts_and_the_configuration(promtool: Callable[..., None]) -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


def test_the_alerts_fire_when_they_should(promtool: Callable[..., None], tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path)
    promtool("test", "rules", "alerts_test.yml")


def test_prometheus_parses_every_query_of_the_dashboard(promtool: Callable[..., None], tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(EXPRESSIONS)]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    promtool("check", "rules", "panels.yml")
