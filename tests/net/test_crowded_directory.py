"""What a peer of a large run reads, and what its node stores, does not grow with the run: on real nodes, in bytes."""

from __future__ import annotations

from agora_protocol.limits import MAX_KEY_RECORDS

from tests.net.crowded_directory import STAGES, measured


def test_a_run_of_1000_peers_costs_each_of_them_no_more_bytes_than_one_of_100() -> None:
    small, large = measured(100), measured(1_000)
    assert small.found == 100, "everybody"
    assert large.found >= 1_000 / STAGES + 60, "all replicas of its stage, many of the next, some of the others"
    assert large.largest_key <= MAX_KEY_RECORDS
    assert large.read_per_minute < 1.3 * small.read_per_minute
    assert large.read_per_minute < 4e6 and large.published_per_minute < 4e5
    assert large.stored < 3 * small.stored, "each record lies in three shards at most"
