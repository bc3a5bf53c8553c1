"""The order of an epoch holds every sample once, and is the same wherever it is computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agora.data.draws import epoch_order


@given(st.integers(0, 2**63), st.integers(0, 1000), st.integers(0, 500))
def test_every_sample_comes_once_an_epoch(seed: int, epoch: int, count: int) -> None:
    assert sorted(epoch_order(seed, epoch, count).tolist()) == list(range(count))


def test_the_order_is_pinned_because_peers_of_other_versions_must_agree() -> None:
    assert epoch_order(7, 3, 8).tolist() == [6, 5, 0, 2, 7, 3, 1, 4]


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
