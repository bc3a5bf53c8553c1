"""Whatever sources do, each chunk is asked of somebody until it is here, and of few at once."""

from __future__ import annotations

from agora_protocol.ids import PeerId
from hypothesis import given
from hypothesis import strategies as st

from agora.state.board import STEAL_AFTER_S, UNKNOWN_S, Board

PEERS = [PeerId(name) for name in "abcd"]
A, B, C, _ = PEERS


@given(
    st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.sampled_from("take arrive fail forget wait".split())))
)
def test_whatever_happens_nothing_is_lost_or_asked_too_often(count, events) -> None:
    board, now = Board(count), 0.0
    asked: set[tuple[int, PeerId]] = set()

    def take(peer: PeerId) -> int | None:
        chunk = board.take(peer, now)
        if chunk is not None:
            assert chunk not in board.here and (chunk, peer) not in asked
            asked.add((chunk, peer))
        return chunk

    def arrive(chunk: int, peer: PeerId) -> None:
        asked.discard((chunk, peer))
        needless = board.arrived(chunk, peer, now)
        assert {(chunk, other) for other in needless} == {pair for pair in asked if pair[0] == chunk}
        for other in needless:
            asked.discard((chunk, other))
            board.failed(chunk, other)  # its call is cancelled

    for number, what in events:
        mine = next(((c, p) for c, p in sorted(asked) if p == PEERS[number]), None)
        if what == "take":
            take(PEERS[number])
        elif what == "wait":
            now += 1.0
        elif what == "forget" and board.here:
            board.forget(min(board.here))
        elif mine and what == "arrive":
            arrive(*mine)
        elif mine and what == "fail":
            asked.discard(mine)
            board.failed(*mine)
    for chunk, peer in sorted(asked):
        if (chunk, peer) in asked:
            arrive(chunk, peer)
    while (chunk := take(A)) is not None:
        arrive(chunk, A)
    assert board.complete and board.here == set(range(count))


def test_a_chunk_is_doubled_only_when_it_takes_unusually_long_and_none_is_missing() -> None:
    board = Board(4)
    assert [board.take(A, 0.0), board.take(B, 0.0), board.take(A, 0.0)] == [0, 1, 2]
    board.arrived(1, B, 1.0)
    assert board.usual_s() == 1.0
    assert board.take(B, 1.0) == 3, "what is missing comes first, however late another is"
    board.arrived(3, B, 2.0)
    assert board.take(B, 2.0) is None and board.take(B, 2.01) == 0 and board.doubled == 1
    assert board.take(C, 2.01) == 2 and board.take(C, 4.01) is None and board.take(C, 4.02) == 0, "the second hangs too"
    assert board.take(A, 99.0) is None, "nobody doubles a call of its own"
    assert board.arrived(0, B, 5.0) == [A, C]


def test_before_a_first_chunk_patience_is_longer_and_never_too_short() -> None:
    board = Board(1)
    board.take(A, 0.0)
    assert board.take(B, 2 * UNKNOWN_S) is None and board.take(B, 2 * UNKNOWN_S + 0.1) == 0
    quick = Board(2)
    for chunk in range(2):
        assert quick.take(A, 0.0) == chunk
    quick.arrived(0, A, 0.01)
    assert quick.take(B, STEAL_AFTER_S) is None and quick.take(B, STEAL_AFTER_S + 0.01) == 1


def test_what_failed_is_asked_again_first_and_counted() -> None:
    board = Board(5)
    assert [board.take(A, 0.0) for _ in range(3)] == [0, 1, 2]
    board.failed(1, A)
    board.failed(2, A)
    assert board.fetched_again == 2
    assert [board.take(B, 0.0) for _ in range(4)] == [1, 2, 3, 4]
