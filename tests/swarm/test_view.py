"""Merging signed records into one view."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

from agora_protocol.ids import PeerId, Span
from agora_protocol.records import Record
from hypothesis import given, settings
from hypothesis import strategies as st

from agora.swarm import view as views
from agora.swarm.view import PeerView, StageEstimate, View
from tests.swarm.makers import claim, peer_id, progress, seen

A, B = peer_id("a"), peer_id("b")

LINGER_S = 6.0


def merge(view: View, records: list[Record], now_unix: float) -> View:
    return views.merge(view, records, now_unix, LINGER_S)


def test_claims_make_replicas_and_only_serving_peers_are_sent_microbatches() -> None:
    seen = merge(View(), [claim("a", "0-1"), claim("b", "1", state="joining"), claim("c", "1", state="leaving")], 100.0)
    assert [p.peer for p in seen.replicas(1)] == [A]
    assert {p.peer for p in seen.claimants(1)} == {A, B}
    assert seen.replicas(2) == () and seen.without(A).replicas(0) == ()


def test_a_peer_is_dropped_when_its_records_are_not_found_for_a_while_but_not_at_once() -> None:
    seen = merge(View(), [claim("a", "0")], 100.0)
    assert A in merge(seen, [], 100.0 + LINGER_S - 0.1).peers
    assert A not in merge(seen, [], 100.0 + LINGER_S).peers
    renewed = merge(seen, [claim("a", "0")], 104.0)
    assert A in merge(renewed, [], 109.9).peers and renewed.peers[A].seen_unix == 104.0


def test_the_newest_incarnation_wins_whatever_the_order() -> None:
    old, new = claim("a", "0", incarnation=1), claim("a", "1", incarnation=2)
    for records in ([old, new], [new, old]):
        assert merge(View(), records, 100.0).peers[A].span.first == 1
    assert merge(merge(View(), [new], 100.0), [old], 101.0).peers[A].incarnation == 2


def test_a_new_life_forgets_the_progress_of_the_old_one() -> None:
    seen = merge(View(), [claim("a", "0"), progress("a", "0", (9,))], 100.0)
    assert merge(seen, [claim("a", "0", incarnation=2)], 101.0).peers[A].steps == ()


def test_a_state_never_goes_back_within_one_life() -> None:
    seen = merge(View(), [claim("a", "0-1", state="leaving")], 100.0)
    assert merge(seen, [claim("a", "0-1", state="serving")], 101.0).peers[A].state == "leaving"
    assert merge(seen, [claim("a", "0-1", incarnation=2)], 101.0).peers[A].state == "serving"


def test_progress_without_its_claim_is_ignored() -> None:
    assert merge(View(), [progress("a", "0", (5,))], 100.0).peers == {}
    seen = merge(View(), [claim("a", "0", incarnation=2), progress("a", "0", (5,))], 100.0)
    assert seen.peers[A].steps == ()
    assert merge(seen, [progress("a", "0-1", (5, 5), incarnation=2)], 100.0).peers[A].steps == ()


def test_steps_are_dated_when_they_grow_and_never_shrink() -> None:
    def after(view: View, steps: tuple[int, ...], now: float, loss: float | None = None) -> View:
        return merge(view, [claim("a", "0-1"), progress("a", "0-1", steps, loss=loss)], now)

    found = after(View(), (0, 0), 100.0)
    assert found.peers[A].stepped_unix is None
    found = after(found, (1, 0), 102.0)
    assert found.peers[A].stepped_unix == 102.0 and found.peers[A].mean_step_s.value is None
    found = after(found, (2, 2), 105.0, loss=3.5)
    assert (found.peers[A].stepped_unix, found.peers[A].mean_step_s.value) == (105.0, 2.0)
    assert found.peers[A].step_of(1) == 2 and found.peers[A].step_of(7) == 0
    stale = after(found, (1, 2), 106.0, loss=9.0).peers[A]
    assert (stale.steps, stale.loss, stale.stepped_unix) == ((2, 2), 3.5, 105.0)
    same = after(found, (2, 2), 107.0, loss=3.4).peers[A]
    assert (same.stepped_unix, same.loss) == (105.0, 3.4)


def test_whoever_is_first_seen_far_along_has_stepped() -> None:
    seen = merge(View(), [claim("a", "0"), progress("a", "0", (900,))], 100.0)
    assert seen.peers[A].stepped_unix == 100.0


RECORDS = st.one_of(
    st.builds(
        claim,
        st.sampled_from("abc"),
        st.sampled_from(["0", "1", "0-1"]),
        state=st.sampled_from(["joining", "serving", "leaving"]),
        incarnation=st.integers(1, 3),
    ),
    st.builds(
        lambda n, s, i: progress(n, "0", (s,), incarnation=i),
        st.sampled_from("abc"),
        st.integers(0, 9),
        st.integers(1, 3),
    ),
)


@given(st.lists(RECORDS, max_size=12), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_order_in_which_the_directory_answers_does_not_matter(records: list, rng: random.Random) -> None:
    """But for two spans in one life, which no peer claims."""
    lives: dict = {}
    records = [r for r in records if lives.setdefault((r.peer, r.incarnation), r.span) == r.span]
    shuffled = list(records)
    rng.shuffle(shuffled)
    one, other = merge(View(), records, 100.0), merge(View(), shuffled, 100.0)
    for peer in one.peers.keys() | other.peers.keys():
        a, b = one.peers[peer], other.peers[peer]
        assert (a.span, a.incarnation, a.state, a.steps) == (b.span, b.incarnation, b.state, b.steps)


@given(st.lists(RECORDS, max_size=12))
@settings(max_examples=60)
def test_merging_the_same_records_again_changes_nothing(records: list) -> None:
    once = merge(View(), records, 100.0)
    assert merge(once, records, 100.0) == once


def test_a_sampled_stage_has_as_many_peers_as_estimated_in_the_same_states_as_those_that_are_known() -> None:
    known = merge(View(), [claim("a", "0"), claim("b", "0"), claim("c", "0", state="joining")], 100.0)
    known = merge(known, [claim("d", "0", state="leaving"), claim("e", "1")], 100.0)
    assert (known.replica_count(0), known.claimant_count(0), known.replica_count(2)) == (2, 3, 0)
    sampled = replace(known, estimates={0: StageEstimate(400.0, 30.0), 1: StageEstimate(0.5, 60.0)})
    assert (sampled.replica_count(0), sampled.claimant_count(0)) == (200, 300)
    assert sampled.replica_count(1) == 1, "what is known is the least"
    assert (sampled.period_s(0), sampled.period_s(2)) == (30.0, 0.0)
    later = merge(sampled, [claim("a", "0")], 101.0).without(B)
    assert later.replica_count(0) == round(400 / 3), "of three that are known one serves"


class CountingPeers(Mapping[PeerId, PeerView]):
    """The peers of a view, and how many of them were looked at."""

    def __init__(self, peers: dict[PeerId, PeerView]) -> None:
        self.peers, self.looked_at = peers, 0

    def __getitem__(self, peer: PeerId) -> PeerView:
        self.looked_at += 1
        return self.peers[peer]

    def __iter__(self) -> Iterator[PeerId]:
        return iter(self.peers)

    def __len__(self) -> int:
        return len(self.peers)


def test_each_peer_of_a_view_is_looked_at_once_however_often_stages_are_asked_for() -> None:
    stages, count = 32, 10_000
    spans = {PeerId(f"p{n}"): Span(n % stages, n % stages) for n in range(count)}
    peers = {peer: replace(seen("a", "0"), peer=peer, span=span) for peer, span in spans.items()}
    counting = CountingPeers(peers)
    crowd = View(counting)
    for _ in range(100):
        for stage in range(stages):
            assert crowd.replicas(stage) is crowd.replicas(stage)
    assert counting.looked_at == count
    assert sum(len(crowd.replicas(stage)) for stage in range(stages)) == count
    assert [p.peer for p in crowd.replicas(5)] == sorted(p.peer for p in peers.values() if 5 in p.span)
    for _ in range(100):
        crowd.claimants(5)
    assert counting.looked_at == count
