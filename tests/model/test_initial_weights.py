"""Initial weights are a function of seed and name alone, and look like the bell curve they stand for."""

from __future__ import annotations

import hashlib

import pytest
import torch

from agora.model.family import CHUNK, initial_values


def test_values_have_the_asked_deviation_and_are_bounded() -> None:
    values = initial_values(1, "a", (400, 500), 0.02)
    assert values.dtype == torch.float32
    assert values.mean().abs() < 3 * 0.02 / 200_000**0.5
    assert values.std() == pytest.approx(0.02, rel=0.01)
    assert values.abs().max() < 4.9 * 0.02
    within = (values.abs() < 0.02).float().mean().item()
    assert within == pytest.approx(0.6827, abs=0.01)


def test_the_bits_are_pinned() -> None:
    """Peers of other machines and versions must agree; if this fails, every run's weights have changed."""
    values = initial_values(7, "layers.3.attention.query.weight", (3, 5), 0.02)
    assert (
        hashlib.sha256(values.numpy().tobytes()).hexdigest()
        == "b753323fd3ce215836d363b5b3e29524e21f80fbd4c12e26ed9e6c0c40102b67"
    )


def test_names_and_seeds_draw_apart() -> None:
    drawn = [initial_values(seed, name, (64,), 1.0) for seed in (0, 1) for name in ("a", "b")]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert not torch.equal(one, other)


def test_other_random_state_has_no_influence() -> None:
    torch.manual_seed(0)
    first = initial_values(0, "a", (10,), 1.0)
    torch.manual_seed(1)
    torch.rand(3)
    assert torch.equal(first, initial_values(0, "a", (10,), 1.0))


def test_large_tensors_are_filled_chunk_by_chunk() -> None:
    values = initial_values(0, "a", (CHUNK + 3,), 1.0)
    assert values[-3:].abs().max() > 0
    assert values.std() == pytest.approx(1, rel=0.01)
