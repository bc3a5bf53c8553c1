"""Claims about the page's server: what a browser gets, who gets nothing, and what one look costs and shows."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.ids import peer_name

from agora.observe import events
from agora.observe.journal import Journal, JournalTail
from agora.page import feed
from agora.page.feed import Feed, History, Invitation, Kept, changes, how_to_join, in_short, pause_s, shown
from agora.page.run_page import BUNDLE, MAX_SUBSCRIBERS
from agora.page.server import SECURITY_HEADERS
from tests.page.made import INVITE, NOW, RUN, Fixed, good_view, peer, serving, status_of, write_history
from tests.swarm.makers import peer_id, view

Answer = tuple[int, dict[str, str], bytes]


def ask(url: str, path: str, method: str = "GET", **headers: str) -> Answer:
    """Status, headers in lower case, and body. headers: as HTTP names them, with _ for -."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


@contextmanager
def following(url: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The updates that one open page gets."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request("GET", "/updates")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")

    def updates() -> Iterator[dict[str, Any]]:
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))

    try:
        yield updates()
    finally:
        answer.close()
        connection.close()


def test_the_whole_bundle_comes_from_here_and_nothing_else() -> None:
    with serving(Fixed(status_of(good_view()))) as url:
        for path, (_, kind) in BUNDLE.items():
            code, headers, body = ask(url, path)
            assert code == 200 and headers["content-type"].startswith(kind) and body, path
            assert {name: headers[name.lower()] for name in SECURITY_HEADERS} == SECURITY_HEADERS
            if kind != "image/svg+xml" and not path.startswith("/uplot"):
                assert b"//" not in body.replace(b"// ", b""), f"{path} names no other place"
        for path in ("/server.py", "/../server.py", "/%2e%2e/server.py", "/uplot/LICENSE", "/page.html"):
            assert ask(url, path)[0] == 404, path


