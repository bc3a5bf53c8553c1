"""Claims about the page in a real Chromium: it shows the status, markup stays text, and it is quick with 10,000 peers.

Makes the pictures of docs/use/page.md: AGORA_PICTURES=1 writes them anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.errors import AgoraError, NotAdmitted, ProtocolError
from agora_protocol.limits import PROTOCOL_VERSION
from agora_protocol.refusals import error_of_refusal, refusal_of_error

import agora.net.dht
from agora.cli import status_command
from agora.cli.status_command import lines_of
from agora.node import paths
from agora.page.feed import MAX_PEERS
from agora.swarm.view import View
from tests.page.chromium import MISSING, PROGRAM, Chromium, chromium
from tests.page.made import INVITE, Fixed, good_view, peer, serving, status_of, write_history
from tests.swarm.makers import peer_id, view

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
    pytest.mark.skipif(bool(os.environ.get("CI")), reason="CI starts no browser"),
    pytest.mark.timeout(600),
]

DOCS = Path(__file__).resolve().parents[2] / "docs" / "use" / "page"
AXE = Path(__file__).with_name("axe") / "axe.min.js"
FIRST_LINE = "document.querySelector('main').innerText.split('\\n')[0]"
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script><b>bold</b>'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(browser: Chromium, url: str, *, width: int = 1280, is_dark: bool = False) -> None:
    """Opens the page and waits until it shows a status."""
    browser.open("about:blank")
    browser.complaints.clear()  # of the page before, whose server has ended
    browser.resize(width, 900, is_dark=is_dark)
    browser.open(url)
    browser.until("document.querySelector('#state').textContent !== '…'")


def rows_of(browser: Chromium, body: str) -> list[list[str]]:
    """The texts of a table's cells."""
    cells = f"[...document.querySelectorAll('#{body} tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    return list(browser.evaluate(cells))


def tiles_of(browser: Chromium) -> dict[str, str]:
    boxes = "[...document.querySelectorAll('#tiles div')].map((box) => [box.children[0], box.children[1].children[0]])"
    return dict(browser.evaluate(f"{boxes}.map((pair) => pair.map((node) => node.textContent))"))


def stages_of(browser: Chromium) -> list[list[str]]:
    items = "[...document.querySelectorAll('#stages button')].map((item) => [...item.children])"
    return list(browser.evaluate(f"{items}.map((parts) => parts.map((part) => part.textContent))"))


def picture(browser: Chromium, name: str, tmp_path: Path, *, is_whole: bool) -> None:
    folder = DOCS if os.environ.get("AGORA_PICTURES") else tmp_path
    folder.mkdir(exist_ok=True)
    browser.picture(folder / name, is_whole=is_whole)
    assert (folder / name).stat().st_size > 10_000


# --- what it shows


def shows_the_status(browser: Chromium, status: dict[str, Any]) -> None:
    """Asserts that every figure of the status stands on the page as it is."""
    health = status["health"]
    do = f" Do: {health['do']}." if health["do"] else ""
    assert browser.evaluate(FIRST_LINE) == f"{health['state']} {health['why']}.{do}"
    tiles = tiles_of(browser)
    assert "Result" not in tiles, "there is none yet"
    assert tiles["Step"] == f"{status['step']:,}" and tiles["Peers"] == str(len(status["peers"]))
    assert tiles["Loss"] == (f"{status['loss']:.3f}" if status["loss"] is not None else "-")
    assert tiles["Tokens/s"] == f"{status['tokens_per_second']:,.0f}"
    for row, (title, count, rate, _, why) in zip(status["stages"], stages_of(browser), strict=True):
        replicas = "replica" if row["replicas"] == 1 else "replicas"
        assert title == f"Stage {row['stage']}: {row['health']['state']}"
        assert count == f"{row['replicas']:,} {replicas}, step {row['step']:,}"
        assert rate.removesuffix(", the slowest") == f"{row['tokens_per_second']:,.0f} tokens/s"
        assert row["waits_for"] in why
    shown_peers = rows_of(browser, "peers")
    assert len(shown_peers) == len(status["peers"])
    for known, cells in zip(status["peers"], shown_peers, strict=True):
        asked = "this machine" if "machine" in status else "the peer that was asked"
        mark = f" ({asked})" if known["path"] == "self" else ""
        assert cells[0] == f"{known['name']} …{known['peer'][-6:]}{mark}"
        assert cells[1] == "-".join(map(str, dict.fromkeys(known["span"])))
        assert cells[2:5] == [known["state"], f"{known['step']:,}", f"{known['tokens_per_second']:,.0f}"]
        assert cells[8] == known["path"] and known["note"] in cells[10] and known["waits_for"] in cells[10]


