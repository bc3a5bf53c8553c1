"""The page of a real swarm: a daemon's own, and one that a machine serves that has no daemon; both say what is so."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.page.chromium import PROGRAM, chromium
from tests.process.harness import WAIT_S, Daemon, Swarm, drained, fired, last_step, swarm, swarm_command, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def fetched(url: str) -> Any:
    return json.load(urllib.request.urlopen(url, timeout=WAIT_S))


@contextmanager
def open_page(url: str) -> Iterator[http.client.HTTPResponse]:
    """The updates of a page that stays open."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=WAIT_S)
    connection.request("GET", "/updates")
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def next_update(page: http.client.HTTPResponse) -> dict[str, Any]:
    while not (line := page.readline()).startswith(b"data: "):
        assert line, "the page's server has ended"
    return dict(json.loads(line.removeprefix(b"data: ")))


def first_update(url: str) -> dict[str, Any]:
    with open_page(url) as page:
        return next_update(page)


def test_a_daemon_and_a_machine_without_one_show_the_same_run(tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    (root / "agora.toml").write_text('page_address = "127.0.0.1:0"\n')
    with swarm(tmp_path, tiny(2)) as made:
        daemon = made.start("a", "0", flags=["--page"])
        made.start("b", "1")
        made.serving()
        url = str(daemon.events("StartStep", name="page")[0]["note"])
        made.until(lambda: fetched(f"{url}/status.json")["step"] >= 3, "three steps on the page")
        the_status_is_the_command_s(made, daemon, url)
        the_history_is_the_journal_s(made, daemon, url)
        a_machine_without_a_daemon_shows_it_too(made, url, tmp_path)
        a_browser_shows_it(made, daemon, url, tmp_path)
        the_model_writes(made, url)
        with open_page(url):
            assert made.stop() == {"a": 0, "b": 0}, "an open page keeps nobody from leaving"


def test_a_page_that_fails_costs_the_run_nothing(tmp_path: Path) -> None:
    root = tmp_path / "a"
    root.mkdir()
    (root / "agora.toml").write_text('page_address = "127.0.0.1:0"\n')
    with swarm(tmp_path, tiny(1)) as made:
        daemon = made.start("a", "0", flags=["--page"], faults="page.look:fail:2")
        made.serving()
        url = str(daemon.events("StartStep", name="page")[0]["note"])
        with open_page(url) as page:
            next_update(page)
            made.until(lambda: daemon.events("TaskFailed"), "the page's feed to fail")
        assert [event["task"] for event in daemon.events("TaskFailed")] == ["page"] and len(fired(daemon)) == 1
        reached = last_step(daemon)
        made.until(lambda: last_step(daemon) >= reached + 3, "the run to go on")
        assert fetched(f"{url}/status.json")["step"] >= reached
        assert made.stop() == {"a": 0}


def the_status_is_the_command_s(made: Swarm, daemon: Daemon, url: str) -> None:
    """The same moment's: of numbers that change all the time the page's lie between those before and after."""

    def agree() -> bool:
        before, on_page, after = daemon.ask("status"), fetched(f"{url}/status.json"), daemon.ask("status")
        assert before.keys() == on_page.keys() and on_page["run_id"] == before["run_id"]
        names = [[(peer["peer"], peer["span"], peer["state"]) for peer in told["peers"]] for told in (before, on_page)]
        assert names[0] == names[1]
        assert before["step"] <= after["step"]
        return bool(before["step"] == on_page["step"] == after["step"])

    made.until(agree, "page and status to be of one moment")


def the_history_is_the_journal_s(made: Swarm, daemon: Daemon, url: str) -> None:
    made.until(lambda: len(first_update(url)["points"]) > 3, "points over time")
    update = first_update(url)
    assert [point[0] for point in update["points"]] == sorted(point[0] for point in update["points"])
    assert update["join"]["mode"] == "open" and update["join"]["invite"].startswith("agora://")
    seen = {sentence for _, name, sentence in update["happenings"] if name == "PeerSeen"}
    assert len(daemon.events("PeerSeen")) >= len(seen) >= 1
    made.until(lambda: first_update(url)["work"].get("microbatches_started", 0) > 0, "the origin's microbatches")


def a_machine_without_a_daemon_shows_it_too(made: Swarm, url: str, directory: Path) -> None:
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    command = [sys.executable, "-m", "agora.cli.main_swarm", "page", made.invite, "--port", "0"]
    environment = os.environ | {"AGORA_RUNTIME_DIR": str(elsewhere), "AGORA_HOME": str(directory / "home")}
    served = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert served.stderr is not None
        line = served.stderr.readline()
        place = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert place is not None, line
        update = first_update(place[0])
        assert {peer["peer"] for peer in update["status"]["peers"]} == {daemon.peer for daemon in made.daemons.values()}
        assert "ticket" in update["join"]["note"], "the mode is not known here"
        code, printed = swarm_command(elsewhere, "status", made.invite, "--dir", str(directory / "home"))
        told = fetched(f"{place[0]}/status.json")
        assert code == 3 and printed["health"]["state"] == told["health"]["state"] == "DEGRADED"
        assert printed.keys() == told.keys() and len(printed["peers"]) == len(told["peers"]) == 2
        first_update(place[0])
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0
    finally:
        served.kill()


def a_browser_shows_it(made: Swarm, daemon: Daemon, url: str, directory: Path) -> None:
    """While the origin opens nothing new, so that page and status are of one moment."""
    if PROGRAM is None or os.environ.get("CI"):
        print("not shown in a browser: Chromium is not installed, or this is CI")
        return
    with chromium(directory / "profile") as browser:
        browser.open(url)
        browser.until("document.querySelector('#tiles dd')")
        drained(made, daemon)
        cells = (
            "[...document.querySelectorAll('#peers tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )

        def agrees() -> bool:
            told = daemon.ask("status")
            rows = [[row[0], row[1], row[2], row[3], row[8]] for row in browser.evaluate(cells)]
            tiles = browser.evaluate(
                "[...document.querySelectorAll('#tiles dd')].map((one) => one.firstChild.textContent)"
            )
            assert [peer["path"] for peer in told["peers"]].count("self") == 1
            return rows == [
                [
                    f"{peer['name']} …{peer['peer'][-6:]}{' (this machine)' if peer['path'] == 'self' else ''}",
                    "-".join(map(str, dict.fromkeys(peer["span"]))),
                    peer["state"],
                    f"{peer['step']:,}",
                    peer["path"],
                ]
                for peer in told["peers"]
            ] and tiles[:2] == [f"{told['step']:,}", f"{told['loss']:.3f}"]

        made.until(agrees, "the browser to show what the status says")
        daemon.ask("refill")
        line = browser.evaluate("document.querySelector('main').innerText.split('\\n')[0]")
        assert line.startswith("DEGRADED stage 0 has a single peer")
        assert not browser.complaints


def the_model_writes(made: Swarm, url: str) -> None:
    with open_page(url) as page:

        def text() -> str:
            told = next_update(page)["text"]
            assert not told["why"], told
            return str(told["text"])

        assert made.until(text, "the model's text")
