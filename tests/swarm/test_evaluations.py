"""Claims about signed results of evaluations: which are kept, which are published, and what a false one changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from agora_protocol.directory_shards import shard_hash
from agora_protocol.errors import ProtocolError
from agora_protocol.evaluations import MAX_METRIC_BYTES, Evaluation, open_evaluation, seal_evaluation
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.limits import (
    MAX_EVALUATION_BYTES,
    MAX_EVALUATION_VALUES,
    MAX_EVALUATIONS_OF_ISSUER,
    MAX_KEPT_EVALUATIONS,
    MAX_NAME_BYTES,
    MAX_PROOF_BYTES,
    MAX_RECORD_BYTES,
    MAX_SHARED_EVALUATIONS,
)
from agora_protocol.manifest_sections import EvaluationSection
from agora_protocol.records import EvaluationList, seal_record

from agora.swarm.evaluations import COPIES, EvaluationBook, SealedEvaluation, choose_published, due_tasks
from tests.swarm.makers import RUN

NOW = 1_790_000_000
KEYS = [Identity(bytes([n]) * 32) for n in range(1, 12)]


def result(by: Identity = KEYS[0], task: str = "sums", at: int = NOW, step: int = 100, value: float = 0.5) -> bytes:
    made = Evaluation(by.peer, task, step, (("accuracy", value),), 50, 900, 3.0, at)
    return seal_evaluation(made, RUN, by)


def book(*refused: PeerId) -> EvaluationBook:
    return EvaluationBook(RUN, lambda peer, _: peer not in refused)


def kept(known: EvaluationBook) -> list[bytes]:
    return [each.sealed for each in known.known()]


def test_of_one_member_and_task_the_last_result_is_kept_in_whatever_order_they_come() -> None:
    old, new, other = result(at=NOW - 60), result(value=0.75), result(task="repeats", at=NOW - 30)
    for order in ([old, new, other], [new, old, other], [other, new, old]):
        known = book()
        for sealed in order:
            known.add(sealed, NOW)
        assert kept(known) == [new, other]
    assert known.add(new, NOW) is None, "a known one is not new"


@pytest.mark.parametrize("what", ["another signer", "another run", "a stranger", "the future", "damaged", "nothing"])
def test_a_false_one_changes_nothing(what: str) -> None:
    known = book(KEYS[1].peer)
    known.add(result(), NOW)
    good = Evaluation(KEYS[2].peer, "sums", 1, (("accuracy", 1.0),), 1, 1, 1.0, NOW)
    flipped = bytearray(result(KEYS[2]))
    flipped[len(flipped) // 2] ^= 1
    false = {
        "another signer": result(KEYS[2])[:-64] + result(KEYS[3])[-64:],
        "another run": seal_evaluation(good, RunId("cd" * 32), KEYS[2]),
        "a stranger": result(KEYS[1]),
        "the future": result(KEYS[2], at=NOW + 100),
        "damaged": bytes(flipped),
        "nothing": b"",
    }
    with pytest.raises(ProtocolError):
        known.add(false[what], NOW)
    assert kept(known) == [result()]


def test_nobody_signs_for_another() -> None:
    made = Evaluation(KEYS[0].peer, "sums", 1, (("accuracy", 1.0),), 1, 1, 1.0, NOW)
    with pytest.raises(ProtocolError, match="can only be sealed by its issuer"):
        seal_evaluation(made, RUN, KEYS[1])
    with pytest.raises(ProtocolError, match="metric twice"):
        replace(made, values=(("accuracy", 1.0), ("accuracy", 0.0)))


def test_who_is_not_admitted_any_more_is_forgotten() -> None:
    refused = set[PeerId]()
    known = EvaluationBook(RUN, lambda peer, _: peer not in refused)
    for key in KEYS[:3]:
        known.add(result(key), NOW)
    refused.add(KEYS[1].peer)
    known.forget_refused()
    assert {each.evaluation.issuer for each in known.known()} == {KEYS[0].peer, KEYS[2].peer}


def test_what_is_kept_is_bounded_and_who_signs_much_pushes_out_its_own() -> None:
    known = book()
    for key in KEYS[1:6]:
        known.add(result(key, at=NOW - 1000), NOW)
    for number in range(200):
        known.add(result(KEYS[0], f"task {number}", at=NOW - 200 + number), NOW)
    assert len(known.known()) == 5 + MAX_EVALUATIONS_OF_ISSUER
    newest = [each.evaluation.task for each in known.known()][:MAX_EVALUATIONS_OF_ISSUER]
    assert newest == [f"task {number}" for number in range(199, 199 - MAX_EVALUATIONS_OF_ISSUER, -1)]
    assert known.add(result(KEYS[0], "task 3", at=NOW - 197), NOW) is None, "one that went is not taken again"
    for key in KEYS[1:]:
        for number in range(MAX_EVALUATIONS_OF_ISSUER):
            known.add(result(key, f"task {number}", at=NOW - number), NOW)
    assert len(known.known()) == MAX_KEPT_EVALUATIONS
    assert {each.evaluation.issuer for each in known.known()} == {key.peer for key in KEYS}


def test_the_longest_list_fits_into_its_record() -> None:
    key = KEYS[0]
    values = tuple((f"{n}".ljust(MAX_METRIC_BYTES, "m"), 1.0) for n in range(MAX_EVALUATION_VALUES))
    counts = 2**62
    longest = Evaluation(
        key.peer, "t" * MAX_NAME_BYTES, counts, values, counts, counts, 1e9, NOW, bytes(MAX_PROOF_BYTES)
    )
    sealed = seal_evaluation(longest, RUN, key)
    assert len(sealed) <= MAX_EVALUATION_BYTES
    most = (bytes(MAX_EVALUATION_BYTES),) * MAX_SHARED_EVALUATIONS
    assert len(seal_record(EvaluationList(key.peer, Span(0, 0), most), RUN, key, 1e9)) <= MAX_RECORD_BYTES


def opened(*sealed: bytes) -> list[SealedEvaluation]:
    return [SealedEvaluation(open_evaluation(data, RUN), data) for data in sealed]


def settled(peers: Sequence[PeerId], known: Sequence[SealedEvaluation], seed: int) -> dict[PeerId, list[bytes]]:
    """What each peer publishes in the end: they decide again and again, in a random order."""
    lists: dict[PeerId, list[bytes]] = {}
    draw = random.Random(seed)
    for _ in range(6):
        for me in draw.sample(peers, len(peers)):
            lists[me] = choose_published(known, lists, me, RUN)
    return lists


@pytest.mark.parametrize("seed", range(4))
def test_an_issuer_publishes_its_own_and_a_few_pass_it_on_when_it_has_gone(seed: int) -> None:
    peers = sorted((key.peer for key in KEYS), key=lambda peer: shard_hash(RUN, peer))
    issuer = next(key for key in KEYS if key.peer == peers[-1])
    known = opened(result(issuer))
    with_issuer = settled(peers, known, seed)
    assert [peer for peer in peers if with_issuer[peer]] == [*peers[:COPIES], issuer.peer]
    without = settled(peers[:-1], known, seed)
    assert [peer for peer in peers[:-1] if without[peer]] == peers[:COPIES]


def test_own_results_go_before_those_of_others() -> None:
    others = opened(*(result(KEYS[1], f"task {number}") for number in range(MAX_SHARED_EVALUATIONS)))
    own = opened(result(at=NOW - 100))
    published = choose_published([*others, *own], {}, KEYS[0].peer, RUN)
    assert published == [own[0].sealed, *(each.sealed for each in others[:-1])]


SECTION = EvaluationSection(tasks=("sums", "heldout"), every=100)
PEERS = [key.peer for key in KEYS]


def chosen(step: int, origins: Sequence[PeerId]) -> list[PeerId]:
    return [me for me in origins if due_tasks(SECTION, step, me, origins, [], RUN)]


def measured(by: Identity, task: str, step: int) -> Evaluation:
    return open_evaluation(result(by, task, step=step), RUN)


def test_one_peer_evaluates_in_each_round_and_they_take_turns() -> None:
    assert chosen(99, PEERS) == [], "the first round begins after `every` steps"
    turns = [chosen(step, PEERS) for step in range(100, 20_100, 100)]
    assert all(len(turn) == 1 for turn in turns)
    assert {turn[0] for turn in turns} == set(PEERS)
    assert chosen(137, PEERS) == chosen(100, PEERS), "it stays the same one for the whole round"


def test_when_the_chosen_one_is_gone_one_other_takes_over_and_no_two_others_change_places() -> None:
    for step in range(100, 3000, 100):
        (first,) = chosen(step, PEERS)
        (second,) = chosen(step, [peer for peer in PEERS if peer != first])
        assert second != first
        other = next(peer for peer in PEERS if peer not in (first, second))
        assert chosen(step, [peer for peer in PEERS if peer != other]) == [first]


def test_a_task_is_evaluated_once_in_a_round_whoever_comes_later() -> None:
    (first,) = chosen(100, PEERS)
    key = next(key for key in KEYS if key.peer == first)
    known = [measured(key, "sums", 120)]
    assert due_tasks(SECTION, 150, first, PEERS, known, RUN) == ["heldout"]
    assert due_tasks(SECTION, 250, first, [first], known, RUN) == ["sums", "heldout"], "the next round is another"
    rest = [peer for peer in PEERS if peer != first]
    (second,) = chosen(100, rest)
    assert due_tasks(SECTION, 150, second, rest, known, RUN) == ["heldout"], "what was done before it went, is done"


def test_who_is_not_to_evaluate_stops_nobody_by_signing_a_result() -> None:
    (first,) = chosen(100, PEERS)
    false = [measured(key, task, 100) for key in KEYS if key.peer != first for task in SECTION.tasks]
    assert due_tasks(SECTION, 100, first, PEERS, false, RUN) == ["sums", "heldout"]


def test_without_tasks_nobody_evaluates() -> None:
    assert due_tasks(EvaluationSection(), 5000, PEERS[0], [], [], RUN) == []