def test_it_shows_what_the_status_says(browser: Chromium, tmp_path: Path) -> None:
    write_history(tmp_path)
    known = view(
        *good_view().without(peer_id("c"), peer_id("d")).peers.values(),
        peer("c", "1", tokens_per_second=400.0, note="NVIDIA L4, 20.1 of 22.5 GiB, MFU 31.0%"),
        peer("d", "1", tokens_per_second=420.0, reachability="relayed"),
    )
    status = status_of(known)
    device = {"name": "NVIDIA A40", "memory_used": 2**34, "memory_total": 48 * 2**30, "mfu": 0.413, "idle_in_jobs": 0.1}
    status["peers"][1]["device"] = device
    status["result"] = {"state": "none", "folder": "", "why": ""}
    status["machine"] = {"when_idle": None, "day": None, "queue": None}
    with serving(Fixed(status, tmp_path)) as url:
        opened(browser, url)
        shows_the_status(browser, json.loads(json.dumps(status)))
        assert [rate.endswith("the slowest") for _, _, rate, _, _ in stages_of(browser)] == [False, True]
        assert rows_of(browser, "peers")[1][6] == "NVIDIA A40, 16.0 of 48.0 GiB, MFU 41.3 %"
        assert rows_of(browser, "rounds") == [["1", "gradient", "183", "1.9 of 2", "1 of 16", "0.41", "1.4MB"]]
        assert rows_of(browser, "tasks")[0][:3] == ["words", "accuracy", "0.4100"]
        assert "9,560 microbatches: 9,560 answered, 0 dropped; 3 calls" in browser.evaluate("work.textContent")
        assert "training from 6.400 to 2.410; held-out from" in browser.evaluate(
            "document.querySelector('#loss-chart').ariaLabel"
        )
        happened = browser.evaluate(
            "[...document.querySelectorAll('#happenings span')].map((span) => span.textContent)"
        )
        assert happened[0].endswith("has gone: banned by the founder") and happened[1].endswith(
            "is banned by the founder"
        )
        browser.until("document.querySelector('#text').textContent === 'Once upon a time\\nthere was a swarm.'")
        assert browser.evaluate("document.querySelector('#join-command').textContent").startswith(
            "agora-node join agora://"
        )
        picture(browser, "page.png", tmp_path, is_whole=True)
        opened(browser, url, width=390, is_dark=True)
        browser.until("!document.querySelector('#text').hidden")
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390, "nothing sticks out of a phone"
        picture(browser, "phone.png", tmp_path, is_whole=False)
        assert not browser.complaints


def test_what_peers_write_stays_text(browser: Chromium) -> None:
    status = status_of(view(peer("a", "0", waits_for=MARKUP, note=MARKUP), peer("b", "1", note=MARKUP)))
    status |= {"name": MARKUP, "tuning": {MARKUP: 1.0}}
    status["peers"][0] |= {"name": MARKUP, "state": MARKUP, "path": MARKUP, "device": {"name": MARKUP}}
    status["stages"][0]["health"]["state"] = MARKUP
    status["health"] = {"state": MARKUP, "why": MARKUP, "do": MARKUP}
    status["samples"] = status["result"] = {"epoch": MARKUP, "state": MARKUP, "folder": MARKUP}
    source = Fixed(status)
    source.written = MARKUP
    with serving(source) as url:
        opened(browser, url)
        browser.until("document.querySelector('#text').textContent.includes('onerror')")
        assert browser.evaluate("document.querySelectorAll('img, b, main script').length") == 0
        assert browser.evaluate(FIRST_LINE).startswith(f"{MARKUP} {MARKUP}.")
        assert rows_of(browser, "peers")[0][0].startswith(MARKUP)
        assert browser.evaluate("document.title").startswith(MARKUP)
        assert browser.evaluate("document.querySelector('#stages button').className") == ""
        assert not browser.complaints, "nothing was even tried that the policy had to stop"


def test_a_foreign_page_gets_nothing(browser: Chromium) -> None:
    """From another origin of the same machine, where a browser would still send the request."""
    with serving(Fixed(status_of(good_view()))) as url, serving(Fixed(status_of(good_view()))) as other:
        browser.open(f"{other}/icon.svg")  # a document whose policy is the page's own; so its policy is lifted here
        browser.call("Page.setBypassCSP", enabled=True)
        browser.open(f"{other}/icon.svg")
        ask = "fetch('{}/status.json'{}).then((answer) => answer.status + answer.type, () => 'refused')"
        assert browser.evaluate(ask.format(url, "")) == "refused"
        assert browser.evaluate(ask.format(url, ", {mode: 'no-cors'}")) == "refused"
        assert browser.evaluate(ask.format(other, "")) == "200basic"
        browser.call("Page.setBypassCSP", enabled=False)


