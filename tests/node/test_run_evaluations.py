"""Claims about how signed results of evaluations spread between daemons, and what is kept of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agora_protocol.directory_shards import DirectoryShard
from agora_protocol.evaluations import Evaluation, seal_evaluation
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId
from agora_protocol.manifest import SignedManifest, preset
from agora_protocol.records import Record
from agora_protocol.tickets import Ticket, make_proof, seal_ticket

from agora.cli.status_command import check_status, lines_of
from agora.node.paths import Home
from agora.node.peer import run_evaluations
from agora.node.peer.run_admission import load_admission_book
from agora.node.peer.run_evaluations import SHARD, Evaluations
from agora.observe import events
from agora.page.feed import History

FOUNDER, MEMBER, READER = (Identity(bytes([n]) * 32) for n in range(1, 4))
SIGNED = SignedManifest.sign(preset("tiny", admission={"mode": "ticket"}), FOUNDER)
NOW = 1_790_000_000.0


class Store:
    """A directory in memory that all daemons share."""

    def __init__(self) -> None:
        self.records: dict[PeerId, Record] = {}

    async def publish(
        self, record: Record, identity: Identity, lifetime_s: float, shards: Sequence[DirectoryShard]
    ) -> bool:
        assert list(shards) == [SHARD] and record.peer == identity.peer
        self.records[record.peer] = record
        return True

    async def read_many(
        self, kind: type[Record], shards: Sequence[DirectoryShard]
    ) -> Mapping[DirectoryShard, Sequence[Record]]:
        return {SHARD: [record for record in self.records.values() if type(record) is kind]}


def proof_of(holder: Identity, role: str = "member") -> bytes:
    ticket = Ticket(FOUNDER.peer, holder.peer, False, role, int(NOW) + 1000)
    return b"" if holder is FOUNDER else make_proof(seal_ticket(ticket, SIGNED.run_id, FOUNDER))


class Daemon:
    def __init__(self, folder: Path, identity: Identity) -> None:
        folder.mkdir(exist_ok=True)
        self.home = Home(folder)
        self.identity = identity
        self.unix = NOW
        self.reported: list[events.Event] = []
        self.book = load_admission_book(self.home, SIGNED, NOW)
        self.evaluations = self.open()

    def open(self) -> Evaluations:
        context: Any = SimpleNamespace(
            home=self.home, me=self.identity.peer, identity=self.identity, report_event=self.reported.append
        )
        admission: Any = SimpleNamespace(book=self.book, proof=proof_of(self.identity))
        return Evaluations(context, SIGNED.run_id, admission, unix=lambda: self.unix)

    def sign(self, task: str = "sums", **values: float) -> None:
        self.evaluations.sign(task, values, step=400, items=50, tokens=900, seconds=3.0)

    def tasks(self) -> list[str]:
        return [each.evaluation.task for each in self.evaluations.book.known()]

    def events(self, kind: type[events.Event]) -> list[Any]:
        return [event for event in self.reported if type(event) is kind]


async def until_quiet(store: Store, *daemons: Daemon) -> None:
    """Each reads and publishes some times."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(daemon.evaluations.exchange_lists(store)) for daemon in daemons]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_evaluations, "LIST_INTERVAL_S", 0.02)