def test_a_browser_runs_nothing_but_the_bundle() -> None:
    policy = dict(part.strip().split(" ", 1) for part in SECURITY_HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'", "text becomes markup nowhere"
    page = (Path(feed.__file__).parent / "bundle" / "page.html").read_text(encoding="utf-8")
    assert "style=" not in page and "onclick" not in page and "<style" not in page
    script = (Path(feed.__file__).parent / "bundle" / "page.js").read_text(encoding="utf-8")
    assert not [way for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(") if way in script]


@pytest.mark.parametrize("path", ["/", "/updates", "/status.json", "/peers.json"])
def test_other_web_pages_get_nothing(path: str) -> None:
    source = Fixed(status_of(good_view()))
    with serving(source) as url:
        own = url.removeprefix("http://")
        assert ask(url, path, Host="rebound.example")[0] == 421
        assert ask(url, path, Origin="http://evil.example")[0] == 403
        assert ask(url, path, Origin="http://localhost:1")[0] == 403
        assert ask(url, path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
        assert ask(url, path, Sec_Fetch_Site="same-site", Sec_Fetch_Mode="no-cors")[0] == 403
        assert ask(url, path, "POST", Origin=f"http://{own}")[0] == 405
        assert source.asked == 0, "and cost nothing"
        assert ask(url, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200, "a link leads here"


def test_status_json_is_the_status_itself() -> None:
    status = status_of(good_view())
    with serving(Fixed(status)) as url:
        code, headers, body = ask(url, "/status.json")
        assert (code, headers["content-type"], json.loads(body)) == (200, "application/json", status)


def test_a_status_is_asked_for_once_however_many_want_it() -> None:
    source = Fixed(status_of(good_view()))
    with serving(source) as url:
        for _ in range(20):
            ask(url, "/status.json")
        assert source.asked < 20, "within a second it is the same"


def test_an_open_page_gets_the_run_and_then_what_is_new(tmp_path: Path) -> None:
    write_history(tmp_path)
    source = Fixed(status_of(good_view()), tmp_path)
    with serving(source) as url, following(url) as updates:
        first = next(updates)
        assert first["is_first"] and first["status"]["health"] == source.now["health"]
        assert first["status"]["peers"] == source.now["peers"] and first["status"]["peer_count"] == 4
        assert len(first["points"]) == 241 and first["points"][100][2] == pytest.approx(2.4 + 4.0 * 0.98**100)
        assert all(earlier[0] < later[0] for earlier, later in pairwise(first["points"]))
        assert first["points"][-1] == [NOW, 184, 2.41, first["work"]["heldout_loss_nats"], 1800.0]
        assert first["work"]["microbatches_started"] == 9560 and first["work"]["microbatches_rerouted"] == 3
        assert first["rounds"][0]["round"] == 183 and first["tasks"] == [[NOW - 597.0, "words", "accuracy", 0.41]]
        assert first["join"]["command"] == f"agora-node join {INVITE}"
        told = [sentence for _, _, sentence in first["happenings"]]
        assert any(sentence.endswith("is banned by the founder") for sentence in told)
        assert len(told) == 5, "a microbatch is nothing for the time line"
        gone = events.PeerGone(peer_id("b"), "no answer")
        Journal(tmp_path).take(gone, NOW + 1.0)
        second = next(update for update in updates if update["happenings"])
        assert not second["is_first"]
        assert [name for _, name, _ in second["happenings"]] == ["PeerGone"]
        assert second["happenings"][0][2] == f"{peer_name(peer_id('b'))} has gone: no answer", "never seen at a stage"
        seen, gone = events.PeerSeen(peer_id("b"), 0, 1, "serving"), events.PeerGone(peer_id("b"), "no answer")
        for event in (seen, gone):
            Journal(tmp_path).take(event, NOW + 2.0)
        third = next(update for update in updates if len(update["happenings"]) == 2)
        assert third["happenings"][-1][2] == f"{peer_name(peer_id('b'))} has gone from stages 0-1: no answer"
        assert source.written == second["text"]["text"]


def test_without_a_daemon_the_statuses_tell_what_has_happened() -> None:
    source = Fixed(before := status_of(good_view()))
    with serving(source) as url, following(url) as updates:
        assert next(updates)["happenings"] == []
        source.now = after = status_of(good_view().without(peer_id("d")))
        second = next(update for update in updates if update["happenings"])
        assert [(name, sentence) for _, name, sentence in second["happenings"]] == list(
            changes(before, after, before["peers"])
        )
        gone = f"{peer_name(peer_id('d'))} has gone from stage 1"
        assert second["happenings"][1][2] == f"{gone}: it is not in the status any more"
        names = [name for _, name, _ in second["happenings"]]
        assert names == ["HealthChanged", "PeerGone"]


def test_who_left_while_no_peer_answered_is_named_when_one_answers_again() -> None:
    source = Fixed(status_of(good_view()))
    with serving(source) as url, following(url) as updates:
        next(updates)
        source.now = LocalError("no peer answers")
        assert [name for _, name, _ in next(u for u in updates if u["happenings"])["happenings"]] == ["HealthChanged"]
        source.now = status_of(good_view().without(peer_id("d")))
        told = [sentence for _, _, sentence in next(u for u in updates if u["happenings"])["happenings"]]
        assert [sentence for sentence in told if "has gone from stage 1" in sentence]


def test_pages_are_bounded() -> None:
    with serving(Fixed(status_of(good_view()))) as url:
        for _ in range(MAX_SUBSCRIBERS + 1):
            assert ask(url, "/updates", "HEAD")[0] == 200, "a question for headers alone follows nothing"
        open_pages = [following(url) for _ in range(MAX_SUBSCRIBERS)]
        for page in open_pages:
            next(page.__enter__())
        code, headers, body = ask(url, "/updates")
        assert code == 503 and headers["retry-after"] and b"close one" in body
        assert ask(url, "/status.json")[0] == 200, "the others are answered"
        for page in open_pages:
            page.__exit__(None, None, None)


def test_ten_thousand_peers_are_told_by_stage_and_in_pages() -> None:
    many = status_of(view(*(peer(f"p{at}", str(at % 8)) for at in range(10_000))), 8)
    with serving(Fixed(many)) as url:
        with following(url) as updates:
            update = next(updates)
        short = update["status"]
        assert short["peer_count"] == 10_000 and len(short["peers"]) == feed.MAX_PEERS
        assert short["states"] == {"training": 10_000} and [row["replicas"] for row in short["stages"]] == [1250] * 8
        assert len(json.dumps(update)) < 80_000
        page = json.loads(ask(url, "/peers.json?stage=3&start=1200")[2])
        assert page["total"] == 1250 and len(page["peers"]) == 50
        assert all(found["span"] == [3, 3] for found in page["peers"])
        assert json.loads(ask(url, "/peers.json?start=9999")[2])["peers"] == many["peers"][9999:]
        for wrong in ("stage=x", "start=-1", "stage=1e3", "start=99999999999"):
            assert ask(url, f"/peers.json?{wrong}")[0] == 400, wrong


def test_the_larger_the_run_the_rarer_the_looks() -> None:
    assert pause_s(2) == pause_s(500) == 2.0 and pause_s(2, 10.0) == 10.0
    assert pause_s(10_000) == 40.0, "at 15 microseconds a peer: 0.4 % of a core"


def test_a_source_that_fails_is_said_and_the_page_goes_on() -> None:
    source = Fixed(LocalError("the manifest cannot be read; check its owner"))
    source.written = LocalError("no stage is held")
    with serving(source) as url, following(url) as updates:
        first = next(updates)
        health = first["status"]["health"]
        assert (health["state"], health["why"]) == ("UNREACHABLE", "the manifest cannot be read; check its owner")
        source.now = status_of(good_view())
        assert next(update for update in updates if update["status"]["stages"])["status"]["health"]["state"] == "OK"
        second = next(update for update in updates if update["text"]["why"])
        assert second["text"]["why"] == "no stage is held"


@pytest.mark.parametrize("wrong", [{"peers": [{"peer": [1], "span": 3}]}, {"peers": [3]}, {"health": {}}, {"step": {}}])
def test_a_malformed_status_of_a_peer_ends_nothing(wrong: dict[str, Any]) -> None:
    source = Fixed(status_of(good_view()))
    with serving(source) as url, following(url) as updates:
        next(updates)
        source.now = status_of(good_view()) | wrong
        next(updates)
        source.now = status_of(good_view())
        assert next(update for update in updates if update["status"]["health"].get("state") == "OK")


def test_what_hides_or_reorders_text_is_replaced() -> None:
    assert shown({"a\u202eb": ["x\x1b[2J", 2**60, 1.5, None, True]}) == {"a?b": ["x?[2J", None, 1.5, None, True]}
    assert len(shown("a" * 5000)) == feed.MAX_TEXT
    assert shown("<b>bold</b>\nline") == "<b>bold</b>\nline", "markup is text, and text stays as it is"


@pytest.mark.parametrize(
    ("mode", "command", "note"),
    [
        ("open", f"agora-node join {INVITE}", "Everyone"),
        ("listed", f"agora-node join {INVITE}", "Only the machines that the manifest lists"),
        ("ticket", "agora-node join INVITE", "swarm invite RUN"),
        ("", f"agora-node join {INVITE}", "swarm invite RUN"),
    ],
)
def test_joining_is_explained_by_the_run_s_mode(mode: str, command: str, note: str) -> None:
    found = how_to_join(Invitation(INVITE, mode))
    assert found is not None and found["command"] == command and note in found["note"]


def test_what_is_kept_is_bounded_and_old_points_are_thinned() -> None:
    thinned, dropped = Kept(100, thins=True), Kept(100)
    for at in range(1000):
        thinned.add(at, [at])
        dropped.add(at, [at])
    assert len(thinned.since(-1)) <= 100 >= len(dropped.since(-1))
    assert thinned.since(-1)[0] == [0] and thinned.since(998) == dropped.since(998) == [[999]]
    assert dropped.since(-1)[0][0] >= 900


def test_a_long_journal_is_read_from_near_its_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_file_bytes=20_000)
    for at in range(400):
        journal.take(events.PeerGone(peer_id("a"), f"reason {at}"), NOW + at)
    tail = JournalTail(tmp_path)
    tail.skip_to_tail(30_000)
    told = [fields["reason"] for fields in tail.read_new()]
    assert told[-1] == "reason 399" and 100 < len(told) < 250, "across files, whole lines alone"
    journal.take(events.PeerGone(peer_id("a"), "new"), NOW)
    tail.skip_to_tail(30_000)
    assert [fields["reason"] for fields in tail.read_new()] == ["new"]


def test_a_run_of_another_id_in_the_same_folder_is_left_out(tmp_path: Path) -> None:
    write_history(tmp_path)
    history = History()
    history.take(status_of(good_view()) | {"run_id": "cd" * 32}, tmp_path, NOW)
    assert len(history.since(0)["points"]) == 1


def test_counts_include_peers_that_a_daemon_left_out() -> None:
    status = status_of(good_view()) | {"peers_left_out": 700, "run_id": RUN}
    assert in_short(status)["peer_count"] == 704


def test_a_feed_that_nobody_follows_asks_nothing() -> None:
    source = Fixed(status_of(good_view()))
    assert Feed(source).subscribers == 0 and source.asked == 0