# --- what holds a run back


def empty_stage() -> dict[str, Any]:
    return status_of(view(peer("a", "0"), peer("b", "0"), peer("c", "2"), peer("d", "2")), 3)


def single_slow_replica() -> dict[str, Any]:
    return status_of(view(peer("a", "0"), peer("b", "0"), peer("c", "1", tokens_per_second=90.0, ago_s=41.0)))


def no_tokens() -> dict[str, Any]:
    waits = {"waits_for": "0 of the 8192 tokens of its share are counted", "ago_s": 400.0}
    return status_of(view(*(peer(name, "0", **waits) for name in "ab"), *(peer(name, "1") for name in "cd")))


def only_replica_banned() -> dict[str, Any]:
    banned = peer("evil", "1")
    return status_of(view(peer("a", "0"), peer("b", "0"), banned).without(banned.peer))


def nobody_in_sight() -> dict[str, Any]:
    return status_of(View())


def as_answered(error: AgoraError) -> dict[str, Any]:
    """What `swarm status` says on a machine without a daemon, whose question to the run's peers ends like this."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    light: Any = SimpleNamespace(fetch_status=fail)  # the real one cannot be imported beside hivemind
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as home:
        patched.setitem(sys.modules, "agora.net.dht.status_client", light)
        patched.setattr(agora.net.dht, "status_client", light, raising=False)
        return dict(status_command.fetch(INVITE, paths.Home(Path(home))))


def old_version() -> dict[str, Any]:
    text = f"olive-heron speaks protocol version {PROTOCOL_VERSION} and brisk-otter speaks protocol version 7: "
    text += "olive-heron has the older agora, and must upgrade it."
    return as_answered(error_of_refusal(refusal_of_error(ProtocolError("wrong-version", text))))


def this_machine_banned() -> dict[str, Any]:
    text = "the run's founder, or a delegate, has banned this peer; ask them"
    return as_answered(error_of_refusal(refusal_of_error(NotAdmitted(text))))


CASES: list[tuple[Any, str, str, list[str]]] = [
    (empty_stage, "STALLED", "stage 1 has no peer", ["WAITING", "STALLED", "WAITING"]),
    (single_slow_replica, "DEGRADED", "stage 1 has a single peer; last step 41 s ago", ["OK", "DEGRADED"]),
    (
        no_tokens,
        "STALLED",
        "stage 0 took no step for 400 s; up to 60 s are usual; a peer of it says: 0 of the 8192",
        [],
    ),
    (only_replica_banned, "STALLED", "stage 1 has no peer", ["WAITING", "STALLED"]),
    (nobody_in_sight, "UNREACHABLE", "no peer of the run can be found", []),
    (old_version, "UNREACHABLE", "olive-heron has the older agora", []),
    (this_machine_banned, "UNREACHABLE", "the run's founder, or a delegate, has banned this peer; ask them", []),
]


@pytest.mark.parametrize(("case", "state", "cause", "stages"), CASES, ids=[case.__name__ for case, *_ in CASES])
def test_the_first_line_names_what_holds_the_run_back(
    browser: Chromium, tmp_path: Path, case: Any, state: str, cause: str, stages: list[str]
) -> None:
    """With the diagnosis of `swarm status`, in its words."""
    status = case()
    write_history(tmp_path)
    with serving(Fixed(status, tmp_path)) as url:
        opened(browser, url)
        line = browser.evaluate(FIRST_LINE)
        assert line.startswith(state) and cause in line
        printed = lines_of(status)[-1]
        assert printed.startswith(f"health  {state}  why: {status['health']['why']}"), "as `swarm status` says"
        assert f"Do: {status['health']['do']}." in line, "and what to do"
        if stages:
            assert [title.split(": ")[1] for title, *_ in stages_of(browser)] == stages
        if state == "UNREACHABLE":
            assert {tiles_of(browser)[name] for name in ("Step", "Tokens/s", "Peers")} == {"-"}, "unknown is not 0"
        if case is only_replica_banned:
            happened = browser.evaluate("document.querySelector('#happenings').innerText")
            assert "is banned by the founder" in happened
        if case is old_version:
            assert "Do: upgrade agora on this machine, which is the older side" in line
        if case is empty_stage:
            assert "it waits, since stage 1 has no peer" in stages_of(browser)[0][4]
            assert browser.evaluate("document.querySelector('#stages button').className") == "warn"
        if case is single_slow_replica:
            assert "stage 1 limits the run, with 90 tokens/s to the others' 1,800" in line
            assert stages_of(browser)[1][2] == "90 tokens/s, the slowest"
            picture(browser, "degraded.png", tmp_path, is_whole=False)


def test_a_page_whose_server_has_ended_says_so(browser: Chromium) -> None:
    with serving(Fixed(status_of(good_view()))) as url:
        opened(browser, url)
        assert browser.evaluate("document.querySelector('#connection').textContent") == ""
    browser.until("document.querySelector('#connection').textContent.includes('what is shown is old')")


def test_figures_that_stand_still_are_said_to_be_old(browser: Chromium) -> None:
    source = Hanging(status_of(good_view()))
    with serving(source) as url:
        opened(browser, url)
        browser.until("document.querySelector('#connection').textContent.startsWith('Nothing new has come for 1')")
        assert source.asked == 2, "the second question has no answer"


class Hanging(Fixed):
    """A source that answers once."""

    async def status(self) -> Any:
        answer = await super().status()
        if self.asked > 1:
            await asyncio.Event().wait()
        return answer


def test_a_page_that_stays_open_does_not_grow(browser: Chromium, tmp_path: Path) -> None:
    write_history(tmp_path)
    source = Fixed(status_of(good_view()), tmp_path)
    with serving(source) as url:
        opened(browser, url)
        browser.until("!document.querySelector('#text').hidden")
        count, updates = "document.querySelectorAll('*').length", "performance.getEntriesByName('update').length"
        before = browser.evaluate(f"[{count}, {updates}]")
        browser.until(f"{updates} >= {before[1] + 20}")
        assert browser.evaluate(count) == before[0]


# --- keyboard and assistive technology


def test_stages_and_peers_are_reached_by_keyboard(browser: Chromium) -> None:
    with serving(Fixed(status_of(good_view()))) as url:
        opened(browser, url)
        browser.press("Tab", 9)
        assert browser.evaluate("document.activeElement.className") == "skip"
        browser.press("Tab", 9)
        assert browser.evaluate("document.activeElement.dataset.stage") == "0"
        browser.press("Tab", 9)
        browser.press("Enter", 13)
        browser.until("document.querySelectorAll('#peers tr').length === 2")
        assert {row[1] for row in rows_of(browser, "peers")} == {"1"}
        assert browser.evaluate("document.activeElement.ariaPressed") == "true"
        assert browser.evaluate("document.querySelector('#peers-summary').textContent") == "2 peers of stage 1"


@pytest.mark.parametrize(("width", "is_dark"), [(1280, False), (390, True)])
def test_axe_finds_no_error(browser: Chromium, tmp_path: Path, width: int, is_dark: bool) -> None:
    write_history(tmp_path)
    with serving(Fixed(single_slow_replica(), tmp_path)) as url:
        opened(browser, url, width=width, is_dark=is_dark)
        browser.until("!document.querySelector('#text').hidden")
        browser.call("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
        found = browser.evaluate("axe.run().then(({violations, passes}) => ({violations, passes: passes.length}))")
        told = [(one["id"], one["impact"], [node["html"] for node in one["nodes"]]) for one in found["violations"]]
        assert not told
        assert found["passes"] > 20


# --- ten thousand peers


def many_peers() -> dict[str, Any]:
    return status_of(view(*(peer(f"p{at}", str(at % 8), note=f"note {at}") for at in range(10_000))), 8)


def test_ten_thousand_peers_are_shown_by_stage(browser: Chromium) -> None:
    source = Fixed(many_peers())
    with serving(source) as url:
        opened(browser, url)
        assert (
            browser.evaluate("document.querySelector('#peers-summary').textContent")
            == "1 to 100 of 10,000 peers of all stages"
        )
        assert len(rows_of(browser, "peers")) == MAX_PEERS
        browser.evaluate("document.querySelectorAll('#stages button')[5].click()")
        browser.until("document.querySelector('#peers-summary').textContent === '1 to 100 of 1,250 peers of stage 5'")
        browser.evaluate("document.querySelector('#next').click()")
        browser.until("document.querySelector('#peers-summary').textContent === '101 to 200 of 1,250 peers of stage 5'")
        assert {row[1] for row in rows_of(browser, "peers")} == {"5"}
        assert browser.evaluate("document.querySelectorAll('*').length") < 3000