def test_every_member_finds_what_one_has_signed_also_when_it_has_gone(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store()
        first, second, late = (Daemon(tmp_path / f"d{n}", key) for n, key in enumerate((MEMBER, FOUNDER, READER)))
        first.sign(accuracy=0.5, accuracy_by_length=0.25)
        assert [event.metric for event in first.events(events.TaskEvaluated)] == ["accuracy", "accuracy_by_length"]
        await until_quiet(store, first, second)
        (found,) = second.evaluations.book.known()
        assert found.evaluation.issuer == MEMBER.peer and found.evaluation.step == 400
        told = [(event.metric, event.value, event.peer) for event in second.events(events.EvaluationTaken)]
        assert told == [("accuracy", 0.5, MEMBER.peer), ("accuracy_by_length", 0.25, MEMBER.peer)]
        del store.records[MEMBER.peer]
        await until_quiet(store, second, late)
        assert late.evaluations.book.known() == [found]
        assert not first.events(events.EvaluationTaken), "its own it knows"

    asyncio.run(main())


def test_what_strangers_and_readers_sign_changes_nothing(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "d", FOUNDER)
    values = (("accuracy", 1.0),)
    for signer, proof in ((MEMBER, b""), (READER, proof_of(READER, "reader")), (READER, proof_of(MEMBER))):
        made = Evaluation(signer.peer, "sums", 400, values, 50, 900, 3.0, int(NOW), proof)
        assert daemon.evaluations.take([seal_evaluation(made, SIGNED.run_id, signer), b"\xc1"]) == 0
    assert daemon.evaluations.book.known() == [] and daemon.reported == []


def test_a_proof_in_a_result_does_not_replace_the_peer_s_newer_one(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "d", FOUNDER)
    ticket = Ticket(FOUNDER.peer, MEMBER.peer, False, "member", int(NOW) + 5000)
    daemon.book.judge(MEMBER.peer, make_proof(seal_ticket(ticket, SIGNED.run_id, FOUNDER)), NOW)
    made = Evaluation(MEMBER.peer, "sums", 400, (("accuracy", 1.0),), 50, 900, 3.0, int(NOW), proof_of(MEMBER))
    assert daemon.evaluations.take([seal_evaluation(made, SIGNED.run_id, MEMBER)]) == 1
    assert daemon.book.is_member(MEMBER.peer, NOW + 4000)


def test_results_outlive_a_restart_but_not_the_ticket_of_who_signed_them(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "d", MEMBER)
    daemon.sign(accuracy=0.5)
    assert daemon.home.evaluations(SIGNED.run_id).stat().st_mode & 0o777 == 0o600
    with daemon.home.evaluations(SIGNED.run_id).open("a") as file:
        file.write("not hex\n00ff\n")
    daemon.evaluations = daemon.open()
    assert daemon.tasks() == ["sums"]
    daemon.unix += 2000.0
    daemon.evaluations.forget_refused()
    assert daemon.tasks() == []


def test_names_and_values_that_records_do_not_allow_are_left_out(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "d", FOUNDER)
    daemon.sign("quíz\n" + 100 * "z", **{"café" * 20: 0.5, "inf": math.inf})
    daemon.sign("nothing", nan=math.nan)
    (found,) = daemon.evaluations.book.known()
    assert found.evaluation.task == "qu?z?" + 59 * "z" and found.evaluation.values == (("caf?" * 8, 0.5),)


STATUS = {
    "schema": 1, "run_id": "ab" * 32, "name": "tiny", "step": 500, "loss": None, "tokens_per_second": 0.0,
    "health": {"state": "OK", "why": "it trains", "do": None}, "stages": [], "peers": [],
}  # fmt: skip


def shown(task: str, step: int, value: float, unix: float) -> dict[str, Any]:
    return {
        "task": task, "step": step, "values": {"accuracy": value}, "items": 50, "tokens": 900, "seconds": 3.0,
        "peer": MEMBER.peer, "name": "olive-heron", "unix": unix,
    }  # fmt: skip


def test_the_status_shows_the_last_result_of_each_task_and_who_signed_it() -> None:
    results = [shown("sums", 400, 0.5, NOW), shown("sums", 300, 0.25, NOW - 60), shown("repeats", 100, 1.0, NOW)]
    lines = [line for line in lines_of({**STATUS, "evaluations": results}) if line.startswith("task")]
    assert lines == [
        "task    repeats: accuracy 1.0000  (50 items, step 100, by olive-heron)",
        "task    sums: accuracy 0.5000  (50 items, step 400, by olive-heron)",
    ]
    many = [shown(f"t{number:02}", 1, 0.5, NOW) for number in range(20)]
    assert lines_of({**STATUS, "evaluations": many})[-2] == "... and 12 more tasks; --json has all of them"
    with pytest.raises(Exception, match="malformed status"):
        check_status({**STATUS, "evaluations": [{"task": "sums"}]})


def test_the_page_of_a_reader_has_each_result_once() -> None:
    history, first = History(), [shown("sums", 300, 0.25, NOW - 60)]
    status = {**STATUS, "evaluations": first}
    history.take(status, None, NOW)
    history.take(status, None, NOW + 2)
    history.take({**status, "evaluations": [shown("sums", 400, 0.5, NOW), *first]}, None, NOW + 4)
    tasks = history.since(0)["tasks"]
    assert tasks == [[NOW - 60, "sums", "accuracy", 0.25], [NOW, "sums", "accuracy", 0.5]]
