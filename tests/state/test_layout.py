"""Flat arrays, named tensors and chunks are three views of the same elements."""

from __future__ import annotations

import numpy as np
import pytest
from agora_protocol.limits import STATE_CHUNK_BYTES
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from agora.state import layout
from agora.state.layout import (
    ELEMENT_BYTES,
    HASH_BYTES,
    Layout,
    Slot,
    chunk_count,
    chunk_hashes,
    chunk_range,
    pack_chunk,
    unpack_chunk,
)
from tests.state.world import state


def slots_of(shapes: list[tuple[int, ...]]) -> tuple[int, list[Slot]]:
    """Slots with a gap after each, and the elements of all, padded as a stage's are."""
    slots, end = [], 0
    for number, shape in enumerate(shapes):
        slots.append(Slot(f"layer.{number}.weight", end, shape))
        end += -(-int(np.prod(shape)) // 16) * 16
    return -(-end // 1024) * 1024, slots


@given(
    st.lists(array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=9), min_size=1, max_size=8), st.integers(0, 99)
)
def test_named_tensors_and_flat_elements_are_the_same(shapes, seed) -> None:
    numel, slots = slots_of(shapes)
    stage = Layout(numel, slots)
    rng = np.random.default_rng(seed)
    tensors = {slot.name: rng.standard_normal(slot.shape).astype(np.float32) for slot in slots}
    flat = stage.flat(tensors)
    assert flat.shape == (numel,)
    back = stage.named(flat)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
    for view in back.values():
        view[...] = 0
    assert not flat.any(), "what no slot covers is zero"


def test_tensors_of_another_stage_are_named() -> None:
    numel, slots = slots_of([(2, 3), (4,)])
    stage = Layout(numel, slots)
    good = stage.named(np.zeros(numel, np.float32))
    with pytest.raises(ValueError, match="layer.1.weight is missing"):
        stage.flat({"layer.0.weight": good["layer.0.weight"]})
    with pytest.raises(ValueError, match="more is no tensor"):
        stage.flat(good | {"more": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"layer.0.weight is float32 \(3, 2\)"):
        stage.flat(good | {"layer.0.weight": np.zeros((3, 2), np.float32)})
    with pytest.raises(ValueError, match="layer.1.weight is float64"):
        stage.flat(good | {"layer.1.weight": np.zeros(4)})


@given(st.integers(1, 300))
def test_chunks_cover_every_element_once_and_carry_its_moments(blocks) -> None:
    numel = 1024 * blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "CHUNK_ELEMENTS", 5000)
        given_state = state(numel)
        parts = [pack_chunk(given_state, chunk) for chunk in range(chunk_count(numel))]
        sizes = [given_state.mean[chunk_range(chunk, numel)].size for chunk in range(len(parts))]
        assert [len(part) for part in parts] == [ELEMENT_BYTES * size for size in sizes]
        arrays = [unpack_chunk(memoryview(part)) for part in parts]
        for number, name in enumerate(("weights", "mean", "square")):
            np.testing.assert_array_equal(np.concatenate([a[number] for a in arrays]), getattr(given_state, name))
        assert len(chunk_hashes(given_state)) == HASH_BYTES * len(parts)
        assert chunk_range(len(parts) - 1, numel).stop == numel


def test_a_chunk_is_never_larger_than_the_protocol_says() -> None:
    nbytes = ELEMENT_BYTES * chunk_range(0, 10**7).stop
    assert nbytes <= STATE_CHUNK_BYTES < nbytes + 12
