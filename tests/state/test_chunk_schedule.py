"""Whatever sources do, each chunk is asked of somebody until it is here, and of few at once."""

from __future__ import annotations

from agora_protocol.ids import PeerId
from hypothesis import given
from hypothesis import strategies as st

from agora.state.chunk_schedule import ASSUMED_CHUNK_S, DUPLICATE_AFTER_S, ChunkSchedule

PEERS = [PeerId(name) for name in "abcd"]
A, B, C, _ = PEERS


@given(
    st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.sampled_from("take arrive fail discard wait".split())))
)
def test_whatever_happens_nothing_is_lost_or_asked_too_often(count, events) -> None:
    schedule, now = ChunkSchedule(count), 0.0
    asked: set[tuple[int, PeerId]] = set()

    def take(peer: PeerId) -> int | None:
        chunk = schedule.take(peer, now)
        if chunk is not None:
            assert chunk not in schedule.arrived_chunks and (chunk, peer) not in asked
            asked.add((chunk, peer))
        return chunk

    def arrive(chunk: int, peer: PeerId) -> None:
        asked.discard((chunk, peer))
        needless = schedule.record_arrival(chunk, peer, now)
        assert {(chunk, other) for other in needless} == {pair for pair in asked if pair[0] == chunk}
        for other in needless:
            asked.discard((chunk, other))
            schedule.record_call_end(chunk, other)  # its call is cancelled

    for number, what in events:
        mine = next(((c, p) for c, p in sorted(asked) if p == PEERS[number]), None)
        if what == "take":
            take(PEERS[number])
        elif what == "wait":
            now += 1.0
        elif what == "discard" and schedule.arrived_chunks:
            schedule.discard(min(schedule.arrived_chunks))
        elif mine and what == "arrive":
            arrive(*mine)
        elif mine and what == "fail":
            asked.discard(mine)
            schedule.record_call_end(*mine)
    for chunk, peer in sorted(asked):
        if (chunk, peer) in asked:
            arrive(chunk, peer)
    while (chunk := take(A)) is not None:
        arrive(chunk, A)
    assert schedule.is_complete and schedule.arrived_chunks == set(range(count))


def test_a_chunk_is_asked_twice_only_when_it_takes_unusually_long_and_none_is_missing() -> None:
    schedule = ChunkSchedule(4)
    assert [schedule.take(A, 0.0), schedule.take(B, 0.0), schedule.take(A, 0.0)] == [0, 1, 2]
    schedule.record_arrival(1, B, 1.0)
    assert schedule.median_s() == 1.0
    assert schedule.take(B, 1.0) == 3, "what is missing comes first, however late another is"
    schedule.record_arrival(3, B, 2.0)
    assert schedule.take(B, 2.0) is None and schedule.take(B, 2.01) == 0 and schedule.duplicated == 1
    assert schedule.take(C, 2.01) == 2 and schedule.take(C, 4.01) is None and schedule.take(C, 4.02) == 0, (
        "the second hangs too"
    )
    assert schedule.take(A, 99.0) is None, "nobody repeats a call of its own"
    assert schedule.record_arrival(0, B, 5.0) == [A, C]


def test_before_a_first_chunk_patience_is_longer_and_never_too_short() -> None:
    schedule = ChunkSchedule(1)
    schedule.take(A, 0.0)
    assert schedule.take(B, 2 * ASSUMED_CHUNK_S) is None and schedule.take(B, 2 * ASSUMED_CHUNK_S + 0.1) == 0
    quick = ChunkSchedule(2)
    for chunk in range(2):
        assert quick.take(A, 0.0) == chunk
    quick.record_arrival(0, A, 0.01)
    assert quick.take(B, DUPLICATE_AFTER_S) is None and quick.take(B, DUPLICATE_AFTER_S + 0.01) == 1


def test_what_failed_is_asked_again_first_and_counted() -> None:
    schedule = ChunkSchedule(5)
    assert [schedule.take(A, 0.0) for _ in range(3)] == [0, 1, 2]
    schedule.record_call_end(1, A)
    schedule.record_call_end(2, A)
    assert schedule.refetched == 2
    assert [schedule.take(B, 0.0) for _ in range(4)] == [1, 2, 3, 4]


def test_a_source_gets_the_lowest_missing_chunk_of_those_that_it_has() -> None:
    schedule = ChunkSchedule(4)
    assert schedule.take(A, 0.0, lambda chunk: chunk in (1, 3)) == 1
    assert schedule.take(A, 0.0, lambda chunk: chunk in (1, 3)) == 3
    assert schedule.take(A, 0.0, lambda chunk: chunk in (1, 3)) is None
    assert [schedule.take(B, 0.0), schedule.take(B, 0.0)] == [0, 2]
    late = 10 * ASSUMED_CHUNK_S
    assert schedule.take(C, late, lambda chunk: chunk == 2) == 2, "a chunk that takes long, if it has that"
    assert schedule.take(C, late, lambda chunk: False) is None
    for chunk, peer in ((0, B), (1, A), (2, C), (3, A)):
        schedule.record_arrival(chunk, peer, late)
    assert schedule.is_complete
